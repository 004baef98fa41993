//! What was seen of a pod: written by its scraper, read by every decision.
//!
//! Lives here: [`Status`] and [`Reported`].
//! Never here: I/O, what was declared (`pod`).
//! Invariant: no locks. Every cell is valid by itself; a reader may see the counts of one scrape beside
//! the usage of the next, which a decision could have seen a moment later anyway.

use crate::decide::prerequisite::PrefixCaching;
use crate::decide::snapshot::{Availability, EngineReport};
use crate::revision::Revision;
use crate::units::{BlockSize, Blocks, Ratio};
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long an engine's report is believed, unless told otherwise: three missed scrapes.
const DEFAULT_AGE_LIMIT: Duration = Duration::from_secs(3);

/// No report yet, as a stamp.
const NEVER: u64 = 0;

/// One reading of an engine's own numbers; what the engine did not say is `None`.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub struct Reported {
    /// Requests waiting to be scheduled.
    pub waiting: Option<u32>,
    /// Requests running.
    pub running: Option<u32>,
    /// Share of the KV cache in use, 0..=1.
    pub kv_usage: Option<Ratio>,
    /// KV blocks the engine has.
    pub kv_blocks: Option<Blocks>,
    /// Tokens per KV block.
    pub block_size: Option<BlockSize>,
    /// Whether it keeps the blocks of finished requests.
    pub prefix_caching: PrefixCaching,
}

/// Who is told of changes. Engines report all the time, and it is no matter whether a report is read a
/// moment later; anything else about a pod is.
#[derive(Clone, Debug, Default)]
pub(crate) struct Changed {
    /// Which pods there are, what is declared of them, whether they can take requests.
    pub(crate) pods: Revision,
    /// What engines say of themselves.
    pub(crate) reports: Revision,
}

/// What was seen of one incarnation of a pod.
#[derive(Debug)]
pub struct Status {
    availability: AtomicU8,
    /// Milliseconds from `epoch` to the last report, plus one; [`NEVER`] before the first.
    heard: AtomicU64,
    /// Milliseconds a report is believed.
    age_limit: AtomicU64,
    /// Waiting in the high half, running in the low half.
    requests: AtomicU64,
    /// Bits of a finite `f64` of at least 0.
    kv_usage: AtomicU64,
    /// 0 is unknown.
    kv_blocks: AtomicU32,
    /// 0 is unknown.
    block_size: AtomicU32,
    /// 0 is unknown, 1 is on, 2 is off.
    prefix_caching: AtomicU8,
    epoch: Instant,
    /// Told of every change.
    changes: Changed,
}

impl Status {
    pub(crate) fn new(availability: Availability, changes: Changed) -> Status {
        Status {
            availability: AtomicU8::new(code(availability)),
            heard: AtomicU64::new(NEVER),
            age_limit: AtomicU64::new(millis(DEFAULT_AGE_LIMIT)),
            requests: AtomicU64::new(0),
            kv_usage: AtomicU64::new(0),
            kv_blocks: AtomicU32::new(0),
            block_size: AtomicU32::new(0),
            prefix_caching: AtomicU8::new(0),
            // tokio's clock, so that a paused one in a test is paused here too.
            epoch: tokio::time::Instant::now().into_std(),
            changes,
        }
    }

    /// The same numbers under another availability, for what is now asked otherwise. Whoever wrote here
    /// may still be writing, and is no longer heard.
    pub(crate) fn succeeded(&self, availability: Availability) -> Status {
        let (relaxed, number) = (Ordering::Relaxed, AtomicU64::new);
        Status {
            availability: AtomicU8::new(code(availability)),
            // First of all, as in `engine_report`.
            heard: number(self.heard.load(Ordering::Acquire)),
            age_limit: number(self.age_limit.load(relaxed)),
            requests: number(self.requests.load(relaxed)),
            kv_usage: number(self.kv_usage.load(relaxed)),
            kv_blocks: AtomicU32::new(self.kv_blocks.load(relaxed)),
            block_size: AtomicU32::new(self.block_size.load(relaxed)),
            prefix_caching: AtomicU8::new(self.prefix_caching.load(relaxed)),
            epoch: self.epoch,
            changes: self.changes.clone(),
        }
    }

    /// Whether the pod can take requests now.
    #[must_use]
    pub fn availability(&self) -> Availability {
        availability(self.availability.load(Ordering::Relaxed))
    }

    /// Sets whether the pod can take requests; returns what held before.
    pub fn set_availability(&self, to: Availability) -> Availability {
        // One step: of two writers at once, the one with the last word must know what it changed.
        let before = self.availability.swap(code(to), Ordering::Relaxed);
        self.changed(before, to)
    }

    /// Sets what a probe found, unless the pod is going away; returns what held before.
    pub fn observe(&self, found: Availability) -> Availability {
        let draining = code(Availability::Draining);
        // A probe may answer until the very end, which does not make the pod stay.
        let before = self
            .availability
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |held| {
                (held != draining).then_some(code(found))
            });
        match before {
            Ok(before) => self.changed(before, found),
            Err(_) => Availability::Draining,
        }
    }

    fn changed(&self, before: u8, to: Availability) -> Availability {
        let before = availability(before);
        if before != to {
            self.changes.pods.bump();
        }
        before
    }

    /// Sets how long a report is believed.
    pub fn set_age_limit(&self, limit: Duration) {
        self.age_limit.store(millis(limit), Ordering::Relaxed);
        self.changes.pods.bump();
    }

    /// Records what the engine said at `now`.
    ///
    /// A reading that lacks the number of running requests or the usage says too little about load, and
    /// leaves the last report to age. Capacities are kept until the engine reports others.
    pub fn record(&self, reported: &Reported, now: Instant) {
        self.note(reported, now);
        self.changes.reports.bump();
    }

    fn note(&self, reported: &Reported, now: Instant) {
        if let Some(blocks) = reported.kv_blocks {
            self.kv_blocks.store(blocks.0, Ordering::Relaxed);
        }
        if let Some(size) = reported.block_size {
            self.block_size.store(size.get(), Ordering::Relaxed);
        }
        match reported.prefix_caching {
            PrefixCaching::Unknown => {}
            PrefixCaching::On => self.prefix_caching.store(1, Ordering::Relaxed),
            PrefixCaching::Off => self.prefix_caching.store(2, Ordering::Relaxed),
        }
        let (Some(running), Some(kv_usage)) = (reported.running, reported.kv_usage) else {
            return;
        };
        let waiting = reported.waiting.unwrap_or(0);
        self.requests.store(
            u64::from(waiting) << 32 | u64::from(running),
            Ordering::Relaxed,
        );
        self.kv_usage
            .store(kv_usage.get().to_bits(), Ordering::Relaxed);
        // Released last, so that whoever sees the new stamp sees numbers at least as new.
        self.heard
            .store(self.stamp(now).saturating_add(1), Ordering::Release);
    }

    /// What the engine said of itself, unless that is older than the age limit at `now`.
    #[must_use]
    pub fn engine_report(&self, now: Instant) -> EngineReport {
        let heard = self.heard.load(Ordering::Acquire);
        if heard == NEVER {
            return EngineReport::None;
        }
        let age = self.stamp(now).saturating_sub(heard - 1);
        if self.age_limit.load(Ordering::Relaxed) < age {
            return EngineReport::None;
        }
        let requests = self.requests.load(Ordering::Relaxed);
        EngineReport::Fresh {
            waiting: u32::try_from(requests >> 32).unwrap_or(u32::MAX),
            running: u32::try_from(requests & u64::from(u32::MAX)).unwrap_or(u32::MAX),
            kv_usage: Ratio::new(f64::from_bits(self.kv_usage.load(Ordering::Relaxed)))
                .unwrap_or(Ratio::ZERO),
        }
    }

    /// When the last report will be older than the age limit, if there was one. Rounded up to the
    /// millisecond that [`Status::engine_report`] counts in.
    #[must_use]
    pub fn report_expires(&self) -> Option<Instant> {
        let heard = self.heard.load(Ordering::Acquire);
        let believed = self.age_limit.load(Ordering::Relaxed);
        // `heard` is one more than the stamp, which is what is wanted here.
        let after = Duration::from_millis(heard.saturating_add(believed));
        (heard != NEVER).then(|| self.epoch.checked_add(after))?
    }

    /// Time from the last report to `now`, if there was one.
    #[must_use]
    pub fn report_age(&self, now: Instant) -> Option<Duration> {
        let heard = self.heard.load(Ordering::Acquire);
        (heard != NEVER).then(|| Duration::from_millis(self.stamp(now).saturating_sub(heard - 1)))
    }

    /// KV blocks the engine reported.
    #[must_use]
    pub fn kv_blocks(&self) -> Option<Blocks> {
        match self.kv_blocks.load(Ordering::Relaxed) {
            0 => None,
            blocks => Some(Blocks(blocks)),
        }
    }

    /// Tokens per KV block the engine reported.
    #[must_use]
    pub fn block_size(&self) -> Option<BlockSize> {
        BlockSize::new(self.block_size.load(Ordering::Relaxed))
    }

    /// Whether the engine keeps the blocks of finished requests, as it said last.
    #[must_use]
    pub fn prefix_caching(&self) -> PrefixCaching {
        match self.prefix_caching.load(Ordering::Relaxed) {
            1 => PrefixCaching::On,
            2 => PrefixCaching::Off,
            _ => PrefixCaching::Unknown,
        }
    }

    fn stamp(&self, now: Instant) -> u64 {
        millis(now.saturating_duration_since(self.epoch))
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn availability(code: u8) -> Availability {
    match code {
        0 => Availability::Ready,
        2 => Availability::Draining,
        3 => Availability::Unreachable,
        _ => Availability::NotReady,
    }
}

fn code(availability: Availability) -> u8 {
    match availability {
        Availability::Ready => 0,
        Availability::NotReady => 1,
        Availability::Draining => 2,
        Availability::Unreachable => 3,
    }
}

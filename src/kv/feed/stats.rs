//! What a feed has seen, for metrics and explanations.
//!
//! Lives here: [`FeedStats`] and the cell that the task writes and others read.
//! Never here: decisions.
//! Invariant: counters only grow.

use crate::kv::index::Applied;
use crate::revision::Revision;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

/// Counters of one feed since it was started.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FeedStats {
    /// Batches decoded and applied.
    pub batches: u64,
    /// Events in them.
    pub events: u64,
    /// Payloads that were not a batch.
    pub malformed: u64,
    /// Events left out of a readable batch: unknown or unreadable.
    pub skipped: u64,
    /// Times the sequence jumped ahead.
    pub gaps: u64,
    /// Times the pod's blocks were dropped: a restart, or a gap that could not be filled.
    pub resets: u64,
    /// Replays asked for.
    pub replays: u64,
    /// Replays that brought no progress (no answer, a hole, too short).
    pub replay_failures: u64,
    /// Connections made after the first.
    pub reconnects: u64,
    /// Attempts to connect that failed.
    pub connect_failures: u64,
    /// Sequence number of the last batch, if there was one.
    pub last_seq: Option<u64>,
    /// Time since the last batch, if there was one.
    pub last_event_age: Option<Duration>,
    /// What the batches did to the index.
    pub applied: Applied,
}

/// Where the task is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum State {
    /// Never connected so far.
    Connecting,
    /// Connected, catching up (or, after a reconnect without replay, not yet sure).
    Syncing,
    /// In step.
    Live,
    /// Was connected, is not.
    Lost,
}

#[derive(Debug, Default)]
pub(super) struct Stats {
    state: AtomicU8,
    counters: Mutex<(FeedStats, Option<Instant>)>,
    /// Told when the state changes.
    revision: Revision,
}

impl Stats {
    pub(super) fn new(revision: Revision) -> Stats {
        Stats {
            revision,
            ..Stats::default()
        }
    }

    pub(super) fn set_state(&self, state: State) {
        let before = self.state.swap(state as u8, Ordering::AcqRel);
        if before != state as u8 {
            self.revision.bump();
        }
    }

    pub(super) fn state(&self) -> State {
        match self.state.load(Ordering::Acquire) {
            0 => State::Connecting,
            1 => State::Syncing,
            2 => State::Live,
            _ => State::Lost,
        }
    }

    /// Changes the counters.
    pub(super) fn count(&self, change: impl FnOnce(&mut FeedStats)) {
        change(&mut self.counters.lock().0);
    }

    /// Notes a message with sequence number `seq`, and changes the counters.
    pub(super) fn heard(&self, seq: u64, change: impl FnOnce(&mut FeedStats)) {
        let mut counters = self.counters.lock();
        counters.0.last_seq = Some(seq);
        counters.1 = Some(Instant::now());
        change(&mut counters.0);
    }

    pub(super) fn read(&self) -> FeedStats {
        let counters = self.counters.lock();
        FeedStats {
            last_event_age: counters.1.map(|at| at.elapsed()),
            ..counters.0.clone()
        }
    }
}

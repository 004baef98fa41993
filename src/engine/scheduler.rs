//! The engine's scheduler: discrete passes over a token budget, as in vLLM's v1 engine.
//!
//! Lives here: [`Scheduler`]: (state, now) → a [`Pass`] with its duration → (state, [`Report`]).
//! Never here: a clock, a task, a socket, text. Time is an argument.
//! Invariant: every live sequence is in exactly one of waiting, pulling, landed, running; the blocks in use
//! are exactly theirs plus those kept for decode engines that have not fetched them yet.
//!
//! A pass serves running sequences first (one token for each decode, the next chunk for each
//! unfinished prefill), then admits waiting ones while budget, seats and blocks last. A running
//! sequence that gets no block preempts the youngest one, which is computed again later.

mod sequence;
#[cfg(test)]
mod tests;
mod types;

pub use sequence::{Finish, Job, Keep, PromptSource, SequenceId, Start};
pub use types::{Limits, Load, Next, Output, Pass, QueueFull, Report, Totals};

use super::cache::{BlockId, Change, Pool};
use super::timing;
use crate::units::Tokens;
use rustc_hash::FxBuildHasher;
use sequence::Sequence;
use std::collections::{HashMap, VecDeque};
use std::time::Duration;

struct Pulling {
    sequence: Sequence,
    ready: Duration,
}

struct Lease {
    blocks: Vec<BlockId>,
    until: Duration,
}

/// The state of one engine.
pub struct Scheduler {
    limits: Limits,
    pool: Pool,
    waiting: VecDeque<Sequence>,
    pulling: Vec<Pulling>,
    /// Fetched, and waiting for a seat.
    landed: VecDeque<Sequence>,
    running: Vec<Sequence>,
    kept: HashMap<SequenceId, Lease, FxBuildHasher>,
    link_free: Duration,
    next_id: u64,
    totals: Totals,
}

impl Scheduler {
    /// An empty engine.
    #[must_use]
    pub fn new(limits: Limits) -> Scheduler {
        Scheduler {
            limits,
            pool: Pool::new(limits.blocks),
            waiting: VecDeque::new(),
            pulling: Vec::new(),
            landed: VecDeque::new(),
            running: Vec::new(),
            kept: HashMap::default(),
            link_free: Duration::ZERO,
            next_id: 0,
            totals: Totals::default(),
        }
    }

    /// Queues `jobs`, all or none.
    ///
    /// # Errors
    /// [`QueueFull`] when they do not all fit.
    pub fn submit(&mut self, jobs: Vec<Job>) -> Result<Vec<SequenceId>, QueueFull> {
        let waiting = self.waiting.len();
        let tokens = |sum: usize, more: usize| sum.saturating_add(more);
        let queued = self.waiting.iter().map(Sequence::len).fold(0, tokens);
        let wanted = jobs.iter().map(|job| job.prompt.len()).fold(0, tokens);
        if self.limits.waiting < waiting + jobs.len()
            || (0 < waiting && self.limits.waiting_tokens < queued + wanted)
        {
            return Err(QueueFull {
                wanted: jobs.len(),
                waiting,
            });
        }
        let ids = jobs.into_iter().map(|job| {
            let id = SequenceId(self.next_id);
            self.next_id += 1;
            self.waiting
                .push_back(Sequence::new(id, job, self.limits.block_size));
            id
        });
        Ok(ids.collect())
    }

    /// Forgets a sequence and frees its blocks; nothing happens for one that has finished.
    pub fn cancel(&mut self, id: SequenceId) {
        let found = if let Some(at) = self.landed.iter().position(|s| s.id == id) {
            self.landed.remove(at)
        } else if let Some(at) = self.waiting.iter().position(|s| s.id == id) {
            self.waiting.remove(at)
        } else if let Some(at) = self.running.iter().position(|s| s.id == id) {
            Some(self.running.remove(at))
        } else if let Some(at) = self.pulling.iter().position(|p| p.sequence.id == id) {
            Some(self.pulling.remove(at).sequence)
        } else {
            None
        };
        if let Some(sequence) = found {
            self.pool.give_back(&sequence.blocks);
            self.totals.aborted += 1;
        }
    }

    /// Blocks kept under `id`, still there to be fetched.
    #[must_use]
    pub fn keeps(&self, id: SequenceId) -> bool {
        self.kept.contains_key(&id)
    }

    /// Frees the blocks kept under `id`; `false` when there are none (never kept, fetched, expired).
    pub fn release(&mut self, id: SequenceId) -> bool {
        let lease = self.kept.remove(&id);
        if let Some(lease) = &lease {
            self.pool.give_back(&lease.blocks);
        }
        lease.is_some()
    }

    /// Drops the cached content. Refused (`false`) while blocks are in use. As with vLLM, routers
    /// hear of it in the report of the next pass, not before.
    pub fn reset(&mut self) -> bool {
        self.pool.clear()
    }

    /// Counters since the start.
    #[must_use]
    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// How busy it is now.
    #[must_use]
    pub fn load(&self) -> Load {
        Load {
            running: self.running.len(),
            waiting: self.waiting.len() + self.pulling.len() + self.landed.len(),
            used: self.pool.used(),
            total: self.pool.total(),
        }
    }

    /// What changed in the cache since the last report, for a wait during which no pass reports.
    pub fn changes(&mut self) -> Vec<Change> {
        self.pool.drain()
    }

    /// Starts the next pass at `now`, or says how long there is nothing to do.
    pub fn start(&mut self, now: Duration) -> Next {
        self.expire(now);
        self.land(now);
        let mut budget = self.limits.batch_tokens;
        let preempted = self.serve_running(&mut budget);
        if !preempted || self.running.is_empty() {
            self.admit(now, &mut budget);
        }
        self.price().map_or_else(|| self.rest(), Next::Run)
    }

    /// Ends the pass begun by [`Scheduler::start`]; `now` is the instant it ended.
    pub fn complete(&mut self, now: Duration) -> Report {
        let mut outputs = Vec::new();
        let mut still = Vec::with_capacity(self.running.len());
        for mut sequence in std::mem::take(&mut self.running) {
            let Some(token) = sequence.finish_pass() else {
                still.push(sequence);
                continue;
            };
            self.totals.generated += 1;
            if let Some(source) = token.first {
                self.totals.prompt.add(source);
            }
            let mut output = Output {
                sequence: sequence.id,
                first: token.first,
                finish: token.finish,
                kept: Vec::new(),
            };
            match token.finish {
                None => still.push(sequence),
                Some(finish) => output.kept = self.retire(sequence, finish, now),
            }
            outputs.push(output);
        }
        self.running = still;
        Report {
            outputs,
            changes: self.pool.drain(),
        }
    }

    fn retire(&mut self, sequence: Sequence, finish: Finish, now: Duration) -> Vec<BlockId> {
        match finish {
            Finish::Stop => self.totals.stopped += 1,
            Finish::Length => self.totals.length += 1,
        }
        // vLLM hands over only what was cut off by its limit: an answer that ended needs no decode.
        if sequence.keep == Keep::ForDecode && finish == Finish::Length {
            let blocks = sequence.blocks.clone();
            let until = now + self.limits.lease;
            self.kept.insert(
                sequence.id,
                Lease {
                    blocks: sequence.blocks,
                    until,
                },
            );
            return blocks;
        }
        self.pool.give_back(&sequence.blocks);
        Vec::new()
    }

    fn expire(&mut self, now: Duration) {
        let late: Vec<SequenceId> = self
            .kept
            .iter()
            .filter(|(_, lease)| lease.until <= now)
            .map(|(id, _)| *id)
            .collect();
        for id in late {
            self.release(id);
            self.totals.expired += 1;
        }
    }

    /// Transfers that have ended: their blocks are content now, and only the last token of the
    /// prompt is left to compute.
    fn land(&mut self, now: Duration) {
        let mut still = Vec::with_capacity(self.pulling.len());
        for mut pulling in std::mem::take(&mut self.pulling) {
            if now < pulling.ready {
                still.push(pulling);
                continue;
            }
            let sequence = &mut pulling.sequence;
            sequence.landed();
            self.totals.external_hits += sequence.source.external.0;
            sequence.announce(sequence.computed, &mut self.pool);
            self.landed.push_back(pulling.sequence);
        }
        self.pulling = still;
    }

    /// Gives each running sequence its next tokens; `true` when one had to be preempted.
    fn serve_running(&mut self, budget: &mut usize) -> bool {
        let mut preempted = false;
        let mut at = 0;
        while at < self.running.len() {
            let tokens = self.running[at].missing().min(*budget);
            if tokens == 0 {
                self.running[at].scheduled = 0;
                at += 1;
                continue;
            }
            let mut fits = self.running[at].reserve(tokens, &mut self.pool);
            while !fits && at + 1 < self.running.len() {
                self.preempt_last();
                preempted = true;
                fits = self.running[at].reserve(tokens, &mut self.pool);
            }
            if !fits {
                self.preempt_last();
                return true;
            }
            *budget -= tokens;
            at += 1;
        }
        preempted
    }

    /// Sends the youngest running sequence back to the queue. It has been given nothing in this
    /// pass yet: the running ones are served oldest first.
    fn preempt_last(&mut self) {
        if let Some(mut sequence) = self.running.pop() {
            self.pool.give_back(&sequence.blocks);
            sequence.restart();
            self.totals.preemptions += 1;
            self.waiting.push_front(sequence);
        }
    }

    fn admit(&mut self, now: Duration, budget: &mut usize) {
        while 0 < *budget && self.running.len() < self.limits.sequences {
            // Landed ones hold blocks, so they go first: what waits may need those blocks.
            let landed = self.landed.pop_front();
            let had_landed = landed.is_some();
            let Some(mut sequence) = landed.or_else(|| self.waiting.pop_front()) else {
                return;
            };
            if !self.seat(&mut sequence, budget) {
                match had_landed {
                    true => self.landed.push_front(sequence),
                    false => self.waiting.push_front(sequence),
                }
                return;
            }
            if sequence.pulls() {
                let missing = sequence.source.external;
                let begin = self.link_free.max(now);
                self.link_free = begin + self.limits.pace.of(self.limits.link.transfer(missing));
                self.pulling.push(Pulling {
                    sequence,
                    ready: self.link_free,
                });
            } else {
                self.running.push(sequence);
            }
        }
    }

    /// Finds blocks for the front of the queue; `false` when there are too few.
    fn seat(&mut self, sequence: &mut Sequence, budget: &mut usize) -> bool {
        let fresh = sequence.blocks.is_empty();
        if fresh {
            let hits = self.pool.held(sequence.reusable());
            let wanted = sequence.wanted_blocks(hits, *budget);
            let Some(blocks) = self.pool.take(&sequence.hashes[..hits], wanted) else {
                return false;
            };
            sequence.seated(blocks, hits);
            if !sequence.counted {
                sequence.counted = true;
                self.totals.prefix_queries += sequence.prompt as u64;
                self.totals.prefix_hits += sequence.source.cached.0;
                self.totals.external_queries += sequence.source.external.0;
            }
            if sequence.pulls() {
                return true;
            }
        }
        let tokens = sequence.missing().min(*budget);
        if !sequence.reserve(tokens, &mut self.pool) {
            if fresh {
                self.pool.give_back(&sequence.blocks);
                sequence.restart();
            }
            return false;
        }
        *budget -= tokens;
        true
    }

    fn price(&self) -> Option<Pass> {
        let (mut prefill, mut decodes, mut context) = (0, 0, 0);
        for sequence in self.running.iter().filter(|s| 0 < s.scheduled) {
            if sequence.decodes() {
                decodes += 1;
                context += sequence.computed + sequence.scheduled;
            } else {
                prefill += sequence.scheduled;
            }
        }
        if prefill == 0 && decodes == 0 {
            return None;
        }
        let prefill = Tokens(prefill as u64);
        let capacity = self.pool.total() as u64 * u64::from(self.limits.block_size.get());
        let mut duration = timing::prefill(prefill);
        if 0 < decodes {
            duration += timing::decode(Tokens(context as u64), Tokens(capacity));
        }
        Some(Pass {
            duration: self.limits.pace.of(duration),
            prefill,
            decodes,
        })
    }

    fn rest(&self) -> Next {
        let transfers = self.pulling.iter().map(|pulling| pulling.ready);
        let leases = self.kept.values().map(|lease| lease.until);
        transfers
            .chain(leases)
            .min()
            .map_or(Next::Idle, Next::WaitUntil)
    }
}

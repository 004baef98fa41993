//! The bounded memory of what the last decisions were made from.
//!
//! Lives here: [`Remembered`], and [`Recent`]: how many of them are kept, and what is held for a reader.
//! Never here: decisions.
//! Invariant: what is kept and each hold are bounded in number and in bytes.

use crate::decide::snapshot::Ask;
use crate::decide::{Decision, NoRoute, Policy, decide};
use crate::observe::Observation;
use crate::pick::{InForce, Picker};
use crate::telemetry::record::Record;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Decisions that are remembered at most.
pub const MOST_REMEMBERED: usize = 2048;
/// Bytes they take at most. At 1,000 pods a decision takes some 40 KB, and 150 KB when something about
/// the pods has changed since the one before.
const MOST_BYTES: usize = 32 << 20;
/// What a decision takes beside its pods: its record, most of all.
const ALONE: usize = size_of::<Remembered>() + size_of::<Record>() + 1024;
/// Longest model name of a decision that is remembered: what clients write must not fill the memory.
const LONGEST_MODEL: usize = 256;
/// Holds at once: further ones end the oldest.
const MOST_HOLDS: usize = 2;
/// How long a hold lasts.
const HOLD: Duration = Duration::from_secs(600);

/// One decision with all that it was made from.
#[derive(Debug)]
pub(super) struct Remembered {
    pub(super) record: Arc<Record>,
    pub(super) ask: Ask,
    pub(super) observation: Observation,
    pub(super) in_force: Arc<InForce>,
}

impl Remembered {
    /// The same request among the same pods, under `policy`.
    pub(super) fn decide(&self, policy: &Policy) -> Result<Decision, NoRoute> {
        decide(&self.ask, &self.observation.snapshot, policy)
    }

    /// Bytes of its own: what it shares with `before` is counted there.
    fn bytes(&self, before: Option<&Remembered>) -> usize {
        let snapshot = &self.observation.snapshot;
        let shared = before.is_some_and(|before| {
            Arc::ptr_eq(snapshot.board(), before.observation.snapshot.board())
        });
        let board = if shared { 0 } else { snapshot.board().bytes() };
        ALONE + snapshot.bytes() + board
    }
}

/// The last decisions with all that they were made from.
#[derive(Debug, Default)]
pub(super) struct Recent(Mutex<Kept>);

#[derive(Debug, Default)]
struct Kept {
    ring: Ring,
    bytes: usize,
    holds: VecDeque<Hold>,
    next_hold: u64,
}

/// Decisions, oldest first, each with the bytes it was counted for.
type Ring = VecDeque<(Arc<Remembered>, usize)>;

/// What was remembered at one moment.
#[derive(Debug)]
struct Hold {
    number: u64,
    until: Instant,
    ring: Ring,
}

impl Recent {
    /// Adds a decision; the oldest ones go when there are too many, or when they take too much.
    pub(super) fn push(&self, one: Arc<Remembered>) {
        let long = |model: &crate::names::ModelName| LONGEST_MODEL < model.as_str().len();
        if one.ask.model.as_ref().is_some_and(long) {
            return;
        }
        let mut gone = Vec::new();
        let mut kept = self.0.lock();
        let bytes = one.bytes(kept.ring.back().map(|(last, _)| &**last));
        kept.bytes += bytes;
        kept.ring.push_back((one, bytes));
        while MOST_REMEMBERED < kept.ring.len() || MOST_BYTES < kept.bytes {
            let Some((oldest, bytes)) = kept.ring.pop_front() else {
                break;
            };
            kept.bytes -= bytes;
            gone.push(oldest);
        }
        // Freed after the lock is.
        drop(kept);
    }

    /// A decision with all that it was made from: one of the last, or one that is held.
    pub(super) fn find(&self, id: &str) -> Option<Arc<Remembered>> {
        let kept = self.0.lock();
        let now = Instant::now();
        let holds = kept.holds.iter().rev().filter(|hold| now < hold.until);
        let mut rings = std::iter::once(&kept.ring).chain(holds.map(|hold| &hold.ring));
        rings.find_map(|ring| {
            let mut newest_first = ring.iter().rev().map(|(one, _)| one);
            newest_first.find(|one| one.record.id == id).cloned()
        })
    }

    /// The last `most` decisions, oldest first.
    pub(super) fn last(&self, most: usize) -> Vec<Arc<Remembered>> {
        let kept = self.0.lock();
        let skip = kept.ring.len().saturating_sub(most);
        let last = kept.ring.iter().skip(skip);
        last.map(|(one, _)| Arc::clone(one)).collect()
    }

    fn hold(&self, instead: Option<u64>) -> (u64, usize) {
        let mut kept = self.0.lock();
        let now = Instant::now();
        kept.holds
            .retain(|hold| Some(hold.number) != instead && now < hold.until);
        if kept.holds.len() == MOST_HOLDS {
            kept.holds.pop_front();
        }
        let number = kept.next_hold;
        kept.next_hold += 1;
        let hold = Hold {
            number,
            until: now + HOLD,
            ring: kept.ring.clone(),
        };
        let decisions = hold.ring.len();
        kept.holds.push_back(hold);
        (number, decisions)
    }
}

impl Picker {
    /// Keeps what is remembered now for ten minutes, whatever is decided meanwhile: for who reads a list
    /// that stands still. A hold of the same reader from before, `instead`, ends. Its number, and how
    /// many decisions it holds.
    #[must_use]
    pub fn hold(&self, instead: Option<u64>) -> (u64, usize) {
        self.recent.hold(instead)
    }

    /// The record of one of the last decisions, or of one that is held.
    #[must_use]
    pub fn record(&self, id: &str) -> Option<Arc<Record>> {
        let remembered = || Some(Arc::clone(&self.recent.find(id)?.record));
        self.journal.find(id).or_else(remembered)
    }
}

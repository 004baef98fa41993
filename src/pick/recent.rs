//! The bounded memory of what the last decisions were made from.
//!
//! Lives here: [`Remembered`], and [`Recent`]: how many of them are kept, and what is held for a reader.
//! Never here: decisions.
//! Invariant: what is kept and each hold are bounded in number and in bytes.

use crate::decide::ask::{Ask, Subset};
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
        let Observation { view, snapshot } = &self.observation;
        let before = before.map(|before| &before.observation);
        let board = match before {
            Some(before) if Arc::ptr_eq(snapshot.board(), before.snapshot.board()) => 0,
            _ => snapshot.board().bytes(),
        };
        let view = match before {
            Some(before) if Arc::ptr_eq(view, &before.view) => 0,
            _ => view.bytes(),
        };
        let subset = match &self.ask.subset {
            Subset::Any => 0,
            Subset::Only(entries) | Subset::Throughout(entries) => size_of_val(&**entries),
        };
        ALONE + snapshot.bytes() + board + view + subset
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
        let now = Instant::now();
        let mut kept = self.0.lock();
        let mut ended = kept.end(|hold| Some(hold.number) == instead || hold.until <= now);
        if kept.holds.len() == MOST_HOLDS {
            ended.extend(kept.holds.pop_front());
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
        // Freed after the lock is.
        drop(kept);
        (number, decisions)
    }
}

impl Kept {
    /// Takes the holds that are over.
    fn end(&mut self, is_over: impl Fn(&Hold) -> bool) -> VecDeque<Hold> {
        let holds = std::mem::take(&mut self.holds).into_iter();
        let (ended, going) = holds.partition(|hold| is_over(hold));
        self.holds = going;
        ended
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

    /// Frees what was held for readers until `now`. To be called now and then: a hold that is over is not
    /// shown, and takes memory until the next one.
    pub fn end_holds(&self, now: Instant) {
        let ended = self.recent.0.lock().end(|hold| hold.until <= now);
        // Freed after the lock is.
        drop(ended);
    }

    /// The record of one of the last decisions, or of one that is held.
    #[must_use]
    pub fn record(&self, id: &str) -> Option<Arc<Record>> {
        let remembered = || Some(Arc::clone(&self.recent.find(id)?.record));
        self.journal.find(id).or_else(remembered)
    }
}

//! The bounded memory of what the last decisions were made from.
//!
//! Lives here: [`Recent`]: who packs and when, how much is kept, what is held for a reader.
//! Never here: how it is packed (see `packed`), decisions.
//! Invariant: a request waits for a short queue alone; the queue, the memory and each hold are bounded.

use crate::pick::Picker;
use crate::pick::packed::{Packed, Remembered};
use crate::telemetry::record::Record;
use parking_lot::{Mutex, MutexGuard};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Decisions that are remembered at most.
pub const MOST_REMEMBERED: usize = 2048;
/// Bytes they take at most.
const MOST_BYTES: usize = 16 << 20;
/// Longest model name of a decision that is remembered: what clients write must not fill the memory.
const LONGEST_MODEL: usize = 256;
/// Decisions that wait to be packed, and pods in all of them: some 14 MiB. Beyond, the oldest go.
const MOST_WAITING: usize = 4096;
const MOST_WAITING_PODS: usize = 64 << 10;
/// Time between two packings: at thousands of decisions a second and a thousand pods not all can be
/// packed, and what is not must not cost a core.
const PACK_EVERY: Duration = Duration::from_millis(20);
/// Holds at once: further ones end the oldest.
const MOST_HOLDS: usize = 2;
/// How long a hold lasts.
const HOLD: Duration = Duration::from_secs(600);

/// The last decisions with all that they were made from.
#[derive(Debug, Default)]
pub(super) struct Recent(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    waiting: Mutex<Waiting>,
    kept: Mutex<Kept>,
}

/// What was decided just now.
#[derive(Debug, Default)]
struct Waiting {
    queue: VecDeque<Remembered>,
    pods: usize,
    packing: bool,
    packed: Option<Instant>,
}

#[derive(Debug, Default)]
struct Kept {
    packed: Packed,
    holds: VecDeque<Hold>,
    next_hold: u64,
}

/// What was remembered at one moment.
#[derive(Debug)]
struct Hold {
    number: u64,
    until: Instant,
    packed: Packed,
}

impl Recent {
    /// Adds a decision. What it takes to pack it is done elsewhere.
    pub(super) fn push(&self, one: Remembered) {
        let long = |model: &crate::names::ModelName| LONGEST_MODEL < model.as_str().len();
        if MOST_WAITING_PODS < one.size() || one.ask.model.as_ref().is_some_and(long) {
            return;
        }
        let mut gone = Vec::new();
        let mut waiting = self.0.waiting.lock();
        waiting.pods += one.size();
        waiting.queue.push_back(one);
        while MOST_WAITING < waiting.queue.len() || MOST_WAITING_PODS < waiting.pods {
            let Some(oldest) = waiting.queue.pop_front() else {
                break;
            };
            waiting.pods -= oldest.size();
            gone.push(oldest);
        }
        let due = waiting.packed.is_none_or(|at| PACK_EVERY <= at.elapsed());
        let pack = due && !waiting.packing;
        waiting.packing |= pack;
        // Freed after the lock is.
        drop(waiting);
        drop(gone);
        if pack {
            let inner = Arc::clone(&self.0);
            match tokio::runtime::Handle::try_current() {
                Ok(runtime) => drop(runtime.spawn_blocking(move || drop(inner.settled()))),
                Err(_) => drop(inner.settled()),
            }
        }
    }

    /// The record of a decision.
    pub(super) fn record(&self, id: &str) -> Option<Arc<Record>> {
        self.0.search(|packed| packed.record(id))
    }

    /// A decision with all that it was made from.
    pub(super) fn find(&self, id: &str) -> Option<Remembered> {
        self.0.search(|packed| packed.find(id))
    }

    /// The last `most` decisions one after another, oldest first.
    pub(super) fn last(&self, most: usize, act: impl FnMut(&Remembered)) {
        // A copy, so that packing goes on meanwhile.
        let packed = self.0.settled().packed.clone();
        packed.last(most, act);
    }
}

impl Inner {
    /// What is kept, with all that waited.
    fn settled(&self) -> MutexGuard<'_, Kept> {
        let mut kept = self.kept.lock();
        let queue = {
            let mut waiting = self.waiting.lock();
            waiting.pods = 0;
            waiting.packed = Some(Instant::now());
            std::mem::take(&mut waiting.queue)
        };
        for one in queue {
            kept.packed.push(one);
            kept.packed.trim(MOST_BYTES, MOST_REMEMBERED);
        }
        let now = Instant::now();
        kept.holds.retain(|hold| now < hold.until);
        self.waiting.lock().packing = false;
        kept
    }

    fn search<T>(&self, find: impl Fn(&Packed) -> Option<T>) -> Option<T> {
        let kept = self.settled();
        let holds = kept.holds.iter().rev().map(|hold| &hold.packed);
        std::iter::once(&kept.packed).chain(holds).find_map(find)
    }

    fn hold(&self, instead: Option<u64>) -> (u64, usize) {
        let mut kept = self.settled();
        kept.holds.retain(|hold| Some(hold.number) != instead);
        if kept.holds.len() == MOST_HOLDS {
            kept.holds.pop_front();
        }
        let number = kept.next_hold;
        kept.next_hold += 1;
        let hold = Hold {
            number,
            until: Instant::now() + HOLD,
            packed: kept.packed.clone(),
        };
        let decisions = hold.packed.len();
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
        self.recent.0.hold(instead)
    }

    /// The record of one of the last decisions, or of one that is held.
    #[must_use]
    pub fn record(&self, id: &str) -> Option<Arc<Record>> {
        self.journal.find(id).or_else(|| self.recent.record(id))
    }
}

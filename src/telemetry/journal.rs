//! The last decisions, in memory, for the admin port.
//!
//! Lives here: a bounded ring of [`Record`]s, and [`Journal::follow`] for those who watch it.
//! Never here: anything that outlives the process.
//! Invariant: at most `capacity` records; the oldest goes first.

use crate::telemetry::record::Record;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The last decisions.
#[derive(Debug)]
pub struct Journal {
    capacity: usize,
    next: AtomicU64,
    ring: Mutex<Ring>,
}

#[derive(Debug)]
struct Ring {
    records: VecDeque<Arc<Record>>,
    /// How many records were ever pushed: the position after the newest one. Sequence numbers do not
    /// serve for this, because a record may be pushed after one with a higher number.
    pushed: u64,
}

/// What was pushed since a position.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// The records, oldest first.
    pub records: Vec<Arc<Record>>,
    /// How many more there were: gone from the ring, or beyond the limit.
    pub missed: u64,
    /// Where the next batch begins.
    pub next: u64,
}

impl Journal {
    /// A journal of at most `capacity` records.
    #[must_use]
    pub fn new(capacity: usize) -> Journal {
        Journal {
            capacity,
            next: AtomicU64::new(1),
            ring: Mutex::new(Ring {
                records: VecDeque::with_capacity(capacity.min(4096)),
                pushed: 0,
            }),
        }
    }

    /// The next sequence number.
    pub fn sequence(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Adds a record.
    pub fn push(&self, record: Arc<Record>) {
        if self.capacity == 0 {
            return;
        }
        let mut ring = self.ring.lock();
        if ring.records.len() == self.capacity {
            ring.records.pop_front();
        }
        ring.records.push_back(record);
        ring.pushed += 1;
    }

    /// The record with this decision id.
    #[must_use]
    pub fn find(&self, id: &str) -> Option<Arc<Record>> {
        self.ring
            .lock()
            .records
            .iter()
            .rev()
            .find(|record| record.id == id)
            .cloned()
    }

    /// Up to `limit` records with a sequence number above `sequence`, oldest first.
    #[must_use]
    pub fn after(&self, sequence: u64, limit: usize) -> Vec<Arc<Record>> {
        self.ring
            .lock()
            .records
            .iter()
            .filter(|record| sequence < record.sequence)
            .take(limit)
            .cloned()
            .collect()
    }

    /// What was pushed from `position` on; of more than `limit` records, the newest. Position 0 is the
    /// oldest record there is.
    #[must_use]
    pub fn follow(&self, position: u64, limit: usize) -> Batch {
        let ring = self.ring.lock();
        let new = ring.pushed.saturating_sub(position);
        let held = ring.records.len();
        let take = usize::try_from(new).unwrap_or(held).min(held).min(limit);
        Batch {
            records: ring.records.iter().skip(held - take).cloned().collect(),
            missed: new - take as u64,
            next: ring.pushed,
        }
    }
}

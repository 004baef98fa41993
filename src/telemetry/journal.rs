//! The last decisions, in memory, for the admin endpoint.
//!
//! Lives here: a bounded ring of [`Record`]s.
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
    ring: Mutex<VecDeque<Arc<Record>>>,
}

impl Journal {
    /// A journal of at most `capacity` records.
    #[must_use]
    pub fn new(capacity: usize) -> Journal {
        Journal {
            capacity,
            next: AtomicU64::new(1),
            ring: Mutex::new(VecDeque::with_capacity(capacity.min(4096))),
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
        if ring.len() == self.capacity {
            ring.pop_front();
        }
        ring.push_back(record);
    }

    /// The record with this decision id.
    #[must_use]
    pub fn find(&self, id: &str) -> Option<Arc<Record>> {
        self.ring
            .lock()
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
            .iter()
            .filter(|record| sequence < record.sequence)
            .take(limit)
            .cloned()
            .collect()
    }
}

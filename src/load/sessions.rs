//! Which pods each session was sent to last.
//!
//! Lives here: a bounded table with a time to live per entry.
//! Never here: session names (only a keyed hash of them is kept), locks, clocks.
//! Invariant: never more entries than the limit, and an expired entry is never returned.

use crate::names::{PodId, SessionId};
use rustc_hash::FxBuildHasher;
use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::time::Instant;

/// A session by the hash of its name under a secret key of this process. Names are the client's and
/// may be long; hashes make every entry the same size. Two sessions that collide share a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct SessionKey(u64);

#[derive(Debug)]
pub(super) struct Sessions {
    limit: usize,
    secret: RandomState,
    entries: HashMap<SessionKey, Entry, FxBuildHasher>,
    /// The same entries by the time they expire.
    order: BTreeSet<(Instant, SessionKey)>,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    pods: SessionPods,
    expires: Instant,
}

/// The pods of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SessionPods {
    /// The pod that decoded its last turn.
    pub(super) decode: PodId,
    /// The pod that prefilled its last turn that was prefilled remotely.
    pub(super) prefill: Option<PodId>,
}

impl Sessions {
    pub(super) fn new(limit: usize) -> Sessions {
        Sessions {
            limit,
            secret: RandomState::new(),
            entries: HashMap::default(),
            order: BTreeSet::new(),
        }
    }

    pub(super) fn key(&self, session: &SessionId) -> SessionKey {
        SessionKey(self.secret.hash_one(session.as_str()))
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn pods(&self, key: SessionKey, now: Instant) -> Option<SessionPods> {
        self.entries
            .get(&key)
            .filter(|entry| now < entry.expires)
            .map(|entry| entry.pods)
    }

    /// Remembers `pods` for the session until `expires`. When the table is full, the entry that would
    /// expire first makes room.
    pub(super) fn record(&mut self, key: SessionKey, pods: SessionPods, expires: Instant) {
        if self.limit == 0 {
            return;
        }
        if let Some(old) = self.entries.insert(key, Entry { pods, expires }) {
            self.order.remove(&(old.expires, key));
        }
        self.order.insert((expires, key));
        if self.limit < self.entries.len()
            && let Some((_, first)) = self.order.pop_first()
        {
            self.entries.remove(&first);
        }
    }

    /// Moves the session to `to` if it is still on `from`.
    pub(super) fn rebind(&mut self, key: SessionKey, from: PodId, to: PodId) {
        if let Some(entry) = self.entries.get_mut(&key)
            && entry.pods.decode == from
        {
            entry.pods.decode = to;
        }
    }

    /// Drops a few entries that have expired. A few per request is enough to keep up, because a
    /// request adds one at most, and bounds the time under the ledger's lock.
    pub(super) fn expire(&mut self, now: Instant) {
        for _ in 0..4 {
            match self.order.first() {
                Some((expires, key)) if *expires <= now => {
                    let key = *key;
                    self.order.pop_first();
                    self.entries.remove(&key);
                }
                _ => return,
            }
        }
    }
}

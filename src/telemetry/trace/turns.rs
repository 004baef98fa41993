//! The span of each conversation's last turn, so that the next one can link to it.
//!
//! Lives here: [`Turns`].
//! Never here: session names; only a keyed hash of them is kept, and it never leaves.
//! Invariant: a fixed number of entries; a conversation that loses its place loses a link, nothing else.

use crate::telemetry::trace::context::Context;
use parking_lot::Mutex;
use std::hash::{BuildHasher, RandomState};

/// Conversations remembered; 48 bytes each.
const PLACES: usize = 16_384;

#[derive(Debug)]
pub(super) struct Turns {
    secret: RandomState,
    places: Mutex<Vec<Option<(u64, Context)>>>,
}

impl Turns {
    pub(super) fn new() -> Turns {
        Turns {
            secret: RandomState::new(),
            places: Mutex::default(),
        }
    }

    /// Remembers `own` as the last turn of `session`; returns the turn before.
    pub(super) fn replace(&self, session: &str, own: &Context) -> Option<Context> {
        let hash = self.secret.hash_one(session);
        let own = Context {
            state: None,
            ..own.clone()
        };
        let mut places = self.places.lock();
        if places.is_empty() {
            places.resize(PLACES, None);
        }
        let place = &mut places[hash as usize % PLACES];
        place
            .replace((hash, own))
            .filter(|(before, _)| *before == hash)
            .map(|(_, context)| context)
    }
}

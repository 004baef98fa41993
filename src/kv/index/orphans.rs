//! Stores whose parent has not been announced (yet).
//!
//! Lives here: [`Orphans`], a small waiting room keyed by the missing parent.
//! Never here: a guess at where such blocks belong.
//! Invariant: bounded in events and in tokens; the oldest leave first; a block that is removed
//! while it waits takes those behind it along.

use crate::kv::event::{EngineHash, Medium, Stored, TokenForm};
use rustc_hash::FxBuildHasher;
use std::collections::{HashMap, VecDeque};

/// Most events that wait per rank.
const MAX_EVENTS: usize = 256;
/// Most tokens that wait per rank.
const MAX_TOKENS: usize = 262_144;

/// The waiting room of one rank.
#[derive(Default)]
pub(super) struct Orphans {
    waiting: HashMap<u64, Stored, FxBuildHasher>,
    by_parent: HashMap<EngineHash, Vec<u64>, FxBuildHasher>,
    by_block: HashMap<EngineHash, u64, FxBuildHasher>,
    order: VecDeque<u64>,
    next: u64,
    tokens: usize,
}

impl Orphans {
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Lets `event` wait for `parent`; how many events had to leave for it (itself, if too long).
    pub(super) fn park(&mut self, parent: EngineHash, event: &Stored) -> u64 {
        let size = event.tokens.len() + event.hashes.len();
        if MAX_TOKENS < size {
            return 1;
        }
        let mut dropped = 0;
        while MAX_EVENTS <= self.waiting.len() || MAX_TOKENS < self.tokens + size {
            let Some(oldest) = self.order.pop_front() else {
                break;
            };
            dropped += u64::from(self.take(oldest).is_some());
        }
        let id = self.next;
        self.next += 1;
        self.tokens += size;
        self.by_parent.entry(parent).or_default().push(id);
        self.by_block
            .extend(event.hashes.iter().map(|hash| (*hash, id)));
        self.order.push_back(id);
        self.waiting.insert(id, event.clone());
        if 2 * MAX_EVENTS < self.order.len() {
            self.order.retain(|id| self.waiting.contains_key(id));
        }
        dropped
    }

    /// The events that waited for `parent`, in the order they came.
    pub(super) fn claim(&mut self, parent: EngineHash) -> Vec<Stored> {
        let ids = self.by_parent.remove(&parent).unwrap_or_default();
        ids.into_iter().filter_map(|id| self.take(id)).collect()
    }

    /// A block is gone: it and what follows it in its event need not wait any longer.
    pub(super) fn remove(&mut self, hash: EngineHash, medium: Medium) -> bool {
        let Some(id) = self.by_block.get(&hash).copied() else {
            return false;
        };
        if self.waiting.get(&id).map(|waiting| waiting.medium) != Some(medium) {
            return false;
        }
        let Some(mut waiting) = self.take(id) else {
            return false;
        };
        let blocks = waiting.hashes.iter().position(|block| *block == hash);
        let blocks = blocks.unwrap_or(0);
        let Some(parent) = waiting.parent.filter(|_| 0 < blocks) else {
            return true;
        };
        waiting.hashes.truncate(blocks);
        waiting
            .tokens
            .truncate(blocks.saturating_mul(waiting.block_size as usize));
        waiting.tokens_as = TokenForm::Single;
        self.park(parent, &waiting);
        true
    }

    fn take(&mut self, id: u64) -> Option<Stored> {
        let event = self.waiting.remove(&id)?;
        self.tokens -= event.tokens.len() + event.hashes.len();
        for hash in &event.hashes {
            if self.by_block.get(hash) == Some(&id) {
                self.by_block.remove(hash);
            }
        }
        if let Some(parent) = event.parent
            && let Some(ids) = self.by_parent.get_mut(&parent)
        {
            ids.retain(|other| *other != id);
            if ids.is_empty() {
                self.by_parent.remove(&parent);
            }
        }
        Some(event)
    }
}

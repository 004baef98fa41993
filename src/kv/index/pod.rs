//! One pod: which of its events count, and what they change.
//!
//! Lives here: [`State`], guarded by the pod's own lock, so that pods are applied in parallel.
//! Never here: sockets and sequence numbers (see `feed`).
//! Invariant: only main-attention blocks of the learned size with a known parent are indexed;
//! everything else is counted in [`Applied`] and leaves the index as it was.

use super::change::Changer;
use super::lanes::PodLanes;
use super::rank::Rank;
use super::{Applied, Shared};
use crate::kv::event::{Adapter, Attention, Batch, Event, Locality, Medium, Stored, TokenForm};
use crate::names::PodId;
use crate::units::BlockSize;

/// Ranks that one pod may have.
const MAX_RANKS: usize = 64;
/// Stores of another block size, one after another, after which that size is believed.
const SIZE_STREAK: u32 = 32;

/// What one pod holds.
pub(super) struct State {
    pod: PodId,
    block_size: Option<BlockSize>,
    /// Stores of another size since the last of the learned one.
    streak: u32,
    ranks: Vec<Rank>,
    /// What [`Shared::memberships`] knows of this pod.
    counted: u64,
    /// Set when the pod is forgotten; whoever still holds it then does nothing.
    pub(super) forgotten: bool,
}

impl State {
    pub(super) fn new(pod: PodId) -> State {
        State {
            pod,
            block_size: None,
            streak: 0,
            ranks: Vec::new(),
            counted: 0,
            forgotten: false,
        }
    }

    /// Memberships: blocks of all ranks, each once whatever its tiers.
    pub(super) fn blocks(&self) -> u64 {
        self.ranks.iter().map(|rank| rank.blocks.len() as u64).sum()
    }

    /// Brings the total of all pods up to date; the pod's own.
    pub(super) fn account(&mut self, shared: &Shared) -> u64 {
        let now = self.blocks();
        shared.add_memberships(now.wrapping_sub(self.counted));
        self.counted = now;
        now
    }

    pub(super) fn apply(&mut self, batch: &Batch, shared: &Shared) -> Applied {
        let mut applied = Applied {
            batches: 1,
            ..Applied::default()
        };
        let Some(rank) = self.rank(batch.rank, shared) else {
            applied.rank_limit += 1;
            return applied;
        };
        for event in &batch.events {
            match event {
                Event::Stored(event) => self.stored(rank, event, shared, &mut applied),
                Event::Removed(event) => {
                    self.changer(rank, shared).removed(event, &mut applied);
                }
                Event::Cleared => {
                    applied.cleared += 1;
                    self.changer(rank, shared).clear();
                }
            }
        }
        applied
    }

    fn changer<'a>(&'a mut self, rank: usize, shared: &'a Shared) -> Changer<'a> {
        Changer {
            rank: &mut self.ranks[rank],
            shared,
        }
    }

    fn rank(&mut self, number: u32, shared: &Shared) -> Option<usize> {
        let found = self.ranks.iter().position(|rank| rank.number == number);
        if found.is_some() || MAX_RANKS <= self.ranks.len() {
            return found;
        }
        let lane = shared.registry.lock().take_lane();
        self.ranks.push(Rank::new(number, lane));
        self.publish(shared);
        Some(self.ranks.len() - 1)
    }

    /// Tells readers the lanes and the block size of this pod.
    fn publish(&self, shared: &Shared) {
        shared.publish(
            self.pod,
            Some(PodLanes {
                generation: self.pod.generation,
                block_size: self.block_size,
                ranks: self.ranks.iter().map(Rank::levels).collect(),
            }),
        );
    }

    pub(super) fn reset(&mut self, number: u32, shared: &Shared) {
        for rank in &mut self.ranks {
            if rank.number == number {
                Changer { rank, shared }.clear();
            }
        }
    }

    pub(super) fn reset_all(&mut self, shared: &Shared) {
        for rank in &mut self.ranks {
            Changer { rank, shared }.clear();
        }
    }

    pub(super) fn forget(&mut self, shared: &Shared) {
        self.forgotten = true;
        self.reset_all(shared);
        self.account(shared);
        shared.publish(self.pod, None);
        let mut registry = shared.registry.lock();
        for rank in self.ranks.drain(..) {
            for (_, lane) in rank.own_lanes() {
                registry.give_back(lane);
            }
        }
    }

    fn stored(&mut self, rank: usize, event: &Stored, shared: &Shared, applied: &mut Applied) {
        if event.locality == Locality::Remote {
            applied.remote += 1;
            return;
        }
        if event.medium == Medium::Unknown {
            applied.unknown_medium += 1;
            return;
        }
        if event.attention == Attention::Partial || !self.ranks[rank].follows(event.group) {
            applied.other_group += 1;
            return;
        }
        if event.is_placeholder() {
            self.level_for(rank, event.medium, shared);
            self.changer(rank, shared).moved(event, applied);
            return;
        }
        let Some(size) = self.learn(event, shared, applied) else {
            return;
        };
        let Some(blocks) = full_blocks(event, size, applied) else {
            return;
        };
        if event.adapter == Adapter::NumberOnly {
            applied.unnamed_adapter += 1;
            return;
        }
        if self.ranks[rank].group.is_none() {
            self.ranks[rank].group = event.group;
        }
        self.level_for(rank, event.medium, shared);
        self.changer(rank, shared)
            .stored(event, size, blocks, applied);
        if shared.limits.blocks_per_pod < self.account(shared) || shared.is_full() {
            applied.over_limit += 1;
            self.reset_all(shared);
        }
    }

    /// The block size to index with, or `None` if `event` has another one.
    ///
    /// Some engines also announce partly filled blocks, of a smaller size; so one odd event does
    /// not change what was learned, but a pod that speaks only another size (it came back with
    /// another configuration) is believed.
    fn learn(
        &mut self,
        event: &Stored,
        shared: &Shared,
        applied: &mut Applied,
    ) -> Option<BlockSize> {
        let Some(size) = BlockSize::new(event.block_size) else {
            applied.misaligned += 1;
            return None;
        };
        if self.block_size == Some(size) {
            self.streak = 0;
            return Some(size);
        }
        if self.block_size.is_some() {
            applied.other_size += 1;
            self.streak += 1;
            if 0 < self.blocks() && self.streak < SIZE_STREAK {
                return None;
            }
            self.reset_all(shared);
        }
        self.block_size = Some(size);
        self.streak = 0;
        self.publish(shared);
        Some(size)
    }

    /// Gives the rank the lane that `medium` needs, filled with what the level before holds.
    fn level_for(&mut self, rank: usize, medium: Medium, shared: &Shared) {
        let level = match medium {
            Medium::Host => 1,
            Medium::Disk => 2,
            Medium::Device | Medium::Unknown => return,
        };
        if self.ranks[rank].lanes[level].is_some() {
            return;
        }
        let lane = shared.registry.lock().take_lane();
        let target = &mut self.ranks[rank];
        target.lanes[level] = Some(lane);
        for (run, segment) in target.segments(level) {
            let mut shard = shared.shards[run.shard()].write();
            shard.cover(lane, segment);
        }
        self.publish(shared);
    }
}

/// How many blocks of `event` are full; `None` when tokens and hashes do not belong together.
///
/// More tokens than blocks means that blocks were left out (masked), and which ones is unknown.
fn full_blocks(event: &Stored, size: BlockSize, applied: &mut Applied) -> Option<usize> {
    let tokens = match event.tokens_as {
        TokenForm::Single => event.tokens.len(),
        TokenForm::Pairs => event.tokens.len().saturating_sub(1),
    };
    let size = size.get() as usize;
    if event.hashes.len().saturating_mul(size) < tokens {
        applied.misaligned += 1;
        return None;
    }
    let full = tokens / size;
    applied.partial += (event.hashes.len() - full) as u64;
    (0 < full).then_some(full)
}

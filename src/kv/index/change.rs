//! Changes to what one rank holds, carried into the runs.
//!
//! Lives here: [`Changer`], which keeps a rank's entries and the lanes in the runs in step.
//! Never here: which events count (see `pod`).
//! Invariant: no shard is locked while another is, nor for more than a chunk of blocks; entries of
//! the rank change only under the pod's lock, so between chunks only readers see what is half done,
//! and they see less, never more, than is held.

use super::rank::{Held, Rank, Removal, RunId, Uncover};
use super::runs::{Segment, Shard, Spot};
use super::{Applied, Shared, keys};
use crate::blocks::BlockKey;
use crate::kv::event::{EngineHash, Locality, Medium, Removed, Stored};
use crate::units::BlockSize;
use parking_lot::RwLockWriteGuard;
use smallvec::SmallVec;

/// Blocks, or runs, handled per hold of a shard's lock, so that lookups never wait long.
const CHUNK: usize = 256;

/// One rank together with the shards it changes.
pub(super) struct Changer<'a> {
    pub(super) rank: &'a mut Rank,
    pub(super) shared: &'a Shared,
}

impl Changer<'_> {
    /// A store with tokens, and whatever waited for its blocks.
    pub(super) fn stored(
        &mut self,
        event: &Stored,
        size: BlockSize,
        blocks: usize,
        applied: &mut Applied,
    ) {
        let after = match event.parent {
            None => None,
            Some(parent) => match self.rank.blocks.get(&parent) {
                Some(held) => Some(*held),
                None => {
                    applied.parked += 1;
                    applied.parked_dropped += self.rank.orphans.park(parent, event);
                    return;
                }
            },
        };
        applied.stored += self.insert(event, after, size, blocks);
        if self.rank.orphans.is_empty() {
            return;
        }
        let mut known = event.hashes[..blocks].to_vec();
        while let Some(parent) = known.pop() {
            for waiting in self.rank.orphans.claim(parent) {
                let after = self.rank.blocks.get(&parent).copied();
                let blocks = waiting.tokens.len() / size.get() as usize;
                let blocks = blocks.min(waiting.hashes.len());
                // It may have waited since before the pod changed its block size.
                if after.is_some() && waiting.block_size == size.get() {
                    applied.stored += self.insert(&waiting, after, size, blocks);
                    known.extend_from_slice(&waiting.hashes[..blocks]);
                }
            }
        }
    }

    /// Indexes the first `blocks` blocks of `event` behind `after`; how many found a place.
    fn insert(
        &mut self,
        event: &Stored,
        after: Option<Held>,
        size: BlockSize,
        blocks: usize,
    ) -> u64 {
        let parent = after.and_then(|held| {
            let shard = self.shared.shards[held.run.shard()].read();
            shard.key(held.spot())
        });
        if after.is_some() && parent.is_none() {
            return 0;
        }
        let keys = keys::chain(event, parent, size, blocks);
        let Some(first) = keys.first() else { return 0 };
        let shard = after.map_or_else(|| Shared::shard_of(*first), |held| held.run.shard());
        let mut spot = after.map(Held::spot);
        let mut stored = 0;
        for (hashes, keys) in event.hashes.chunks(CHUNK).zip(keys.chunks(CHUNK)) {
            let hashes = &hashes[..keys.len()];
            let Some((last, placed)) = self.place(shard, spot, (hashes, keys), event.medium) else {
                break;
            };
            stored += placed;
            spot = Some(last);
        }
        stored
    }

    /// Puts consecutive blocks into a shard behind `after`; the last place, and how many fit.
    fn place(
        &mut self,
        number: usize,
        after: Option<Spot>,
        (hashes, keys): (&[EngineHash], &[BlockKey]),
        medium: Medium,
    ) -> Option<(Spot, u64)> {
        let top = self.rank.levels()[2];
        let mut shard = Locked::new(self.shared, number);
        let segments = shard.guard.locate(after, keys);
        let mut fresh: SmallVec<[(Segment, usize); 4]> = SmallVec::new();
        let mut displaced = Vec::new();
        let mut at = 0;
        for segment in &segments {
            let Segment { run, start, len } = *segment;
            let covers = shard.guard.covers(run);
            if covers.overlaps(top, start..start + len) {
                for (offset, hash) in (start..start + len).zip(&hashes[at..]) {
                    let held = Held::new(RunId::new(number, run), offset, medium);
                    displaced.extend(self.place_one(*hash, held, medium, &mut shard.guard));
                }
            } else {
                let held = Held::new(RunId::new(number, run), start, medium);
                self.cover([false; 3], held, *segment, &mut shard.guard);
                fresh.push((*segment, at));
            }
            at += usize::from(len);
        }
        drop(shard);
        for (segment, at) in fresh {
            let run = RunId::new(number, segment.run);
            let offsets = segment.start..segment.start + segment.len;
            for (offset, hash) in offsets.zip(&hashes[at..]) {
                let held = Held::new(run, offset, medium);
                if let Some(old) = self.rank.blocks.insert(*hash, held) {
                    displaced.push((*hash, old));
                }
            }
        }
        self.displace(displaced);
        let last = segments.last()?;
        let spot = Spot {
            run: last.run,
            offset: last.start + last.len - 1,
        };
        Some((spot, at as u64))
    }

    /// One block of a stretch of which the rank holds something already. What the hash stood for
    /// before, if that was another place, is returned.
    fn place_one(
        &mut self,
        hash: EngineHash,
        new: Held,
        medium: Medium,
        shard: &mut Shard,
    ) -> Option<(EngineHash, Held)> {
        let spot = new.spot();
        let one = Segment {
            run: spot.run,
            start: spot.offset,
            len: 1,
        };
        let mut displaced = None;
        if let Some(held) = self.rank.blocks.get_mut(&hash) {
            if held.place() == new.place() {
                let before = held.levels();
                held.add(medium);
                let held = *held;
                if !held.is_alias() {
                    self.cover(before, held, one, shard);
                }
                return None;
            }
            displaced = self.rank.blocks.remove(&hash).map(|old| (hash, old));
        }
        if shard
            .covers(spot.run)
            .holds(self.rank.levels()[2], spot.offset)
        {
            self.rank.add_alias(hash, new);
        } else {
            self.cover([false; 3], new, one, shard);
            self.rank.blocks.insert(hash, new);
        }
        displaced
    }

    /// Covers `segment` on the lanes of the levels that `held` has and that were not there `before`.
    fn cover(&self, before: [bool; 3], held: Held, segment: Segment, shard: &mut Shard) {
        let now = held.levels();
        for (level, lane) in self.rank.own_lanes() {
            if now[level] && !before[level] {
                shard.cover(lane, segment);
            }
        }
    }

    /// A hash now stands for another block than before (its removal was missed).
    fn displace(&mut self, displaced: Vec<(EngineHash, Held)>) {
        for (hash, old) in displaced {
            let mut changes = Vec::new();
            let heir = self.rank.release(hash, old, &mut changes);
            self.recover(heir);
            self.uncover(&mut changes);
        }
    }

    /// A store without tokens: blocks that are known (or not) are now on `event.medium` too.
    pub(super) fn moved(&mut self, event: &Stored, applied: &mut Applied) {
        for hash in &event.hashes {
            let Some(held) = self.rank.blocks.get_mut(hash) else {
                applied.moved_unknown += 1;
                continue;
            };
            applied.moved += 1;
            let before = held.levels();
            held.add(event.medium);
            let held = *held;
            if held.is_alias() || before == held.levels() {
                continue;
            }
            let spot = held.spot();
            let one = Segment {
                run: spot.run,
                start: spot.offset,
                len: 1,
            };
            let mut shard = Locked::new(self.shared, held.run.shard());
            self.cover(before, held, one, &mut shard.guard);
        }
    }

    pub(super) fn removed(&mut self, event: &Removed, applied: &mut Applied) {
        if event.locality == Locality::Remote {
            applied.remote += 1;
            return;
        }
        if event.medium == Medium::Unknown {
            applied.unknown_medium += 1;
            return;
        }
        if !self.rank.follows(event.group) {
            applied.other_group += 1;
            return;
        }
        let mut changes = Vec::new();
        for hash in &event.hashes {
            match self.rank.remove(*hash, event.medium, &mut changes) {
                Removal::Done => applied.removed += 1,
                Removal::Unknown => {
                    let waited = self.rank.orphans.remove(*hash, event.medium);
                    applied.removed_unknown += u64::from(!waited);
                }
                Removal::Inherited(heir) => {
                    applied.removed += 1;
                    self.recover(Some(heir));
                }
            }
        }
        self.uncover(&mut changes);
    }

    /// Makes the changes in the runs, and empties the list.
    fn uncover(&mut self, changes: &mut Vec<Uncover>) {
        let mut rest = changes.as_slice();
        while let Some(first) = rest.first() {
            let number = first.run.shard();
            let same = |change: &&Uncover| change.run.shard() == number;
            let len = rest.iter().take(CHUNK).take_while(same).count();
            let mut shard = Locked::new(self.shared, number);
            for change in &rest[..len] {
                if let Some(lane) = self.rank.lanes[change.level] {
                    shard.guard.uncover(lane, change.segment());
                }
            }
            rest = &rest[len..];
        }
        changes.clear();
    }

    /// Covers the place that an alias inherited, on levels where its owner was not.
    fn recover(&mut self, heir: Option<Held>) {
        let Some(held) = heir else { return };
        let spot = held.spot();
        let one = Segment {
            run: spot.run,
            start: spot.offset,
            len: 1,
        };
        let mut shard = Locked::new(self.shared, held.run.shard());
        self.cover([false; 3], held, one, &mut shard.guard);
    }

    /// The rank holds nothing any more.
    pub(super) fn clear(&mut self) {
        let runs = self.rank.clear();
        let mut rest = runs.as_slice();
        while let Some(first) = rest.first() {
            let number = first.shard();
            let same = |run: &&RunId| run.shard() == number;
            let len = rest.iter().take(CHUNK).take_while(same).count();
            let mut shard = Locked::new(self.shared, number);
            for run in &rest[..len] {
                for (_, lane) in self.rank.own_lanes() {
                    shard.guard.uncover_run(lane, run.run());
                }
            }
            rest = &rest[len..];
        }
    }
}

/// A shard locked for changes; frees what nobody holds any more when it is let go.
struct Locked<'a> {
    guard: RwLockWriteGuard<'a, Shard>,
    shared: &'a Shared,
    keys_before: usize,
}

impl<'a> Locked<'a> {
    fn new(shared: &'a Shared, number: usize) -> Locked<'a> {
        let guard = shared.shards[number].write();
        let keys_before = guard.keys();
        Locked {
            guard,
            shared,
            keys_before,
        }
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        self.guard.settle();
        let now = self.guard.keys() as u64;
        self.shared
            .add_keys(now.wrapping_sub(self.keys_before as u64));
    }
}

//! What one data-parallel rank of a pod holds, by the engine's names for blocks.
//!
//! Lives here: [`Rank`]: engine hash → place in the runs, with the tiers and copies held.
//! Never here: which events count (see `pod`), the runs themselves (see `runs`).
//! Invariant: a lane covers a place exactly when the entry that owns the place has a tier of that
//! lane's level; an entry without any tier does not exist.

use super::lanes::Levels;
use super::orphans::Orphans;
use super::runs::{Segment, Spot};
use crate::kv::event::{EngineHash, Medium};
use rustc_hash::FxBuildHasher;
use smallvec::SmallVec;
use std::collections::HashMap;

/// Copies of one device block that are told apart.
///
/// Engines may hold several copies of one block and announce each: the block is gone when as many
/// removals as stores have come. But vLLM's `kv_cache_report_mode=full` announces again what is
/// held already, without a new copy, and each such announcement lets the count run one too high.
/// The cap bounds how long a block can be believed in after its last copy went; it is high enough
/// for the copies that a burst of equal cold prompts really makes.
pub(super) const MAX_COPIES: u8 = 16;

/// One block of a rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct Held {
    /// Shard and run.
    pub(super) run: RunId,
    /// Block in the run.
    pub(super) offset: u16,
    /// Copies on the device, up to [`MAX_COPIES`].
    copies: u8,
    flags: u8,
}

/// The shard in the upper bits, the shard's run in the lower ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct RunId(u32);

/// Shards, as a power of two.
pub(super) const SHARD_BITS: u32 = 6;

impl RunId {
    pub(super) fn new(shard: usize, run: u32) -> RunId {
        let shard = u32::try_from(shard).unwrap_or(0);
        RunId(shard << (32 - SHARD_BITS) | run)
    }

    pub(super) fn shard(self) -> usize {
        (self.0 >> (32 - SHARD_BITS)) as usize
    }

    pub(super) fn run(self) -> u32 {
        self.0 & (u32::MAX >> SHARD_BITS)
    }
}

const HOST: u8 = 1;
const DISK: u8 = 2;
/// Another engine hash owns the place; this one has no part in the coverage.
const ALIAS: u8 = 4;

impl Held {
    pub(super) fn new(run: RunId, offset: u16, medium: Medium) -> Held {
        let mut held = Held {
            run,
            offset,
            copies: 0,
            flags: 0,
        };
        held.add(medium);
        held
    }

    /// Shard, run and block.
    pub(super) fn place(self) -> (RunId, u16) {
        (self.run, self.offset)
    }

    pub(super) fn spot(self) -> Spot {
        Spot {
            run: self.run.run(),
            offset: self.offset,
        }
    }

    /// One more announcement. Tiers below the device are sets: their connectors announce a shared
    /// block again with every request that touches it, and remove it once.
    pub(super) fn add(&mut self, medium: Medium) {
        match medium {
            Medium::Device => self.copies = (self.copies + 1).min(MAX_COPIES),
            Medium::Host => self.flags |= HOST,
            Medium::Disk => self.flags |= DISK,
            Medium::Unknown => {}
        }
    }

    fn remove(&mut self, medium: Medium) {
        match medium {
            Medium::Device => self.copies = self.copies.saturating_sub(1),
            Medium::Host => self.flags &= !HOST,
            Medium::Disk => self.flags &= !DISK,
            Medium::Unknown => {}
        }
    }

    /// On which of the three levels (device; device or host; anywhere) the block is held.
    pub(super) fn levels(self) -> [bool; 3] {
        let device = 0 < self.copies;
        let host = device || self.flags & HOST != 0;
        [device, host, host || self.flags & DISK != 0]
    }

    pub(super) fn is_alias(self) -> bool {
        self.flags & ALIAS != 0
    }
}

/// A change of coverage that is to be made in the runs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Uncover {
    pub(super) run: RunId,
    pub(super) level: usize,
    pub(super) start: u16,
    pub(super) len: u16,
}

impl Uncover {
    pub(super) fn segment(self) -> Segment {
        Segment {
            run: self.run.run(),
            start: self.start,
            len: self.len,
        }
    }
}

/// One rank.
pub(super) struct Rank {
    pub(super) number: u32,
    /// The lanes of the three levels; `None` while the level before says the same.
    pub(super) lanes: [Option<u32>; 3],
    /// The KV-cache group that is indexed: the first with full attention that announced blocks.
    pub(super) group: Option<u32>,
    pub(super) blocks: HashMap<EngineHash, Held, FxBuildHasher>,
    /// Other engine hashes for a place that already has an owner (same tokens, but a difference
    /// that the events do not show).
    aliases: HashMap<(RunId, u16), SmallVec<[EngineHash; 1]>, FxBuildHasher>,
    pub(super) orphans: Orphans,
}

impl Rank {
    pub(super) fn new(number: u32, device_lane: u32) -> Rank {
        Rank {
            number,
            lanes: [Some(device_lane), None, None],
            group: None,
            blocks: HashMap::default(),
            aliases: HashMap::default(),
            orphans: Orphans::default(),
        }
    }

    /// The lane of each level, the one before standing in for a missing one.
    pub(super) fn levels(&self) -> Levels {
        let device = self.lanes[0].unwrap_or(u32::MAX);
        let host = self.lanes[1].unwrap_or(device);
        [device, host, self.lanes[2].unwrap_or(host)]
    }

    /// The lanes in use, with the level they stand for.
    pub(super) fn own_lanes(&self) -> impl Iterator<Item = (usize, u32)> + use<> {
        let lanes = self.lanes;
        (0..3).filter_map(move |level| lanes[level].map(|lane| (level, lane)))
    }

    /// Whether events of `group` are about the indexed blocks.
    pub(super) fn follows(&self, group: Option<u32>) -> bool {
        group.is_none() || self.group.is_none() || self.group == group
    }

    /// Notes that `hash` names a place that another hash owns.
    pub(super) fn add_alias(&mut self, hash: EngineHash, mut held: Held) {
        held.flags |= ALIAS;
        let names = self.aliases.entry(held.place()).or_default();
        names.push(hash);
        self.blocks.insert(hash, held);
    }

    /// Takes one copy of `hash` away. What is no longer covered is added to `changes`.
    pub(super) fn remove(
        &mut self,
        hash: EngineHash,
        medium: Medium,
        changes: &mut Vec<Uncover>,
    ) -> Removal {
        let Some(entry) = self.blocks.get_mut(&hash) else {
            return Removal::Unknown;
        };
        let before = *entry;
        entry.remove(medium);
        let after = *entry;
        if !after.levels()[2] {
            self.blocks.remove(&hash);
            return match self.release(hash, before, changes) {
                Some(heir) => Removal::Inherited(heir),
                None => Removal::Done,
            };
        }
        if !before.is_alias() {
            self.lower(before, after.levels(), changes);
        }
        Removal::Done
    }

    /// `hash`, which is no longer among the blocks, gives up the place it had as `held`; the entry
    /// that owns the place from now on, if there is one.
    pub(super) fn release(
        &mut self,
        hash: EngineHash,
        held: Held,
        changes: &mut Vec<Uncover>,
    ) -> Option<Held> {
        if held.is_alias() {
            self.drop_alias(hash, held);
            return None;
        }
        let heir = self.promote(held);
        // What the heir goes on holding stays covered, so the place never looks free in between.
        let after = heir.map_or([false; 3], Held::levels);
        self.lower(held, after, changes);
        heir
    }

    fn lower(&self, held: Held, after: [bool; 3], changes: &mut Vec<Uncover>) {
        let before = held.levels();
        for level in 0..3 {
            if before[level] && !after[level] && self.lanes[level].is_some() {
                push_change(changes, held, level);
            }
        }
    }

    fn drop_alias(&mut self, hash: EngineHash, held: Held) {
        let place = held.place();
        if let Some(names) = self.aliases.get_mut(&place) {
            names.retain(|name| *name != hash);
            if names.is_empty() {
                self.aliases.remove(&place);
            }
        }
    }

    /// The owner of a place is gone: another name for it becomes the owner.
    fn promote(&mut self, gone: Held) -> Option<Held> {
        if self.aliases.is_empty() {
            return None;
        }
        let names = self.aliases.get_mut(&gone.place())?;
        let heir = names.pop();
        if names.is_empty() {
            self.aliases.remove(&gone.place());
        }
        let held = self.blocks.get_mut(&heir?)?;
        held.flags &= !ALIAS;
        Some(*held)
    }

    /// Forgets every block; the runs they stood in, each once, in order.
    pub(super) fn clear(&mut self) -> Vec<RunId> {
        let mut runs: Vec<RunId> = self.blocks.values().map(|held| held.run).collect();
        runs.sort_unstable();
        runs.dedup();
        self.blocks = HashMap::default();
        self.aliases = HashMap::default();
        self.orphans = Orphans::default();
        runs
    }

    /// Every place held on `level`, as few segments as possible.
    pub(super) fn segments(&self, level: usize) -> Vec<(RunId, Segment)> {
        let mut places: Vec<(RunId, u16)> = self
            .blocks
            .values()
            .filter(|held| held.levels()[level] && !held.is_alias())
            .map(|held| held.place())
            .collect();
        places.sort_unstable();
        let mut segments: Vec<(RunId, Segment)> = Vec::new();
        for (run, offset) in places {
            match segments.last_mut() {
                Some((last, segment)) if *last == run && segment.start + segment.len == offset => {
                    segment.len += 1;
                }
                _ => segments.push((
                    run,
                    Segment {
                        run: run.run(),
                        start: offset,
                        len: 1,
                    },
                )),
            }
        }
        segments
    }
}

/// What became of a removal.
#[derive(Clone, Copy, Debug)]
pub(super) enum Removal {
    /// No such block.
    Unknown,
    /// Noted.
    Done,
    /// Noted; the block's place now belongs to this entry, whose levels must be covered again.
    Inherited(Held),
}

/// Adds one block to `changes`, joining it to the last change when it is next to it.
fn push_change(changes: &mut Vec<Uncover>, held: Held, level: usize) {
    let offset = held.offset;
    let same = |change: &&mut Uncover| change.run == held.run && change.level == level;
    // Levels alternate when a block leaves all of them, so look back a few.
    let recent = changes.iter_mut().rev().take(3).find(same);
    if let Some(change) = recent {
        if offset + 1 == change.start {
            change.start = offset;
            change.len += 1;
            return;
        }
        if change.start + change.len == offset {
            change.len += 1;
            return;
        }
    }
    changes.push(Uncover {
        run: held.run,
        level,
        start: offset,
        len: 1,
    });
}

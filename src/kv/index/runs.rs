//! Block chains, compressed into runs.
//!
//! Lives here: [`Shard`], every chain that starts with the same few first blocks. A run is a
//! stretch of consecutive keys of one chain and the lanes that hold them; the first key of each run
//! is found through a map. Runs are never split and know no parent: a walk leaves a run where its
//! keys stop matching and looks the next key up as the head of another run.
//! Never here: engine hashes, pods, tiers; a lane is only a number.
//! Invariants: a key stands in at most one place, and whoever comes from its parent finds it (as
//! the next key of the same run, or as a head); because keys are chained, two equal keys mean that
//! everything before them is equal too, so the end of a match is found by bisection.

use super::cover::Covers;
use crate::blocks::BlockKey;
use rustc_hash::FxBuildHasher;
use smallvec::SmallVec;
use std::collections::HashMap;

/// Longest run, in blocks: bounds what a single live block can keep in memory.
const RUN_BLOCKS: usize = 4096;
/// Most runs in a shard, because their number shares 32 bits with the shard's.
const MAX_RUNS: usize = 1 << 26;

/// A place in a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Spot {
    pub(super) run: u32,
    pub(super) offset: u16,
}

/// Consecutive places in one run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Segment {
    pub(super) run: u32,
    pub(super) start: u16,
    pub(super) len: u16,
}

/// Where the blocks of one event ended up, in order.
pub(super) type Segments = SmallVec<[Segment; 4]>;

#[derive(Default)]
#[repr(align(64))] // one cache line
struct Run {
    keys: Vec<BlockKey>,
    covers: Covers,
}

/// Chains by their first block.
#[derive(Default)]
pub(super) struct Shard {
    heads: HashMap<BlockKey, u32, FxBuildHasher>,
    runs: Vec<Run>,
    free: Vec<u32>,
    /// Runs that may have become shorter or empty since the last [`Shard::settle`].
    dirty: Vec<u32>,
    keys: usize,
}

/// Length of the common start of two chains that share everything before them.
#[inline]
fn matched(run: &[BlockKey], keys: &[BlockKey]) -> usize {
    let len = run.len().min(keys.len());
    let (run, keys) = (&run[..len], &keys[..len]);
    if len == 0 || run[len - 1] == keys[len - 1] {
        return len;
    }
    // Everything before `same` is equal, everything from `differs` on is not.
    let (mut same, mut differs) = (0, len - 1);
    while same < differs {
        let middle = usize::midpoint(same, differs);
        if run[middle] == keys[middle] {
            same = middle + 1;
        } else {
            differs = middle;
        }
    }
    same
}

fn short(offset: usize) -> u16 {
    u16::try_from(offset).unwrap_or(u16::MAX)
}

impl Shard {
    /// Keys stored, including those that nobody holds but that lie between held ones.
    pub(super) fn keys(&self) -> usize {
        self.keys
    }

    /// The key at `spot`.
    pub(super) fn key(&self, spot: Spot) -> Option<BlockKey> {
        let run = self.runs.get(spot.run as usize)?;
        run.keys.get(usize::from(spot.offset)).copied()
    }

    /// For every lane, how many leading `keys` it holds; `scores` is indexed by lane, zero before.
    pub(super) fn walk(&self, keys: &[BlockKey], scores: &mut [u32]) {
        let mut depth = 0;
        while let Some(head) = keys.get(depth).and_then(|key| self.heads.get(key)) {
            let run = &self.runs[*head as usize];
            let len = short(matched(&run.keys, &keys[depth..]));
            let reached = u32::try_from(depth).unwrap_or(u32::MAX);
            let mut through = false;
            for cover in run.covers.iter() {
                // A lane that came after the caller sized its scores is not asked about.
                let Some(score) = scores.get_mut(cover.lane as usize) else {
                    continue;
                };
                if *score == reached {
                    *score += u32::from(cover.prefix.min(len));
                    through |= len <= cover.prefix;
                }
            }
            if !through {
                break;
            }
            depth += usize::from(len);
        }
    }

    /// Finds or makes the places of `keys`, which follow `after` (or start a chain).
    ///
    /// The caller then covers them, or the new ones stay without a holder until their run shrinks.
    /// Fewer blocks than keys come back when the shard is full.
    pub(super) fn locate(&mut self, after: Option<Spot>, keys: &[BlockKey]) -> Segments {
        let mut segments = Segments::new();
        let mut after = after;
        let mut rest = keys;
        while let Some(first) = rest.first() {
            let Some(segment) = self
                .locate_known(after, rest)
                .or_else(|| self.append(after, *first, &rest[1..]))
            else {
                break;
            };
            after = Some(Spot {
                run: segment.run,
                offset: segment.start + segment.len - 1,
            });
            rest = &rest[usize::from(segment.len)..];
            segments.push(segment);
        }
        segments
    }

    fn locate_known(&self, after: Option<Spot>, keys: &[BlockKey]) -> Option<Segment> {
        if let Some(spot) = after {
            let run = &self.runs[spot.run as usize];
            let next = usize::from(spot.offset) + 1;
            let len = matched(run.keys.get(next..).unwrap_or_default(), keys);
            if 0 < len {
                return Some(Segment {
                    run: spot.run,
                    start: short(next),
                    len: short(len),
                });
            }
        }
        let head = *self.heads.get(&keys[0])?;
        Some(Segment {
            run: head,
            start: 0,
            len: short(matched(&self.runs[head as usize].keys, keys)),
        })
    }

    /// Puts `first`, which stands nowhere yet, and those after it that stand nowhere either.
    fn append(
        &mut self,
        after: Option<Spot>,
        first: BlockKey,
        more: &[BlockKey],
    ) -> Option<Segment> {
        let tail = after.filter(|spot| {
            let len = self.runs[spot.run as usize].keys.len();
            usize::from(spot.offset) + 1 == len && len < RUN_BLOCKS
        });
        let number = match tail {
            Some(spot) => spot.run,
            None => self.new_run(first)?,
        };
        let run = &mut self.runs[number as usize];
        let start = run.keys.len();
        let room = RUN_BLOCKS - start - 1;
        // A later key may already be the head of a run that lost what led to it.
        let heads = &self.heads;
        let more = more
            .iter()
            .take(room)
            .take_while(|key| !heads.contains_key(key));
        let len = 1 + more.clone().count();
        run.keys
            .reserve_exact(growth(run.keys.capacity(), start + len).saturating_sub(start));
        run.keys.push(first);
        run.keys.extend(more);
        self.keys += len;
        Some(Segment {
            run: number,
            start: short(start),
            len: short(len),
        })
    }

    fn new_run(&mut self, head: BlockKey) -> Option<u32> {
        let number = match self.free.pop() {
            Some(number) => number,
            None if self.runs.len() < MAX_RUNS => {
                self.runs.push(Run::default());
                u32::try_from(self.runs.len() - 1).ok()?
            }
            None => return None,
        };
        self.heads.insert(head, number);
        Some(number)
    }

    /// The lanes of `run`.
    pub(super) fn covers(&self, run: u32) -> &Covers {
        &self.runs[run as usize].covers
    }

    /// Lane `lane` now holds `len` blocks of `run` from `start`.
    pub(super) fn cover(&mut self, lane: u32, segment: Segment) {
        let Segment { run, start, len } = segment;
        self.runs[run as usize].covers.add(lane, start..start + len);
    }

    /// Lane `lane` no longer holds them.
    pub(super) fn uncover(&mut self, lane: u32, segment: Segment) {
        let Segment { run, start, len } = segment;
        let target = &mut self.runs[run as usize];
        target.covers.remove(lane, start..start + len);
        if target.covers.is_empty() || usize::from(start + len) == target.keys.len() {
            self.mark(run);
        }
    }

    /// Lane `lane` no longer holds anything of `run`.
    pub(super) fn uncover_run(&mut self, lane: u32, run: u32) {
        self.runs[run as usize].covers.remove_lane(lane);
        self.mark(run);
    }

    fn mark(&mut self, run: u32) {
        if self.dirty.last() != Some(&run) {
            self.dirty.push(run);
        }
    }

    /// Frees what no lane holds any more; to be called before the shard is unlocked.
    pub(super) fn settle(&mut self) {
        while let Some(number) = self.dirty.pop() {
            let run = &mut self.runs[number as usize];
            let Some(head) = run.keys.first().copied() else {
                continue;
            };
            let extent = usize::from(run.covers.extent());
            self.keys -= run.keys.len() - extent.min(run.keys.len());
            if extent == 0 {
                *run = Run::default();
                self.heads.remove(&head);
                self.free.push(number);
                continue;
            }
            run.keys.truncate(extent);
            if 4 * extent.max(8) < run.keys.capacity() {
                run.keys.shrink_to(2 * extent);
            }
        }
    }

    /// Memory of the shard's own tables in bytes, about.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.heads.is_empty() && self.keys == 0 && self.free.len() == self.runs.len()
    }
}

/// Capacity for `len` keys: a quarter more than now, not double, because most runs stop growing.
fn growth(capacity: usize, len: usize) -> usize {
    if len <= capacity {
        capacity
    } else {
        len.max(capacity + capacity / 4)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_takes_one_cache_line() {
        assert_eq!(size_of::<Run>(), 64);
    }

    #[test]
    fn the_end_of_a_match_is_found_at_every_place() {
        let keys: Vec<BlockKey> = (0..300).map(BlockKey).collect();
        let lengths = (0..40).chain([63, 64, 65, 255, 256, 257, 300]);
        for (len, other_len) in lengths
            .clone()
            .flat_map(|n| lengths.clone().map(move |m| (n, m)))
        {
            for common in 0..=len.min(other_len) {
                let tail = (common..other_len).map(|n| BlockKey(1000 + n as u128));
                let other: Vec<BlockKey> = keys[..common].iter().copied().chain(tail).collect();
                assert_eq!(matched(&keys[..len], &other), common, "{len} {other_len}");
            }
        }
    }
}

//! Which blocks of one run each lane holds.
//!
//! Lives here: [`Covers`], a set of offsets per lane, written as a leading stretch plus, when a
//! block in the middle is gone, the stretches after it.
//! Never here: keys, pods, tiers.
//! Invariant: lanes are sorted and none is empty; stretches are sorted, do not touch and all lie
//! beyond the leading one, so `prefix` is the exact number of leading blocks a lane holds.

use smallvec::SmallVec;
use std::ops::Range;

/// What one lane holds of a run.
#[derive(Clone, Copy)]
pub(super) struct Cover {
    /// Whose.
    pub(super) lane: u32,
    /// Blocks held without a hole, from the start of the run.
    pub(super) prefix: u16,
    /// Whether there are stretches beyond the first hole.
    gapped: bool,
}

type Stretch = (u16, u16);
type Gaps = Vec<(u32, Vec<Stretch>)>;

/// The lanes of one run.
#[derive(Default)]
pub(super) struct Covers {
    lanes: SmallVec<[Cover; 2]>,
    /// Only lanes whose `gapped` is set; rare, so a list is enough.
    #[allow(clippy::box_collection)] // one word in the many runs that have none
    gaps: Option<Box<Gaps>>,
}

impl Covers {
    pub(super) fn iter(&self) -> std::slice::Iter<'_, Cover> {
        self.lanes.iter()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.lanes.is_empty()
    }

    fn find(&self, lane: u32) -> Result<usize, usize> {
        // New lanes often come last, and a run with one lane is the common case.
        match self.lanes.last() {
            None => Err(0),
            Some(last) if last.lane < lane => Err(self.lanes.len()),
            Some(last) if last.lane == lane => Ok(self.lanes.len() - 1),
            Some(_) => self.lanes.binary_search_by_key(&lane, |cover| cover.lane),
        }
    }

    fn stretches(&self, lane: u32) -> &[Stretch] {
        let gaps = self.gaps.as_deref().map_or(&[][..], Vec::as_slice);
        gaps.iter()
            .find(|(owner, _)| *owner == lane)
            .map_or(&[], |(_, stretches)| stretches)
    }

    fn set_stretches(&mut self, lane: u32, stretches: Vec<Stretch>) {
        let gaps = self.gaps.get_or_insert_default();
        gaps.retain(|(owner, _)| *owner != lane);
        if !stretches.is_empty() {
            gaps.push((lane, stretches));
        }
        if gaps.is_empty() {
            self.gaps = None;
        }
    }

    /// Whether `lane` holds any block of `range`.
    pub(super) fn overlaps(&self, lane: u32, range: Range<u16>) -> bool {
        let Ok(at) = self.find(lane) else {
            return false;
        };
        let cover = self.lanes[at];
        range.start < cover.prefix
            || (cover.gapped
                && self
                    .stretches(lane)
                    .iter()
                    .any(|(start, end)| *start < range.end && range.start < *end))
    }

    /// Whether `lane` holds the block at `offset`.
    pub(super) fn holds(&self, lane: u32, offset: u16) -> bool {
        self.overlaps(lane, offset..offset.saturating_add(1))
    }

    /// One more than the largest offset that any lane holds.
    pub(super) fn extent(&self) -> u16 {
        let prefixes = self.lanes.iter().map(|cover| cover.prefix).max();
        let gaps = self.gaps.as_deref().map_or(&[][..], Vec::as_slice);
        let ends = gaps.iter().filter_map(|(_, stretches)| stretches.last());
        let last = ends.map(|(_, end)| *end).max();
        prefixes.max(last).unwrap_or(0)
    }

    /// `lane` now holds all of `range`.
    pub(super) fn add(&mut self, lane: u32, range: Range<u16>) {
        if range.is_empty() {
            return;
        }
        let at = match self.find(lane) {
            Ok(at) => at,
            Err(at) => {
                self.lanes.insert(
                    at,
                    Cover {
                        lane,
                        prefix: 0,
                        gapped: false,
                    },
                );
                at
            }
        };
        let cover = self.lanes[at];
        if !cover.gapped && range.start <= cover.prefix {
            self.lanes[at].prefix = cover.prefix.max(range.end);
            return;
        }
        let mut held = self.held(cover);
        held.push((range.start, range.end));
        held.sort_unstable();
        let mut merged: Vec<Stretch> = Vec::with_capacity(held.len());
        for (start, end) in held {
            match merged.last_mut() {
                Some(last) if start <= last.1 => last.1 = last.1.max(end),
                _ => merged.push((start, end)),
            }
        }
        self.set(at, merged);
    }

    /// `lane` no longer holds anything of `range`.
    pub(super) fn remove(&mut self, lane: u32, range: Range<u16>) {
        let Ok(at) = self.find(lane) else { return };
        let cover = self.lanes[at];
        if !cover.gapped && cover.prefix <= range.end && 0 < range.start {
            self.lanes[at].prefix = cover.prefix.min(range.start);
            return;
        }
        let mut left = Vec::new();
        for (start, end) in self.held(cover) {
            let before = (start, end.min(range.start));
            let after = (start.max(range.end), end);
            left.extend([before, after].iter().filter(|(start, end)| start < end));
        }
        self.set(at, left);
    }

    /// `lane` no longer holds anything.
    pub(super) fn remove_lane(&mut self, lane: u32) {
        if let Ok(at) = self.find(lane) {
            self.set(at, Vec::new());
        }
    }

    /// Everything a lane holds, as sorted stretches.
    fn held(&self, cover: Cover) -> Vec<Stretch> {
        let mut held = Vec::new();
        if 0 < cover.prefix {
            held.push((0, cover.prefix));
        }
        if cover.gapped {
            held.extend_from_slice(self.stretches(cover.lane));
        }
        held
    }

    /// Replaces what the lane at `at` holds.
    fn set(&mut self, at: usize, mut held: Vec<Stretch>) {
        let Cover { lane, gapped, .. } = self.lanes[at];
        let prefix = match held.first() {
            Some((0, end)) => {
                let end = *end;
                held.remove(0);
                end
            }
            _ => 0,
        };
        let now_gapped = !held.is_empty();
        if gapped || now_gapped {
            self.set_stretches(lane, held);
        }
        if prefix == 0 && !now_gapped {
            self.lanes.remove(at);
            if self.lanes.len() <= 2 {
                self.lanes.shrink_to_fit();
            }
        } else {
            self.lanes[at].prefix = prefix;
            self.lanes[at].gapped = now_gapped;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn covers_answer_as_a_set_of_offsets_would(
            steps in proptest::collection::vec((0u8..3, 0u32..3, 0u16..20, 1u16..8), 1..60)
        ) {
            let mut covers = Covers::default();
            let mut sets = [BTreeSet::new(), BTreeSet::new(), BTreeSet::new()];
            for (what, lane, start, len) in steps {
                let set = &mut sets[lane as usize];
                let range = start..start + len;
                match what {
                    0 => { covers.add(lane, range.clone()); set.extend(range); }
                    1 => { covers.remove(lane, range.clone()); set.retain(|o| !range.contains(o)); }
                    _ if len == 1 => { covers.remove_lane(lane); set.clear(); }
                    _ => { covers.remove(lane, start..start + 1); set.remove(&start); }
                }
                for (lane, set) in (0u32..).zip(&sets) {
                    let prefix = (0u16..).take_while(|o| set.contains(o)).count();
                    let found = covers.iter().find(|c| c.lane == lane);
                    prop_assert_eq!(found.map_or(0, |c| usize::from(c.prefix)), prefix);
                    prop_assert_eq!(found.is_some(), !set.is_empty());
                    for offset in 0..30 {
                        prop_assert_eq!(covers.holds(lane, offset), set.contains(&offset));
                    }
                }
                let extent = sets.iter().filter_map(|s| s.last()).max().map_or(0, |o| o + 1);
                prop_assert_eq!(covers.extent(), extent);
            }
        }
    }
}

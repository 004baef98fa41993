//! Lanes: the columns of the index.
//!
//! Lives here: which lanes a pod has. A lane is a dense number for one set of blocks: what one
//! rank of a pod holds on the device, or on device and host, or anywhere. The second and third
//! exist only once the rank has announced such a tier; until then the lane before stands for them.
//! Never here: the sets themselves (see `runs`).
//! Invariant: a lane number belongs to one pod at a time and is given away again only after its set
//! has been emptied.

use crate::names::PodId;
use crate::units::BlockSize;
use smallvec::SmallVec;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

const NO_LANE: u32 = u32::MAX;

/// The lanes of one rank: device; device or host; anywhere.
pub(super) type Levels = [u32; 3];

/// What readers know of one pod.
#[derive(Clone)]
pub(super) struct PodLanes {
    pub(super) generation: u32,
    pub(super) block_size: Option<BlockSize>,
    pub(super) ranks: SmallVec<[Levels; 1]>,
}

/// What readers know of all pods; immutable, replaced as a whole.
#[derive(Clone, Default)]
pub(super) struct LaneTable {
    pods: Vec<Option<PodLanes>>,
    /// Generation and lane of the pods that have one lane only, which are most pods.
    single: Vec<(u32, u32)>,
    lanes: usize,
    sizes: SmallVec<[BlockSize; 2]>,
}

impl LaneTable {
    /// One more than the largest lane number in use.
    pub(super) fn lanes(&self) -> usize {
        self.lanes
    }

    /// Block sizes of all pods, ascending, each once.
    pub(super) fn sizes(&self) -> &SmallVec<[BlockSize; 2]> {
        &self.sizes
    }

    /// The lane of a pod that has just one.
    pub(super) fn single(&self, pod: PodId) -> Option<u32> {
        let (generation, lane) = *self.single.get(usize::from(pod.slot))?;
        (generation == pod.generation && lane != NO_LANE).then_some(lane)
    }

    pub(super) fn pod(&self, pod: PodId) -> Option<&PodLanes> {
        let entry = self.pods.get(usize::from(pod.slot))?.as_ref()?;
        (entry.generation == pod.generation).then_some(entry)
    }

    fn set(&mut self, slot: u16, entry: Option<PodLanes>) {
        let slot = usize::from(slot);
        if self.pods.len() <= slot {
            self.pods.resize(slot + 1, None);
            self.single.resize(slot + 1, (0, NO_LANE));
        }
        self.single[slot] = match &entry {
            Some(PodLanes {
                generation, ranks, ..
            }) => match ranks.as_slice() {
                [[device, host, disk]] if device == host && device == disk => {
                    (*generation, *device)
                }
                _ => (0, NO_LANE),
            },
            None => (0, NO_LANE),
        };
        self.pods[slot] = entry;
        let pods = || self.pods.iter().flatten();
        let last = pods().flat_map(|pod| pod.ranks.iter().flatten()).max();
        self.lanes = last.map_or(0, |lane| *lane as usize + 1);
        self.sizes = pods().filter_map(|pod| pod.block_size).collect();
        self.sizes.sort_unstable();
        self.sizes.dedup();
    }
}

/// Gives out lane numbers, smallest first, and keeps the table that readers copy.
#[derive(Default)]
pub(super) struct Registry {
    table: LaneTable,
    next: u32,
    free: BinaryHeap<Reverse<u32>>,
}

impl Registry {
    pub(super) fn take_lane(&mut self) -> u32 {
        if let Some(Reverse(lane)) = self.free.pop() {
            return lane;
        }
        self.next += 1;
        self.next - 1
    }

    pub(super) fn give_back(&mut self, lane: u32) {
        self.free.push(Reverse(lane));
    }

    /// Replaces what is known of `pod`, unless its slot has a later occupant; the table to publish.
    pub(super) fn set(&mut self, pod: PodId, entry: Option<PodLanes>) -> LaneTable {
        let slot = self.table.pods.get(usize::from(pod.slot));
        let occupant = slot.and_then(Option::as_ref);
        if occupant.is_none_or(|occupant| occupant.generation <= pod.generation) {
            self.table.set(pod.slot, entry);
        }
        self.table.clone()
    }
}

//! The index: for a prompt, how many leading blocks each pod holds, per tier.
//!
//! Lives here: [`Index`] and its limits and counters. It is exact: blocks are keyed by content
//! (`blocks::BlockKey`, computed again from the tokens that the engines announce), a block removed
//! in the middle ends the prefix there, and every engine's own hash is only a name for removals.
//! Never here: I/O, clocks, what a decision makes of the answer.
//! Invariant: many readers, one writer per pod. A lookup locks one shard for reading; a change
//! locks one shard for at most a few hundred blocks at a time.

mod change;
mod cover;
mod keys;
mod lanes;
mod orphans;
mod overlaps;
mod pod;
mod rank;
mod runs;
#[cfg(test)]
mod tests;
mod writer;

pub use overlaps::Overlaps;
pub use writer::Writer;

use crate::blocks::{BlockChain, BlockKey};
use crate::kv::event::Batch;
use crate::names::PodId;
use crate::revision::Revision;
use crate::units::BlockSize;
use arc_swap::ArcSwap;
use lanes::{LaneTable, PodLanes, Registry};
use parking_lot::{Mutex, RwLock};
use pod::State;
use rank::SHARD_BITS;
use runs::Shard;
use smallvec::SmallVec;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const SHARDS: usize = 1 << SHARD_BITS;

/// How much an index may hold. A block takes about 50 bytes per pod that holds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Blocks of one pod, all ranks together. A pod that announces more is emptied (and counted in
    /// [`Applied::over_limit`]): missing knowledge costs a cache hit, growth costs the process.
    pub blocks_per_pod: u64,
    /// Blocks of all pods together; the pod whose store goes beyond is emptied.
    pub blocks: u64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            blocks_per_pod: 4_000_000,
            blocks: 64_000_000,
        }
    }
}

macro_rules! counters {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $name { $($(#[$field_doc])* pub $field: u64,)* }

        impl std::ops::AddAssign for $name {
            fn add_assign(&mut self, other: $name) {
                $(self.$field += other.$field;)*
            }
        }
    };
}

counters! {
    /// What applying a batch did, to be added up.
    Applied {
        /// Batches looked at.
        batches,
        /// Blocks stored with their tokens, those held already included.
        stored,
        /// Copies of blocks removed.
        removed,
        /// Times a rank was emptied by its engine.
        cleared,
        /// Blocks announced without tokens that are known, so that only their tier changed.
        moved,
        /// The same, not known.
        moved_unknown,
        /// Removals of blocks that were not held; normal after joining late.
        removed_unknown,
        /// Stores whose parent is unknown; they wait for it.
        parked,
        /// Stores that left the waiting room without having met their parent.
        parked_dropped,
        /// Stores of another block size than the pod's (partly filled blocks, as a rule).
        other_size,
        /// Events of KV-cache groups that are not indexed.
        other_group,
        /// Partly filled blocks at the end of a store.
        partial,
        /// Stores whose tokens do not fit their blocks.
        misaligned,
        /// Events about storage that is not the pod's.
        remote,
        /// Events about a medium that this version does not know.
        unknown_medium,
        /// Stores of an adapter that is only given by number.
        unnamed_adapter,
        /// Times the pod was emptied because a limit was reached.
        over_limit,
        /// Batches of more ranks than a pod may have.
        rank_limit,
        /// Batches for a pod that is not (or no longer) known.
        unknown_pod,
    }
}

/// What pods hold.
pub struct Index {
    shared: Shared,
    pods: RwLock<Vec<Option<Arc<Pod>>>>,
}

/// One pod's cell.
struct Pod {
    id: PodId,
    blocks: AtomicU64,
    state: Mutex<State>,
}

/// What the pods of an index share.
struct Shared {
    limits: Limits,
    shards: Box<[RwLock<Shard>]>,
    registry: Mutex<Registry>,
    table: ArcSwap<LaneTable>,
    memberships: AtomicU64,
    keys: AtomicU64,
    revision: Revision,
}

impl Shared {
    fn shard_of(first: BlockKey) -> usize {
        // The upper bits: the maps inside a shard hash the whole key.
        (first.0 >> (128 - SHARD_BITS)) as usize
    }

    fn publish(&self, pod: PodId, entry: Option<PodLanes>) {
        let mut registry = self.registry.lock();
        let table = registry.set(pod, entry);
        self.table.store(Arc::new(table));
        self.revision.bump();
    }

    /// Adds a difference, in two's complement.
    fn add_memberships(&self, difference: u64) {
        self.memberships.fetch_add(difference, Ordering::Relaxed);
    }

    /// Adds a difference, in two's complement.
    fn add_keys(&self, difference: u64) {
        self.keys.fetch_add(difference, Ordering::Relaxed);
    }

    fn is_full(&self) -> bool {
        let memberships = self.memberships.load(Ordering::Relaxed);
        let keys = self.keys.load(Ordering::Relaxed);
        self.limits.blocks < memberships.max(keys)
    }
}

impl std::fmt::Debug for Index {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Index")
            .field("blocks", &self.len())
            .finish_non_exhaustive()
    }
}

impl Index {
    /// An empty index.
    #[must_use]
    pub fn new(limits: Limits) -> Index {
        Index {
            shared: Shared {
                limits,
                shards: (0..SHARDS).map(|_| RwLock::default()).collect(),
                registry: Mutex::default(),
                table: ArcSwap::default(),
                memberships: AtomicU64::new(0),
                keys: AtomicU64::new(0),
                revision: Revision::default(),
            },
            pods: RwLock::default(),
        }
    }

    /// Gets ready for batches of `pod`. An earlier incarnation in the same slot is forgotten; an
    /// id that is known, or older than the slot's, changes nothing.
    pub fn add_pod(&self, pod: PodId) {
        let slot = usize::from(pod.slot);
        let mut pods = self.pods.write();
        if pods.len() <= slot {
            pods.resize_with(slot + 1, || None);
        }
        let before = pods[slot].take();
        if let Some(known) = &before
            && pod.generation <= known.id.generation
        {
            pods[slot] = before;
            return;
        }
        pods[slot] = Some(Arc::new(Pod {
            id: pod,
            blocks: AtomicU64::new(0),
            state: Mutex::new(State::new(pod)),
        }));
        drop(pods);
        if let Some(before) = before {
            before.state.lock().forget(&self.shared);
        }
    }

    /// Drops everything `pod` holds, for good: batches that are still under way for this
    /// incarnation are ignored.
    pub fn forget(&self, pod: PodId) {
        let mut pods = self.pods.write();
        let Some(entry) = pods.get_mut(usize::from(pod.slot)) else {
            return;
        };
        let Some(known) = entry.take_if(|known| known.id == pod) else {
            return;
        };
        drop(pods);
        known.state.lock().forget(&self.shared);
    }

    fn pod(&self, pod: PodId) -> Option<Arc<Pod>> {
        let pods = self.pods.read();
        let known = pods.get(usize::from(pod.slot))?.as_ref()?;
        (known.id == pod).then(|| Arc::clone(known))
    }

    /// Applies one batch, in order.
    pub fn apply(&self, pod: PodId, batch: &Batch) -> Applied {
        self.apply_to(self.pod(pod).as_deref(), batch)
    }

    fn apply_to(&self, known: Option<&Pod>, batch: &Batch) -> Applied {
        let ignored = Applied {
            unknown_pod: 1,
            ..Applied::default()
        };
        let Some(known) = known else {
            return ignored;
        };
        let mut state = known.state.lock();
        if state.forgotten {
            return ignored;
        }
        let applied = state.apply(batch, &self.shared);
        known.count(&mut state, &self.shared);
        applied
    }

    /// Forgets what one rank of `pod` holds, because it can no longer be trusted.
    pub fn reset(&self, pod: PodId, rank: u32) {
        self.reset_of(self.pod(pod).as_deref(), rank);
    }

    fn reset_of(&self, known: Option<&Pod>, rank: u32) {
        if let Some(known) = known {
            let mut state = known.state.lock();
            state.reset(rank, &self.shared);
            known.count(&mut state, &self.shared);
        }
    }

    /// Block sizes in use, ascending: a prompt needs one chain per entry.
    #[must_use]
    pub fn block_sizes(&self) -> SmallVec<[BlockSize; 2]> {
        self.shared.table.load().sizes().clone()
    }

    /// The block size that `pod` has been heard to use.
    #[must_use]
    pub fn block_size(&self, pod: PodId) -> Option<BlockSize> {
        self.heard().block_size(pod)
    }

    /// What has been heard of all pods so far.
    #[must_use]
    pub fn heard(&self) -> Heard {
        Heard(self.shared.table.load_full())
    }

    /// Grows whenever a pod's block size, or the state of the feed that fills it, changes. The blocks
    /// themselves have no part in it.
    #[must_use]
    pub fn revision(&self) -> u64 {
        self.shared.revision.get()
    }

    /// What a feed tells of its state's changes.
    pub(super) fn changes(&self) -> Revision {
        self.shared.revision.clone()
    }

    /// Looks a prompt up for all pods in one pass; `chains` holds it once per block size.
    pub fn overlaps(&self, chains: &[BlockChain], out: &mut Overlaps) {
        let table = self.shared.table.load();
        if !Arc::ptr_eq(&table, &out.table) {
            out.table = Arc::clone(&table);
        }
        out.scores.clear();
        out.scores.resize(table.lanes(), 0);
        for chain in chains {
            if let Some(first) = chain.keys.first() {
                let shard = &self.shared.shards[Shared::shard_of(*first)];
                shard.read().walk(&chain.keys, &mut out.scores);
            }
        }
    }

    /// Blocks that `pod` holds, over all ranks; a block on several tiers counts once.
    #[must_use]
    pub fn blocks(&self, pod: PodId) -> u64 {
        self.pod(pod)
            .map_or(0, |known| known.blocks.load(Ordering::Relaxed))
    }

    /// Blocks of all pods: the sum of [`Index::blocks`].
    #[must_use]
    pub fn len(&self) -> u64 {
        self.shared.memberships.load(Ordering::Relaxed)
    }

    /// Whether no pod holds anything.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// What an index had heard of pods at one moment.
pub struct Heard(Arc<LaneTable>);

impl Heard {
    /// The block size that `pod` was heard to use.
    #[must_use]
    pub fn block_size(&self, pod: PodId) -> Option<BlockSize> {
        self.0.pod(pod)?.block_size
    }
}

impl Pod {
    fn count(&self, state: &mut State, shared: &Shared) {
        self.blocks.store(state.account(shared), Ordering::Relaxed);
    }
}

//! Everything one decision may look at, observed once.
//!
//! Lives here: [`Snapshot`], [`Candidate`] and the measurements they carry.
//! Never here: how any of it was measured.
//! Invariant: plain values; unknown has a name (no `Option<bool>`, no magic numbers).

use crate::decide::board::{Board, Member};
use crate::names::{Endpoint, PodId};
use crate::units::{BlockSize, Blocks, Ratio, Tokens};
use std::sync::Arc;

/// All pods with their numbers, taken at one instant.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    board: Arc<Board>,
    serves: Serving,
    cached: Vec<TierBlocks>,
    /// Whether any pod holds blocks below its device.
    tiers: bool,
    loads: Vec<PodLoad>,
}

/// Which pods serve what the request names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Serving {
    /// All of them.
    #[default]
    All,
    /// Those that say so, in the board's order; a pod that is not listed does not.
    Each(Arc<[Serves]>),
}

impl Serving {
    /// Whether the pod at `position` does.
    #[inline]
    #[must_use]
    pub fn at(&self, position: usize) -> Serves {
        match self {
            Serving::All => Serves::Yes,
            Serving::Each(list) => list.get(position).copied().unwrap_or(Serves::NotThisModel),
        }
    }
}

impl Snapshot {
    /// A snapshot of `board` for a request of which its pods hold `cached`, in the same order. Nothing
    /// is promised to them yet (see [`Snapshot::set_loads`]).
    #[must_use]
    pub fn new(board: Arc<Board>, serves: Serving, mut cached: Vec<TierBlocks>) -> Snapshot {
        let pods = board.members().len();
        cached.resize(pods, TierBlocks::default());
        Snapshot {
            board,
            serves,
            tiers: any_tiers(&cached),
            cached,
            loads: vec![PodLoad::default(); pods],
        }
    }

    /// Notes what was promised to each pod.
    pub fn set_loads(&mut self, of: impl Fn(PodId) -> PodLoad) {
        for (load, pod) in self.loads.iter_mut().zip(self.board.ids()) {
            *load = of(*pod);
        }
    }

    /// What holds of the pods whatever the request.
    #[must_use]
    pub fn board(&self) -> &Arc<Board> {
        &self.board
    }

    /// How many pods there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.loads.len()
    }

    /// Whether there is no pod.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.loads.is_empty()
    }

    /// The pod at `position`, which is below [`Snapshot::len`].
    ///
    /// # Panics
    /// When it is not.
    #[must_use]
    pub fn candidate(&self, position: usize) -> Candidate {
        let member = &self.board.members()[position];
        Candidate {
            pod: member.pod,
            endpoint: member.endpoint,
            role: member.role,
            availability: member.availability,
            serves: self.serves.at(position),
            local_prefill: member.local_prefill,
            block_size: member.block_size,
            cached: self.cached[position],
            kv_source: member.kv_source,
            load: self.loads[position],
            prefill_capacity: member.prefill_capacity,
            kv_capacity: member.kv_capacity,
            engine: member.engine,
        }
    }

    /// All pods.
    pub fn candidates(&self) -> impl ExactSizeIterator<Item = Candidate> {
        (0..self.len()).map(|position| self.candidate(position))
    }

    /// Memory of its own, without that of the board.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.len() * (size_of::<TierBlocks>() + size_of::<PodLoad>() + size_of::<Serves>())
    }

    pub(super) fn serves(&self) -> &Serving {
        &self.serves
    }

    pub(super) fn has_tiers(&self) -> bool {
        self.tiers
    }

    pub(super) fn cached(&self) -> &[TierBlocks] {
        &self.cached
    }

    pub(super) fn loads(&self) -> &[PodLoad] {
        &self.loads
    }
}

fn any_tiers(cached: &[TierBlocks]) -> bool {
    let below = |blocks: &TierBlocks| blocks.host.0 | blocks.disk.0;
    cached.iter().fold(0, |all, blocks| all | below(blocks)) != 0
}

impl FromIterator<Candidate> for Snapshot {
    fn from_iter<T: IntoIterator<Item = Candidate>>(candidates: T) -> Snapshot {
        let candidates: Vec<Candidate> = candidates.into_iter().collect();
        let serves = || candidates.iter().map(|pod| pod.serves);
        let cached: Vec<TierBlocks> = candidates.iter().map(|pod| pod.cached).collect();
        Snapshot {
            board: Arc::new(Board::new(
                candidates.iter().map(Candidate::member).collect(),
            )),
            serves: if serves().all(|serves| serves == Serves::Yes) {
                Serving::All
            } else {
                Serving::Each(serves().collect())
            },
            tiers: any_tiers(&cached),
            cached,
            loads: candidates.iter().map(|pod| pod.load).collect(),
        }
    }
}

/// One pod as the decision sees it.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    /// Its identity.
    pub pod: PodId,
    /// Where it listens.
    pub endpoint: Endpoint,
    /// What it may be used for.
    pub role: Role,
    /// Whether it can take requests now.
    pub availability: Availability,
    /// Whether it serves the model (and adapter) the request names.
    pub serves: Serves,
    /// Whether a request may be prefilled on this pod although it decodes.
    pub local_prefill: LocalPrefill,
    /// Tokens per KV block on this pod.
    pub block_size: BlockSize,
    /// Leading blocks of the prompt that it holds, per tier.
    pub cached: TierBlocks,
    /// What is known about its KV events.
    pub kv_source: KvSource,
    /// What this process has promised it.
    pub load: PodLoad,
    /// Prompt tokens the pod can take into one prefill batch.
    pub prefill_capacity: Capacity<Tokens>,
    /// KV blocks the pod has.
    pub kv_capacity: Capacity<Blocks>,
    /// What the engine itself reported, when it did.
    pub engine: EngineReport,
}

impl Candidate {
    /// What holds of it whatever the request.
    #[must_use]
    pub fn member(&self) -> Member {
        Member {
            pod: self.pod,
            endpoint: self.endpoint,
            role: self.role,
            availability: self.availability,
            local_prefill: self.local_prefill,
            block_size: self.block_size,
            kv_source: self.kv_source,
            prefill_capacity: self.prefill_capacity,
            kv_capacity: self.kv_capacity,
            engine: self.engine,
        }
    }
}

/// What a pod may be used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Prefill only.
    Prefill,
    /// Decode, and prefill of what it decodes.
    Decode,
    /// Either.
    Both,
}

impl Role {
    /// Whether a pod of this role may be the destination that decodes.
    #[must_use]
    pub fn decodes(self) -> bool {
        matches!(self, Role::Decode | Role::Both)
    }

    /// Whether a pod of this role may prefill for another pod.
    #[must_use]
    pub fn prefills(self) -> bool {
        matches!(self, Role::Prefill | Role::Both)
    }

    /// The word used in YAML, spans and output.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Role::Prefill => "prefill",
            Role::Decode => "decode",
            Role::Both => "both",
        }
    }
}

/// Whether a pod can take requests now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Availability {
    /// Yes.
    Ready,
    /// Known, but not (yet) ready.
    NotReady,
    /// Going away: finishes what it has.
    Draining,
    /// Does not answer.
    Unreachable,
}

impl Availability {
    /// The word used in metrics and output.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Availability::Ready => "ready",
            Availability::NotReady => "not_ready",
            Availability::Draining => "draining",
            Availability::Unreachable => "unreachable",
        }
    }
}

/// Whether a pod serves what the request names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Serves {
    /// Yes (or the request names nothing).
    Yes,
    /// Not this model.
    NotThisModel,
}

/// Whether a request may skip remote prefill on this pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LocalPrefill {
    /// The engine prefills what it decodes when told nothing else.
    Able,
    /// The engine refuses such requests.
    Unable,
}

/// Leading blocks of a prompt on one pod. Host and disk extend the tier before them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct TierBlocks {
    /// On the accelerator.
    pub device: Blocks,
    /// Beyond `device`, in host memory.
    pub host: Blocks,
    /// Beyond `host`, on disk or further away.
    pub disk: Blocks,
}

impl TierBlocks {
    /// All leading blocks, whatever the tier.
    #[must_use]
    pub fn total(self) -> Blocks {
        self.device
            .saturating_add(self.host)
            .saturating_add(self.disk)
    }
}

/// What is known about a pod's KV events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvSource {
    /// Connected and contiguous: `cached` is exact.
    Live,
    /// Connecting, or catching up: `cached` may be short.
    Syncing,
    /// Connected before, not now, or with a gap that could not be filled.
    Lost,
    /// None is configured for this pod: `cached` is always zero.
    Absent,
}

impl KvSource {
    /// The word used in spans, metrics and output.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            KvSource::Live => "live",
            KvSource::Syncing => "syncing",
            KvSource::Lost => "lost",
            KvSource::Absent => "absent",
        }
    }
}

/// What this process has promised a pod, and has not yet seen the end of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct PodLoad {
    /// Requests.
    pub requests: u32,
    /// Prompt tokens still to be prefilled there (net of cache).
    pub prefill_tokens: Tokens,
    /// Distinct KV blocks of the requests that run there.
    pub decode_blocks: Blocks,
    /// How many blocks of *this* request are among `decode_blocks` already.
    pub shared_blocks: Blocks,
}

/// A capacity and where the number comes from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Capacity<T> {
    /// The engine reported it.
    Reported(T),
    /// The operator configured it.
    Configured(T),
    /// A built-in assumption.
    Assumed(T),
    /// Nobody knows.
    Unknown,
}

impl<T: Copy> Capacity<T> {
    /// The number and the word for its source, unless unknown.
    #[must_use]
    pub fn known(self) -> Option<(T, CapacitySource)> {
        match self {
            Capacity::Reported(value) => Some((value, CapacitySource::Reported)),
            Capacity::Configured(value) => Some((value, CapacitySource::Configured)),
            Capacity::Assumed(value) => Some((value, CapacitySource::Assumed)),
            Capacity::Unknown => None,
        }
    }
}

/// Where a capacity comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub enum CapacitySource {
    /// The engine reported it.
    Reported,
    /// The operator configured it.
    Configured,
    /// A built-in assumption.
    Assumed,
}

impl CapacitySource {
    /// The word used in policies and output.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            CapacitySource::Reported => "Reported",
            CapacitySource::Configured => "Configured",
            CapacitySource::Assumed => "Assumed",
        }
    }
}

/// What an engine says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub enum EngineReport {
    /// Never heard, or too long ago to be believed.
    #[default]
    None,
    /// Heard recently.
    Fresh {
        /// Requests waiting to be scheduled.
        waiting: u32,
        /// Requests running.
        running: u32,
        /// Share of the KV cache in use, 0..=1.
        kv_usage: Ratio,
    },
}

//! What holds of every pod whatever a request asks.
//!
//! Lives here: [`Board`], shared by all decisions that saw the same, and its [`Member`]s.
//! Never here: anything that depends on the request (`snapshot`), how any of it was measured.
//! Invariant: plain values that never change; what a scan reads of them was derived by the same
//! [`check`] that explains a pod.

use crate::decide::eligibility::{Allowed, check};
use crate::decide::select::Purpose;
use crate::decide::snapshot::{
    Availability, Capacity, EngineReport, KvSource, LocalPrefill, Role, Serves,
};
use crate::names::{Endpoint, PodId};
use crate::units::{BlockSize, Blocks, Tokens};

/// One pod, as far as no request is concerned.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Member {
    /// Its identity.
    pub pod: PodId,
    /// Where it listens.
    pub endpoint: Endpoint,
    /// What it may be used for.
    pub role: Role,
    /// Whether it can take requests now.
    pub availability: Availability,
    /// Whether a request may be prefilled on this pod although it decodes.
    pub local_prefill: LocalPrefill,
    /// Tokens per KV block on this pod.
    pub block_size: BlockSize,
    /// What is known about its KV events.
    pub kv_source: KvSource,
    /// Prompt tokens the pod can take into one prefill batch.
    pub prefill_capacity: Capacity<Tokens>,
    /// KV blocks the pod has.
    pub kv_capacity: Capacity<Blocks>,
    /// What the engine itself reported, when it did.
    pub engine: EngineReport,
}

/// All pods at one instant. What selections read of every pod lies in columns, so that looking at a
/// thousand pods stays within the processor's nearest cache.
#[derive(Debug, Default)]
pub struct Board {
    members: Vec<Member>,
    ids: Vec<PodId>,
    uses: Vec<Uses>,
    size: Option<BlockSize>,
    by_slot: Vec<Option<u16>>,
}

/// The purposes that a pod may be used for, as one bit each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Uses(u8);

impl Uses {
    fn of(member: &Member) -> Uses {
        let usable =
            |purpose: &Purpose| check(member, Serves::Yes, &Allowed::ALL, *purpose).is_ok();
        let bits = Purpose::ALL.iter().filter(|purpose| usable(purpose));
        Uses(bits.fold(0, |bits, purpose| bits | bit(*purpose)))
    }

    /// Whether `purpose` is among them, subset and model aside.
    #[inline]
    pub(super) fn allow(self, purpose: Purpose) -> bool {
        self.0 & bit(purpose) != 0
    }
}

fn bit(purpose: Purpose) -> u8 {
    match purpose {
        Purpose::PrefillAndDecode => 1,
        Purpose::Prefill => 2,
        Purpose::DecodeOnly => 4,
    }
}

impl Board {
    /// A board of `members`, whose slots differ.
    #[must_use]
    pub fn new(members: Vec<Member>) -> Board {
        let slots = members
            .iter()
            .map(|member| usize::from(member.pod.slot) + 1);
        let mut by_slot = vec![None; slots.max().unwrap_or(0)];
        for (position, member) in members.iter().enumerate() {
            by_slot[usize::from(member.pod.slot)] = u16::try_from(position).ok();
        }
        let size = members.first().map(|member| member.block_size);
        Board {
            size: size.filter(|size| members.iter().all(|member| member.block_size == *size)),
            ids: members.iter().map(|member| member.pod).collect(),
            uses: members.iter().map(Uses::of).collect(),
            by_slot,
            members,
        }
    }

    /// The pods.
    #[must_use]
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// Their identities, in the same order.
    #[must_use]
    pub fn ids(&self) -> &[PodId] {
        &self.ids
    }

    /// Where `pod` is among the members, unless that incarnation is not there.
    #[must_use]
    pub fn position(&self, pod: PodId) -> Option<usize> {
        let position = usize::from((*self.by_slot.get(usize::from(pod.slot))?)?);
        (self.members[position].pod == pod).then_some(position)
    }

    /// Where the pod at `endpoint` is among the members.
    #[must_use]
    pub fn position_at(&self, endpoint: Endpoint) -> Option<usize> {
        let mut members = self.members.iter();
        members.position(|member| member.endpoint == endpoint)
    }

    /// Tokens per KV block, when all pods agree on it.
    #[must_use]
    pub fn block_size(&self) -> Option<BlockSize> {
        self.size
    }

    /// Memory that it takes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let pod = size_of::<Member>() + size_of::<PodId>() + size_of::<Uses>();
        self.members.len() * pod + self.by_slot.len() * size_of::<Option<u16>>()
    }

    /// Per pod, what it may be used for.
    pub(super) fn uses(&self) -> &[Uses] {
        &self.uses
    }
}

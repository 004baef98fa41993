//! The books of every pod, by slot.
//!
//! Lives here: the counters of each pod incarnation, kept in step with the blocks in use.
//! Never here: who holds a booking, sessions, locks.
//! Invariant: a charge and its release touch the same incarnation of a pod or nothing.

use crate::blocks::BlockChain;
use crate::decide::snapshot::PodLoad;
use crate::load::blocks::InUse;
use crate::load::booking::{DecodeCharge, PrefillCharge};
use crate::names::PodId;
use crate::units::{Blocks, Tokens};
use std::sync::Arc;

/// All pods ever charged, by slot.
#[derive(Debug, Default)]
pub(super) struct Pods {
    slots: Vec<Slot>,
    in_use: InUse,
    /// Leading blocks of the request that is being decided, by slot: only for incarnations that have
    /// an account.
    shared: Vec<Blocks>,
}

/// One slot and its present user.
#[derive(Debug, Default)]
struct Slot {
    /// The incarnation that `account` belongs to; older ones are gone.
    generation: u32,
    account: Account,
}

#[derive(Debug, Default)]
struct Account {
    requests: u32,
    prefill_tokens: Tokens,
    /// Blocks in use that are shared with nobody.
    unkeyed: Blocks,
    /// Blocks in use, each counted once.
    keyed: Blocks,
}

impl Slot {
    #[inline]
    fn load(&self) -> PodLoad {
        let account = &self.account;
        PodLoad {
            requests: account.requests,
            prefill_tokens: account.prefill_tokens,
            decode_blocks: account.keyed.saturating_add(account.unkeyed),
            shared_blocks: Blocks::ZERO,
        }
    }
}

impl Pods {
    pub(super) fn load(&self, pod: PodId) -> PodLoad {
        self.known(pod).map_or(PodLoad::default(), Slot::load)
    }

    /// The same, with what [`Pods::mark_shared`] noted last.
    #[inline]
    pub(super) fn load_shared(&self, pod: PodId) -> PodLoad {
        let shared = self.shared.get(usize::from(pod.slot));
        self.known(pod).map_or(PodLoad::default(), |slot| PodLoad {
            shared_blocks: shared.copied().unwrap_or_default(),
            ..slot.load()
        })
    }

    /// Notes, for the request that has `chains`, how many of its leading blocks run on which pod.
    /// Keys of different block sizes never agree, so each pod is named by one chain at most.
    pub(super) fn mark_shared(&mut self, chains: &[BlockChain]) {
        self.shared.clear();
        self.shared.resize(self.slots.len(), Blocks::ZERO);
        for chain in chains {
            self.in_use.leading(&chain.keys, |pod, count| {
                let slot = usize::from(pod.slot);
                let known = self.slots.get(slot);
                if known.is_some_and(|known| known.generation == pod.generation) {
                    self.shared[slot] = Blocks(count);
                }
            });
        }
    }

    /// Charges the decode pod. The keys of a charge that comes too late, its pod being gone, are
    /// dropped from it, so that its release finds nothing to give back.
    pub(super) fn charge_decode(&mut self, charge: &mut DecodeCharge) {
        if self.open(charge.pod).is_none() {
            charge.keys = Arc::from([]);
            return;
        }
        let new = self.in_use.add(charge.pod, &charge.keys);
        if let Some(account) = self.account_mut(charge.pod) {
            account.requests = account.requests.saturating_add(1);
            account.prefill_tokens = account.prefill_tokens.saturating_add(charge.prefill_tokens);
            account.unkeyed = account.unkeyed.saturating_add(charge.unkeyed);
            account.keyed = account.keyed.saturating_add(Blocks(new));
        }
    }

    pub(super) fn release_decode(&mut self, charge: &DecodeCharge) {
        let gone = self.in_use.remove(charge.pod, &charge.keys);
        if let Some(account) = self.account_mut(charge.pod) {
            account.requests = account.requests.saturating_sub(1);
            account.prefill_tokens = account.prefill_tokens.saturating_sub(charge.prefill_tokens);
            account.unkeyed = account.unkeyed.saturating_sub(charge.unkeyed);
            account.keyed = account.keyed.saturating_sub(Blocks(gone));
        }
    }

    /// Releases the prefill work of a local route and clears it in `charge`.
    pub(super) fn release_prefill_tokens(&mut self, charge: &mut DecodeCharge) {
        let tokens = std::mem::take(&mut charge.prefill_tokens);
        if let Some(account) = self.account_mut(charge.pod) {
            account.prefill_tokens = account.prefill_tokens.saturating_sub(tokens);
        }
    }

    pub(super) fn charge_prefill(&mut self, charge: &PrefillCharge) {
        if let Some(account) = self.open(charge.pod) {
            account.requests = account.requests.saturating_add(1);
            account.prefill_tokens = account.prefill_tokens.saturating_add(charge.tokens);
        }
    }

    pub(super) fn release_prefill(&mut self, charge: &PrefillCharge) {
        if let Some(account) = self.account_mut(charge.pod) {
            account.requests = account.requests.saturating_sub(1);
            account.prefill_tokens = account.prefill_tokens.saturating_sub(charge.tokens);
        }
    }

    /// Closes the account of `pod`: from now on only later incarnations are charged.
    pub(super) fn forget(&mut self, pod: PodId) {
        let slot = self.slot(pod);
        if slot.generation <= pod.generation {
            *slot = Slot {
                generation: pod.generation.saturating_add(1),
                ..Slot::default()
            };
        }
    }

    pub(super) fn is_forgotten(&self, pod: PodId) -> bool {
        self.slots
            .get(usize::from(pod.slot))
            .is_some_and(|slot| pod.generation < slot.generation)
    }

    fn known(&self, pod: PodId) -> Option<&Slot> {
        self.slots
            .get(usize::from(pod.slot))
            .filter(|slot| slot.generation == pod.generation)
    }

    fn account_mut(&mut self, pod: PodId) -> Option<&mut Account> {
        self.slots
            .get_mut(usize::from(pod.slot))
            .filter(|slot| slot.generation == pod.generation)
            .map(|slot| &mut slot.account)
    }

    /// The account of `pod`, opened if need be; `None` when the pod is gone.
    fn open(&mut self, pod: PodId) -> Option<&mut Account> {
        let slot = self.slot(pod);
        if slot.generation < pod.generation {
            *slot = Slot {
                generation: pod.generation,
                ..Slot::default()
            };
        }
        (slot.generation == pod.generation).then_some(&mut slot.account)
    }

    fn slot(&mut self, pod: PodId) -> &mut Slot {
        let index = usize::from(pod.slot);
        if self.slots.len() <= index {
            self.slots.resize_with(index + 1, Slot::default);
        }
        &mut self.slots[index]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocks::BlockKey;

    const POD: PodId = PodId {
        slot: 3,
        generation: 1,
    };

    fn charge(pod: PodId, keys: &[u128]) -> DecodeCharge {
        DecodeCharge {
            pod,
            prefill_tokens: Tokens(5),
            keys: keys.iter().map(|key| BlockKey(*key)).collect(),
            unkeyed: Blocks(1),
        }
    }

    #[test]
    fn a_charge_for_an_earlier_incarnation_is_dropped() {
        let mut pods = Pods::default();
        pods.charge_decode(&mut charge(POD, &[1]));
        let earlier = PodId {
            generation: 0,
            ..POD
        };
        let mut late = charge(earlier, &[1, 2]);
        pods.charge_decode(&mut late);
        let load = pods.load(POD);
        assert_eq!((load.requests, load.decode_blocks), (1, Blocks(2)));
        assert_eq!(pods.load(earlier), PodLoad::default());
        pods.release_decode(&late);
        assert_eq!(pods.load(POD), load);
    }

    #[test]
    fn blocks_of_a_forgotten_pod_are_not_shared_with_its_successor() {
        let mut pods = Pods::default();
        let mut first = charge(POD, &[1, 2]);
        pods.charge_decode(&mut first);
        pods.forget(POD);
        let next = PodId {
            generation: 2,
            ..POD
        };
        let mut second = charge(next, &[1]);
        pods.charge_decode(&mut second);
        let chain = BlockChain {
            size: crate::units::BlockSize::new(16).unwrap(),
            keys: first.keys.clone(),
        };
        pods.mark_shared(&[chain]);
        assert_eq!(pods.load_shared(next).shared_blocks, Blocks(1));
        assert_eq!(pods.load_shared(POD).shared_blocks, Blocks::ZERO);
        pods.release_decode(&first);
        pods.release_decode(&second);
        assert_eq!(pods.load(next), PodLoad::default());
    }
}

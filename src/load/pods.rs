//! The books of every pod, by slot.
//!
//! Lives here: counters and the set of blocks in use per pod incarnation.
//! Never here: who holds a booking, sessions, locks.
//! Invariant: a charge and its release touch the same incarnation of a pod or nothing, and the set of
//! blocks in use on a pod is closed under prefixes (whole chains come and go), which is what lets
//! [`Pods::shared`] search by halves.

use crate::blocks::BlockKey;
use crate::decide::snapshot::PodLoad;
use crate::load::booking::{DecodeCharge, PrefillCharge};
use crate::names::PodId;
use crate::units::{Blocks, Tokens};
use rustc_hash::FxBuildHasher;
use std::collections::HashMap;
use std::collections::hash_map::Entry;

/// All pods ever charged, by slot.
#[derive(Debug, Default)]
pub(super) struct Pods {
    slots: Vec<Slot>,
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
    unkeyed: Blocks,
    /// Blocks in use, by how many requests.
    keyed: HashMap<BlockKey, u32, FxBuildHasher>,
}

impl Pods {
    pub(super) fn load(&self, pod: PodId) -> PodLoad {
        let Some(account) = self.account(pod) else {
            return PodLoad::default();
        };
        let keyed = Blocks(u32::try_from(account.keyed.len()).unwrap_or(u32::MAX));
        PodLoad {
            requests: account.requests,
            prefill_tokens: account.prefill_tokens,
            decode_blocks: keyed.saturating_add(account.unkeyed),
            shared_blocks: Blocks::ZERO,
        }
    }

    /// How many leading `keys` are in use on `pod`, looking at `hint` first.
    pub(super) fn shared(&self, pod: PodId, keys: &[BlockKey], hint: usize) -> usize {
        let Some(account) = self.account(pod) else {
            return 0;
        };
        let used = |index: usize| {
            keys.get(index)
                .is_some_and(|key| account.keyed.contains_key(key))
        };
        let (mut low, mut high) = (0, keys.len());
        // `low` leading keys are in use, and the key at `high` is not.
        if hint <= high {
            if hint == 0 || used(hint - 1) {
                low = hint;
                if !used(hint) {
                    return hint;
                }
            } else {
                high = hint - 1;
            }
        }
        while low < high {
            let middle = low + (high - low) / 2;
            if used(middle) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        low
    }

    pub(super) fn charge_decode(&mut self, charge: &DecodeCharge) {
        let Some(account) = self.open(charge.pod) else {
            return;
        };
        account.requests = account.requests.saturating_add(1);
        account.prefill_tokens = account.prefill_tokens.saturating_add(charge.prefill_tokens);
        account.unkeyed = account.unkeyed.saturating_add(charge.unkeyed);
        for key in charge.keys.iter() {
            let users = account.keyed.entry(*key).or_insert(0);
            *users = users.saturating_add(1);
        }
    }

    pub(super) fn release_decode(&mut self, charge: &DecodeCharge) {
        let Some(account) = self.account_mut(charge.pod) else {
            return;
        };
        account.requests = account.requests.saturating_sub(1);
        account.prefill_tokens = account.prefill_tokens.saturating_sub(charge.prefill_tokens);
        account.unkeyed = account.unkeyed.saturating_sub(charge.unkeyed);
        for key in charge.keys.iter() {
            if let Entry::Occupied(mut users) = account.keyed.entry(*key) {
                *users.get_mut() -= 1;
                if *users.get() == 0 {
                    users.remove();
                }
            }
        }
        account.give_memory_back();
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
                account: Account::default(),
            };
        }
    }

    pub(super) fn is_forgotten(&self, pod: PodId) -> bool {
        self.slots
            .get(usize::from(pod.slot))
            .is_some_and(|slot| pod.generation < slot.generation)
    }

    fn account(&self, pod: PodId) -> Option<&Account> {
        self.slots
            .get(usize::from(pod.slot))
            .filter(|slot| slot.generation == pod.generation)
            .map(|slot| &slot.account)
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
                account: Account::default(),
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

impl Account {
    /// Keeps the set of blocks from staying as large as it once was.
    fn give_memory_back(&mut self) {
        const KEEP: usize = 1024;
        let keyed = &mut self.keyed;
        if KEEP < keyed.capacity() && keyed.len() < keyed.capacity() / 8 {
            keyed.shrink_to(keyed.len() * 2);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::sync::Arc;

    const POD: PodId = PodId {
        slot: 3,
        generation: 1,
    };

    fn charge(keys: &[u128]) -> DecodeCharge {
        DecodeCharge {
            pod: POD,
            prefill_tokens: Tokens::ZERO,
            keys: keys.iter().map(|key| BlockKey(*key)).collect(),
            unkeyed: Blocks::ZERO,
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        #[test]
        fn shared_is_the_run_of_used_keys_whatever_the_hint(
            used in 0..40_u128,
            asked in 0..40_u128,
            hint in 0..50_usize,
        ) {
            let mut pods = Pods::default();
            pods.charge_decode(&charge(&(0..used).collect::<Vec<_>>()));
            let keys: Arc<[BlockKey]> = (0..asked).map(BlockKey).collect();
            let expected = usize::try_from(used.min(asked)).unwrap();
            prop_assert_eq!(pods.shared(POD, &keys, hint), expected);
        }
    }

    #[test]
    fn the_set_of_blocks_gives_its_memory_back() {
        let mut pods = Pods::default();
        let large = charge(&(0..100_000).collect::<Vec<_>>());
        let small = charge(&[1, 2, 3]);
        pods.charge_decode(&large);
        pods.charge_decode(&small);
        pods.release_decode(&large);
        let account = pods.account(POD).unwrap();
        assert_eq!(account.keyed.len(), 3);
        assert!(account.keyed.capacity() < 1_000);
    }

    #[test]
    fn a_charge_for_an_earlier_incarnation_is_dropped() {
        let mut pods = Pods::default();
        pods.charge_decode(&charge(&[1]));
        let mut late = charge(&[2]);
        late.pod.generation = 0;
        pods.charge_decode(&late);
        pods.release_decode(&late);
        assert_eq!(pods.load(POD).requests, 1);
        assert_eq!(pods.load(late.pod), PodLoad::default());
    }
}

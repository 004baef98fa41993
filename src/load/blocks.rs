//! Which blocks are in use where, by block.
//!
//! Lives here: for each block of a running request, the pods that run it and how many requests do.
//! Never here: blocks that are cached and idle (`kv`), counters of a pod (`pods`).
//! Invariant: whole chains come and go, so the pods that use a block use all blocks before it. Two
//! blocks of a chain with equally many pods are therefore used by the same pods, which is what lets
//! [`InUse::leading`] look at each set of pods once.

use crate::blocks::BlockKey;
use crate::names::PodId;
use rustc_hash::FxBuildHasher;
use smallvec::SmallVec;
use std::collections::HashMap;
use std::collections::hash_map::Entry;

/// The blocks of all running requests.
#[derive(Debug, Default)]
pub(super) struct InUse {
    users: HashMap<BlockKey, Users, FxBuildHasher>,
}

/// Pods, in order, with the number of their requests that use the block.
type Users = SmallVec<[(PodId, u32); 1]>;

impl InUse {
    /// One request more uses `keys` on `pod`; returns how many of them are new there.
    pub(super) fn add(&mut self, pod: PodId, keys: &[BlockKey]) -> u32 {
        let mut new = 0;
        for key in keys {
            let users = self.users.entry(*key).or_default();
            match users.binary_search_by_key(&pod, |(user, _)| *user) {
                Ok(found) => users[found].1 = users[found].1.saturating_add(1),
                Err(place) => {
                    users.insert(place, (pod, 1));
                    new += 1;
                }
            }
        }
        new
    }

    /// One request less uses `keys` on `pod`; returns how many of them are no longer used there.
    pub(super) fn remove(&mut self, pod: PodId, keys: &[BlockKey]) -> u32 {
        let mut gone = 0;
        for key in keys {
            let Entry::Occupied(mut entry) = self.users.entry(*key) else {
                continue;
            };
            let users = entry.get_mut();
            let Ok(found) = users.binary_search_by_key(&pod, |(user, _)| *user) else {
                continue;
            };
            users[found].1 -= 1;
            if users[found].1 == 0 {
                users.remove(found);
                gone += 1;
                if users.is_empty() {
                    entry.remove();
                }
            }
        }
        self.give_memory_back();
        gone
    }

    /// Calls `each` with pods and the number of leading `keys` in use there. A pod may be named
    /// several times; the last number holds. Pods without any are not named.
    pub(super) fn leading(&self, keys: &[BlockKey], mut each: impl FnMut(PodId, u32)) {
        let mut report = |users: &[(PodId, u32)], count: u32| {
            for (pod, _) in users {
                each(*pod, count);
            }
        };
        let mut last: &[(PodId, u32)] = &[];
        let mut count = 0;
        for key in keys {
            let Some(users) = self.users.get(key) else {
                break;
            };
            if users.len() < last.len() {
                report(last, count);
            }
            last = users;
            count += 1;
        }
        report(last, count);
    }

    /// Keeps the map from staying as large as it once was.
    fn give_memory_back(&mut self) {
        const KEEP: usize = 4096;
        if KEEP < self.users.capacity() && self.users.len() < self.users.capacity() / 8 {
            self.users.shrink_to(self.users.len() * 2);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pod(slot: u16) -> PodId {
        PodId {
            slot,
            generation: 0,
        }
    }

    /// A chain that leaves the common one after `branch` keys.
    fn chain(length: u128, branch: u128, own: u128) -> Vec<BlockKey> {
        let after = (own + 1) << 64 | branch << 32;
        let keys = (0..length).map(|key| if key < branch { key } else { after | key });
        keys.map(BlockKey).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        #[test]
        fn leading_blocks_are_counted_as_one_by_one(
            running in prop::collection::vec((0..6_u16, 0..20_u128, 0..20_u128, 0..3_u128), 0..20),
            ended in prop::collection::vec(any::<bool>(), 20),
            asked in (0..25_u128, 0..25_u128, 0..3_u128),
        ) {
            let mut in_use = InUse::default();
            let mut distinct = [0_i64; 6];
            for (slot, length, branch, own) in &running {
                let new = in_use.add(pod(*slot), &chain(*length, *branch, *own));
                distinct[usize::from(*slot)] += i64::from(new);
            }
            let mut left = Vec::new();
            for (request, ended) in running.iter().zip(ended) {
                if ended {
                    let (slot, length, branch, own) = request;
                    let gone = in_use.remove(pod(*slot), &chain(*length, *branch, *own));
                    distinct[usize::from(*slot)] -= i64::from(gone);
                } else {
                    left.push(*request);
                }
            }
            let keys = chain(asked.0, asked.1, asked.2);
            let mut counted = [0_u32; 6];
            in_use.leading(&keys, |pod, count| counted[usize::from(pod.slot)] = count);
            for slot in 0..6_u16 {
                let used: std::collections::HashSet<_> = left
                    .iter()
                    .filter(|(on, ..)| *on == slot)
                    .flat_map(|(_, length, branch, own)| chain(*length, *branch, *own))
                    .collect();
                let leading = keys.iter().take_while(|key| used.contains(key)).count();
                let index = usize::from(slot);
                prop_assert_eq!(counted[index] as usize, leading);
                prop_assert_eq!(distinct[index], used.len() as i64);
            }
        }
    }

    #[test]
    fn memory_is_given_back() {
        let mut in_use = InUse::default();
        let (large, small) = (chain(100_000, 0, 1), chain(3, 0, 2));
        in_use.add(pod(0), &large);
        in_use.add(pod(1), &small);
        in_use.remove(pod(0), &large);
        assert_eq!(in_use.users.len(), 3);
        assert!(in_use.users.capacity() <= 4096);
    }
}

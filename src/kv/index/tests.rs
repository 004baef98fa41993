//! The index against a model that keeps every block's whole prompt, and the single rules.

use super::*;
use crate::blocks::KeySpace;
use crate::decide::snapshot::TierBlocks;
use crate::kv::event::{
    Adapter, Attention, EngineHash, Event, Extra, Locality, Medium, Removed, Stored,
};
use crate::names::{ModelName, Tenant};
use crate::units::Blocks;
use proptest::prelude::*;
use std::collections::{BTreeMap, HashSet};
use std::hash::{Hash, Hasher};

const SIZE: u32 = 2;

fn pod(slot: u16) -> PodId {
    PodId {
        slot,
        generation: 0,
    }
}

fn tokens(blocks: &[u32]) -> Vec<u32> {
    blocks.iter().flat_map(|b| [*b, b + 1000]).collect()
}

fn name(blocks: &[u32]) -> EngineHash {
    let mut hasher = rustc_hash::FxHasher::default();
    blocks.hash(&mut hasher);
    EngineHash(hasher.finish())
}

fn chain_in(blocks: &[u32], adapter: Option<&str>, tenant: Option<&str>) -> BlockChain {
    let space = KeySpace {
        block_size: BlockSize::new(SIZE).expect("not zero"),
        adapter: adapter.map(ModelName::from),
        tenant: tenant.map(Tenant::from),
    };
    BlockChain::new(&space, &tokens(blocks))
}

fn tiers(device: u32, host: u32, disk: u32) -> TierBlocks {
    TierBlocks {
        device: Blocks(device),
        host: Blocks(host),
        disk: Blocks(disk),
    }
}

fn look(index: &Index, chain: BlockChain, pod: PodId) -> TierBlocks {
    let mut out = Overlaps::new();
    index.overlaps(&[chain], &mut out);
    out.get(pod)
}

fn device(index: &Index, blocks: &[u32], pod: PodId) -> u32 {
    look(index, chain_in(blocks, None, None), pod).device.0
}

/// A store of `blocks[from..]` on the device.
fn store(blocks: &[u32], from: usize) -> Stored {
    Stored {
        hashes: (from..blocks.len()).map(|i| name(&blocks[..=i])).collect(),
        parent: (0 < from).then(|| name(&blocks[..from])),
        tokens: tokens(&blocks[from..]),
        block_size: SIZE,
        ..Stored::default()
    }
}

fn removal(hashes: &[EngineHash], medium: Medium) -> Event {
    Event::Removed(Removed {
        hashes: hashes.to_vec(),
        medium,
        ..Removed::default()
    })
}

fn apply(index: &Index, pod: PodId, rank: u32, events: Vec<Event>) -> Applied {
    let batch = Batch {
        rank,
        events,
        ..Batch::default()
    };
    index.apply(pod, &batch)
}

fn apply_store(index: &Index, pod: PodId, stored: Stored) -> Applied {
    apply(index, pod, 0, vec![Event::Stored(Box::new(stored))])
}

fn index_of(pods: u16) -> Index {
    let index = Index::new(Limits::default());
    (0..pods).for_each(|slot| index.add_pod(pod(slot)));
    index
}

fn assert_nothing_left(index: &Index) {
    assert_eq!(index.len(), 0);
    assert_eq!(index.shared.keys.load(Ordering::Relaxed), 0);
    for shard in &index.shared.shards {
        assert!(shard.read().is_empty());
    }
}

/// What an engine holds, block by block: (rank, whole prompt) → copies per medium.
#[derive(Default)]
struct Model(BTreeMap<(u32, Vec<u32>), [u32; 3]>);

impl Model {
    fn add(&mut self, rank: u32, prompt: &[u32], medium: usize) {
        let copies = self.0.entry((rank, prompt.to_vec())).or_default();
        copies[medium] = if medium == 0 { copies[0] + 1 } else { 1 };
    }

    fn remove(&mut self, rank: u32, prompt: &[u32], medium: usize) {
        if let Some(copies) = self.0.get_mut(&(rank, prompt.to_vec())) {
            copies[medium] = copies[medium].saturating_sub(1);
        }
        self.0.retain(|_, copies| *copies != [0; 3]);
    }

    fn has(&self, rank: u32, prompt: &[u32]) -> bool {
        self.0.contains_key(&(rank, prompt.to_vec()))
    }

    fn find(&self, prompt: &[u32]) -> TierBlocks {
        let reach = |rank: u32, tiers: usize| {
            let held = |end: &usize| {
                let copies = self.0.get(&(rank, prompt[..*end].to_vec()));
                copies.is_some_and(|copies| copies[..tiers].iter().any(|n| 0 < *n))
            };
            u32::try_from((1..=prompt.len()).take_while(held).count()).expect("short")
        };
        let best = (0..2).map(|rank| [1, 2, 3].map(|tiers| reach(rank, tiers)));
        let best = best
            .max_by_key(|[d, h, a]| (*d, *a, *h))
            .expect("two ranks");
        tiers(best[0], best[1] - best[0], best[2] - best[1])
    }
}

const MEDIA: [Medium; 3] = [Medium::Device, Medium::Host, Medium::Disk];

#[derive(Clone, Debug)]
enum Step {
    Store(Vec<u32>, usize),
    Move(Vec<u32>, usize),
    Remove(Vec<u32>, usize, usize),
    Clear,
    Reset,
    Forget,
}

fn step() -> impl Strategy<Value = Step> {
    let prompt = || proptest::collection::vec(0u32..2, 1..7);
    prop_oneof![
        6 => (prompt(), prop_oneof![4 => Just(0usize), 1 => 1usize..3]).prop_map(|(p, m)| Step::Store(p, m)),
        2 => (prompt(), 1usize..3).prop_map(|(p, m)| Step::Move(p, m)),
        6 => (prompt(), 1usize..4, prop_oneof![4 => Just(0usize), 1 => 1usize..3]).prop_map(|(p, n, m)| Step::Remove(p, n, m)),
        1 => Just(Step::Clear),
        1 => Just(Step::Reset),
        1 => Just(Step::Forget),
    ]
}

/// Does `step` to both; the pod's id, which a `Forget` renews.
fn play(index: &Index, model: &mut Model, id: PodId, rank: u32, step: &Step) -> PodId {
    match step {
        Step::Store(prompt, medium) => {
            // The engine computes what it does not hold, so the parent of a store is held.
            let from = (0..prompt.len())
                .rev()
                .find(|from| *from == 0 || model.has(rank, &prompt[..*from]));
            let from = from.expect("zero will do");
            let event = Stored {
                medium: MEDIA[*medium],
                ..store(prompt, from)
            };
            apply(index, id, rank, vec![Event::Stored(Box::new(event))]);
            (from + 1..=prompt.len()).for_each(|end| model.add(rank, &prompt[..end], *medium));
        }
        Step::Move(prompt, medium) => {
            let hashes: Vec<_> = (1..=prompt.len()).map(|end| name(&prompt[..end])).collect();
            let event = Stored {
                hashes,
                medium: MEDIA[*medium],
                ..Stored::default()
            };
            apply(index, id, rank, vec![Event::Stored(Box::new(event))]);
            for end in 1..=prompt.len() {
                if model.has(rank, &prompt[..end]) {
                    model.add(rank, &prompt[..end], *medium);
                }
            }
        }
        Step::Remove(prompt, blocks, medium) => {
            let ends = (1..=prompt.len()).rev().take(*blocks);
            let hashes: Vec<_> = ends.clone().map(|end| name(&prompt[..end])).collect();
            apply(index, id, rank, vec![removal(&hashes, MEDIA[*medium])]);
            ends.for_each(|end| model.remove(rank, &prompt[..end], *medium));
        }
        Step::Clear => {
            apply(index, id, rank, vec![Event::Cleared]);
            model.0.retain(|(owner, _), _| *owner != rank);
        }
        Step::Reset => {
            index.reset(id, rank);
            model.0.retain(|(owner, _), _| *owner != rank);
        }
        Step::Forget => {
            index.forget(id);
            model.0.clear();
            let next = PodId {
                generation: id.generation + 1,
                ..id
            };
            index.add_pod(next);
            return next;
        }
    }
    id
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn the_index_answers_as_a_list_of_all_blocks_would(
        steps in proptest::collection::vec((0usize..3, 0u32..2, step()), 1..60),
        questions in proptest::collection::vec(proptest::collection::vec(0u32..2, 1..8), 8),
    ) {
        let index = index_of(3);
        let mut ids = [pod(0), pod(1), pod(2)];
        let mut models = [Model::default(), Model::default(), Model::default()];
        let mut out = Overlaps::new();
        for (who, rank, step) in &steps {
            ids[*who] = play(&index, &mut models[*who], ids[*who], *rank, step);
            for question in &questions {
                index.overlaps(&[chain_in(question, None, None)], &mut out);
                for (id, model) in ids.iter().zip(&models) {
                    prop_assert_eq!(out.get(*id), model.find(question), "{:?} of {} after {:?}", question, id, step);
                }
            }
            for (id, model) in ids.iter().zip(&models) {
                prop_assert_eq!(index.blocks(*id), model.0.len() as u64);
            }
        }
        let contents: HashSet<_> = models.iter().flat_map(|m| m.0.keys().map(|(_, p)| p)).collect();
        prop_assert!(contents.len() as u64 <= index.shared.keys.load(Ordering::Relaxed));
        ids.iter().for_each(|id| index.forget(*id));
        assert_nothing_left(&index);
    }
}

#[test]
fn two_copies_need_two_removals_and_a_third_does_nothing() {
    let index = index_of(1);
    let h = [name(&[1])];
    for _ in 0..2 {
        apply_store(&index, pod(0), store(&[1], 0));
    }
    let mut answers = Vec::new();
    for _ in 0..3 {
        apply(&index, pod(0), 0, vec![removal(&h, Medium::Device)]);
        answers.push(device(&index, &[1], pod(0)));
    }
    assert_eq!(answers, [1, 0, 0]);
    apply_store(&index, pod(0), store(&[1], 0));
    assert_eq!(device(&index, &[1], pod(0)), 1);
}

#[test]
fn a_host_copy_survives_the_removal_from_the_device() {
    let index = index_of(1);
    apply_store(&index, pod(0), store(&[1], 0));
    apply_store(
        &index,
        pod(0),
        Stored {
            medium: Medium::Host,
            ..store(&[1], 0)
        },
    );
    apply(
        &index,
        pod(0),
        0,
        vec![removal(&[name(&[1])], Medium::Device)],
    );
    assert_eq!(
        look(&index, chain_in(&[1], None, None), pod(0)),
        tiers(0, 1, 0)
    );
    assert_eq!(index.blocks(pod(0)), 1);
}

#[test]
fn repeated_announcements_are_believed_for_sixteen_removals_at_most() {
    let index = index_of(1);
    for _ in 0..100 {
        apply_store(&index, pod(0), store(&[1], 0));
    }
    for _ in 0..16 {
        assert_eq!(device(&index, &[1], pod(0)), 1);
        apply(
            &index,
            pod(0),
            0,
            vec![removal(&[name(&[1])], Medium::Device)],
        );
    }
    assert_nothing_left(&index);
}

#[test]
fn a_cleared_rank_keeps_the_blocks_of_other_ranks_and_pods() {
    let index = index_of(2);
    let blocks: Vec<u32> = (0..10).collect();
    let all = || vec![Event::Stored(Box::new(store(&blocks, 0)))];
    apply(&index, pod(0), 0, all());
    apply(&index, pod(0), 1, all());
    apply(&index, pod(1), 0, all());
    let first = Event::Stored(Box::new(store(&blocks[..1], 0)));
    apply(&index, pod(0), 0, vec![Event::Cleared, first.clone()]);
    assert_eq!((index.blocks(pod(0)), index.len()), (11, 21));
    assert_eq!(device(&index, &blocks, pod(0)), 10);
    apply(&index, pod(0), 1, vec![Event::Cleared]);
    assert_eq!(device(&index, &blocks, pod(0)), 1);
    assert_eq!(device(&index, &blocks, pod(1)), 10);
}

#[test]
fn adapters_and_salts_do_not_share_blocks() {
    let index = index_of(3);
    let blocks = [1, 2, 3, 4];
    let adapter = || Adapter::Named(Arc::from("ad-1"));
    let text = |text: &str| Extra::Text(Arc::from(text));
    apply_store(
        &index,
        pod(0),
        Stored {
            adapter: adapter(),
            extra: vec![vec![text("ad-1")]; 4],
            ..store(&blocks, 0)
        },
    );
    apply_store(&index, pod(1), store(&blocks, 0));
    // vLLM: the salt is an extra key of the first block, after the adapter.
    apply_store(
        &index,
        pod(2),
        Stored {
            adapter: adapter(),
            extra: vec![vec![text("ad-1"), text("tenant")], vec![text("ad-1")]],
            ..store(&blocks[..2], 0)
        },
    );
    apply_store(
        &index,
        pod(2),
        Stored {
            adapter: adapter(),
            extra: vec![vec![text("ad-1")]; 2],
            ..store(&blocks, 2)
        },
    );
    let found = |adapter: Option<&str>, tenant: Option<&str>| {
        [0, 1, 2].map(|slot| {
            look(&index, chain_in(&blocks, adapter, tenant), pod(slot))
                .device
                .0
        })
    };
    assert_eq!(found(Some("ad-1"), None), [4, 0, 0]);
    assert_eq!(found(None, None), [0, 4, 0]);
    assert_eq!(found(Some("ad-2"), None), [0, 0, 0]);
    assert_eq!(found(Some("ad-1"), Some("tenant")), [0, 0, 4]);
    assert_eq!(found(None, Some("tenant")), [0, 0, 0]);
    // SGLang: a field of its own.
    apply_store(
        &index,
        pod(1),
        Stored {
            salt: Some(Arc::from("tenant")),
            hashes: vec![EngineHash(77)],
            ..store(&blocks[..1], 0)
        },
    );
    assert_eq!(found(None, Some("tenant")), [0, 1, 0]);
}

#[test]
fn an_image_never_matches_plain_text() {
    let index = index_of(1);
    let image = Extra::Item {
        id: Arc::from("image"),
        offset: 0,
    };
    apply_store(
        &index,
        pod(0),
        Stored {
            extra: vec![vec![], vec![image]],
            ..store(&[1, 2, 3], 0)
        },
    );
    assert_eq!(device(&index, &[1, 2, 3], pod(0)), 1);
}

#[test]
fn an_adapter_known_by_number_only_is_not_indexed() {
    let index = index_of(1);
    let applied = apply_store(
        &index,
        pod(0),
        Stored {
            adapter: Adapter::NumberOnly,
            ..store(&[1], 0)
        },
    );
    assert_eq!((applied.unnamed_adapter, index.len()), (1, 0));
}

#[test]
fn a_store_waits_for_its_parent_and_is_never_taken_for_a_start() {
    let index = index_of(1);
    let blocks = [1, 2, 3, 4];
    let applied = apply_store(&index, pod(0), store(&blocks, 3));
    assert_eq!((applied.parked, applied.stored), (1, 0));
    apply_store(&index, pod(0), store(&blocks[..3], 1));
    assert_eq!(index.len(), 0);
    assert_eq!(device(&index, &blocks[3..], pod(0)), 0);
    let applied = apply_store(&index, pod(0), store(&blocks[..1], 0));
    assert_eq!(applied.stored, 4);
    assert_eq!(device(&index, &blocks, pod(0)), 4);
}

#[test]
fn a_block_removed_while_it_waits_stays_away() {
    let index = index_of(1);
    let blocks = [1, 2, 3, 4];
    apply_store(&index, pod(0), store(&blocks, 1));
    let applied = apply(
        &index,
        pod(0),
        0,
        vec![removal(&[name(&blocks[..3])], Medium::Device)],
    );
    assert_eq!(applied.removed_unknown, 0);
    apply_store(&index, pod(0), store(&blocks[..1], 0));
    assert_eq!(device(&index, &blocks, pod(0)), 2);
}

#[test]
fn the_waiting_room_is_bounded() {
    let index = index_of(1);
    let mut dropped = 0;
    for i in 0..1000 {
        dropped += apply_store(&index, pod(0), store(&[i, 1, 2], 2)).parked_dropped;
    }
    assert_eq!(dropped, 1000 - 256);
}

#[test]
fn sliding_window_groups_and_their_removals_are_left_out() {
    let index = index_of(1);
    let full = Stored {
        group: Some(1),
        attention: Attention::Full,
        ..store(&[1, 2], 0)
    };
    let window = Stored {
        group: Some(0),
        attention: Attention::Partial,
        hashes: vec![name(&[1, 2])],
        ..store(&[1, 2], 0)
    };
    let applied = apply_store(&index, pod(0), window);
    assert_eq!((applied.other_group, index.len()), (1, 0));
    apply_store(&index, pod(0), full);
    let gone = |group| {
        Event::Removed(Removed {
            hashes: vec![name(&[1, 2])],
            group: Some(group),
            ..Removed::default()
        })
    };
    apply(&index, pod(0), 0, vec![gone(0)]);
    assert_eq!(device(&index, &[1, 2], pod(0)), 2);
    apply(&index, pod(0), 0, vec![gone(1)]);
    assert_eq!(device(&index, &[1, 2], pod(0)), 1);
}

#[test]
fn masked_stores_of_unstated_attention_are_left_out() {
    let index = index_of(1);
    let masked = Stored {
        hashes: vec![name(&[1, 2, 3])],
        ..store(&[1, 2, 3], 0)
    };
    let applied = apply_store(&index, pod(0), masked);
    assert_eq!((applied.misaligned, index.len()), (1, 0));
}

#[test]
fn partly_filled_blocks_are_left_out() {
    let index = index_of(1);
    let mut short = store(&[1, 2], 0);
    short.tokens.pop();
    let applied = apply_store(&index, pod(0), short);
    assert_eq!((applied.partial, applied.stored), (1, 1));
    let other = Stored {
        block_size: 1,
        ..store(&[1], 0)
    };
    let applied = apply_store(
        &index,
        pod(0),
        Stored {
            tokens: vec![1],
            ..other
        },
    );
    assert_eq!((applied.other_size, index.blocks(pod(0))), (1, 1));
    assert_eq!(index.block_size(pod(0)), BlockSize::new(SIZE));
}

#[test]
fn a_pod_that_changed_its_block_size_is_believed_in_the_end() {
    let index = index_of(2);
    apply_store(&index, pod(0), store(&[1, 2], 0));
    apply_store(&index, pod(1), store(&[1, 2], 0));
    let other = Stored {
        block_size: 4,
        hashes: vec![EngineHash(9)],
        ..store(&[1, 2], 0)
    };
    let changed = (0..100).position(|_| apply_store(&index, pod(0), other.clone()).stored == 1);
    assert_eq!(changed, Some(31));
    assert_eq!(
        index.block_sizes().as_slice(),
        [2, 4].map(|n| BlockSize::new(n).expect("not zero"))
    );
    assert_eq!(device(&index, &[1, 2], pod(0)), 0);
    let space = KeySpace {
        block_size: BlockSize::new(4).expect("not zero"),
        adapter: None,
        tenant: None,
    };
    let chains = [
        chain_in(&[1, 2], None, None),
        BlockChain::new(&space, &tokens(&[1, 2])),
    ];
    let mut out = Overlaps::new();
    index.overlaps(&chains, &mut out);
    assert_eq!(
        (out.get(pod(0)), out.get(pod(1))),
        (tiers(1, 0, 0), tiers(2, 0, 0))
    );
}

#[test]
fn shared_storage_and_unknown_media_say_nothing_about_a_pod() {
    let index = index_of(1);
    let remote = Stored {
        locality: Locality::Remote,
        ..store(&[1], 0)
    };
    let unknown = Stored {
        medium: Medium::Unknown,
        ..store(&[1], 0)
    };
    assert_eq!(apply_store(&index, pod(0), remote).remote, 1);
    assert_eq!(apply_store(&index, pod(0), unknown).unknown_medium, 1);
    assert_eq!(index.len(), 0);
}

#[test]
fn two_engine_hashes_of_one_content_are_one_block_until_both_are_gone() {
    let index = index_of(1);
    apply_store(&index, pod(0), store(&[1, 2], 0));
    let twin = Stored {
        hashes: vec![EngineHash(5), EngineHash(6)],
        ..store(&[1, 2], 0)
    };
    apply_store(&index, pod(0), twin);
    apply(
        &index,
        pod(0),
        0,
        vec![removal(&[name(&[1]), name(&[1, 2])], Medium::Device)],
    );
    assert_eq!(device(&index, &[1, 2], pod(0)), 2);
    apply(
        &index,
        pod(0),
        0,
        vec![removal(&[EngineHash(5)], Medium::Device)],
    );
    assert_eq!(device(&index, &[1, 2], pod(0)), 0);
    apply(
        &index,
        pod(0),
        0,
        vec![removal(&[EngineHash(6)], Medium::Device)],
    );
    assert_nothing_left(&index);
}

#[test]
fn an_engine_hash_used_for_another_block_leaves_the_old_one() {
    let index = index_of(1);
    apply_store(&index, pod(0), store(&[1], 0));
    apply_store(
        &index,
        pod(0),
        Stored {
            hashes: vec![name(&[1])],
            ..store(&[2], 0)
        },
    );
    assert_eq!(device(&index, &[1], pod(0)), 0);
    assert_eq!(device(&index, &[2], pod(0)), 1);
    assert_eq!(index.len(), 1);
}

#[test]
fn late_batches_of_a_forgotten_pod_are_ignored() {
    let index = index_of(1);
    let blocks: Vec<u32> = (0..1000).collect();
    apply_store(&index, pod(0), store(&blocks, 0));
    index.forget(pod(0));
    let next = PodId {
        slot: 0,
        generation: 1,
    };
    index.add_pod(next);
    assert_eq!(
        apply_store(&index, pod(0), store(&blocks, 0)).unknown_pod,
        1
    );
    assert_eq!(
        (
            device(&index, &blocks, pod(0)),
            device(&index, &blocks, next)
        ),
        (0, 0)
    );
    assert_nothing_left(&index);
    index.add_pod(pod(0));
    assert_eq!(apply_store(&index, next, store(&blocks, 0)).stored, 1000);
}

#[test]
fn a_pod_beyond_its_limit_is_emptied_and_others_stay() {
    let index = Index::new(Limits {
        blocks_per_pod: 10,
        blocks: 1000,
    });
    index.add_pod(pod(0));
    index.add_pod(pod(1));
    apply_store(&index, pod(1), store(&[1, 2], 0));
    let blocks: Vec<u32> = (0..11).collect();
    assert_eq!(
        apply_store(&index, pod(0), store(&blocks[..10], 0)).over_limit,
        0
    );
    assert_eq!(
        apply_store(&index, pod(0), store(&blocks, 10)).over_limit,
        1
    );
    assert_eq!((index.blocks(pod(0)), index.len()), (0, 2));
}

#[test]
fn long_prompts_span_runs() {
    let index = index_of(2);
    let blocks: Vec<u32> = (0..10_000).collect();
    apply_store(&index, pod(0), store(&blocks, 0));
    apply_store(&index, pod(1), store(&blocks[..5000], 0));
    apply(
        &index,
        pod(0),
        0,
        vec![removal(&[name(&blocks[..4500])], Medium::Device)],
    );
    assert_eq!(device(&index, &blocks, pod(0)), 4499);
    assert_eq!(device(&index, &blocks, pod(1)), 5000);
    apply_store(&index, pod(0), store(&blocks[..4500], 4499));
    assert_eq!(device(&index, &blocks, pod(0)), 10_000);
}

#[test]
fn lookups_beside_writers_never_see_more_than_is_held() {
    let index = Arc::new(index_of(4));
    let blocks: Vec<u32> = (0..600).collect();
    std::thread::scope(|scope| {
        for slot in 0..4 {
            let (index, blocks) = (Arc::clone(&index), &blocks);
            scope.spawn(move || {
                for round in 0..30 {
                    let len = 100 * (usize::from(slot) + 1) + round;
                    apply_store(&index, pod(slot), store(&blocks[..len], 0));
                    apply(&index, pod(slot), 0, vec![Event::Cleared]);
                }
                let len = 100 * (usize::from(slot) + 1);
                apply_store(&index, pod(slot), store(&blocks[..len], 0));
            });
        }
        let mut out = Overlaps::new();
        for _ in 0..300 {
            index.overlaps(&[chain_in(&blocks, None, None)], &mut out);
            for slot in 0..4 {
                assert!(out.get(pod(slot)).device.0 < 100 * (u32::from(slot) + 1) + 30);
            }
        }
    });
    for slot in 0..4 {
        assert_eq!(
            device(&index, &blocks, pod(slot)),
            100 * (u32::from(slot) + 1)
        );
    }
}

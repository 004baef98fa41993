//! Every capture means what it says, and the index follows real engines.
#![allow(clippy::expect_used, clippy::panic)] // helpers of tests

use crate::kv_support::*;
use proptest::prelude::*;
use serde_json::Value;
use sidestep::kv::event::{Batch, EngineHash, Event};
use sidestep::kv::index::{Applied, Index, Limits};
use std::collections::HashSet;

/// Payload and stated `[ts, events, rank]` of every live message of the captures.
fn messages() -> Vec<(String, Vec<u8>, Batch)> {
    let mut all = Vec::new();
    for (name, capture) in captures("") {
        let list = |key: &str| capture[key].as_array().cloned().unwrap_or_default();
        for live in list("live") {
            let expected = &live["expected"];
            let rank = &expected["data_parallel_rank"];
            let batch = stated_batch(&expected["ts"], &expected["events"], rank);
            all.push((
                format!("{name}: {}", live["case"]),
                frames(&live).remove(2),
                batch,
            ));
        }
        let steps = list("steps");
        let events = steps
            .iter()
            .flat_map(|step| step["events"].as_array().expect("events"));
        for message in list("frames").iter().chain(events) {
            let [ts, events, rank] = [0, 1, 2].map(|at| &message["decoded"][at]);
            let batch = stated_batch(ts, events, rank);
            all.push((name.clone(), frames(message).remove(2), batch));
        }
    }
    all
}

#[test]
fn every_captured_message_decodes_to_its_stated_meaning() {
    let messages = messages();
    let of_publishers = messages.iter().filter(|(name, ..)| name.contains("json:"));
    assert_eq!(of_publishers.count(), 18 * 12, "18 releases, 12 cases each");
    assert!(18 * 12 + 14 + 15 <= messages.len());
    for (name, payload, mut stated) in messages {
        let batch = Batch::decode(&payload).expect("decodes");
        // The JSON reader may be off in the last place.
        assert!((batch.ts - stated.ts).abs() < 1e-6, "{name}");
        stated.ts = batch.ts;
        assert_eq!(batch, stated, "{name}");
    }
}

#[test]
fn replayed_batches_equal_the_live_ones() {
    for (name, capture) in captures("") {
        let Some(replay) = capture["replay"].as_array() else {
            continue;
        };
        let live = capture["live"].as_array().expect("live messages");
        for message in &replay[..replay.len() - 1] {
            let replayed = frames(message);
            let [.., seq, payload] = replayed.as_slice() else {
                panic!("{name}: a number and a payload");
            };
            let same = live.iter().map(frames).find(|frames| frames[1] == *seq);
            assert_eq!(same.map(|frames| frames[2].clone()).as_ref(), Some(payload));
        }
    }
}

fn new_index() -> Index {
    let index = Index::new(Limits::default());
    index.add_pod(pod(0));
    index
}

fn apply(index: &Index, message: &Value) -> Applied {
    let payload = frames(message).remove(2);
    index.apply(pod(0), &Batch::decode(&payload).expect("decodes"))
}

fn step<'a>(capture: &'a Value, name: &str) -> &'a Value {
    let steps = capture["steps"].as_array().expect("steps");
    let found = steps.iter().find(|step| step["step"] == name);
    found.unwrap_or_else(|| panic!("step {name}"))
}

#[test]
fn the_index_follows_a_running_vllm() {
    let (_, capture) = captures("vllm-0.32.0-ENGINE-full").remove(0);
    let index = new_index();
    // The tokens that the engine's own /tokenize gives for the chat, 201 of them.
    let chat = token_ids(&step(&capture, "tokenize_chat")["response"]["tokens"]);
    assert_eq!(chat.len(), 201);
    let ids: Vec<u32> = (1000..1099).chain(std::iter::repeat_n(1099, 29)).collect();
    let after: Vec<u32> = (2000..2064).collect();
    let found = || {
        let of = |tokens: &[u32], tenant| held(&index, pod(0), chain(32, tokens, tenant));
        [
            of(&chat, None),
            of(&chat, Some("tenant-a")),
            of(&chat, Some("tenant-b")),
            of(&ids, None),
            of(&after, None),
        ]
    };
    let mut log = Vec::new();
    for step in capture["steps"].as_array().expect("steps") {
        for message in step["events"].as_array().expect("events") {
            apply(&index, message);
        }
        log.push((step["step"].as_str().expect("a name"), found()));
    }
    let at = |name: &str| {
        log.iter()
            .find(|(step, _)| *step == name)
            .expect("a step")
            .1
    };
    assert_eq!(at("render_responses"), [0, 0, 0, 0, 0]);
    assert_eq!(at("chat_1"), [6, 0, 0, 0, 0]);
    assert_eq!(at("chat_1_repeat_report_full"), [6, 0, 0, 0, 0]);
    assert_eq!(at("chat_salt"), [6, 6, 0, 0, 0]);
    assert_eq!(at("completion_token_ids"), [6, 6, 0, 4, 0]);
    assert_eq!(at("after_reset"), [0, 0, 0, 0, 2]);
    assert_eq!(index.blocks(pod(0)), 2);
}

#[test]
fn a_session_continues_behind_the_block_it_names() {
    let (_, capture) = captures("vllm-0.32.0-ENGINE-full").remove(0);
    let index = new_index();
    let events = |name| {
        step(&capture, name)["events"]
            .as_array()
            .expect("events")
            .clone()
    };
    let mut applied = Applied::default();
    for message in events("chat_1").iter().chain(&events("chat_session_id")) {
        applied += apply(&index, message);
    }
    assert_eq!((applied.stored, applied.parked), (8, 0));
    // It left the first conversation after four blocks and added two.
    let tokens = |name| token_ids(&events(name)[0]["decoded"][1][0]["token_ids"]);
    let prompt = [&tokens("chat_1")[..128], &tokens("chat_session_id")].concat();
    assert_eq!(held(&index, pod(0), chain(32, &prompt, None)), 6);
}

#[test]
fn the_index_follows_a_hybrid_model_through_evictions() {
    let (_, capture) = captures("vllm-0.32.0-ENGINE-hybrid-evict").remove(0);
    let index = new_index();
    let mut prompts: Vec<(Vec<u32>, Vec<EngineHash>)> = Vec::new();
    let mut present = HashSet::new();
    let mut evicted = 0;
    for step in capture["steps"].as_array().expect("steps") {
        for message in step["events"].as_array().expect("events") {
            let applied = apply(&index, message);
            assert_eq!((applied.parked, applied.misaligned), (0, 0));
            for event in message["decoded"][1].as_array().expect("events") {
                // Only group 1 has full attention.
                if event["group_idx"] != 1 {
                    continue;
                }
                match stated_event(event) {
                    Event::Stored(stored) => {
                        present.extend(stored.hashes.iter().copied());
                        prompts.push((stored.tokens, stored.hashes));
                    }
                    Event::Removed(removed) => {
                        evicted += removed.hashes.len();
                        present.retain(|hash| !removed.hashes.contains(hash));
                    }
                    Event::Cleared => panic!("nothing is cleared here"),
                }
            }
        }
        for (tokens, hashes) in &prompts {
            let leading = hashes
                .iter()
                .take_while(|hash| present.contains(*hash))
                .count();
            let found = held(&index, pod(0), chain(32, tokens, None));
            assert_eq!(found as usize, leading, "after {}", step["step"]);
        }
        assert_eq!(index.blocks(pod(0)), present.len() as u64);
    }
    assert!(8 <= prompts.len() && 20 < evicted);
}

#[test]
fn the_index_follows_sglangs_radix_cache() {
    let (_, capture) = captures("sglang-0.5.23-RADIXCACHE").remove(0);
    let plain: Vec<u32> = (100..112).collect();
    let branch: Vec<u32> = (100..108).chain(7..11).collect();
    for dynamo_format in [false, true] {
        let index = new_index();
        let mut log = Vec::new();
        let frames = capture["frames"].as_array().expect("frames");
        for message in frames
            .iter()
            .filter(|m| m["dynamo_format"] == dynamo_format)
        {
            apply(&index, message);
            let of = |tokens: &[u32], tenant| held(&index, pod(0), chain(4, tokens, tenant));
            log.push([
                of(&plain, None),
                of(&branch, None),
                of(&plain, Some("tenant-a")),
            ]);
        }
        let expected = [
            [3, 2, 0], // insert_12
            [3, 3, 0], // insert_branch
            [3, 3, 2], // insert_salt
            [3, 3, 2], // insert_extra_key
            [2, 3, 2], // evict_4
            [0, 0, 0], // evict_all
            [0, 0, 0], // reset
        ];
        assert_eq!(log, expected, "dynamo_format {dynamo_format}");
        assert_eq!(index.len(), 0);
    }
}

#[test]
fn a_batch_of_mixed_shapes_keeps_its_good_neighbours() {
    let mut payload = vec![0x93, 0xcb, 0x41, 0xda, 0, 0, 0, 0, 0, 0, 0x93];
    payload.extend_from_slice(b"\x96\xabBlockStored\x91\x01\xc0\x94\x01\x02\x03\x04\x04\xc0");
    payload.extend_from_slice(
        b"\x86\xa4type\xabBlockStored\xacblock_hashes\x91\x02\xb1parent_block_hash\x01\xa9token_ids\x94\x05\x06\x07\x08\xaablock_size\x04\xacfuture_field\x82\x01\x02\xa1x\x93\x01\xc0\xc3",
    );
    payload.extend_from_slice(b"\x92\xaeBlockRelocated\x91\x07\x00");
    let batch = Batch::decode(&payload).expect("decodes");
    assert_eq!((batch.events.len(), batch.skipped.unknown), (2, 1));
    let index = new_index();
    index.apply(pod(0), &batch);
    let prompt: Vec<u32> = (1..9).collect();
    assert_eq!(held(&index, pod(0), chain(4, &prompt, None)), 2);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn damaged_captures_never_panic_and_leave_an_index_that_can_be_emptied(
        damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        cut in proptest::option::of(any::<prop::sample::Index>()),
    ) {
        let index = new_index();
        for (_, mut payload, _) in messages() {
            for (at, value) in &damage {
                let at = at.index(payload.len());
                payload[at] = *value;
            }
            if let Some(cut) = cut {
                payload.truncate(cut.index(payload.len()));
            }
            if let Ok(batch) = Batch::decode(&payload) {
                index.apply(pod(0), &batch);
            }
        }
        index.forget(pod(0));
        prop_assert_eq!(index.len(), 0);
    }
}

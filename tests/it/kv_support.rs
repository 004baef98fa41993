//! Reading captures, and waiting for conditions.
#![allow(clippy::expect_used, clippy::panic)] // helpers of tests

use serde_json::Value;
use sidestep::blocks::{BlockChain, KeySpace};
use sidestep::decide::snapshot::TierBlocks;
use sidestep::kv::event::{
    Adapter, Attention, Batch, EngineHash, Event, Extra, Locality, Medium, Removed, Skipped,
    Stored, TokenForm,
};
use sidestep::kv::index::{Index, Overlaps};
use sidestep::names::{PodId, Tenant};
use sidestep::units::BlockSize;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Polls `is_met` until it holds; fails after 20 s, saying what never happened.
pub(crate) async fn until(what: &str, mut is_met: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !is_met() {
        assert!(Instant::now() < deadline, "never: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// The captures whose name starts with `prefix`, by name.
pub(crate) fn captures(prefix: &str) -> Vec<(String, Value)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/captures");
    let mut found: Vec<_> = std::fs::read_dir(folder)
        .expect("the captures")
        .filter_map(|entry| {
            let path = entry.expect("readable").path();
            let name = path.file_name()?.to_str()?.to_owned();
            let is_wanted = name.starts_with(prefix) && name.ends_with(".json");
            let text = || std::fs::read_to_string(&path).expect("readable");
            is_wanted.then(|| (name, serde_json::from_str(&text()).expect("JSON")))
        })
        .collect();
    found.sort_by(|a, b| a.0.cmp(&b.0));
    found
}

pub(crate) fn hex(text: &str) -> Vec<u8> {
    (0..text.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&text[at..at + 2], 16).expect("hex"))
        .collect()
}

/// The frames of a captured message.
pub(crate) fn frames(message: &Value) -> Vec<Vec<u8>> {
    let list = message.get("frames_hex").unwrap_or(message);
    let list = list.as_array().expect("frames");
    list.iter()
        .map(|frame| hex(frame.as_str().expect("hex")))
        .collect()
}

fn integer(value: &Value) -> i128 {
    let big = value.get("$int").and_then(Value::as_str);
    let plain = || value.as_i64().map(i128::from);
    big.map(|text| text.parse().expect("a number"))
        .or_else(plain)
        .expect("an integer")
}

fn bytes(value: &Value) -> Option<Vec<u8>> {
    value.get("$bytes").and_then(Value::as_str).map(hex)
}

pub(crate) fn hash(value: &Value) -> EngineHash {
    if let Some(bytes) = bytes(value) {
        let tail = bytes.last_chunk::<8>().expect("eight bytes");
        return EngineHash(u64::from_be_bytes(*tail));
    }
    let value = integer(value);
    let bits = u64::try_from(value)
        .or_else(|_| i64::try_from(value).map(i64::cast_unsigned))
        .expect("64 bits");
    EngineHash(bits)
}

fn hashes(event: &Value) -> Vec<EngineHash> {
    let list = event["block_hashes"].as_array().expect("hashes");
    list.iter().map(hash).collect()
}

fn small(value: &Value) -> Option<u32> {
    value
        .as_u64()
        .map(|value| u32::try_from(value).expect("small"))
}

pub(crate) fn token_ids(value: &Value) -> Vec<u32> {
    let list = value.as_array().expect("token ids");
    list.iter().filter_map(small).collect()
}

fn text(value: &Value) -> Option<Arc<str>> {
    value.as_str().map(Arc::from)
}

fn medium(event: &Value) -> Medium {
    match event["medium"].as_str() {
        None | Some("GPU") => Medium::Device,
        Some("CPU" | "CPU_PINNED") => Medium::Host,
        Some("STORAGE" | "DISK" | "EXTERNAL") => Medium::Disk,
        Some(_) => Medium::Unknown,
    }
}

fn locality(event: &Value) -> Locality {
    match event["locality"].as_str() {
        Some("REMOTE") => Locality::Remote,
        _ => Locality::Local,
    }
}

fn extra(item: &Value) -> Extra {
    if let Some(text) = text(item) {
        return Extra::Text(text);
    }
    if let Some(bytes) = bytes(item) {
        return Extra::Bytes(bytes);
    }
    Extra::Item {
        id: text(&item[0]).expect("an identifier"),
        offset: item[1].as_i64().expect("an offset"),
    }
}

/// A stated event, with every field that its release knows, as it should be decoded.
pub(crate) fn stated_event(event: &Value) -> Event {
    match event["type"].as_str().expect("a type") {
        "AllBlocksCleared" => Event::Cleared,
        "BlockRemoved" => Event::Removed(Removed {
            hashes: hashes(event),
            medium: medium(event),
            locality: locality(event),
            group: small(&event["group_idx"]),
        }),
        "BlockStored" => Event::Stored(Box::new(stated_store(event))),
        other => panic!("a known type, found {other}"),
    }
}

fn stated_store(event: &Value) -> Stored {
    let ids = event["token_ids"].as_array().expect("token ids");
    let pairs = ids.first().is_some_and(Value::is_array);
    let tokens = if pairs {
        let first = small(&ids[0][0]).expect("a token");
        let rest = ids.iter().map(|pair| small(&pair[1]).expect("a token"));
        std::iter::once(first).chain(rest).collect()
    } else {
        token_ids(&event["token_ids"])
    };
    let per_block = event["extra_keys"].as_array().into_iter().flatten();
    Stored {
        hashes: hashes(event),
        parent: (!event["parent_block_hash"].is_null()).then(|| hash(&event["parent_block_hash"])),
        tokens,
        tokens_as: if pairs {
            TokenForm::Pairs
        } else {
            TokenForm::Single
        },
        block_size: small(&event["block_size"]).expect("a block size"),
        medium: medium(event),
        locality: locality(event),
        group: small(&event["group_idx"]),
        attention: match event["kv_cache_spec_kind"].as_str() {
            None => Attention::Unstated,
            Some("full_attention") => Attention::Full,
            Some(_) => Attention::Partial,
        },
        adapter: match (text(&event["lora_name"]), event["lora_id"].is_null()) {
            (Some(name), _) => Adapter::Named(name),
            (None, false) => Adapter::NumberOnly,
            (None, true) => Adapter::None,
        },
        salt: text(&event["cache_salt"]),
        extra: per_block
            .map(|items| items.as_array().into_iter().flatten().map(extra).collect())
            .collect(),
    }
}

/// The batch that a capture states.
pub(crate) fn stated_batch(ts: &Value, events: &Value, rank: &Value) -> Batch {
    let events = events.as_array().expect("events");
    Batch {
        ts: ts.as_f64().expect("a time"),
        rank: small(rank).expect("a rank"),
        events: events.iter().map(stated_event).collect(),
        skipped: Skipped::default(),
    }
}

/// The keys of a prompt.
pub(crate) fn chain(size: u32, tokens: &[u32], tenant: Option<&str>) -> BlockChain {
    let space = KeySpace {
        block_size: BlockSize::new(size).expect("not zero"),
        adapter: None,
        tenant: tenant.map(Tenant::from),
    };
    BlockChain::new(&space, tokens)
}

/// What `pod` holds of a prompt.
pub(crate) fn tiers(index: &Index, pod: PodId, chain: BlockChain) -> TierBlocks {
    let mut out = Overlaps::new();
    index.overlaps(&[chain], &mut out);
    out.get(pod)
}

/// Blocks on the device of `pod`.
pub(crate) fn held(index: &Index, pod: PodId, chain: BlockChain) -> u32 {
    tiers(index, pod, chain).device.0
}

pub(crate) fn pod(slot: u16) -> PodId {
    PodId {
        slot,
        generation: 0,
    }
}

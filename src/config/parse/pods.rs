//! The list of pods.
//!
//! Lives here: its defaults, and that no two pods share a name or an address.
//! Never here: which pod becomes which incarnation (`fleet`).
//! Invariant: names and addresses are unique.

use crate::config::diagnostic::Wrong;
use crate::config::node::NodeId;
use crate::config::parse::{Reading, values};
use crate::config::raw;
use crate::config::shape::{Field, Spot, Text, Whole, WordOr};
use crate::decide::snapshot::{LocalPrefill, Role};
use crate::fleet::{KvEventsSpec, Listed, MAX_PODS, PodSpec, Probe};
use crate::names::{Endpoint, ModelName};
use crate::units::{BlockSize, Blocks, Tokens};
use std::collections::HashSet;
use std::num::NonZeroU32;
use std::sync::Arc;

/// Where an engine serves its metrics, when not said.
const METRICS_PATH: &str = "/metrics";

/// Far more misses than anybody waits for.
const MOST_FAILURES: i64 = 100;

/// The largest block: far above any engine's.
pub(crate) const LARGEST_BLOCK: i64 = 1 << 16;

/// Reads a file of pods.
pub(crate) fn document(raw: &raw::Pods, reading: &mut Reading<'_>) -> Vec<PodSpec> {
    match &raw.pods {
        Field::Given(list) => pods(list.at, &list.value, reading),
        Field::Faulty => Vec::new(),
        Field::Absent => {
            reading.report.missing(raw.at, "pods", "a list of pods");
            Vec::new()
        }
    }
}

/// Reads the list `at`.
pub(crate) fn pods(at: NodeId, list: &[Spot<raw::Pod>], reading: &mut Reading<'_>) -> Vec<PodSpec> {
    if MAX_PODS < list.len() {
        let expected = format!("at most {MAX_PODS} pods");
        reading
            .report
            .fault(at, Wrong::new(expected, list.len().to_string()));
        return Vec::new();
    }
    let mut seen = Seen::default();
    let pods: Vec<PodSpec> = list
        .iter()
        .filter_map(|raw| pod(&raw.value, &mut seen, reading))
        .collect();
    if list.is_empty() {
        reading.report.warn(at, "no pod: every request is refused");
    } else if pods.len() == list.len() && !pods.iter().any(|pod| pod.role.decodes()) {
        let message = "no pod decodes: every request is refused";
        reading.report.warn(at, message);
    }
    pods
}

/// The names and addresses so far.
#[derive(Default)]
struct Seen {
    names: HashSet<Arc<str>>,
    endpoints: HashSet<Endpoint>,
}

fn pod(raw: &raw::Pod, seen: &mut Seen, reading: &mut Reading<'_>) -> Option<PodSpec> {
    let name = reading.required(&raw.name, (raw.at, "name"), "the name of the pod", |text| {
        let name = values::name(text)?;
        unique(seen.names.insert(Arc::clone(&name)), "a name", text)?;
        Ok(name)
    });
    let endpoint = reading.required(
        &raw.address,
        (raw.at, "address"),
        "an address such as 10.0.0.7:8000",
        |text| {
            let endpoint = values::endpoint(text)?;
            unique(seen.endpoints.insert(endpoint), "an address", text)?;
            Ok(endpoint)
        },
    );
    let role = reading.required(
        &raw.role,
        (raw.at, "role"),
        "prefill, decode or both",
        |text| {
            let words = [Role::Prefill, Role::Decode, Role::Both];
            values::word(text, &words.map(|role| (role.as_str(), role)))
        },
    );
    let local_prefill = local_prefill(&raw.local_prefill, reading);
    if role == Some(Role::Prefill) {
        let why = "the pod does not decode";
        reading.no_effect(&raw.local_prefill, why);
    }
    let model = |text: &Text| values::name(text).map(ModelName);
    let models = reading.each(&raw.models, model);
    let adapters = reading.each(&raw.adapters, model);
    let kv_events = kv_events(&raw.kv_events, reading);
    let size = capacity(&raw.capacity, reading);
    let probe = probe(&raw.probe, reading);
    let name = name?;
    Some(PodSpec {
        // A file has no other identity to offer; a changed address is a new incarnation anyway.
        uid: Arc::clone(&name),
        name,
        endpoint: endpoint?,
        role: role?,
        models,
        adapters,
        local_prefill,
        kv_events,
        block_size: size.block_size,
        kv_blocks: size.kv_blocks,
        prefill_batch_tokens: size.prefill_tokens,
        probe,
        listed: Listed::Ready,
    })
}

/// Whether requests may skip remote prefill.
pub(super) fn local_prefill(field: &Field<Text>, reading: &mut Reading<'_>) -> LocalPrefill {
    let words = [
        ("able", LocalPrefill::Able),
        ("unable", LocalPrefill::Unable),
    ];
    reading.or(field, LocalPrefill::Able, |text| values::word(text, &words))
}

fn unique(new: bool, what: &str, text: &Text) -> Result<(), Wrong> {
    if new {
        return Ok(());
    }
    Err(Wrong::new(
        format!("{what} that no other pod has"),
        format!("{} a second time", text.found),
    ))
}

fn kv_events(raw: &Field<raw::KvEvents>, reading: &mut Reading<'_>) -> Option<KvEventsSpec> {
    let Spot { value: raw, .. } = raw.given()?;
    let address = |text: &Text| values::zmq_endpoint(text);
    let expected = "an address such as tcp://10.0.0.7:5557";
    let events = reading.required(&raw.address, (raw.at, "address"), expected, address);
    let replay = reading.optional(&raw.replay, address);
    let topic = reading.or(&raw.topic, Arc::from(""), values::label);
    Some(KvEventsSpec {
        events: events?,
        replay,
        topic: topic.to_string(),
    })
}

/// What is known about the size of a pod.
#[derive(Default)]
pub(super) struct Sizes {
    pub(super) kv_blocks: Option<Blocks>,
    pub(super) prefill_tokens: Option<Tokens>,
    pub(super) block_size: Option<BlockSize>,
}

/// What is known about the size of a pod.
pub(super) fn capacity(raw: &Field<raw::Capacity>, reading: &mut Reading<'_>) -> Sizes {
    let Some(Spot { value: raw, .. }) = raw.given() else {
        return Sizes::default();
    };
    Sizes {
        kv_blocks: reading.optional(&raw.kv_blocks, |value| {
            values::whole(value, 1, u32::MAX.into()).map(Blocks)
        }),
        prefill_tokens: reading.optional(&raw.prefill_tokens, |value| {
            values::whole(value, 1, values::MOST_TOKENS).map(Tokens)
        }),
        block_size: block_size(&raw.block_size, reading),
    }
}

/// Tokens per KV block.
pub(crate) fn block_size(raw: &Field<Whole>, reading: &mut Reading<'_>) -> Option<BlockSize> {
    reading
        .optional(raw, |value| values::whole(value, 1, LARGEST_BLOCK))
        .and_then(BlockSize::new)
}

/// How a pod is asked for its numbers.
pub(super) fn probe(raw: &Field<WordOr<raw::Probe>>, reading: &mut Reading<'_>) -> Probe {
    let (path, failure_threshold) = match raw.given().map(|spot| &spot.value) {
        Some(WordOr::Word(_)) => {
            let off = |raw: &WordOr<raw::Probe>| match raw {
                WordOr::Word(text) => values::word(text, &[("off", Probe::Off)]),
                WordOr::Section(_) => Ok(Probe::Off),
            };
            return reading.or(raw, Probe::Off, off);
        }
        Some(WordOr::Section(section)) => (
            reading.or(&section.path, Arc::from(METRICS_PATH), values::url_path),
            reading
                .optional(&section.failure_threshold, |value| {
                    values::whole(value, 1, MOST_FAILURES)
                })
                .and_then(NonZeroU32::new),
        ),
        None => (Arc::from(METRICS_PATH), None),
    };
    Probe::Metrics {
        path,
        failure_threshold: failure_threshold.unwrap_or(Probe::FAILURE_THRESHOLD),
    }
}

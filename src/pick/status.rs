//! What the picker says of itself: readiness, pods, the policy in force.
//!
//! Lives here: readable copies of state, for the admin port and health.
//! Never here: anything a decision reads.
//! Invariant: every answer is a copy; no lock is held while it is written out.

use crate::decide::prerequisite::{PrefixCaching, Prerequisite, missing};
use crate::decide::snapshot::{Availability, EngineReport, Role};
use crate::names::PodId;
use crate::pick::Picker;
use crate::pick::readable::PolicySummary;
use serde::Serialize;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// One pod, readable.
#[derive(Clone, Debug, Serialize)]
pub struct PodStatus {
    /// Its name.
    pub name: Arc<str>,
    /// Where it listens.
    pub endpoint: String,
    /// What it may be used for.
    pub role: Role,
    /// Whether it can take requests.
    pub availability: &'static str,
    /// State of its KV events.
    pub kv_source: &'static str,
    /// Blocks that the index knows on it.
    pub kv_blocks: u64,
    /// Seconds since its last KV event, if there was one.
    pub kv_last_event_age_s: Option<f64>,
    /// KV blocks it has, when known.
    pub kv_capacity_blocks: Option<u32>,
    /// Prompt tokens it takes into one prefill batch.
    pub prefill_capacity_tokens: Option<u64>,
    /// Requests promised to it.
    pub requests: u32,
    /// Prefill tokens promised to it.
    pub prefill_tokens: u64,
    /// Blocks promised to it.
    pub decode_blocks: u32,
    /// Requests it says are waiting.
    pub waiting: Option<u32>,
    /// Requests it says are running.
    pub running: Option<u32>,
    /// Share of its KV cache that it says is in use.
    pub kv_usage: Option<f64>,
    /// What the policy in force needs of it and does not get, one word each.
    pub missing: Vec<Prerequisite>,
    /// Its identity.
    #[serde(skip)]
    pub id: PodId,
}

impl Picker {
    /// Whether a decode pod is ready, and this process is not about to end.
    #[must_use]
    pub fn ready(&self) -> bool {
        !self.draining.load(Ordering::Relaxed) && self.decodes()
    }

    fn decodes(&self) -> bool {
        self.observer
            .roster
            .view()
            .pods
            .iter()
            .any(|pod| pod.spec.role.decodes() && pod.availability() == Availability::Ready)
    }

    /// What hinders readiness, in words.
    #[must_use]
    pub fn hindrance(&self) -> String {
        if self.draining.load(Ordering::Relaxed) {
            return "draining".to_owned();
        }
        let mut words = "no decode pod is ready".to_owned();
        if let Some(trouble) = self.observer.roster.watches().trouble() {
            words.push_str("; ");
            words.push_str(&trouble);
        }
        words
    }

    /// All pods.
    #[must_use]
    pub fn pods(&self) -> Vec<PodStatus> {
        let now = Instant::now();
        let observation = self.observer.look(&[], &[], now);
        let in_force = self.in_force();
        let snapshot = &observation.snapshot;
        let loads = self.ledger.loads(snapshot.board().ids().iter().copied());
        snapshot
            .candidates()
            .zip(loads)
            .map(|(candidate, load)| {
                let (waiting, running, kv_usage) = match candidate.engine {
                    EngineReport::None => (None, None, None),
                    EngineReport::Fresh {
                        waiting,
                        running,
                        kv_usage,
                    } => (Some(waiting), Some(running), Some(kv_usage.get())),
                };
                PodStatus {
                    name: observation.name(candidate.pod),
                    endpoint: candidate.endpoint.to_string(),
                    role: candidate.role,
                    availability: candidate.availability.as_str(),
                    kv_source: candidate.kv_source.as_str(),
                    kv_blocks: self.observer.index.blocks(candidate.pod),
                    kv_last_event_age_s: self
                        .observer
                        .sources
                        .feed(candidate.pod)
                        .and_then(|feed| feed.stats().last_event_age)
                        .map(|age| age.as_secs_f64()),
                    kv_capacity_blocks: candidate.kv_capacity.known().map(|(blocks, _)| blocks.0),
                    prefill_capacity_tokens: candidate
                        .prefill_capacity
                        .known()
                        .map(|(tokens, _)| tokens.0),
                    requests: load.requests,
                    prefill_tokens: load.prefill_tokens.0,
                    decode_blocks: load.decode_blocks.0,
                    waiting,
                    running,
                    kv_usage,
                    missing: missing(
                        &candidate,
                        observation
                            .view
                            .get(candidate.pod)
                            .map_or(PrefixCaching::Unknown, |pod| pod.status().prefix_caching()),
                        &in_force.policy,
                    )
                    .to_vec(),
                    id: candidate.pod,
                }
            })
            .collect()
    }

    /// The policy in force.
    #[must_use]
    pub fn policy_summary(&self) -> PolicySummary {
        let conditions = self.conditions.load().to_vec();
        let shadow = self.in_shadow();
        self.history
            .lock()
            .summary(&self.in_force(), conditions, &shadow)
    }
}

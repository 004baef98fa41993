//! One pod: what the operator said of it, and what was seen of it since.
//!
//! Lives here: [`PodSpec`], [`Pod`], and the one place where a capacity gets its source.
//! Never here: I/O, the set of all pods (`roster`).
//! Invariant: a `Pod` never changes its spec; a changed spec is another `Pod`, which shares the status
//! for as long as it is asked alike.

use crate::decide::snapshot::{Availability, Capacity, EngineReport, LocalPrefill, Role};
use crate::fleet::status::{Changed, Status};
use crate::names::{Endpoint, ModelName, PodId};
use crate::units::{BlockSize, Blocks, Tokens};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Instant;

/// Prompt tokens assumed to fit one prefill batch when nobody said: vLLM's default
/// `max_num_batched_tokens` for online serving on large accelerators.
pub const ASSUMED_PREFILL_BATCH: Tokens = Tokens(8192);

/// What is declared about a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodSpec {
    /// Its name, unique among pods.
    pub name: Arc<str>,
    /// Tells two pods of the same name apart (in Kubernetes the object's uid).
    pub uid: Arc<str>,
    /// Where the engine serves requests.
    pub endpoint: Endpoint,
    /// What it may be used for.
    pub role: Role,
    /// Models it serves; empty means every model.
    pub models: Vec<ModelName>,
    /// Adapters (LoRA) it serves.
    pub adapters: Vec<ModelName>,
    /// Whether a request may skip remote prefill on it.
    pub local_prefill: LocalPrefill,
    /// Where it publishes KV events, if it does.
    pub kv_events: Option<KvEventsSpec>,
    /// Tokens per KV block, if the operator said.
    pub block_size: Option<BlockSize>,
    /// KV blocks it has, if the operator said.
    pub kv_blocks: Option<Blocks>,
    /// Prompt tokens it takes into one prefill batch, if the operator said.
    pub prefill_batch_tokens: Option<Tokens>,
    /// How it is asked for its numbers.
    pub probe: Probe,
    /// What its orchestrator says of it.
    pub listed: Listed,
}

/// What the list that a pod is in says of its state. A pod stays listed while it cannot take new
/// requests, so that what was promised to it stays known until those requests end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Listed {
    /// It may be used, if its probe finds it ready.
    Ready,
    /// Not ready, whatever its probe finds.
    NotReady,
    /// On its way out; what runs on it may end.
    Leaving,
}

/// Where a pod publishes its KV events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvEventsSpec {
    /// The event stream, `tcp://ip:port`.
    pub events: String,
    /// Where missed events can be asked for again, `tcp://ip:port`.
    pub replay: Option<String>,
    /// The topic to subscribe to; empty subscribes to everything.
    pub topic: String,
}

/// How a pod is asked for its numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Probe {
    /// `GET` of this path on the pod's endpoint, in Prometheus text form.
    Metrics {
        /// Absolute path, such as `/metrics`.
        path: Arc<str>,
        /// Answers missed in a row that make a ready pod unreachable.
        failure_threshold: NonZeroU32,
    },
    /// Not at all: the pod counts as ready as soon as it is listed.
    Off,
}

impl Probe {
    /// Answers missed in a row that make a ready pod unreachable, unless told otherwise: one may be lost on the way, or
    /// wait for an engine that pauses.
    pub const FAILURE_THRESHOLD: NonZeroU32 = NonZeroU32::MIN.saturating_add(1);

    /// Whether `other` puts the same question, however many misses it bears: what was found then holds.
    fn asks_as(&self, other: &Probe) -> bool {
        match (self, other) {
            (Probe::Off, Probe::Off) => true,
            (Probe::Metrics { path, .. }, Probe::Metrics { path: other, .. }) => path == other,
            _ => false,
        }
    }
}

/// A pod with what is known about it.
#[derive(Clone, Debug)]
pub struct Pod {
    /// This incarnation.
    pub id: PodId,
    /// What is declared about it.
    pub spec: PodSpec,
    status: Arc<Status>,
}

impl Pod {
    /// A pod seen for the first time; `changes` are told of what is seen of it.
    pub(crate) fn new(id: PodId, spec: PodSpec, changes: Changed) -> Pod {
        let status = Arc::new(Status::new(initial(&spec.probe), changes));
        Pod { id, spec, status }
    }

    /// The same incarnation under a changed spec. What was seen of it is kept; whether it is ready is
    /// found out anew where it is asked otherwise.
    pub(crate) fn respecified(&self, spec: PodSpec) -> Pod {
        let status = if self.spec.probe.asks_as(&spec.probe) {
            Arc::clone(&self.status)
        } else {
            // Its own: the task that asked before is still running.
            Arc::new(self.status.succeeded(initial(&spec.probe)))
        };
        Pod {
            id: self.id,
            spec,
            status,
        }
    }

    /// What was seen of it; shared by every `Pod` of this incarnation that is asked alike.
    #[must_use]
    pub fn status(&self) -> &Arc<Status> {
        &self.status
    }

    /// Whether it can take requests now. A probe may answer until the very end, so it is asked last.
    #[must_use]
    pub fn availability(&self) -> Availability {
        match self.spec.listed {
            Listed::Ready => self.status.availability(),
            Listed::NotReady => Availability::NotReady,
            Listed::Leaving => Availability::Draining,
        }
    }

    /// What the engine said of itself, unless that is too old at `now`.
    #[must_use]
    pub fn engine_report(&self, now: Instant) -> EngineReport {
        self.status.engine_report(now)
    }

    /// When that will be too old, if there is anything to grow old.
    #[must_use]
    pub fn report_expires(&self) -> Option<Instant> {
        self.status.report_expires()
    }

    /// KV blocks it has: as configured, else as reported. Nothing is assumed, because the gate that
    /// reads it would then rest on a guess.
    #[must_use]
    pub fn kv_capacity(&self) -> Capacity<Blocks> {
        match (self.spec.kv_blocks, self.status.kv_blocks()) {
            (Some(configured), _) => Capacity::Configured(configured),
            (None, Some(reported)) => Capacity::Reported(reported),
            (None, None) => Capacity::Unknown,
        }
    }

    /// Prompt tokens it takes into one prefill batch: as configured, else
    /// [`ASSUMED_PREFILL_BATCH`]. No engine reports this number.
    #[must_use]
    pub fn prefill_capacity(&self) -> Capacity<Tokens> {
        match self.spec.prefill_batch_tokens {
            Some(configured) => Capacity::Configured(configured),
            None => Capacity::Assumed(ASSUMED_PREFILL_BATCH),
        }
    }

    /// Tokens per KV block: as configured, else as reported. Events, once they arrive, know better.
    #[must_use]
    pub fn block_size(&self) -> Option<BlockSize> {
        self.spec.block_size.or_else(|| self.status.block_size())
    }
}

fn initial(probe: &Probe) -> Availability {
    match probe {
        Probe::Metrics { .. } => Availability::NotReady,
        Probe::Off => Availability::Ready,
    }
}

//! What a request asks of the kernel.
//!
//! Lives here: [`Ask`] and what it is made of.
//! Never here: pods (see `snapshot`), where any of it was read.
//! Invariant: plain values; unknown has a name (no `Option<bool>`, no magic numbers).

use crate::names::{Endpoint, ModelName, PodId};
use crate::units::Tokens;
use std::net::IpAddr;
use std::sync::Arc;
/// What a request asks of the kernel.
#[derive(Clone, Debug)]
pub struct Ask {
    /// Generation, or anything else that only needs a pod.
    pub kind: AskKind,
    /// The model (or adapter) the client named; `None` for requests that name none.
    pub model: Option<ModelName>,
    /// The policy class, for rules that match on it.
    pub policy_class: Option<Arc<str>>,
    /// Priority; higher is more urgent, 0 when not given.
    pub priority: i32,
    /// Length of the prompt.
    pub prompt_tokens: Tokens,
    /// How the length was obtained.
    pub counted: Counted,
    /// The endpoints the data plane allows.
    pub subset: Subset,
    /// The decode pod the client insists on.
    pub decode_pin: Option<Pin>,
    /// The prefill pod the client insists on.
    pub prefill_pin: Option<Pin>,
    /// The decode pod that served this session before.
    pub affinity: Affinity,
    /// The pod that prefilled for this session before; preferred while it is eligible.
    pub prefill_affinity: Option<PodId>,
    /// A uniformly drawn number, for ties and sampling.
    pub draw: u64,
}

/// What kind of request it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AskKind {
    /// A prompt to be prefilled and decoded.
    Generate,
    /// Several sequences in one request (several prompts, or several answers). A handoff moves the KV
    /// of one sequence; engines that are asked for more mix them up.
    GenerateSeveral,
    /// Anything else (model lists, health, unknown APIs): a ready decode pod, nothing more.
    PassThrough,
}

/// How `prompt_tokens` was obtained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counted {
    /// By the model's own tokenizer (or given as token ids).
    Exact,
    /// From the number of bytes, because no tokenizer is configured for the model.
    EstimatedFromBytes,
    /// There was no prompt.
    NoPrompt,
}

impl Counted {
    /// The word used in spans, logs and output.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Counted::Exact => "exact",
            Counted::EstimatedFromBytes => "estimated_from_bytes",
            Counted::NoPrompt => "no_prompt",
        }
    }
}

/// The endpoints the data plane allows for a request.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum Subset {
    /// No hint was sent.
    #[default]
    Any,
    /// Only these for the pod that decodes, which the gateway sends the request to; possibly none, which
    /// allows no pod. The pod that prefills is reached by that pod, and may be any.
    Only(Arc<[SubsetEntry]>),
    /// Only these, for both pods: the gateway sends a request that is prefilled remotely to the pod that
    /// prefills.
    Throughout(Arc<[SubsetEntry]>),
}

/// One entry of a subset hint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SubsetEntry {
    /// Every port of this address.
    Ip(IpAddr),
    /// Exactly this endpoint.
    Endpoint(Endpoint),
}

impl Subset {
    /// Whether `endpoint` is allowed.
    #[must_use]
    pub fn allows(&self, endpoint: Endpoint) -> bool {
        match self {
            Subset::Any => true,
            Subset::Only(entries) | Subset::Throughout(entries) => {
                entries.iter().any(|entry| entry.covers(endpoint))
            }
        }
    }

    /// The same endpoints, of which both pods must be.
    #[must_use]
    pub fn throughout(self) -> Subset {
        match self {
            Subset::Only(entries) => Subset::Throughout(entries),
            Subset::Any | Subset::Throughout(_) => self,
        }
    }
}

impl SubsetEntry {
    /// Whether `endpoint` is this endpoint or has this address.
    #[must_use]
    pub fn covers(self, endpoint: Endpoint) -> bool {
        match self {
            SubsetEntry::Ip(ip) => ip == endpoint.0.ip(),
            SubsetEntry::Endpoint(allowed) => allowed == endpoint,
        }
    }
}

/// A pod that a client insists on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pin {
    /// Exactly this endpoint.
    Endpoint(Endpoint),
    /// The only endpoint of the wanted role at this address, or the session's among several (a
    /// data-parallel rank is an endpoint of its own).
    Address(IpAddr),
}

impl From<Endpoint> for Pin {
    fn from(endpoint: Endpoint) -> Self {
        Pin::Endpoint(endpoint)
    }
}

impl std::fmt::Display for Pin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Pin::Endpoint(endpoint) => endpoint.fmt(f),
            Pin::Address(ip) => ip.fmt(f),
        }
    }
}

/// What session affinity says about a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Affinity {
    /// No session, or one not seen before.
    #[default]
    None,
    /// Prefer this pod while it is eligible.
    Soft(PodId),
    /// Only this pod.
    Hard(PodId),
}

impl Affinity {
    /// The pod of the session's last turn, if there is one.
    #[must_use]
    pub fn pod(self) -> Option<PodId> {
        match self {
            Affinity::None => None,
            Affinity::Soft(pod) | Affinity::Hard(pod) => Some(pod),
        }
    }
}

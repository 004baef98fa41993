//! The kernel: one snapshot in, one decision out.
//!
//! Lives here: eligibility, cost, selection, the bypass rule, the decode gate, reasons.
//! Never here: async, clocks, randomness, locks, logging, Envoy, Kubernetes, YAML.
//! Invariant: the answer is a function of the arguments alone.

pub mod policy;
pub mod reason;
pub mod snapshot;

use crate::decide::reason::{Because, Check};
use crate::decide::snapshot::Candidate;
use crate::units::{Blocks, Tokens};
use smallvec::SmallVec;

/// What was decided, with everything it was decided from.
#[derive(Clone, Debug)]
pub struct Decision {
    /// Where the request goes.
    pub route: Route,
    /// Why.
    pub because: Because,
    /// Index of the policy rule that applied.
    pub rule: usize,
    /// The comparisons made, in order.
    pub checks: SmallVec<[Check; 5]>,
    /// Length of the prompt.
    pub prompt_tokens: Tokens,
    /// The three selections, taken or not.
    pub considered: Considered,
}

/// Where a request goes.
#[derive(Clone, Copy, Debug)]
pub enum Route {
    /// One pod prefills and decodes.
    Local {
        /// That pod.
        decode: Pick,
    },
    /// One pod prefills, another decodes.
    Remote {
        /// The pod that prefills.
        prefill: Pick,
        /// The pod that decodes.
        decode: Pick,
    },
}

impl Route {
    /// The pod that decodes: the destination of the request.
    #[must_use]
    pub fn decode(&self) -> &Pick {
        match self {
            Route::Local { decode } | Route::Remote { decode, .. } => decode,
        }
    }

    /// The pod that prefills for another, if any.
    #[must_use]
    pub fn prefill(&self) -> Option<&Pick> {
        match self {
            Route::Local { .. } => None,
            Route::Remote { prefill, .. } => Some(prefill),
        }
    }

    /// `local` or `remote`.
    #[must_use]
    pub fn as_str(&self) -> &'static str {
        match self {
            Route::Local { .. } => "local",
            Route::Remote { .. } => "remote",
        }
    }
}

/// What the three selections returned.
#[derive(Clone, Copy, Debug, Default)]
pub struct Considered {
    /// The best pod to prefill and decode.
    pub local: Option<Pick>,
    /// The best pod to prefill only.
    pub prefill: Option<Pick>,
    /// The best pod to decode after a remote prefill.
    pub decode: Option<Pick>,
}

/// A selected pod: the candidate itself, with what it costs.
#[derive(Clone, Copy, Debug)]
pub struct Pick {
    /// The pod and the numbers it was chosen by.
    pub candidate: Candidate,
    /// Leading prompt tokens it holds, at most the whole prompt.
    pub cached_tokens: Tokens,
    /// Prompt tokens it does not hold.
    pub net_new_tokens: Tokens,
    /// What choosing it costs.
    pub cost: Cost,
}

/// A cost by its terms; the unit is one KV block.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Prefill work ahead of and including this request, net of `credit`, scaled.
    pub prefill: f64,
    /// Credit given for cached blocks (already subtracted).
    pub credit: f64,
    /// Blocks in use once this request runs.
    pub decode: f64,
    /// Running requests, weighted.
    pub requests: f64,
    /// What is compared.
    pub total: f64,
}

/// What a decision promises its pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Footprint {
    /// KV blocks of the prompt, the last one possibly partial.
    pub blocks: Blocks,
}

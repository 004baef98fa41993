//! What choosing a pod costs, in KV blocks.
//!
//! Lives here: the cost of one pod for one purpose, and the credited tokens that the rule reads.
//! Never here: comparisons between pods, thresholds.
//! Invariant: every cost is a finite number of at least 0.
//!
//! With `bs` the pod's block size, `isl` the prompt, and `credit = overlapCredit·device +
//! hostTier·host + diskTier·disk`:
//!
//! - prefill, or prefill and decode:
//!   `prefillLoadScale · max(0, (queued prefill tokens + isl) / bs − credit) + potential blocks +
//!   activeRequestWeight · requests`;
//! - decode after a remote prefill:
//!   `max(0, potential blocks − credit) + activeRequestWeight · requests`, so that the pod whose
//!   cache can serve the next turn is preferred. With no `overlapCredit` there is no credit at all
//!   and load alone counts.

use crate::decide::policy::{Scoring, TierCredit};
use crate::decide::select::Purpose;
use crate::decide::snapshot::{Candidate, PodLoad, TierBlocks};
use crate::units::{BlockSize, Blocks, Tokens};

/// A cost by its terms; the unit is one KV block.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Prefill work ahead of and including this request, net of `credit`, scaled; 0 for a pod that
    /// only decodes.
    pub prefill: f64,
    /// Credit given for cached blocks (already subtracted).
    pub credit: f64,
    /// Blocks in use once this request runs; for a pod that only decodes, net of `credit`.
    pub decode: f64,
    /// Running requests, weighted.
    pub requests: f64,
    /// The sum of `prefill`, `decode` and `requests`: what is compared.
    pub total: f64,
}

/// Above this, costs are equal: extreme weights must not make an infinity, whose difference to
/// another is not a number.
const MOST: f64 = 1e300;

/// Prices pods for one prompt and one purpose.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pricer {
    prompt: Tokens,
    scoring: Scoring,
    purpose: Purpose,
}

/// A block size with what a prompt takes in it, worked out once for pods that agree on it: the
/// division would be most of the work per pod.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sized {
    size: f64,
    blocks: f64,
}

impl Pricer {
    pub(super) fn new(prompt: Tokens, scoring: Scoring, purpose: Purpose) -> Pricer {
        Pricer {
            prompt,
            scoring,
            purpose,
        }
    }

    #[inline]
    pub(super) fn sized(&self, size: BlockSize) -> Sized {
        Sized {
            size: f64::from(size.get()),
            blocks: f64::from(size.blocks_to_hold(self.prompt).0),
        }
    }

    /// What it costs to give the prompt to a pod that holds `cached` of it and carries `load`.
    #[inline]
    pub(super) fn price(&self, sized: Sized, cached: &TierBlocks, load: &PodLoad) -> Cost {
        let scoring = &self.scoring;
        let Sized { size, blocks } = sized;
        let requests = scoring.active_request_weight.get() * f64::from(load.requests);
        let overlap = scoring.overlap_credit.get();
        let (prefill, credit, decode) = match self.purpose {
            Purpose::PrefillAndDecode | Purpose::Prefill => {
                let credit = weighted_blocks(cached, scoring, overlap);
                let work = (load.prefill_tokens.0 as f64 + self.prompt.0 as f64) / size;
                let prefill = scoring.prefill_load_scale.get() * (work - credit).max(0.0);
                let running = load.decode_blocks.saturating_sub(load.shared_blocks);
                (prefill, credit, f64::from(running.0) + blocks)
            }
            Purpose::DecodeOnly => {
                let credit = if 0.0 < overlap {
                    weighted_blocks(cached, scoring, overlap)
                } else {
                    0.0
                };
                // The transferred blocks are new to the pod, so none is assumed to be shared.
                let potential = f64::from(load.decode_blocks.0) + blocks;
                (0.0, credit, (potential - credit).max(0.0))
            }
        };
        Cost {
            prefill: prefill.min(MOST),
            credit: credit.min(MOST),
            decode: decode.min(MOST),
            requests: requests.min(MOST),
            total: (prefill + decode + requests).min(MOST),
        }
    }
}

/// Leading prompt tokens that `candidate` is credited with, at most the whole prompt.
#[must_use]
pub fn credited_tokens(
    candidate: &Candidate,
    prompt: Tokens,
    scoring: &Scoring,
    credit: TierCredit,
) -> Tokens {
    let tokens = match credit {
        TierCredit::Full => candidate.block_size.tokens(candidate.cached.total()),
        TierCredit::Weighted => {
            let blocks = weighted_blocks(&candidate.cached, scoring, 1.0);
            Tokens((blocks * f64::from(candidate.block_size.get())).round() as u64)
        }
    };
    tokens.min(prompt)
}

/// Blocks this request would add to those that run on `candidate`, those it shares left out.
#[must_use]
pub fn new_blocks(candidate: &Candidate, prompt: Tokens) -> Blocks {
    candidate
        .block_size
        .blocks_to_hold(prompt)
        .saturating_sub(candidate.load.shared_blocks)
}

#[inline]
fn weighted_blocks(cached: &TierBlocks, scoring: &Scoring, device: f64) -> f64 {
    device * f64::from(cached.device.0)
        + scoring.host_tier.get() * f64::from(cached.host.0)
        + scoring.disk_tier.get() * f64::from(cached.disk.0)
}

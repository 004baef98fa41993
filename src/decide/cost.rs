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
use crate::units::{BlockSize, Blocks, Ratio, Tokens};

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
    /// Blocks that a token takes: exact for the powers of two that block sizes are.
    per_token: f64,
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
            per_token: 1.0 / f64::from(size.get()),
            blocks: f64::from(size.blocks_to_hold(self.prompt).0),
        }
    }

    /// What it costs to give the prompt to a pod that holds `cached` of it and carries `load`.
    pub(super) fn price(&self, sized: Sized, cached: &TierBlocks, load: &PodLoad) -> Cost {
        match self.purpose {
            Purpose::PrefillAndDecode | Purpose::Prefill => {
                self.prefill_cost::<false>(sized, cached, load)
            }
            Purpose::DecodeOnly => self.decode_cost::<false>(sized, cached, load),
        }
    }

    /// Whether costs come out the same without looking at `tiers` below the device, of which there
    /// are none, and at the number of requests. Turning counts into floating-point numbers is most of
    /// the work per pod.
    pub(super) fn is_plain(&self, tiers: bool) -> bool {
        !tiers && self.scoring.active_request_weight == Ratio::ZERO
    }

    /// [`Pricer::price`] of a pod that is to prefill, whether or not it decodes.
    #[inline]
    pub(super) fn prefill_cost<const PLAIN: bool>(
        &self,
        sized: Sized,
        cached: &TierBlocks,
        load: &PodLoad,
    ) -> Cost {
        let scoring = &self.scoring;
        let credit = self.credit::<PLAIN>(cached);
        let work = (float(load.prefill_tokens) + float(self.prompt)) * sized.per_token;
        let prefill = scoring.prefill_load_scale.get() * above_zero(work - credit);
        let running = load.decode_blocks.saturating_sub(load.shared_blocks);
        let decode = f64::from(running.0) + sized.blocks;
        self.sum::<PLAIN>((prefill, credit, decode), load)
    }

    /// [`Pricer::price`] of a pod that is to decode what another has prefilled.
    #[inline]
    pub(super) fn decode_cost<const PLAIN: bool>(
        &self,
        sized: Sized,
        cached: &TierBlocks,
        load: &PodLoad,
    ) -> Cost {
        let credit = if self.scoring.overlap_credit == Ratio::ZERO {
            0.0
        } else {
            self.credit::<PLAIN>(cached)
        };
        // The transferred blocks are new to the pod, so none is assumed to be shared.
        let potential = f64::from(load.decode_blocks.0) + sized.blocks;
        let decode = above_zero(potential - credit);
        self.sum::<PLAIN>((0.0, credit, decode), load)
    }

    #[inline]
    fn credit<const PLAIN: bool>(&self, cached: &TierBlocks) -> f64 {
        let overlap = self.scoring.overlap_credit.get();
        if PLAIN {
            overlap * f64::from(cached.device.0)
        } else {
            weighted_blocks(cached, &self.scoring, overlap)
        }
    }

    #[inline]
    fn sum<const PLAIN: bool>(
        &self,
        (prefill, credit, decode): (f64, f64, f64),
        load: &PodLoad,
    ) -> Cost {
        let requests = if PLAIN {
            0.0
        } else {
            self.scoring.active_request_weight.get() * f64::from(load.requests)
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

/// A count that no process reaches is worth no branch per pod.
#[inline]
fn float(tokens: Tokens) -> f64 {
    tokens.0.min(i64::MAX as u64) as i64 as f64
}

/// `value`, but at least 0. The difference of two finite numbers is a number, which `f64::max` would
/// look into.
#[inline]
fn above_zero(value: f64) -> f64 {
    if 0.0 < value { value } else { 0.0 }
}

#[inline]
fn weighted_blocks(cached: &TierBlocks, scoring: &Scoring, device: f64) -> f64 {
    device * f64::from(cached.device.0)
        + scoring.host_tier.get() * f64::from(cached.host.0)
        + scoring.disk_tier.get() * f64::from(cached.disk.0)
}

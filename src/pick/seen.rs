//! Every pod as one of the last decisions saw it.
//!
//! Lives here: [`Candidates`], made of what is remembered (see `recent`).
//! Never here: costs of its own: they are the kernel's.
//! Invariant: what is shown is what was decided from, and no more pods than were asked for.

use crate::decide::select::{Purpose, Terms, survey};
use crate::decide::{Cost, Decision, Ineligible};
use crate::names::PodId;
use crate::pick::Picker;
use crate::pick::recent::Remembered;
use crate::telemetry::explanation::CostLine;
use serde::Serialize;
use std::sync::Arc;

/// Pods that one answer shows, unless another number is asked for.
pub const PODS_SHOWN: usize = 100;

/// Every pod as one decision saw it.
#[derive(Clone, Debug, Serialize)]
pub struct Candidates {
    /// Id of the decision.
    pub id: String,
    /// The pods, chosen ones first, then by cost.
    pub pods: Vec<Seen>,
    /// Pods that are not shown.
    pub left_out: usize,
}

/// One pod as a decision saw it.
#[derive(Clone, Debug, Serialize)]
pub struct Seen {
    pod: Arc<str>,
    role: &'static str,
    kv_source: &'static str,
    cached_device: u32,
    cached_host: u32,
    cached_disk: u32,
    requests: u32,
    prefill_tokens: u64,
    decode_blocks: u32,
    /// `decode`, `prefill`, or nothing: the part it got.
    chosen: Option<&'static str>,
    /// To prefill and decode.
    local: Offer,
    /// To prefill for another pod.
    prefill: Offer,
    /// To decode after another pod has prefilled.
    decode: Offer,
}

/// What a pod costs, or why it was not considered.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Offer {
    /// Its cost, by terms.
    Cost(CostLine),
    /// Why it was not considered.
    Not(&'static str),
}

impl Offer {
    fn total(&self) -> f64 {
        match self {
            Offer::Cost(cost) => cost.total,
            Offer::Not(_) => f64::INFINITY,
        }
    }
}

impl Picker {
    /// Every pod as the decision `id` saw it, while it is remembered; of more than `most` pods, those
    /// of least cost.
    #[must_use]
    pub fn candidates(&self, id: &str, most: usize) -> Option<Candidates> {
        let one = self.recent.find(id)?;
        let policy = &one.in_force.policy;
        let decision = one.decide(policy).ok();
        let mut pods = seen(&one, decision.as_ref());
        pods.sort_by(|a, b| {
            let key = |seen: &Seen| (seen.chosen.is_none(), seen.least());
            let ((a_chosen, a_cost), (b_chosen, b_cost)) = (key(a), key(b));
            a_chosen.cmp(&b_chosen).then(a_cost.total_cmp(&b_cost))
        });
        let left_out = pods.len().saturating_sub(most);
        pods.truncate(most);
        Some(Candidates {
            id: one.record.id.clone(),
            pods,
            left_out,
        })
    }
}

impl Seen {
    fn least(&self) -> f64 {
        let offers = [&self.local, &self.prefill, &self.decode];
        offers
            .iter()
            .map(|offer| offer.total())
            .fold(f64::INFINITY, f64::min)
    }
}

fn seen(one: &Remembered, decision: Option<&Decision>) -> Vec<Seen> {
    let (ask, snapshot) = (&one.ask, &one.observation.snapshot);
    let (_, rule) = one.in_force.policy.rule_for(ask);
    // A request that was decided has terms.
    let Ok(terms) = Terms::new(ask, snapshot, &one.in_force.policy, rule) else {
        return Vec::new();
    };
    let offers = |purpose| survey(ask, snapshot, &terms, purpose).map(|(_, offer)| offer);
    let chosen = |pod: PodId| {
        let route = decision?.route;
        if route.decode().candidate.pod == pod {
            return Some("decode");
        }
        let prefills = route
            .prefill()
            .is_some_and(|pick| pick.candidate.pod == pod);
        prefills.then_some("prefill")
    };
    snapshot
        .candidates()
        .zip(offers(Purpose::PrefillAndDecode))
        .zip(offers(Purpose::Prefill))
        .zip(offers(Purpose::DecodeOnly))
        .map(|(((candidate, local), prefill), decode)| Seen {
            pod: one.observation.name(candidate.pod),
            role: candidate.role.as_str(),
            kv_source: candidate.kv_source.as_str(),
            cached_device: candidate.cached.device.0,
            cached_host: candidate.cached.host.0,
            cached_disk: candidate.cached.disk.0,
            requests: candidate.load.requests,
            prefill_tokens: candidate.load.prefill_tokens.0,
            decode_blocks: candidate.load.decode_blocks.0,
            chosen: chosen(candidate.pod),
            local: offer(local),
            prefill: offer(prefill),
            decode: offer(decode),
        })
        .collect()
}

fn offer(offer: Result<Cost, Ineligible>) -> Offer {
    match offer {
        Ok(cost) => Offer::Cost((&cost).into()),
        Err(why) => Offer::Not(why.as_str()),
    }
}

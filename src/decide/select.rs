//! The one place where a pod is chosen among others.
//!
//! Lives here: [`select`] with its purposes, and [`survey`], which shows every pod as it saw them.
//! Never here: the rule that chooses between routes (`bypass`).
//! Invariant: whatever asks for a pod (a decision, its explanation, a simulation) asks here, and the
//! answer depends on the arguments alone.

use crate::decide::cost::{Cost, Priced, credited_tokens, price};
use crate::decide::eligibility::{Allowed, Ineligible, check};
use crate::decide::policy::{Bypass, ClientPins, Policy, Rule, Scoring, TierCredit};
use crate::decide::reason::NoRoute;
use crate::decide::snapshot::{Affinity, Ask, AskKind, Candidate, Pin, Role, Snapshot};
use crate::names::{Endpoint, PodId};
use crate::units::{Ratio, Tokens};
use smallvec::SmallVec;

/// What a pod is chosen for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Purpose {
    /// To prefill the prompt and decode the answer.
    PrefillAndDecode,
    /// To prefill the prompt for another pod.
    Prefill,
    /// To decode after another pod has prefilled.
    DecodeOnly,
}

/// A selected pod: the candidate itself, with what it costs.
#[derive(Clone, Copy, Debug)]
pub struct Pick {
    /// The pod and the numbers it was chosen by.
    pub candidate: Candidate,
    /// Leading prompt tokens it is credited with, at most the whole prompt. Slower tiers count as
    /// the rule's tier credit says.
    pub cached_tokens: Tokens,
    /// The rest of the prompt.
    pub net_new_tokens: Tokens,
    /// What choosing it costs.
    pub cost: Cost,
}

impl Pick {
    /// Counts cached tokens anew.
    pub(super) fn credit(&mut self, prompt: Tokens, scoring: &Scoring, credit: TierCredit) {
        self.cached_tokens = credited_tokens(&self.candidate, prompt, scoring, credit);
        self.net_new_tokens = prompt.saturating_sub(self.cached_tokens);
    }
}

/// What the selections of one decision have in common.
#[derive(Clone, Debug)]
pub struct Terms<'a> {
    /// How pods are compared.
    pub scoring: Scoring,
    /// Whether cached blocks attract a decode that follows a remote prefill.
    pub decode_affinity: DecodeAffinity,
    /// How slower tiers count in net-new tokens.
    pub tier_credit: TierCredit,
    /// The decode pod that the client insists on, if it may.
    pub decode_pin: Option<Endpoint>,
    /// The prefill pod that the client insists on, if it may.
    pub prefill_pin: Option<Endpoint>,
    /// The request's subset.
    pub allowed: Allowed<'a>,
    /// A pod that does one half of a remote route and cannot do the other.
    pub taken: Option<PodId>,
}

/// Whether cached blocks attract a decode that follows a remote prefill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecodeAffinity {
    /// They do: the next turn may then bypass.
    Cache,
    /// They do not, because nothing ever bypasses.
    LoadOnly,
}

impl DecodeAffinity {
    /// What `rule` asks for.
    #[must_use]
    pub fn of(rule: &Rule) -> DecodeAffinity {
        match rule.bypass {
            Bypass::Never => DecodeAffinity::LoadOnly,
            _ => DecodeAffinity::Cache,
        }
    }
}

impl<'a> Terms<'a> {
    /// The terms under which `policy` and its `rule` look at `ask`.
    ///
    /// # Errors
    ///
    /// When a pin that counts names no pod, or several.
    pub fn new(
        ask: &'a Ask,
        snapshot: &Snapshot,
        policy: &Policy,
        rule: &Rule,
    ) -> Result<Terms<'a>, NoRoute> {
        let pin = |pin: Option<Pin>, purpose| match (policy.client_pins, pin) {
            (ClientPins::Ignore, _) | (ClientPins::Honor, None) => Ok(None),
            (ClientPins::Honor, Some(pin)) => resolve(pin, ask, snapshot, purpose).map(Some),
        };
        Ok(Terms {
            scoring: policy.scoring,
            decode_affinity: DecodeAffinity::of(rule),
            tier_credit: rule.bypass.tier_credit(),
            decode_pin: pin(ask.decode_pin, Purpose::DecodeOnly)?,
            prefill_pin: match ask.kind {
                AskKind::Generate | AskKind::GenerateSeveral => {
                    pin(ask.prefill_pin, Purpose::Prefill)?
                }
                AskKind::PassThrough => None,
            },
            allowed: Allowed::new(&ask.subset),
            taken: None,
        })
    }

    /// The pod that the client insists on for `purpose`, if it may.
    #[must_use]
    pub fn pin(&self, purpose: Purpose) -> Option<Endpoint> {
        match purpose {
            Purpose::Prefill => self.prefill_pin,
            Purpose::PrefillAndDecode | Purpose::DecodeOnly => self.decode_pin,
        }
    }

    /// `candidate` as a pick for `purpose`, whether or not it would be chosen.
    #[must_use]
    pub fn pick(&self, ask: &Ask, candidate: &Candidate, purpose: Purpose) -> Pick {
        let prompt = ask.prompt_tokens;
        let cached = credited_tokens(candidate, prompt, &self.scoring, self.tier_credit);
        Pick {
            candidate: *candidate,
            cached_tokens: cached,
            net_new_tokens: prompt.saturating_sub(cached),
            cost: price(
                candidate,
                &mut Priced::new(prompt),
                &self.scoring_for(purpose),
                purpose,
            ),
        }
    }

    fn scoring_for(&self, purpose: Purpose) -> Scoring {
        let mut scoring = self.scoring;
        if purpose == Purpose::DecodeOnly && self.decode_affinity == DecodeAffinity::LoadOnly {
            scoring.overlap_credit = Ratio::ZERO;
        }
        scoring
    }
}

/// The endpoint that a pin means. Of several at one address the session's is meant.
fn resolve(
    pin: Pin,
    ask: &Ask,
    snapshot: &Snapshot,
    purpose: Purpose,
) -> Result<Endpoint, NoRoute> {
    let pods = &snapshot.candidates;
    let ip = match pin {
        Pin::Endpoint(endpoint) if pods.iter().any(|pod| pod.endpoint == endpoint) => {
            return Ok(endpoint);
        }
        Pin::Endpoint(_) => return Err(NoRoute::PinnedPodUnknown(pin)),
        Pin::Address(ip) => ip,
    };
    let (session, fits): (_, fn(Role) -> bool) = match purpose {
        Purpose::Prefill => (ask.prefill_affinity, Role::prefills),
        Purpose::PrefillAndDecode | Purpose::DecodeOnly => (ask.affinity.pod(), Role::decodes),
    };
    let mut there = pods
        .iter()
        .filter(|pod| pod.endpoint.0.ip() == ip && fits(pod.role));
    let first = there.next().ok_or(NoRoute::PinnedPodUnknown(pin))?;
    if there.next().is_none() || session == Some(first.pod) {
        return Ok(first.endpoint);
    }
    pods.iter()
        .find(|pod| Some(pod.pod) == session && pod.endpoint.0.ip() == ip && fits(pod.role))
        .map(|pod| pod.endpoint)
        .ok_or(NoRoute::PinNeedsPort(ip))
}

/// The pod to use for `purpose`: the cheapest eligible one, or one drawn by cost when the policy has
/// a temperature. `None` when no pod is eligible.
#[must_use]
pub fn select(ask: &Ask, snapshot: &Snapshot, terms: &Terms<'_>, purpose: Purpose) -> Option<Pick> {
    let mut view = View::new(ask, snapshot, terms, purpose);
    let eligible = snapshot.candidates.iter().filter_map(|candidate| {
        view.check(candidate).ok()?;
        Some((candidate, view.price(candidate).total))
    });
    let temperature = terms.scoring.temperature.get();
    let chosen = if 0.0 < temperature {
        sampled(eligible, temperature, ask.draw)
    } else {
        cheapest(eligible, ask.draw)
    }?;
    Some(terms.pick(ask, chosen, purpose))
}

/// Every pod with its cost for `purpose`, or the reason why [`select`] does not consider it.
pub fn survey<'a>(
    ask: &'a Ask,
    snapshot: &'a Snapshot,
    terms: &'a Terms<'_>,
    purpose: Purpose,
) -> impl Iterator<Item = (&'a Candidate, Result<Cost, Ineligible>)> {
    let mut view = View::new(ask, snapshot, terms, purpose);
    snapshot.candidates.iter().map(move |candidate| {
        let cost = view.check(candidate).map(|()| view.price(candidate));
        (candidate, cost)
    })
}

/// Pods as one selection sees them.
struct View<'a> {
    terms: &'a Terms<'a>,
    purpose: Purpose,
    limit: Limit,
    scoring: Scoring,
    prompt: Priced,
}

impl<'a> View<'a> {
    fn new(ask: &Ask, snapshot: &Snapshot, terms: &'a Terms<'_>, purpose: Purpose) -> View<'a> {
        View {
            terms,
            purpose,
            limit: Limit::new(ask, snapshot, terms, purpose),
            scoring: terms.scoring_for(purpose),
            prompt: Priced::new(ask.prompt_tokens),
        }
    }

    #[inline]
    fn check(&self, candidate: &Candidate) -> Result<(), Ineligible> {
        check(candidate, &self.terms.allowed, self.purpose)?;
        self.limit.check(candidate, self.terms.taken)
    }

    #[inline]
    fn price(&mut self, candidate: &Candidate) -> Cost {
        price(candidate, &mut self.prompt, &self.scoring, self.purpose)
    }
}

/// Which pods remain once pins and the session have spoken.
#[derive(Clone, Copy, Debug)]
enum Limit {
    None,
    Pinned(Endpoint),
    Session(PodId),
}

impl Limit {
    /// A pin beats the session. A soft session limits only while its pod is eligible, a hard one
    /// while its pod exists.
    fn new(ask: &Ask, snapshot: &Snapshot, terms: &Terms<'_>, purpose: Purpose) -> Limit {
        if let Some(endpoint) = terms.pin(purpose) {
            return Limit::Pinned(endpoint);
        }
        let find = |pod: PodId| snapshot.candidates.iter().find(|known| known.pod == pod);
        let affinity = match purpose {
            Purpose::Prefill => ask.prefill_affinity.map_or(Affinity::None, Affinity::Soft),
            Purpose::PrefillAndDecode | Purpose::DecodeOnly => ask.affinity,
        };
        match affinity {
            Affinity::None => Limit::None,
            Affinity::Soft(pod) => find(pod)
                .filter(|known| check(known, &terms.allowed, purpose).is_ok())
                .filter(|known| terms.taken != Some(known.pod))
                .map_or(Limit::None, |known| Limit::Session(known.pod)),
            Affinity::Hard(pod) => find(pod).map_or(Limit::None, |known| Limit::Session(known.pod)),
        }
    }

    #[inline]
    fn check(self, candidate: &Candidate, taken: Option<PodId>) -> Result<(), Ineligible> {
        match self {
            Limit::Pinned(endpoint) if candidate.endpoint != endpoint => {
                Err(Ineligible::PinnedElsewhere)
            }
            Limit::Session(pod) if candidate.pod != pod => Err(Ineligible::SessionElsewhere),
            _ if taken == Some(candidate.pod) => Err(Ineligible::AlreadyChosen),
            Limit::None | Limit::Pinned(_) | Limit::Session(_) => Ok(()),
        }
    }
}

/// The candidate of least cost. Among equals the one with the fewest requests, so that a burst of
/// equal requests spreads; among those each with the same probability over `draw`.
fn cheapest<'a>(
    eligible: impl Iterator<Item = (&'a Candidate, f64)>,
    draw: u64,
) -> Option<&'a Candidate> {
    let mut best: Option<(&Candidate, f64)> = None;
    let mut ties = 1;
    // Inner iteration: the compiler makes one loop of it and the adapters behind.
    eligible.for_each(|(candidate, cost)| match best {
        Some((_, least)) if least < cost => {}
        Some((chosen, least)) if cost == least => {
            let (requests, fewest) = (candidate.load.requests, chosen.load.requests);
            if requests < fewest {
                ties = 1;
                best = Some((candidate, cost));
            } else if requests == fewest {
                ties += 1;
                // One in `ties` replaces the one before: each ends with the same probability.
                if scale(mix(draw, ties), ties) == 0 {
                    best = Some((candidate, cost));
                }
            }
        }
        _ => {
            ties = 1;
            best = Some((candidate, cost));
        }
    });
    best.map(|(candidate, _)| candidate)
}

/// A candidate drawn by softmax of its cost, negated and scaled to `0..=1` between the cheapest and
/// the dearest.
fn sampled<'a>(
    eligible: impl Iterator<Item = (&'a Candidate, f64)>,
    temperature: f64,
    draw: u64,
) -> Option<&'a Candidate> {
    let mut weighed: SmallVec<[(&Candidate, f64); 64]> = eligible.collect();
    let least = weighed
        .iter()
        .map(|(_, cost)| *cost)
        .fold(f64::MAX, f64::min);
    let most = weighed.iter().map(|(_, cost)| *cost).fold(0.0, f64::max);
    let mut sum = 0.0;
    for (_, cost) in &mut weighed {
        let share = if least < most {
            (*cost - least) / (most - least)
        } else {
            0.0
        };
        *cost = (-share / temperature).exp();
        sum += *cost;
    }
    // 53 bits, so that the product stays below the sum.
    let mut left = (draw >> 11) as f64 / (1_u64 << 53) as f64 * sum;
    for (candidate, weight) in &weighed {
        if left < *weight {
            return Some(candidate);
        }
        left -= weight;
    }
    weighed.last().map(|(candidate, _)| *candidate)
}

/// A number that looks unrelated for each `step` of one `draw` (the finalizer of SplitMix64).
fn mix(draw: u64, step: u64) -> u64 {
    let mut x = draw.wrapping_add(step.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// `random` as a number below `bound`.
fn scale(random: u64, bound: u64) -> u64 {
    ((u128::from(random) * u128::from(bound)) >> 64) as u64
}

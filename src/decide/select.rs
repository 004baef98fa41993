//! The one place where a pod is chosen among others.
//!
//! Lives here: [`select`] with its purposes, and [`survey`], which shows every pod as it saw them.
//! Never here: the rule that chooses between routes (`bypass`).
//! Invariant: whatever asks for a pod (a decision, its explanation, a simulation) asks here, and the
//! answer depends on the arguments alone.

use crate::decide::ask::{Affinity, Ask, AskKind, Pin};
use crate::decide::cost::{Cost, Pricer, credited_tokens};
use crate::decide::eligibility::{Allowed, Ineligible, check};
use crate::decide::policy::{Bypass, ClientPins, Policy, Rule, Scoring, TierCredit};
use crate::decide::reason::NoRoute;
use crate::decide::scan;
use crate::decide::snapshot::{Candidate, Role, Snapshot};
use crate::names::{Endpoint, PodId};
use crate::units::{Ratio, Tokens};

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

impl Purpose {
    /// All of them.
    pub const ALL: [Purpose; 3] = [
        Purpose::PrefillAndDecode,
        Purpose::Prefill,
        Purpose::DecodeOnly,
    ];
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
    pub fn pick(&self, ask: &Ask, candidate: Candidate, purpose: Purpose) -> Pick {
        let prompt = ask.prompt_tokens;
        let cached = credited_tokens(&candidate, prompt, &self.scoring, self.tier_credit);
        let pricer = Pricer::new(prompt, self.scoring_for(purpose), purpose);
        let sized = pricer.sized(candidate.block_size);
        Pick {
            cached_tokens: cached,
            net_new_tokens: prompt.saturating_sub(cached),
            cost: pricer.price(sized, &candidate.cached, &candidate.load),
            candidate,
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
    let board = snapshot.board();
    let ip = match pin {
        Pin::Endpoint(endpoint) if board.position_at(endpoint).is_some() => return Ok(endpoint),
        Pin::Endpoint(_) => return Err(NoRoute::PinnedPodUnknown(pin)),
        Pin::Address(ip) => ip,
    };
    let (session, fits): (_, fn(Role) -> bool) = match purpose {
        Purpose::Prefill => (ask.prefill_affinity, Role::prefills),
        Purpose::PrefillAndDecode | Purpose::DecodeOnly => (ask.affinity.pod(), Role::decodes),
    };
    let mut there = board
        .members()
        .iter()
        .filter(|pod| pod.endpoint.0.ip() == ip && fits(pod.role));
    let first = there.next().ok_or(NoRoute::PinnedPodUnknown(pin))?;
    if there.next().is_none() || session == Some(first.pod) {
        return Ok(first.endpoint);
    }
    session
        .and_then(|pod| board.position(pod))
        .map(|position| &board.members()[position])
        .filter(|pod| pod.endpoint.0.ip() == ip && fits(pod.role))
        .map(|pod| pod.endpoint)
        .ok_or(NoRoute::PinNeedsPort(ip))
}

/// The pod to use for `purpose`: the cheapest eligible one, or one drawn by cost when the policy has
/// a temperature. `None` when no pod is eligible.
#[must_use]
pub fn select(ask: &Ask, snapshot: &Snapshot, terms: &Terms<'_>, purpose: Purpose) -> Option<Pick> {
    let view = View::new(ask, snapshot, terms, purpose);
    let position = match view.limit {
        // Whoever else there is does not matter.
        Limit::Only(position) => position.filter(|at| view.check(*at).is_ok()),
        Limit::None => scan::open(&view, ask.draw),
    };
    let candidate = snapshot.candidate(position?);
    Some(terms.pick(ask, candidate, purpose))
}

/// Every pod with its cost for `purpose`, or the reason why [`select`] does not consider it.
pub fn survey<'a>(
    ask: &'a Ask,
    snapshot: &'a Snapshot,
    terms: &'a Terms<'_>,
    purpose: Purpose,
) -> impl Iterator<Item = (Candidate, Result<Cost, Ineligible>)> {
    let view = View::new(ask, snapshot, terms, purpose);
    (0..snapshot.len()).map(move |position| {
        let cost = view.check(position).map(|()| view.price(position));
        (snapshot.candidate(position), cost)
    })
}

/// Pods as one selection sees them.
pub(super) struct View<'a> {
    pub(super) snapshot: &'a Snapshot,
    pub(super) terms: &'a Terms<'a>,
    pub(super) purpose: Purpose,
    pub(super) pricer: Pricer,
    limit: Limit,
}

impl<'a> View<'a> {
    fn new(ask: &Ask, snapshot: &'a Snapshot, terms: &'a Terms<'_>, purpose: Purpose) -> View<'a> {
        View {
            snapshot,
            terms,
            purpose,
            pricer: Pricer::new(ask.prompt_tokens, terms.scoring_for(purpose), purpose),
            limit: Limit::new(ask, snapshot, terms, purpose),
        }
    }

    fn check(&self, position: usize) -> Result<(), Ineligible> {
        let member = &self.snapshot.board().members()[position];
        let serves = self.snapshot.serves().at(position);
        check(member, serves, &self.terms.allowed, self.purpose)?;
        match self.limit {
            Limit::Only(only) if only != Some(position) => {
                Err(match self.terms.pin(self.purpose) {
                    Some(_) => Ineligible::PinnedElsewhere,
                    None => Ineligible::SessionElsewhere,
                })
            }
            _ if self.terms.taken == Some(member.pod) => Err(Ineligible::AlreadyChosen),
            Limit::None | Limit::Only(_) => Ok(()),
        }
    }

    fn price(&self, position: usize) -> Cost {
        let size = self.snapshot.board().members()[position].block_size;
        let (cached, loads) = (self.snapshot.cached(), self.snapshot.loads());
        let sized = self.pricer.sized(size);
        self.pricer
            .price(sized, &cached[position], &loads[position])
    }
}

/// Which pods remain once pins and the session have spoken.
#[derive(Clone, Copy, Debug)]
enum Limit {
    None,
    /// The one at this position, if it is there at all.
    Only(Option<usize>),
}

impl Limit {
    /// A pin beats the session. A soft session limits only while its pod is eligible, a hard one
    /// while its pod exists.
    fn new(ask: &Ask, snapshot: &Snapshot, terms: &Terms<'_>, purpose: Purpose) -> Limit {
        let board = snapshot.board();
        if let Some(endpoint) = terms.pin(purpose) {
            return Limit::Only(board.position_at(endpoint));
        }
        let affinity = match purpose {
            Purpose::Prefill => ask.prefill_affinity.map_or(Affinity::None, Affinity::Soft),
            Purpose::PrefillAndDecode | Purpose::DecodeOnly => ask.affinity,
        };
        let Some(position) = affinity.pod().and_then(|pod| board.position(pod)) else {
            return Limit::None;
        };
        let member = &board.members()[position];
        let serves = snapshot.serves().at(position);
        let usable = || {
            check(member, serves, &terms.allowed, purpose).is_ok()
                && terms.taken != Some(member.pod)
        };
        match affinity {
            Affinity::Soft(_) if !usable() => Limit::None,
            _ => Limit::Only(Some(position)),
        }
    }
}

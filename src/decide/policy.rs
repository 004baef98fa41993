//! What the operator wants: when to bypass, how to score, what to do without prefill pods.
//!
//! Lives here: the valid policy types.
//! Never here: YAML, defaults of files, file names (see `config`).
//! Invariant: a value of these types needs no further check.

use crate::decide::ask::Ask;
use crate::decide::snapshot::CapacitySource;
use crate::units::{Ratio, Tokens};
use std::sync::Arc;
use std::time::Duration;

/// A whole policy.
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    /// Its name, for spans and output.
    pub name: Arc<str>,
    /// Counts the versions of this policy that have been in force, from 1.
    pub generation: u64,
    /// The first rule that matches a request applies. The last one should match everything; a request
    /// that none matches is treated by [`Rule::FALLBACK`].
    pub rules: Vec<Rule>,
    /// How pods are compared.
    pub scoring: Scoring,
    /// How conversations stay on their pod.
    pub session_affinity: SessionAffinity,
    /// Whether clients may name the pods they want.
    pub client_pins: ClientPins,
}

impl Policy {
    /// The rule that applies to `ask`, and its index; `rules.len()` stands for [`Rule::FALLBACK`].
    #[must_use]
    pub fn rule_for(&self, ask: &Ask) -> (usize, &Rule) {
        self.rules
            .iter()
            .enumerate()
            .find(|(_, rule)| rule.matches.admits(ask))
            .unwrap_or((self.rules.len(), Rule::FALLBACK))
    }

    /// The rule at `index` as [`Policy::rule_for`] numbers them.
    #[must_use]
    pub fn rule_at(&self, index: usize) -> &Rule {
        self.rules.get(index).unwrap_or(Rule::FALLBACK)
    }
}

/// One rule: whom it concerns and what holds for them.
#[derive(Clone, Debug, PartialEq)]
pub struct Rule {
    /// Whom it concerns.
    pub matches: Match,
    /// When remote prefill is skipped.
    pub bypass: Bypass,
    /// The veto of a busy decode pod.
    pub gate: DecodeGate,
    /// What happens when no prefill pod can be had.
    pub on_no_prefill: OnNoPrefill,
}

impl Rule {
    /// What holds when no rule matches: remote prefill whenever it can be had, and no refusal for
    /// want of a prefill pod.
    pub const FALLBACK: &'static Rule = &Rule {
        matches: Match {
            models: Vec::new(),
            policy_classes: Vec::new(),
            min_priority: None,
        },
        bypass: Bypass::Never,
        gate: DecodeGate::Off,
        on_no_prefill: OnNoPrefill::Local,
    };
}

/// Whom a rule concerns. An empty list matches everything.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Match {
    /// Model names; a trailing `*` matches any ending.
    pub models: Vec<Arc<str>>,
    /// Policy classes.
    pub policy_classes: Vec<Arc<str>>,
    /// The lowest priority concerned.
    pub min_priority: Option<i32>,
}

impl Match {
    /// Whether `ask` is concerned: every list that is not empty must hold a match.
    ///
    /// A request that names no model (or no class) matches only an empty list of them.
    #[must_use]
    pub fn admits(&self, ask: &Ask) -> bool {
        let model = self.models.is_empty()
            || ask.model.as_ref().is_some_and(|name| {
                let name = name.as_str();
                self.models
                    .iter()
                    .any(|pattern| match pattern.strip_suffix('*') {
                        Some(start) => name.starts_with(start),
                        None => name == &**pattern,
                    })
            });
        let class = self.policy_classes.is_empty()
            || ask
                .policy_class
                .as_ref()
                .is_some_and(|class| self.policy_classes.contains(class));
        model && class && self.min_priority.is_none_or(|least| least <= ask.priority)
    }
}

/// When remote prefill is skipped although a prefill pod could be had.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bypass {
    /// Never.
    Never,
    /// Whenever the decode pod can prefill.
    Always,
    /// When little of the prompt is new to the decode pod.
    IslBounding(IslBound),
    /// When the prefill pod is busy.
    PrefillLoad(PrefillBusy),
    /// When either holds.
    IslOrLoad(IslBound, PrefillBusy),
}

impl Bypass {
    /// The bound on net-new tokens, if the rule has one.
    #[must_use]
    pub fn isl_bound(&self) -> Option<&IslBound> {
        match self {
            Bypass::IslBounding(bound) | Bypass::IslOrLoad(bound, _) => Some(bound),
            Bypass::Never | Bypass::Always | Bypass::PrefillLoad(_) => None,
        }
    }

    /// How slower tiers count in the token arithmetic: fully, unless the rule says otherwise.
    #[must_use]
    pub fn tier_credit(&self) -> TierCredit {
        self.isl_bound()
            .map_or(TierCredit::Full, |bound| bound.tier_credit)
    }
}

/// Bounds on the net-new tokens of a bypass. Both comparisons are strict.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct IslBound {
    /// Bypass only when net-new tokens are fewer than this.
    pub threshold: Tokens,
    /// … and are a smaller share of the prompt than this (0..=1).
    pub ratio: Ratio,
    /// A prompt shorter than this bypasses whatever its share; 0 turns this off.
    pub cold_bypass_below: Tokens,
    /// How cached blocks in slower tiers count in net-new tokens.
    pub tier_credit: TierCredit,
}

/// How much a cached block of a slower tier counts in the token arithmetic of the rule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum TierCredit {
    /// A cached token is a cached token, whatever its tier.
    Full,
    /// Weighted as in scoring (`hostTier`, `diskTier`).
    Weighted,
}

/// When a prefill pod counts as busy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PrefillBusy {
    /// Busy when queued prefill tokens exceed this many batches of the pod (strict).
    pub threshold: Ratio,
}

/// The veto of a busy decode pod.
#[derive(Clone, Debug, PartialEq)]
pub enum DecodeGate {
    /// No veto.
    Off,
    /// Bypass only while KV blocks in use, this request's included, are at most this share of the pod.
    On {
        /// The share above which the pod is busy (strict).
        threshold: Ratio,
        /// The sources of a capacity that the gate believes. Not empty.
        trust: Vec<CapacitySource>,
    },
}

/// What happens when no prefill pod can be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnNoPrefill {
    /// The decode pod does both.
    Local,
    /// The request is refused.
    Fail,
}

/// How pods are compared; the unit of a cost is one KV block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scoring {
    /// Credit for a cached block on the device; may exceed 1.
    pub overlap_credit: Ratio,
    /// Credit for a cached block in host memory.
    pub host_tier: Ratio,
    /// Credit for a cached block on disk or further away.
    pub disk_tier: Ratio,
    /// Weight of prefill work.
    pub prefill_load_scale: Ratio,
    /// Cost of each running request.
    pub active_request_weight: Ratio,
    /// 0 picks the cheapest pod; above, pods are drawn by softmax of their normalised cost.
    pub temperature: Ratio,
}

impl Default for Scoring {
    fn default() -> Self {
        let ratio = |value| Ratio::new(value).unwrap_or(Ratio::ZERO);
        Scoring {
            overlap_credit: Ratio::ONE,
            host_tier: ratio(0.75),
            disk_tier: ratio(0.25),
            prefill_load_scale: Ratio::ONE,
            active_request_weight: Ratio::ZERO,
            temperature: Ratio::ZERO,
        }
    }
}

/// How conversations stay on their decode pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SessionAffinity {
    /// They do not.
    Off,
    /// Prefer the pod of the last turn while it is eligible.
    Soft(SessionKey),
    /// Only the pod of the last turn; forgotten when that pod is gone.
    Hard(SessionKey),
}

/// Where a session's name comes from and how long it is remembered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionKey {
    /// Request header, lower case.
    pub header: Arc<str>,
    /// Time since the last turn after which it is forgotten.
    pub ttl: Duration,
}

/// Whether clients may name the pods they want.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientPins {
    /// Pins are removed and have no effect.
    Ignore,
    /// An eligible pinned pod is taken; one that is not eligible refuses the request.
    Honor,
}

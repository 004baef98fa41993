//! The last decisions, decided again under other thresholds.
//!
//! Lives here: [`WhatIf`].
//! Never here: files and forms (see `admin`), choices of its own: all of them are the kernel's.
//! Invariant: a decision that is decided again under its own policy comes out the same, because the
//! kernel looks at nothing but what is remembered here.

use crate::decide::Decision;
use crate::decide::policy::{Bypass, DecodeGate, Policy, Rule};
use crate::decide::reason::NoRoute;
use crate::observe::Observation;
use crate::pick::Picker;
use crate::pick::recent::Remembered;
use serde::Serialize;
use std::sync::Arc;

/// Decisions that are decided again at most.
pub const MOST_DECISIONS: usize = 256;

/// Which rules get the edited bypass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rules {
    /// All of them.
    All,
    /// The one at this index.
    At(usize),
}

/// An edit of the policy in force.
#[derive(Clone, Debug)]
pub struct Edit {
    /// Which rules.
    pub rules: Rules,
    /// When remote prefill is skipped.
    pub bypass: Bypass,
    /// The veto of a busy decode pod.
    pub gate: DecodeGate,
}

impl Edit {
    /// `policy` with this edit; nothing when there is no such rule.
    #[must_use]
    pub fn apply(&self, policy: &Policy) -> Option<Policy> {
        let mut policy = policy.clone();
        let change = |rule: &mut Rule| {
            rule.bypass = self.bypass;
            rule.gate = self.gate.clone();
        };
        match self.rules {
            Rules::All => policy.rules.iter_mut().for_each(change),
            Rules::At(index) => change(policy.rules.get_mut(index)?),
        }
        Some(policy)
    }
}

/// What the last decisions would have been.
#[derive(Clone, Debug, Default, Serialize)]
pub struct WhatIf {
    /// How many were decided again.
    pub considered: usize,
    /// How many came out otherwise: another route, or other pods.
    pub changed: usize,
    /// As they were.
    pub before: Tally,
    /// As they would have been.
    pub after: Tally,
    /// Each of them, newest first.
    pub decisions: Vec<Redecided>,
}

/// Decisions by outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Tally {
    /// Local by policy although a prefill pod could be had.
    pub bypass: usize,
    /// Local for another reason.
    pub local: usize,
    /// Remote prefill.
    pub remote: usize,
    /// No route.
    pub refused: usize,
    /// Prompt tokens that prefill pods compute.
    pub prefill_tokens_remote: u64,
    /// Prompt tokens that decode pods compute.
    pub prefill_tokens_local: u64,
}

/// One decision, as it was and as it would have been.
#[derive(Clone, Debug, Serialize)]
pub struct Redecided {
    /// Id of the decision.
    pub id: String,
    /// Its number.
    pub sequence: u64,
    /// When it was made, in milliseconds since 1970.
    pub time_ms: u64,
    /// Length of the prompt.
    pub prompt_tokens: u64,
    /// Whether it came out otherwise.
    pub changed: bool,
    /// As it was.
    pub before: Verdict,
    /// As it would have been.
    pub after: Verdict,
}

/// Where a request goes, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Verdict {
    /// `local`, `remote` or `refused`.
    pub route: &'static str,
    /// Why, in one word.
    pub because: &'static str,
    /// Whether remote prefill was skipped by policy.
    pub bypass: bool,
    /// Tokens that are new to the pod that prefills.
    pub net_new_tokens: u64,
    /// The pod that decodes.
    pub decode_pod: Option<Arc<str>>,
    /// The pod that prefills for it.
    pub prefill_pod: Option<Arc<str>>,
}

impl Verdict {
    fn new(outcome: &Result<Decision, NoRoute>, observation: &Observation) -> Verdict {
        let decision = match outcome {
            Ok(decision) => decision,
            Err(cause) => {
                return Verdict {
                    route: "refused",
                    because: cause.as_str(),
                    bypass: false,
                    net_new_tokens: 0,
                    decode_pod: None,
                    prefill_pod: None,
                };
            }
        };
        let route = &decision.route;
        let prefills = route.prefill().unwrap_or_else(|| route.decode());
        Verdict {
            route: route.as_str(),
            because: decision.because.as_str(),
            bypass: decision.because.is_bypass(),
            net_new_tokens: prefills.net_new_tokens.0,
            decode_pod: Some(observation.name(route.decode().candidate.pod)),
            prefill_pod: route
                .prefill()
                .map(|pick| observation.name(pick.candidate.pod)),
        }
    }
}

impl Tally {
    fn add(&mut self, verdict: &Verdict) {
        match (verdict.route, verdict.bypass) {
            ("refused", _) => self.refused += 1,
            ("remote", _) => {
                self.remote += 1;
                self.prefill_tokens_remote += verdict.net_new_tokens;
            }
            (_, bypass) => {
                *(if bypass {
                    &mut self.bypass
                } else {
                    &mut self.local
                }) += 1;
                self.prefill_tokens_local += verdict.net_new_tokens;
            }
        }
    }
}

impl Picker {
    /// Decides the last `most` decisions again, under the policy in force with `edit`; nothing when
    /// there is no such rule. Takes CPU time: some milliseconds for all that is remembered.
    #[must_use]
    pub fn what_if(&self, edit: &Edit, most: usize) -> Option<WhatIf> {
        let edited = edit.apply(&self.in_force().policy)?;
        let mut answer = WhatIf::default();
        for one in self.recent.last(most.min(MOST_DECISIONS)).iter().rev() {
            answer.add(one, &edited);
        }
        Some(answer)
    }
}

impl WhatIf {
    fn add(&mut self, one: &Remembered, edited: &Policy) {
        let verdict = |policy: &Policy| Verdict::new(&one.decide(policy), &one.observation);
        let (before, after) = (verdict(&one.in_force.policy), verdict(edited));
        self.before.add(&before);
        self.after.add(&after);
        let changed = before.route != after.route
            || before.decode_pod != after.decode_pod
            || before.prefill_pod != after.prefill_pod;
        self.considered += 1;
        self.changed += usize::from(changed);
        self.decisions.push(Redecided {
            id: one.record.id.clone(),
            sequence: one.record.sequence,
            time_ms: one.record.time_ms(),
            prompt_tokens: one.ask.prompt_tokens.0,
            changed,
            before,
            after,
        });
    }
}

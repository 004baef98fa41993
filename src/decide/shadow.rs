//! What another policy would have decided for the same request on the same snapshot.
//!
//! Lives here: [`opinion`], and the proof obligations of its short cut.
//! Never here: anything that changes the decision; an opinion is recorded, never obeyed.
//! Invariant: an opinion is what [`decide`] returns for the shadow policy, whichever way it was found.

use crate::decide::ask::{Affinity, Ask};
use crate::decide::policy::{ClientPins, Policy, Rule};
use crate::decide::select::DecodeAffinity;
use crate::decide::snapshot::Snapshot;
use crate::decide::{Because, Checks, Considered, Decision, NoRoute, conclude, decide};
use crate::names::Endpoint;

/// What a shadow policy would have done.
#[derive(Clone, Debug, PartialEq)]
pub struct Opinion {
    /// Index of its rule that applied.
    pub rule: usize,
    /// The route it would have taken, or why none.
    pub verdict: Result<Course, NoRoute>,
}

/// A route that was not taken.
#[derive(Clone, Debug, PartialEq)]
pub struct Course {
    /// Why it would have been taken.
    pub because: Because,
    /// The pod that would decode.
    pub decode: Endpoint,
    /// The pod that would prefill for it.
    pub prefill: Option<Endpoint>,
    /// The comparisons it rests on.
    pub checks: Checks,
}

/// A decision and the policy that made it.
#[derive(Clone, Copy, Debug)]
pub struct Decided<'a> {
    /// The policy in force.
    pub policy: &'a Policy,
    /// What it decided.
    pub result: &'a Result<Decision, NoRoute>,
}

/// What `shadow` would have decided where the policy in force decided `decided`. `affinity` is what
/// the shadow's own session affinity makes of the session.
///
/// Where both policies choose pods alike for this request, the selections are taken over and only the
/// bypass is judged again: a few comparisons instead of another look at every pod.
#[must_use]
pub fn opinion(
    ask: &Ask,
    affinity: Affinity,
    snapshot: &Snapshot,
    decided: Decided<'_>,
    shadow: &Policy,
) -> Opinion {
    let (index, rule) = shadow.rule_for(ask);
    let verdict = match decided.result {
        Ok(decision)
            if affinity == ask.affinity && alike(ask, decision, decided.policy, (shadow, rule)) =>
        {
            again(ask, decision, decided.policy, (shadow, rule))
        }
        _ if affinity == ask.affinity => afresh(ask, snapshot, shadow),
        _ => {
            // Without affinity no session binds its prefill pod either.
            let ask = Ask {
                affinity,
                prefill_affinity: affinity.pod().and(ask.prefill_affinity),
                ..ask.clone()
            };
            afresh(&ask, snapshot, shadow)
        }
    };
    Opinion {
        rule: index,
        verdict,
    }
}

/// Whether `decision` chose its pods as `shadow` and its `rule` would. What remains to differ are the
/// rule's comparisons and how slower tiers count in them.
fn alike(
    ask: &Ask,
    decision: &Decision,
    policy: &Policy,
    (shadow, rule): (&Policy, &Rule),
) -> bool {
    let pins = policy.client_pins == shadow.client_pins
        || (ask.decode_pin.is_none() && ask.prefill_pin.is_none());
    let affinity = DecodeAffinity::of(policy.rule_at(decision.rule)) == DecodeAffinity::of(rule);
    pins && affinity && policy.scoring == shadow.scoring
}

fn again(
    ask: &Ask,
    decision: &Decision,
    policy: &Policy,
    (shadow, rule): (&Policy, &Rule),
) -> Result<Course, NoRoute> {
    // A pin that counted named an eligible pod, which was then the one considered.
    let prefill_pin = match shadow.client_pins {
        ClientPins::Honor => ask.prefill_pin.and(decision.considered.prefill.as_ref()),
        ClientPins::Ignore => None,
    };
    let prefill_pin = prefill_pin.map(|pick| pick.candidate.endpoint);
    let credit = rule.bypass.tier_credit();
    if credit == policy.rule_at(decision.rule).bypass.tier_credit() {
        course(ask, rule, &decision.considered, prefill_pin)
    } else {
        let mut considered = decision.considered;
        let Considered {
            local,
            prefill,
            decode,
        } = &mut considered;
        for pick in [local, prefill, decode].into_iter().flatten() {
            pick.credit(ask.prompt_tokens, &shadow.scoring, credit);
        }
        course(ask, rule, &considered, prefill_pin)
    }
}

fn course(
    ask: &Ask,
    rule: &Rule,
    considered: &Considered,
    prefill_pin: Option<Endpoint>,
) -> Result<Course, NoRoute> {
    let concluded = conclude(ask, rule, considered, prefill_pin)?;
    Ok(Course {
        because: concluded.because,
        decode: concluded.decode.candidate.endpoint,
        prefill: concluded.prefill.map(|pick| pick.candidate.endpoint),
        checks: concluded.checks,
    })
}

fn afresh(ask: &Ask, snapshot: &Snapshot, shadow: &Policy) -> Result<Course, NoRoute> {
    let decision = decide(ask, snapshot, shadow)?;
    Ok(Course {
        because: decision.because,
        decode: decision.route.decode().candidate.endpoint,
        prefill: decision.route.prefill().map(|pick| pick.candidate.endpoint),
        checks: decision.checks,
    })
}

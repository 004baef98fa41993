//! Whether the chosen pods are worth a remote prefill: the bypass rule and the decode gate.
//!
//! Lives here: the comparisons with the policy's thresholds, and which threshold to move to get the
//! other answer.
//! Never here: the choice of pods (`select`); what is judged are the picks it returned.
//! Invariant: a bypass needs a yes of the rule and no veto of the gate, and missing data is a reason
//! of its own, never a yes.

use crate::decide::cost::new_blocks;
use crate::decide::policy::{Bypass, DecodeGate, IslBound, Policy, PrefillBusy, Rule};
use crate::decide::reason::{Because, Check, Checked};
use crate::decide::select::Pick;
use crate::decide::snapshot::{EngineReport, KvSource};
use crate::decide::{Checks, Decision};
use crate::units::{Ratio, Tokens};

/// What a rule says of a request, and the comparisons it rests on.
#[derive(Clone, Debug)]
pub(super) struct Judgement {
    /// A bypass, or why not.
    pub(super) because: Because,
    pub(super) checks: Checks,
}

/// Judges a request of `prompt` tokens for which `local` could do both and `prefill` the prefill, by
/// a rule's bypass and gate.
pub(super) fn judge(
    prompt: Tokens,
    local: Option<&Pick>,
    prefill: &Pick,
    (bypass, gate): (Bypass, &DecodeGate),
) -> Judgement {
    let mut checks = Checks::new();
    let because = match (bypass, local) {
        (Bypass::Never, _) => Because::PolicyNever,
        _ if prompt == Tokens::ZERO => Because::EmptyPrompt,
        (_, None) => Because::EngineCannotPrefillLocally,
        (bypass, Some(local)) => {
            let wish = match bypass {
                Bypass::Never => Because::PolicyNever,
                Bypass::Always => Because::PolicyAlways,
                Bypass::IslBounding(bound) => isl(prompt, local, &bound, &mut checks),
                Bypass::PrefillLoad(busy) => prefill_load(prefill, busy, &mut checks),
                Bypass::IslOrLoad(bound, busy) => {
                    let isl = isl(prompt, local, &bound, &mut checks);
                    if isl.is_bypass() {
                        isl
                    } else {
                        let load = prefill_load(prefill, busy, &mut checks);
                        if load.is_bypass() { load } else { isl }
                    }
                }
            };
            if wish.is_bypass() {
                veto(prompt, local, gate, &mut checks).unwrap_or(wish)
            } else {
                wish
            }
        }
    };
    Judgement { because, checks }
}

/// Few net-new tokens, absolutely and as a share of the prompt; or a prompt too short to matter.
fn isl(prompt: Tokens, local: &Pick, bound: &IslBound, checks: &mut Checks) -> Because {
    let refusal = match local.candidate.kv_source {
        // What such a pod holds is not known, and "nothing" would be a guess.
        KvSource::Absent | KvSource::Lost => Because::NoKvSource,
        KvSource::Live | KvSource::Syncing => {
            let net_new = local.net_new_tokens;
            let share = net_new.0 as f64 / prompt.0.max(1) as f64;
            let few = net_new < bound.threshold;
            let small = share < bound.ratio.get();
            checks.push(Check {
                what: Checked::NetNewTokens,
                value: net_new.0 as f64,
                threshold: bound.threshold.0 as f64,
                allows_bypass: few,
            });
            checks.push(Check {
                what: Checked::NetNewShare,
                value: share,
                threshold: bound.ratio.get(),
                allows_bypass: small,
            });
            match (few, small) {
                (true, true) => return Because::NetNewBelowThresholds,
                (false, _) => Because::NetNewAboveThreshold,
                (true, false) => Because::NetNewShareAboveThreshold,
            }
        }
    };
    if bound.cold_bypass_below == Tokens::ZERO {
        return refusal;
    }
    let short = prompt < bound.cold_bypass_below;
    checks.push(Check {
        what: Checked::PromptTokens,
        value: prompt.0 as f64,
        threshold: bound.cold_bypass_below.0 as f64,
        allows_bypass: short,
    });
    if short {
        Because::ColdPromptShort
    } else {
        refusal
    }
}

/// More prefill work waits for the pod than it can take into `busy.threshold` batches.
fn prefill_load(prefill: &Pick, busy: PrefillBusy, checks: &mut Checks) -> Because {
    let capacity = match prefill.candidate.prefill_capacity.known() {
        Some((tokens, _)) if Tokens::ZERO < tokens => tokens.0 as f64,
        _ => return Because::PrefillCapacityUnknown,
    };
    let queued = prefill.candidate.load.prefill_tokens.0 as f64;
    let over = busy.threshold.get() * capacity < queued;
    checks.push(Check {
        what: Checked::PrefillBusy,
        value: queued / capacity,
        threshold: busy.threshold.get(),
        allows_bypass: over,
    });
    if over {
        Because::PrefillBusy
    } else {
        Because::PrefillNotBusy
    }
}

/// Why the decode pod may not take a local prefill, if it may not.
///
/// Blocks in use are this process's projection (blocks of the requests it sent there, this one
/// included) or, when the engine reported its usage lately and that is more, the reported usage plus
/// the blocks that this request adds.
fn veto(prompt: Tokens, local: &Pick, gate: &DecodeGate, checks: &mut Checks) -> Option<Because> {
    let DecodeGate::On { threshold, trust } = gate else {
        return None;
    };
    let candidate = &local.candidate;
    let (capacity, source) = match candidate.kv_capacity.known() {
        Some((blocks, source)) if 0 < blocks.0 => (f64::from(blocks.0), source),
        _ => return Some(Because::DecodeCapacityUnknown),
    };
    if !trust.contains(&source) {
        return Some(Because::DecodeCapacityUntrusted);
    }
    let added = f64::from(new_blocks(candidate, prompt).0);
    let projected = f64::from(candidate.load.decode_blocks.0) + added;
    let in_use = match candidate.engine {
        EngineReport::Fresh { kv_usage, .. } => projected.max(kv_usage.get() * capacity + added),
        EngineReport::None => projected,
    };
    let busy = threshold.get() * capacity < in_use;
    checks.push(Check {
        what: Checked::DecodeBusy,
        value: in_use / capacity,
        threshold: threshold.get(),
        allows_bypass: !busy,
    });
    busy.then_some(Because::DecodeBusy)
}

/// A change of one threshold that would have sent the request the other way.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Flip {
    /// The comparison whose threshold moves.
    pub what: Checked,
    /// The threshold in force.
    pub from: f64,
    /// The nearest value of it that gives the other route.
    pub to: f64,
    /// The reason there would then be.
    pub becomes: Because,
}

/// The smallest single change of a threshold, relative to its value, that would turn this decision's
/// bypass into a remote prefill or the reverse; `None` when no single threshold does.
///
/// Looked at are the thresholds that were compared and, where the rule bounds net-new tokens, a
/// `coldBypassBelow` that is off. The pods stay those that were chosen.
#[must_use]
pub fn nearest_flip(decision: &Decision, policy: &Policy) -> Option<Flip> {
    // Other outcomes come from no comparison, so no threshold changes them.
    let judged = decision.because.is_bypass() || decision.route.prefill().is_some();
    if !judged || decision.because == Because::PrefillPinned {
        return None;
    }
    let rule = policy.rule_at(decision.rule);
    let prompt = decision.prompt_tokens;
    let prefill = decision.considered.prefill.as_ref()?;
    let local = decision.considered.local.as_ref();
    let flip = |what, from, to| {
        let (bypass, trust) = with_threshold(rule, what, to)?;
        let gate = trust.as_ref().unwrap_or(&rule.gate);
        let because = judge(prompt, local, prefill, (bypass, gate)).because;
        (because.is_bypass() != decision.because.is_bypass()).then_some(Flip {
            what,
            from,
            to,
            becomes: because,
        })
    };
    let cold = rule
        .bypass
        .isl_bound()
        .filter(|bound| bound.cold_bypass_below == Tokens::ZERO && prompt != Tokens::ZERO)
        .and_then(|_| flip(Checked::PromptTokens, 0.0, prompt.0 as f64 + 1.0));
    let distance = |flip: &Flip| (flip.to - flip.from).abs() / flip.from.abs().max(f64::EPSILON);
    decision
        .checks
        .iter()
        .filter_map(|check| flip(check.what, check.threshold, across(check)?))
        .chain(cold)
        .min_by(|a, b| distance(a).total_cmp(&distance(b)))
}

/// The nearest threshold at which `check` comes out the other way, if there can be one.
fn across(check: &Check) -> Option<f64> {
    let (value, allows) = (check.value, check.allows_bypass);
    let to = match check.what {
        // Allowed when value < threshold, in whole tokens.
        Checked::NetNewTokens | Checked::PromptTokens if allows => value,
        Checked::NetNewTokens | Checked::PromptTokens => value + 1.0,
        // Allowed when value < threshold, and a share above 1 is no threshold.
        Checked::NetNewShare if allows => value,
        Checked::NetNewShare => Some(value.next_up()).filter(|to| *to <= 1.0)?,
        // Allowed when threshold < value, respectively value <= threshold. The kernel compares
        // products where the value is a quotient, so two steps are needed to be past the rounding.
        Checked::PrefillBusy if allows => value.next_up().next_up(),
        Checked::PrefillBusy => value.next_down().next_down(),
        Checked::DecodeBusy if allows => value.next_down().next_down(),
        Checked::DecodeBusy => value.next_up().next_up(),
    };
    (0.0 <= to).then_some(to)
}

/// What `rule` judges by, with one of its thresholds replaced: its bypass, and its gate if that is
/// what changes.
fn with_threshold(rule: &Rule, what: Checked, to: f64) -> Option<(Bypass, Option<DecodeGate>)> {
    let mut bypass = rule.bypass;
    let ratio = Ratio::new(to)?;
    match (what, &mut bypass, &rule.gate) {
        (Checked::NetNewTokens, Bypass::IslBounding(bound) | Bypass::IslOrLoad(bound, _), _) => {
            bound.threshold = Tokens(to as u64);
        }
        (Checked::NetNewShare, Bypass::IslBounding(bound) | Bypass::IslOrLoad(bound, _), _) => {
            bound.ratio = ratio;
        }
        (Checked::PromptTokens, Bypass::IslBounding(bound) | Bypass::IslOrLoad(bound, _), _) => {
            bound.cold_bypass_below = Tokens(to as u64);
        }
        (Checked::PrefillBusy, Bypass::PrefillLoad(busy) | Bypass::IslOrLoad(_, busy), _) => {
            busy.threshold = ratio;
        }
        (Checked::DecodeBusy, _, DecodeGate::On { trust, .. }) => {
            let gate = DecodeGate::On {
                threshold: ratio,
                trust: trust.clone(),
            };
            return Some((bypass, Some(gate)));
        }
        _ => return None,
    }
    Some((bypass, None))
}

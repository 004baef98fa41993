//! The kernel: one snapshot in, one decision out.
//!
//! Lives here: eligibility, cost, selection, the bypass rule, the decode gate, reasons.
//! Never here: async, clocks, randomness, locks, logging, Envoy, Kubernetes, YAML.
//! Invariant: the answer is a function of the arguments alone.

pub mod ask;
pub mod board;
pub mod bypass;
pub mod cost;
pub mod eligibility;
pub mod policy;
pub mod prerequisite;
pub mod reason;
mod scan;
pub mod select;
pub mod shadow;
pub mod snapshot;

pub use crate::decide::ask::Ask;
pub use crate::decide::bypass::{Flip, nearest_flip};
pub use crate::decide::cost::Cost;
pub use crate::decide::eligibility::Ineligible;
pub use crate::decide::policy::{Policy, Rule};
pub use crate::decide::prerequisite::Prerequisite;
pub use crate::decide::reason::{Because, Check, Checked, NoRoute};
pub use crate::decide::select::{Pick, Purpose};
pub use crate::decide::snapshot::{Candidate, Snapshot};

use crate::decide::ask::{Affinity, AskKind, Subset};
use crate::decide::eligibility::Allowed;
use crate::decide::policy::OnNoPrefill;
use crate::decide::select::{Terms, select};
use crate::decide::snapshot::{LocalPrefill, Serves};
use crate::names::Endpoint;
use crate::units::{Blocks, Tokens};
use smallvec::SmallVec;

/// The comparisons of one decision, in order.
pub type Checks = SmallVec<[Check; 5]>;

/// What was decided, with everything it was decided from.
#[derive(Clone, Debug)]
pub struct Decision {
    /// Where the request goes.
    pub route: Route,
    /// Why.
    pub because: Because,
    /// Index of the policy rule that applied, as [`Policy::rule_for`] numbers them.
    pub rule: usize,
    /// The comparisons made, in order.
    pub checks: Checks,
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

impl Decision {
    /// KV blocks that the prompt takes on the pod that decodes, the last one possibly partial.
    #[must_use]
    pub fn decode_blocks(&self) -> Blocks {
        let size = self.route.decode().candidate.block_size;
        size.blocks_to_hold(self.prompt_tokens)
    }
}

/// Decides where `ask` goes.
///
/// Order: eligibility, client pins, session affinity, the three selections, the bypass rule, the
/// decode gate. A request for which no prefill pod can be had is not judged: the rule's
/// `on_no_prefill` alone decides it.
///
/// # Errors
///
/// [`NoRoute`] when no pod may take the request; it names what is missing.
pub fn decide(ask: &Ask, snapshot: &Snapshot, policy: &Policy) -> Result<Decision, NoRoute> {
    let (rule_index, rule) = policy.rule_for(ask);
    let terms = Terms::new(ask, snapshot, policy, rule)?;
    let considered = consider(ask, snapshot, &terms);
    if considered.decode.is_none() {
        return Err(no_destination(ask, snapshot, &terms));
    }
    let Conclusion {
        decode,
        prefill,
        because,
        checks,
    } = conclude(ask, rule, &considered, terms.pin(Purpose::Prefill))?;
    let route = match prefill {
        Some(prefill) => Route::Remote {
            prefill: *prefill,
            decode: *decode,
        },
        None if because == Because::SamePod => Route::Local {
            decode: terms.pick(ask, decode.candidate, Purpose::PrefillAndDecode),
        },
        None => Route::Local { decode: *decode },
    };
    Ok(Decision {
        route,
        because,
        rule: rule_index,
        checks,
        prompt_tokens: ask.prompt_tokens,
        considered,
    })
}

/// A route by the picks it takes, and why.
#[derive(Debug)]
struct Conclusion<'a> {
    decode: &'a Pick,
    prefill: Option<&'a Pick>,
    because: Because,
    checks: Checks,
}

impl<'a> Conclusion<'a> {
    fn local(decode: &'a Pick, because: Because) -> Conclusion<'a> {
        Conclusion {
            decode,
            prefill: None,
            because,
            checks: Checks::new(),
        }
    }
}

/// What follows from the three selections under `rule`; `prefill_pin` is the prefill pod that the
/// client insists on.
fn conclude<'a>(
    ask: &Ask,
    rule: &Rule,
    considered: &'a Considered,
    prefill_pin: Option<Endpoint>,
) -> Result<Conclusion<'a>, NoRoute> {
    let decode = considered.decode.as_ref().ok_or(NoRoute::NoDecodePod)?;
    if ask.kind == AskKind::PassThrough {
        return Ok(Conclusion::local(decode, Because::NotGeneration));
    }
    let local = considered.local.as_ref();
    if ask.kind == AskKind::GenerateSeveral {
        return match (prefill_pin, local) {
            (Some(pin), _) => Err(NoRoute::PinnedPodUnavailable(pin)),
            (None, None) => Err(NoRoute::NoPodCanPrefill),
            (None, Some(decode)) => Ok(Conclusion::local(decode, Because::SeveralSequences)),
        };
    }
    let Some(prefill) = &considered.prefill else {
        return match (prefill_pin, rule.on_no_prefill, local) {
            (Some(pin), _, _) => Err(NoRoute::PinnedPodUnavailable(pin)),
            (None, OnNoPrefill::Fail, _) => Err(NoRoute::NoPrefillPod),
            (None, OnNoPrefill::Local, None) => Err(NoRoute::NoPodCanPrefill),
            (None, OnNoPrefill::Local, Some(decode)) => {
                Ok(Conclusion::local(decode, Because::NoPrefillPod))
            }
        };
    };
    if prefill.candidate.pod == decode.candidate.pod {
        return Ok(Conclusion::local(decode, Because::SamePod));
    }
    let remote = |because, checks| Conclusion {
        decode,
        prefill: Some(prefill),
        because,
        checks,
    };
    if prefill_pin.is_some() {
        return Ok(remote(Because::PrefillPinned, Checks::new()));
    }
    let judgement = bypass::judge(ask.prompt_tokens, local, prefill, (rule.bypass, &rule.gate));
    Ok(match local {
        Some(decode) if judgement.because.is_bypass() => Conclusion {
            checks: judgement.checks,
            ..Conclusion::local(decode, judgement.because)
        },
        _ => remote(judgement.because, judgement.checks),
    })
}

/// The three selections. Where one pod is the best for both halves of a remote route and its engine
/// refuses to do both, another is sought for the prefill, and failing that for the decode.
fn consider(ask: &Ask, snapshot: &Snapshot, terms: &Terms<'_>) -> Considered {
    let mut found = Considered {
        decode: select(ask, snapshot, terms, Purpose::DecodeOnly),
        ..Considered::default()
    };
    if ask.kind == AskKind::PassThrough {
        return found;
    }
    found.local = select(ask, snapshot, terms, Purpose::PrefillAndDecode);
    if ask.kind == AskKind::GenerateSeveral {
        return found;
    }
    found.prefill = select(ask, snapshot, terms, Purpose::Prefill);
    if let (Some(prefill), Some(decode)) = (&found.prefill, &found.decode)
        && prefill.candidate.pod == decode.candidate.pod
        && decode.candidate.local_prefill == LocalPrefill::Unable
    {
        let mut terms = terms.clone();
        terms.taken = Some(decode.candidate.pod);
        if let Some(other) = select(ask, snapshot, &terms, Purpose::Prefill) {
            found.prefill = Some(other);
        } else if let Some(other) = select(ask, snapshot, &terms, Purpose::DecodeOnly) {
            found.decode = Some(other);
        } else {
            found.prefill = None;
        }
    }
    found
}

/// Why no pod can be the destination.
fn no_destination(ask: &Ask, snapshot: &Snapshot, terms: &Terms<'_>) -> NoRoute {
    let mut pods = snapshot.candidates();
    if 0 < pods.len() && pods.all(|pod| pod.serves == Serves::NotThisModel) {
        return NoRoute::UnknownModel;
    }
    if let Some(pin) = terms.pin(Purpose::DecodeOnly) {
        return NoRoute::PinnedPodUnavailable(pin);
    }
    let board = snapshot.board();
    if let Affinity::Hard(session) = ask.affinity
        && let Some(position) = board.position(session)
    {
        return NoRoute::PinnedPodUnavailable(board.members()[position].endpoint);
    }
    let outside = |pod: Candidate| pod.check(&Allowed::ALL, Purpose::DecodeOnly).is_ok();
    if ask.subset != Subset::Any && snapshot.candidates().any(outside) {
        NoRoute::NoPodInSubset
    } else {
        NoRoute::NoDecodePod
    }
}

//! A decision with everything it rests on, for people: what explain answers.
//!
//! Lives here: [`Explanation`] and its parts, and the sentence for a flip.
//! Never here: prompt text, session names, how a decision is made.
//! Invariant: an explanation of a request that was only tried and one of a decision that was taken have
//! the same form; what is no longer known is absent, never invented.

use crate::decide::eligibility::Ineligible;
use crate::decide::reason::{Check, Checked};
use crate::decide::snapshot::{Candidate, Capacity, EngineReport};
use crate::decide::{Because, Cost, Flip, NoRoute};
use crate::telemetry::record::check_line;
use serde::{Deserialize, Serialize};

/// Why a request goes where it goes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Explanation {
    /// Id of the decision; absent when nothing was decided, only explained.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decision: Option<String>,
    /// The policy that judged.
    pub policy: PolicyName,
    /// What is known of the request.
    pub request: RequestLine,
    /// The outcome.
    pub verdict: Verdict,
    /// What the policy in the shadow would have done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shadow: Option<ShadowVerdict>,
    /// The pods, those that were selected first.
    pub pods: Vec<PodLine>,
    /// How many pods were looked at and are not listed.
    pub pods_left_out: usize,
}

/// A policy by name and version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyName {
    /// Its name.
    pub name: String,
    /// Its version.
    pub generation: u64,
}

/// What is known of the request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestLine {
    /// `chat` or `text_completion`; nothing for other requests.
    pub operation: Option<String>,
    /// The model, when it is a configured one.
    pub model: Option<String>,
    /// Length of the prompt, in tokens.
    pub prompt_tokens: u64,
    /// `exact`, `estimated_from_bytes` or `no_prompt`.
    pub counted: String,
    /// Why the prompt could not be tokenised exactly, if it could not.
    pub encode_trouble: Option<String>,
    /// `none`, `new`, `kept` or `moved`.
    pub session: String,
}

/// An outcome and what it rests on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// `local`, `remote` or `refused`.
    pub route: String,
    /// Why, in one word.
    pub because: String,
    /// Why, in a sentence.
    pub meaning: String,
    /// Whether remote prefill is skipped by policy.
    pub bypass: bool,
    /// Index of the rule that applied.
    pub rule: usize,
    /// The pod that decodes.
    pub decode: Option<PodName>,
    /// The pod that prefills for it.
    pub prefill: Option<PodName>,
    /// The comparisons, in order.
    pub checks: Vec<CheckLine>,
    /// The nearest change of one threshold that would give the other answer, in a sentence.
    pub flip: Option<String>,
}

/// A pod by name and endpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodName {
    /// Its name, while it is known.
    pub name: Option<String>,
    /// Where it listens.
    pub endpoint: String,
}

/// What the policy in the shadow would have done.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ShadowVerdict {
    /// The policy.
    pub policy: PolicyName,
    /// Whether route and pods are the same.
    pub agrees: bool,
    /// Its outcome.
    pub verdict: Verdict,
}

/// One comparison with its numbers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CheckLine {
    /// What was compared.
    pub what: String,
    /// The measured side.
    pub value: f64,
    /// `<`, `<=` or `>`.
    pub operator: String,
    /// The policy's side.
    pub threshold: f64,
    /// Whether it holds, which speaks for a bypass.
    pub allows_bypass: bool,
    /// All of it in one line.
    pub line: String,
}

/// One pod with the numbers it was judged by.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PodLine {
    /// Its name, while it is known.
    pub name: Option<String>,
    /// Where it listens.
    pub endpoint: String,
    /// What it may be used for.
    pub role: String,
    /// Whether it can take requests.
    pub availability: String,
    /// State of its KV events.
    pub kv_source: String,
    /// Whether its engine prefills what it decodes.
    pub local_prefill: bool,
    /// Tokens per block.
    pub block_size: u32,
    /// Leading tokens of the prompt that it holds.
    pub cached: TierLine,
    /// What was promised to it.
    pub load: LoadLine,
    /// Prompt tokens in one prefill batch.
    pub prefill_capacity: CapacityLine,
    /// KV blocks it has.
    pub kv_capacity: CapacityLine,
    /// What its engine said of itself lately.
    pub engine: Option<EngineLine>,
    /// To prefill and decode.
    pub local: Standing,
    /// To prefill for another pod.
    pub prefill: Standing,
    /// To decode after a remote prefill.
    pub decode: Standing,
}

/// Leading tokens of a prompt by tier; host and disk extend the tier before them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierLine {
    /// On the accelerator.
    pub device: u64,
    /// In host memory.
    pub host: u64,
    /// On disk or further away.
    pub disk: u64,
}

/// What was promised to a pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadLine {
    /// Requests.
    pub requests: u32,
    /// Prompt tokens still to be prefilled.
    pub prefill_tokens: u64,
    /// KV blocks.
    pub decode_blocks: u32,
    /// Those among them that are also this request's.
    pub shared_blocks: u32,
}

/// A capacity and who says so.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CapacityLine {
    /// The number, unless nobody knows it.
    pub value: Option<u64>,
    /// `Reported`, `Configured` or `Assumed`.
    pub source: Option<String>,
}

/// What an engine says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct EngineLine {
    /// Requests waiting.
    pub waiting: u32,
    /// Requests running.
    pub running: u32,
    /// Share of the KV cache in use.
    pub kv_usage: f64,
}

/// How a pod stands for one purpose.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Standing {
    /// Whether it was selected.
    pub selected: bool,
    /// What it costs, in blocks; absent when it is not eligible or when that is no longer known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<CostLine>,
    /// Why it is not considered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ineligible: Option<String>,
}

/// A cost by its terms, in blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CostLine {
    /// Prefill work, net of `credit` and scaled.
    pub prefill: f64,
    /// Credit for cached blocks, already subtracted.
    pub credit: f64,
    /// Blocks in use.
    pub decode: f64,
    /// Running requests, weighted.
    pub requests: f64,
    /// What is compared.
    pub total: f64,
}

impl From<&Cost> for CostLine {
    fn from(cost: &Cost) -> Self {
        CostLine {
            prefill: cost.prefill,
            credit: cost.credit,
            decode: cost.decode,
            requests: cost.requests,
            total: cost.total,
        }
    }
}

impl From<&Check> for CheckLine {
    fn from(check: &Check) -> Self {
        CheckLine {
            what: check.what.as_str().to_owned(),
            value: check.value,
            operator: operator(check.what).to_owned(),
            threshold: check.threshold,
            allows_bypass: check.allows_bypass,
            line: check_line(check),
        }
    }
}

impl Standing {
    /// How a pod stands that has this cost, or for this reason none.
    #[must_use]
    pub fn new(cost: &Result<Cost, Ineligible>, selected: bool) -> Standing {
        Standing {
            selected,
            cost: cost.as_ref().ok().map(Into::into),
            ineligible: cost.as_ref().err().map(|word| word.as_str().to_owned()),
        }
    }
}

impl PodLine {
    /// The numbers of `candidate`, before any selection.
    #[must_use]
    pub fn new(candidate: &Candidate, name: Option<String>) -> PodLine {
        let tokens = |blocks| candidate.block_size.tokens(blocks).0;
        PodLine {
            name,
            endpoint: candidate.endpoint.to_string(),
            role: candidate.role.as_str().to_owned(),
            availability: candidate.availability.as_str().to_owned(),
            kv_source: candidate.kv_source.as_str().to_owned(),
            local_prefill: candidate.local_prefill == crate::decide::snapshot::LocalPrefill::Able,
            block_size: candidate.block_size.get(),
            cached: TierLine {
                device: tokens(candidate.cached.device),
                host: tokens(candidate.cached.host),
                disk: tokens(candidate.cached.disk),
            },
            load: LoadLine {
                requests: candidate.load.requests,
                prefill_tokens: candidate.load.prefill_tokens.0,
                decode_blocks: candidate.load.decode_blocks.0,
                shared_blocks: candidate.load.shared_blocks.0,
            },
            prefill_capacity: capacity(candidate.prefill_capacity, |tokens| tokens.0),
            kv_capacity: capacity(candidate.kv_capacity, |blocks| u64::from(blocks.0)),
            engine: match candidate.engine {
                EngineReport::None => None,
                EngineReport::Fresh {
                    waiting,
                    running,
                    kv_usage,
                } => Some(EngineLine {
                    waiting,
                    running,
                    kv_usage: kv_usage.get(),
                }),
            },
            local: Standing::default(),
            prefill: Standing::default(),
            decode: Standing::default(),
        }
    }
}

fn capacity<T: Copy>(capacity: Capacity<T>, number: impl Fn(T) -> u64) -> CapacityLine {
    match capacity.known() {
        Some((value, source)) => CapacityLine {
            value: Some(number(value)),
            source: Some(source.as_str().to_owned()),
        },
        None => CapacityLine::default(),
    }
}

impl Verdict {
    /// A route that is taken because of `because` on `checks`.
    #[must_use]
    pub fn routed(because: Because, rule: usize, checks: &[Check]) -> Verdict {
        Verdict {
            route: because.route().to_owned(),
            because: because.as_str().to_owned(),
            meaning: because.meaning().to_owned(),
            bypass: because.is_bypass(),
            rule,
            decode: None,
            prefill: None,
            checks: checks.iter().map(Into::into).collect(),
            flip: None,
        }
    }

    /// No route.
    #[must_use]
    pub fn refused(cause: NoRoute, rule: usize) -> Verdict {
        Verdict {
            route: "refused".to_owned(),
            because: cause.as_str().to_owned(),
            meaning: cause.to_string(),
            bypass: false,
            rule,
            decode: None,
            prefill: None,
            checks: Vec::new(),
            flip: None,
        }
    }
}

/// How a comparison is written.
#[must_use]
pub(crate) fn operator(what: Checked) -> &'static str {
    match what {
        Checked::NetNewTokens | Checked::NetNewShare | Checked::PromptTokens => "<",
        Checked::PrefillBusy => ">",
        Checked::DecodeBusy => "<=",
    }
}

/// A flip in a sentence, e.g. `would bypass if effectiveIslThreshold were above 412`. A threshold set
/// as the sentence says does give the other answer: shares are rounded to that side.
#[must_use]
pub fn flip_sentence(flip: &Flip) -> String {
    let up = flip.from < flip.to;
    let whole = matches!(flip.what, Checked::NetNewTokens | Checked::PromptTokens);
    let limit = match (whole, up) {
        (true, true) => format!("above {:.0}", flip.to - 1.0),
        (true, false) => format!("at most {:.0}", flip.to),
        (false, true) => format!("at least {}", (flip.to * 1e4).ceil() / 1e4),
        (false, false) => format!("at most {}", (flip.to * 1e4).floor() / 1e4),
    };
    let would = match flip.becomes.is_bypass() {
        true => "would bypass",
        false => "would not bypass",
    };
    format!("{would} if {} were {limit}", flip.what.setting())
}

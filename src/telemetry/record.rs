//! One decision as a readable record: what the journal keeps and the admin page shows.
//!
//! Lives here: [`Facts`], [`Record`], [`Usage`], [`check_line`].
//! Never here: OpenTelemetry, prompt text, session names.
//! Invariant: a record is complete when the decision is made; only its outcome is filled in later.

mod explained;

use crate::decide::reason::{Check, Checked};
use crate::decide::{Because, Candidate, Checks, Decision, Flip, NoRoute, Pick};
use crate::names::Endpoint;
use crate::telemetry::explanation::{CheckLine, CostLine, flip_sentence, operator};
use crate::telemetry::shadow::ShadowFacts;
use parking_lot::Mutex;
use serde::Serialize;
use std::fmt::Write;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// What a decision's span and record say besides the decision itself.
#[derive(Clone, Debug)]
pub struct Facts {
    /// Id of the decision.
    pub decision_id: String,
    /// Policy in force.
    pub policy: Arc<str>,
    /// Its version.
    pub generation: u64,
    /// `chat` or `text_completion`; nothing for other requests.
    pub operation: Option<&'static str>,
    /// The model, when it is a configured one.
    pub model: Option<Arc<str>>,
    /// Whether the client asked for a stream.
    pub stream: bool,
    /// Most tokens the client asked for.
    pub max_tokens: Option<u32>,
    /// How the prompt was counted.
    pub counted: &'static str,
    /// Why the prompt could not be tokenised exactly, if it could not.
    pub encode_trouble: Option<&'static str>,
    /// What session affinity did.
    pub session: SessionOutcome,
    /// Name of the pod that decodes.
    pub decode_pod: Arc<str>,
    /// Name of the pod that prefills for it.
    pub prefill_pod: Option<Arc<str>>,
    /// How many pods were looked at.
    pub candidates: usize,
    /// Time spent per stage.
    pub times: Times,
    /// Trace id, if the request's trace is recorded.
    pub trace_id: Option<String>,
    /// The nearest change of one threshold that would have given the other answer.
    pub flip: Option<Flip>,
}

/// What session affinity did for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SessionOutcome {
    /// The request names no session, or affinity is off.
    None,
    /// First request of its session.
    New,
    /// On the pod of the last turn.
    Kept,
    /// On another pod than the last turn.
    Moved,
}

impl SessionOutcome {
    /// The word used in spans and output.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            SessionOutcome::None => "none",
            SessionOutcome::New => "new",
            SessionOutcome::Kept => "kept",
            SessionOutcome::Moved => "moved",
        }
    }
}

/// Time spent per stage of a decision.
#[derive(Clone, Copy, Debug, Default)]
pub struct Times {
    /// From the whole body to the start of `parse`: long prompts wait for a thread.
    pub waited: Duration,
    /// Reading the body.
    pub parse: Duration,
    /// Rendering and tokenising the prompt.
    pub encode: Duration,
    /// From the whole body to the start of `observe`.
    pub understood: Duration,
    /// Looking at pods, caches and reports.
    pub observe: Duration,
    /// Applying the rules.
    pub decide: Duration,
    /// Promising the load to the chosen pods.
    pub book: Duration,
}

/// What an engine says it used; absent numbers were not said, or not numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// Prompt tokens.
    pub prompt_tokens: Option<u64>,
    /// Generated tokens.
    pub completion_tokens: Option<u64>,
    /// Prompt tokens taken from cache.
    pub cached_tokens: Option<u64>,
}

/// One comparison as an operator reads it, e.g. `net_new 412 < 2048: yes`.
#[must_use]
pub fn check_line(check: &Check) -> String {
    let places = match check.what {
        Checked::NetNewTokens | Checked::PromptTokens => 0,
        Checked::NetNewShare | Checked::PrefillBusy | Checked::DecodeBusy => 3,
    };
    let mut line = String::with_capacity(64);
    line.push_str(check.what.as_str());
    line.push(' ');
    rounded(&mut line, check.value, places);
    line.push(' ');
    line.push_str(operator(check.what));
    line.push(' ');
    rounded(&mut line, check.threshold, places);
    line.push_str(if check.allows_bypass { ": yes" } else { ": no" });
    line
}

/// Adds `value` with so many decimals, up to 3. Every traced request has several such numbers, and the
/// exact digits that the standard library works out take most of the time of writing them.
fn rounded(line: &mut String, value: f64, places: usize) {
    const SCALES: [u64; 4] = [1, 10, 100, 1000];
    let scale = SCALES[places.min(3)];
    // Writing to a String cannot fail.
    if (0.0..1e12).contains(&value) {
        let scaled = (value * scale as f64).round() as u64;
        let _ = write!(line, "{}", scaled / scale);
        if 1 < scale {
            let _ = write!(line, ".{:0places$}", scaled % scale);
        }
    } else {
        let _ = write!(line, "{value:.places$}");
    }
}

/// One selection, readable.
#[derive(Clone, Debug, Serialize)]
pub struct PickRecord {
    #[serde(serialize_with = "shown")]
    endpoint: Endpoint,
    cached_tokens: u64,
    net_new_tokens: u64,
    kv_source: &'static str,
    requests: u32,
    prefill_tokens: u64,
    decode_blocks: u32,
    cost: CostLine,
    #[serde(skip)]
    candidate: Candidate,
}

impl From<&Pick> for PickRecord {
    fn from(pick: &Pick) -> Self {
        PickRecord {
            endpoint: pick.candidate.endpoint,
            cached_tokens: pick.cached_tokens.0,
            net_new_tokens: pick.net_new_tokens.0,
            kv_source: pick.candidate.kv_source.as_str(),
            requests: pick.candidate.load.requests,
            prefill_tokens: pick.candidate.load.prefill_tokens.0,
            decode_blocks: pick.candidate.load.decode_blocks.0,
            cost: (&pick.cost).into(),
            candidate: pick.candidate,
        }
    }
}

/// The three selections, readable.
#[derive(Clone, Debug, Serialize)]
struct ConsideredRecord {
    local: Option<PickRecord>,
    prefill: Option<PickRecord>,
    decode: Option<PickRecord>,
}

/// What the policy in the shadow would have done, readable.
#[derive(Clone, Debug, Serialize)]
struct ShadowRecord {
    policy: Arc<str>,
    generation: u64,
    rule: usize,
    route: &'static str,
    because: &'static str,
    bypass: bool,
    agrees: bool,
    #[serde(serialize_with = "shown_if_any")]
    decode: Option<Endpoint>,
    #[serde(serialize_with = "shown_if_any")]
    prefill: Option<Endpoint>,
    #[serde(serialize_with = "lines")]
    checks: Checks,
    #[serde(skip)]
    verdict: Result<Because, NoRoute>,
}

impl From<&ShadowFacts> for ShadowRecord {
    fn from(facts: &ShadowFacts) -> Self {
        let course = facts.opinion.verdict.as_ref().ok();
        let prefill = course.and_then(|course| course.prefill);
        ShadowRecord {
            policy: Arc::clone(&facts.policy),
            generation: facts.generation,
            rule: facts.opinion.rule,
            route: facts.words.route,
            because: facts.words.because,
            bypass: facts.words.bypass,
            agrees: facts.agrees,
            decode: course.map(|course| course.decode),
            prefill,
            checks: course.map_or_else(Checks::new, |course| course.checks.clone()),
            verdict: facts
                .opinion
                .verdict
                .as_ref()
                .map(|course| course.because)
                .map_err(|cause| *cause),
        }
    }
}

/// How a request went on after its decision.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Outcome {
    /// Status of the answer.
    pub status: Option<u16>,
    /// Time from the whole request to the first response bytes, in milliseconds.
    pub ttft_ms: Option<f64>,
    /// `completed` or `aborted`, once over.
    pub end: Option<&'static str>,
    /// What the engine said it used.
    pub usage: Usage,
}

/// One decision, readable. Serialises to one JSON object.
#[derive(Debug, Serialize)]
pub struct Record {
    /// Id of the decision.
    pub id: String,
    /// Counts decisions of this process from 1.
    pub sequence: u64,
    /// Milliseconds since 1970.
    time_ms: u64,
    route: &'static str,
    because: &'static str,
    #[serde(skip)]
    reason: Because,
    bypass: bool,
    /// Endpoint that decodes.
    #[serde(serialize_with = "shown")]
    decode: Endpoint,
    decode_pod: Arc<str>,
    /// Endpoint that prefills for it.
    #[serde(serialize_with = "shown_if_any")]
    prefill: Option<Endpoint>,
    prefill_pod: Option<Arc<str>>,
    model: Option<Arc<str>>,
    pub(crate) operation: Option<&'static str>,
    prompt_tokens: u64,
    counted: &'static str,
    cached_tokens: u64,
    net_new_tokens: u64,
    policy: Arc<str>,
    generation: u64,
    rule: usize,
    #[serde(serialize_with = "lines")]
    checks: Checks,
    /// The nearest change of one threshold that would have given the other answer.
    flip: Option<String>,
    #[serde(serialize_with = "once")]
    shadow: OnceLock<ShadowRecord>,
    considered: ConsideredRecord,
    candidates: usize,
    session: SessionOutcome,
    encode_trouble: Option<&'static str>,
    parse_us: u64,
    encode_us: u64,
    decide_us: u64,
    trace_id: Option<String>,
    #[serde(flatten, serialize_with = "outcome")]
    outcome: Mutex<Outcome>,
}

fn outcome<S: serde::Serializer>(value: &Mutex<Outcome>, serializer: S) -> Result<S::Ok, S::Error> {
    let copy = *value.lock();
    copy.serialize(serializer)
}

// Every decision is recorded and hardly any record is read: text is made when it is.

fn lines<S: serde::Serializer>(checks: &Checks, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(checks.iter().map(CheckLine::from))
}

fn shown<S: serde::Serializer>(endpoint: &Endpoint, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(endpoint)
}

fn shown_if_any<S: serde::Serializer>(
    endpoint: &Option<Endpoint>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match endpoint {
        Some(endpoint) => serializer.collect_str(endpoint),
        None => serializer.serialize_none(),
    }
}

fn once<S: serde::Serializer, T: Serialize>(
    value: &OnceLock<T>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    value.get().serialize(serializer)
}

impl Record {
    /// Writes down `decision`.
    #[must_use]
    pub fn new(sequence: u64, decision: &Decision, facts: &Facts) -> Record {
        // The numbers that the bypass rule saw: those of the best local pod. Without one (no decode
        // pod can prefill), those of the pod that decodes.
        let judged = decision
            .considered
            .local
            .as_ref()
            .unwrap_or_else(|| decision.route.decode());
        Record {
            id: facts.decision_id.clone(),
            sequence,
            time_ms: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(0, |since| since.as_millis() as u64),
            route: decision.route.as_str(),
            because: decision.because.as_str(),
            reason: decision.because,
            bypass: decision.because.is_bypass(),
            decode: decision.route.decode().candidate.endpoint,
            decode_pod: facts.decode_pod.clone(),
            prefill: decision.route.prefill().map(|pick| pick.candidate.endpoint),
            prefill_pod: facts.prefill_pod.clone(),
            model: facts.model.clone(),
            operation: facts.operation,
            prompt_tokens: decision.prompt_tokens.0,
            counted: facts.counted,
            cached_tokens: judged.cached_tokens.0,
            net_new_tokens: judged.net_new_tokens.0,
            policy: facts.policy.clone(),
            generation: facts.generation,
            rule: decision.rule,
            checks: decision.checks.clone(),
            flip: facts.flip.as_ref().map(flip_sentence),
            shadow: OnceLock::new(),
            considered: ConsideredRecord {
                local: decision.considered.local.as_ref().map(Into::into),
                prefill: decision.considered.prefill.as_ref().map(Into::into),
                decode: decision.considered.decode.as_ref().map(Into::into),
            },
            candidates: facts.candidates,
            session: facts.session,
            encode_trouble: facts.encode_trouble,
            parse_us: facts.times.parse.as_micros() as u64,
            encode_us: facts.times.encode.as_micros() as u64,
            decide_us: (facts.times.observe + facts.times.decide + facts.times.book).as_micros()
                as u64,
            trace_id: facts.trace_id.clone(),
            outcome: Mutex::new(Outcome::default()),
        }
    }

    /// Adds what the policy in the shadow would have done; said once.
    pub fn beside(&self, shadow: &ShadowFacts) {
        self.shadow.get_or_init(|| shadow.into());
    }

    /// Changes the outcome.
    pub fn update(&self, change: impl FnOnce(&mut Outcome)) {
        change(&mut self.outcome.lock());
    }

    /// The outcome so far.
    #[must_use]
    pub fn outcome(&self) -> Outcome {
        *self.outcome.lock()
    }
}

/// One decision in short: a line of a list. Serialises to one JSON object.
#[derive(Debug, Serialize)]
pub struct Brief<'a> {
    id: &'a str,
    sequence: u64,
    time_ms: u64,
    route: &'static str,
    because: &'static str,
    bypass: bool,
    model: Option<&'a str>,
    decode_pod: &'a str,
    prefill_pod: Option<&'a str>,
    prompt_tokens: u64,
    cached_tokens: u64,
    net_new_tokens: u64,
    decide_us: u64,
    #[serde(flatten)]
    outcome: Outcome,
}

impl Record {
    /// The decision in short.
    #[must_use]
    pub fn brief(&self) -> Brief<'_> {
        Brief {
            id: &self.id,
            sequence: self.sequence,
            time_ms: self.time_ms,
            route: self.route,
            because: self.because,
            bypass: self.bypass,
            model: self.model.as_deref(),
            decode_pod: &self.decode_pod,
            prefill_pod: self.prefill_pod.as_deref(),
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.cached_tokens,
            net_new_tokens: self.net_new_tokens,
            decide_us: self.decide_us,
            outcome: self.outcome(),
        }
    }

    /// When it was made, in milliseconds since 1970.
    #[must_use]
    pub fn time_ms(&self) -> u64 {
        self.time_ms
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_rounded_as_the_standard_library_would() {
        let values = [
            0.0,
            0.0004,
            0.0006,
            0.9996,
            0.25,
            0.7,
            1.0,
            41.0 / 100.0,
            411.0,
            2048.0,
            999_999.500_1,
            3e11,
            1e12,
            1e300,
        ];
        for value in values {
            for (places, exact) in [(0, format!("{value:.0}")), (3, format!("{value:.3}"))] {
                let mut line = String::new();
                rounded(&mut line, value, places);
                assert_eq!(line, exact);
            }
        }
    }
}

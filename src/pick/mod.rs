//! The picker: a request in, a plan and what must be released later out.
//!
//! Lives here: [`Picker`], which walks a request through parse, encode, observe, decide, book, plan.
//! Never here: Envoy types, thresholds, file formats.
//! Invariant: a decision and its booking are one step; an error is a [`Refusal`], never a route.

mod admit;
mod ask;
mod beside;
mod draws;
mod explain;
pub mod flight;
pub mod head;
mod question;
pub mod readable;
pub mod recent;
pub mod refusal;
pub mod seen;
mod status;
pub mod usage;
pub mod whatif;

pub use explain::{ExplainLimits, Explainer};
pub use flight::Flight;
pub use head::{Arrival, Ended, Head, Headers};
pub use readable::{PolicyCondition, PolicySummary};
pub use refusal::Refusal;
pub use status::PodStatus;

use crate::blocks::BlockChain;
use crate::decide::ask::Counted;
use crate::decide::policy::Policy;
use crate::decide::reason::Because;
use crate::decide::{Decision, nearest_flip};
use crate::load::{Booking, Ledger};
use crate::names::Endpoint;
use crate::observe::Observer;
use crate::pick::admit::Admitted;
use crate::pick::ask::Understood;
use crate::pick::beside::Beside;
use crate::pick::draws::Draws;
use crate::pick::flight::{Addressee, Progress};
use crate::pick::readable::History;
use crate::pick::recent::{Recent, Remembered};
use crate::pick::usage::Tail;
use crate::prompt::{Api, Encoder};
use crate::route::{DecisionIds, Dialect, HeaderEdit, Plan, plan};
use crate::telemetry::journal::Journal;
use crate::telemetry::metrics::{Metrics, OTHER_MODEL};
use crate::telemetry::record::{Facts, Record, Times, Usage};
use crate::telemetry::trace::{PickSpan, Tracing};
use arc_swap::ArcSwap;
use bytes::Bytes;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};
use tokio::sync::Semaphore;

/// Bodies up to this many bytes are read and tokenised where they arrive: about 50 µs of work.
/// Longer ones go to blocking threads, so that they do not hold up the streams beside them.
const INLINE_BYTES: usize = 16 * 1024;

/// A policy and the dialect that goes with it, in force together.
#[derive(Clone, Debug, PartialEq)]
pub struct InForce {
    /// The policy.
    pub policy: Policy,
    /// How engines are told.
    pub dialect: Dialect,
}

/// The policy in the shadow of the one in force.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum InShadow {
    /// None.
    #[default]
    Nothing,
    /// One of this name or from this file, which could not be had.
    Unresolved(Arc<str>),
    /// This one: its opinion of each request is recorded, and never obeyed.
    Policy(Policy),
}

impl InShadow {
    fn policy(&self) -> Option<&Policy> {
        match self {
            InShadow::Policy(policy) => Some(policy),
            InShadow::Nothing | InShadow::Unresolved(_) => None,
        }
    }
}

/// What a picker is made of.
#[derive(Debug)]
pub struct Parts {
    /// Requests to prompts.
    pub encoder: Encoder,
    /// Pods, their caches and states.
    pub observer: Observer,
    /// What was promised to them.
    pub ledger: Ledger,
    /// The policy in force first.
    pub in_force: InForce,
    /// Where decisions are counted.
    pub metrics: Metrics,
    /// Where spans go.
    pub tracing: Tracing,
    /// Where the last decisions are kept.
    pub journal: Journal,
}

/// Chooses pods for requests.
#[derive(Debug)]
pub struct Picker {
    encoder: Arc<Encoder>,
    observer: Observer,
    ledger: Ledger,
    in_force: ArcSwap<InForce>,
    /// How the policy stands, for whoever asks; nothing that a decision reads.
    conditions: ArcSwap<Vec<PolicyCondition>>,
    in_shadow: ArcSwap<InShadow>,
    metrics: Metrics,
    tracing: Tracing,
    journal: Journal,
    /// What the last decisions were made from.
    recent: Recent,
    /// The last policies.
    history: Mutex<History>,
    ids: DecisionIds,
    draws: Draws,
    /// Whether new requests are to go elsewhere.
    draining: AtomicBool,
    /// Bounds the prompts that are tokenised at once on blocking threads.
    encoding: Arc<Semaphore>,
}

/// A request with a pod.
#[derive(Debug)]
pub struct Picked {
    /// What to do to the request.
    pub plan: Plan,
    /// What to release, time and write down while it runs.
    pub flight: Flight,
}

impl Picker {
    /// A picker made of `parts`.
    #[must_use]
    pub fn new(parts: Parts) -> Picker {
        let draws = Draws::new();
        let threads = std::thread::available_parallelism().map_or(2, usize::from);
        parts.metrics.generation(parts.in_force.policy.generation);
        let mut history = History::default();
        history.push(&parts.in_force);
        Picker {
            encoder: Arc::new(parts.encoder),
            observer: parts.observer,
            ledger: parts.ledger,
            in_force: ArcSwap::from_pointee(parts.in_force),
            conditions: ArcSwap::default(),
            in_shadow: ArcSwap::default(),
            metrics: parts.metrics,
            tracing: parts.tracing,
            journal: parts.journal,
            recent: Recent::default(),
            history: Mutex::new(history),
            ids: DecisionIds::new(draws.next()),
            draws,
            draining: AtomicBool::new(false),
            encoding: Arc::new(Semaphore::new(threads)),
        }
    }

    /// Chooses pods for a request and books their load. `body` is `None` when none will come.
    ///
    /// # Errors
    /// A [`Refusal`] for the client.
    pub async fn pick(&self, head: Head, body: Option<Bytes>) -> Result<Picked, Refusal> {
        let began = Instant::now();
        let mut span = self.tracing.open(
            head.trace_parent.as_deref(),
            head.trace_state.as_deref(),
            began,
        );
        let result = self.pick_in(&head, body, began, &mut span).await;
        match result {
            Ok((plan, settled)) => Ok(Picked {
                plan,
                flight: self.flight(settled, span, began),
            }),
            Err(refusal) => {
                span.refused(refusal.status, refusal.code);
                Err(refusal)
            }
        }
    }

    /// Writes the span of a request that ended before its pick, or while it waited for it.
    pub fn ended_early(&self, arrival: &Arrival, how: Ended<'_>) {
        let mut span = self.tracing.open(
            arrival.trace_parent.as_deref(),
            arrival.trace_state.as_deref(),
            arrival.at,
        );
        match how {
            Ended::Refused(refusal) => span.refused(refusal.status, refusal.code),
            Ended::Aborted => span.ended("aborted", &Usage::default()),
        }
    }

    async fn pick_in(
        &self,
        head: &Head,
        body: Option<Bytes>,
        began: Instant,
        span: &mut PickSpan,
    ) -> Result<(Plan, Settled), Refusal> {
        let in_force = self.in_force.load_full();
        let understood = self.understand(head, body).await?;
        let understood_at = Instant::now();
        let in_shadow = self.in_shadow.load_full();
        let Admitted {
            decision,
            booking,
            ask,
            observation,
            session,
            stages,
        } = self.admit((&in_force, &in_shadow), head, &understood, span)?;

        let id = self.ids.next_id(SystemTime::now());
        let mut plan = plan(in_force.dialect, &decision, id);
        if !head.gateway_traces
            && let Some(own) = span.traceparent()
        {
            plan.edits.push(HeaderEdit::Set("traceparent", own));
        }
        let times = Times {
            understood: understood_at - began,
            observe: stages.observe,
            decide: stages.decide,
            book: stages.book,
            ..understood.times
        };
        let facts = Facts {
            decision_id: plan.decision_id.to_string(),
            policy: Arc::clone(&in_force.policy.name),
            generation: in_force.policy.generation,
            operation: understood.operation,
            model: understood.label.clone(),
            stream: understood.stream,
            max_tokens: understood.max_tokens,
            counted: understood.counted.as_str(),
            encode_trouble: understood.trouble,
            session,
            decode_pod: observation.name(decision.route.decode().candidate.pod),
            prefill_pod: decision
                .route
                .prefill()
                .map(|pick| observation.name(pick.candidate.pod)),
            candidates: observation.snapshot.len(),
            times,
            trace_id: span.trace_id().map(|trace| trace.to_string()),
            flip: nearest_flip(&decision, &in_force.policy),
        };
        span.decided(&decision, &facts);
        self.metrics.decision(began.elapsed(), span.trace_id());
        self.count(&decision, &facts);
        let record = Arc::new(Record::new(self.journal.sequence(), &decision, &facts));
        self.journal.push(Arc::clone(&record));
        let remembered = Arc::new(Remembered {
            record: Arc::clone(&record),
            ask,
            observation,
            in_force: Arc::clone(&in_force),
        });
        self.recent.push(Arc::clone(&remembered));
        let settled = Settled {
            booking,
            record,
            destination: plan.destination,
            addressee: addressee(&decision, plan.destination),
            route: decision.route.as_str(),
            predicted: predicted(&decision, understood.counted),
            counted: (understood.counted == Counted::Exact).then_some(decision.prompt_tokens.0),
            beside: in_shadow.policy().is_some().then(|| {
                Box::new(Beside {
                    remembered,
                    decision,
                    in_shadow: Arc::clone(&in_shadow),
                })
            }),
        };
        Ok((plan, settled))
    }

    /// Reads the body and turns its prompt into tokens, on a blocking thread when it is long.
    async fn understand(&self, head: &Head, body: Option<Bytes>) -> Result<Understood, Refusal> {
        let began = Instant::now();
        let Some((api, body)) = Api::from_path(&head.path).zip(body) else {
            return Ok(Understood::pass_through());
        };
        let sizes = self.observer.block_sizes();
        if body.len() <= INLINE_BYTES {
            return ask::understand(&self.encoder, (api, &body), &sizes, began);
        }
        let permit = Arc::clone(&self.encoding)
            .acquire_owned()
            .await
            .map_err(|_| stopping())?;
        let encoder = Arc::clone(&self.encoder);
        tokio::task::spawn_blocking(move || {
            let _permit = permit;
            ask::understand(&encoder, (api, &body), &sizes, began)
        })
        .await
        .map_err(|_| stopping())?
    }

    fn count(&self, decision: &Decision, facts: &Facts) {
        let label = facts
            .model
            .clone()
            .unwrap_or_else(|| Arc::from(OTHER_MODEL));
        self.metrics.decided(
            &label,
            decision.route.as_str(),
            decision.because.as_str(),
            decision.because.is_bypass(),
        );
        self.metrics.reason(decision.because);
        self.metrics.stage("parse", facts.times.parse);
        self.metrics.stage("encode", facts.times.encode);
        self.metrics.stage("observe", facts.times.observe);
        self.metrics.stage("decide", facts.times.decide);
        self.metrics.stage("book", facts.times.book);
        if let Some(trouble) = facts.encode_trouble {
            self.metrics.encode_trouble(trouble);
            tracing::warn!(
                kind = trouble,
                model = facts.model.as_deref(),
                "a prompt was only estimated: cached blocks cannot be seen; check the model's tokenizer and chat template"
            );
        }
        if decision.because == Because::NoPrefillPod {
            tracing::warn!(
                "no prefill pod can be had, so a decode pod prefills too; check the pods of role prefill (/v1/pods) and, with prefillFirst, that the gateway's subset holds them"
            );
        }
        tracing::debug!(
            id = facts.decision_id,
            route = decision.route.as_str(),
            because = decision.because.as_str(),
            decode = %facts.decode_pod,
            prefill = facts.prefill_pod.as_deref(),
            model = facts.model.as_deref(),
            prompt_tokens = decision.prompt_tokens.0,
            net_new_tokens = decision.considered.local.as_ref().map(|pick| pick.net_new_tokens.0),
            rule = decision.rule,
            generation = facts.generation,
            trace_id = facts.trace_id.as_deref(),
            "decided"
        );
    }

    fn flight(&self, settled: Settled, span: PickSpan, began: Instant) -> Flight {
        Flight {
            booking: settled.booking,
            span,
            record: settled.record,
            metrics: self.metrics.clone(),
            roster: Arc::clone(&self.observer.roster),
            began,
            destination: settled.destination,
            addressee: settled.addressee,
            route: settled.route,
            predicted: settled.predicted,
            counted: settled.counted,
            beside: settled.beside,
            status: None,
            progress: Progress::Waiting,
            tail: Tail::default(),
        }
    }

    /// Puts a policy in force for requests that are decided from now on.
    pub fn set_policy(&self, mut in_force: InForce) {
        in_force.policy.generation = self.in_force.load().policy.generation + 1;
        self.metrics.generation(in_force.policy.generation);
        self.history.lock().push(&in_force);
        self.in_force.store(Arc::new(in_force));
    }

    /// Stops being ready, for good: the process is about to end.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// Says how the policy stands.
    pub fn set_conditions(&self, conditions: Vec<PolicyCondition>) {
        self.conditions.store(Arc::new(conditions));
    }

    /// Puts a policy in the shadow of the one in force, for requests that are decided from now on.
    pub fn set_shadow(&self, mut in_shadow: InShadow) {
        if let (InShadow::Policy(new), InShadow::Policy(old)) =
            (&mut in_shadow, &**self.in_shadow.load())
        {
            new.generation = old.generation + 1;
        }
        self.metrics
            .shadow_unresolved(matches!(in_shadow, InShadow::Unresolved(_)));
        self.in_shadow.store(Arc::new(in_shadow));
    }

    /// The policy in the shadow of the one in force.
    #[must_use]
    pub fn in_shadow(&self) -> Arc<InShadow> {
        self.in_shadow.load_full()
    }

    /// The policy in force.
    #[must_use]
    pub fn in_force(&self) -> Arc<InForce> {
        self.in_force.load_full()
    }

    /// Where decisions are counted.
    #[must_use]
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// The last decisions.
    #[must_use]
    pub fn journal(&self) -> &Journal {
        &self.journal
    }

    /// What was promised to pods.
    #[must_use]
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Pods, their caches and states.
    #[must_use]
    pub fn observer(&self) -> &Observer {
        &self.observer
    }

    /// Where spans go.
    #[must_use]
    pub fn tracing(&self) -> &Tracing {
        &self.tracing
    }
}

/// What a decision leaves behind for its flight.
struct Settled {
    booking: Booking,
    record: Arc<Record>,
    destination: Endpoint,
    addressee: Addressee,
    route: &'static str,
    predicted: Option<u64>,
    counted: Option<u64>,
    beside: Option<Box<Beside>>,
}

/// Which of the two pods of `decision` the plan made the destination.
fn addressee(decision: &Decision, destination: Endpoint) -> Addressee {
    match decision.route.prefill() {
        Some(prefill) if prefill.candidate.endpoint == destination => Addressee::Prefill,
        _ => Addressee::Decode,
    }
}

/// The prediction that the engine's own `cached_tokens` can be held against: on a local route the
/// decode pod reports its own cache; on a remote one engines report the prefill pod's.
fn predicted(decision: &Decision, counted: Counted) -> Option<u64> {
    let exact = counted == Counted::Exact;
    (exact && decision.route.prefill().is_none()).then(|| decision.route.decode().cached_tokens.0)
}

fn stopping() -> Refusal {
    Refusal::new(503, "stopping", "the picker is stopping").retry_after(Duration::from_secs(1))
}

/// Chains of a prompt, for the ledger and the index.
type Chains = smallvec::SmallVec<[BlockChain; 1]>;

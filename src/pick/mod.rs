//! The picker: a request in, a plan and what must be released later out.
//!
//! Lives here: [`Picker`], which walks a request through parse, encode, observe, decide, book, plan.
//! Never here: Envoy types, thresholds, file formats.
//! Invariant: a decision and its booking are one step; an error is a [`Refusal`], never a route.

mod ask;
mod draws;
pub mod flight;
pub mod head;
pub mod refusal;
mod status;
pub mod usage;

pub use flight::Flight;
pub use head::{Head, Headers};
pub use refusal::Refusal;
pub use status::{PodStatus, PolicySummary};

use crate::blocks::BlockChain;
use crate::decide::policy::{Policy, SessionAffinity};
use crate::decide::reason::{Because, NoRoute};
use crate::decide::snapshot::Counted;
use crate::decide::{Decision, decide};
use crate::load::{Admission, Booking, Ledger};
use crate::names::{ModelName, SessionId};
use crate::observe::{Observation, Observer};
use crate::pick::ask::Understood;
use crate::pick::draws::Draws;
use crate::pick::flight::Progress;
use crate::pick::usage::Tail;
use crate::prompt::{Api, Encoder};
use crate::route::{DecisionIds, Dialect, HeaderEdit, Plan, plan};
use crate::telemetry::journal::Journal;
use crate::telemetry::metrics::{Metrics, OTHER_MODEL};
use crate::telemetry::record::{Facts, Record, SessionOutcome, Times};
use crate::telemetry::trace::{PickSpan, Tracing};
use arc_swap::ArcSwap;
use bytes::Bytes;
use std::sync::Arc;
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
    metrics: Metrics,
    tracing: Tracing,
    journal: Journal,
    ids: DecisionIds,
    draws: Draws,
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
        Picker {
            encoder: Arc::new(parts.encoder),
            observer: parts.observer,
            ledger: parts.ledger,
            in_force: ArcSwap::from_pointee(parts.in_force),
            metrics: parts.metrics,
            tracing: parts.tracing,
            journal: parts.journal,
            ids: DecisionIds::new(draws.next()),
            draws,
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

    async fn pick_in(
        &self,
        head: &Head,
        body: Option<Bytes>,
        began: Instant,
        span: &mut PickSpan,
    ) -> Result<(Plan, Settled), Refusal> {
        let in_force = self.in_force.load_full();
        let understood = self.understand(head, body, began).await?;
        let understood_at = Instant::now();
        let admitted = self.admit(&in_force.policy, head, &understood, span)?;
        let Admitted {
            decision,
            booking,
            observation,
            session,
            stages,
        } = admitted;

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
            candidates: observation.snapshot.candidates.len(),
            times,
            trace_id: span.trace_id().map(|trace| trace.to_string()),
        };
        span.decided(&decision, &facts);
        self.metrics.decision(began.elapsed(), span.trace_id());
        self.count(&decision, &facts);
        let record = Arc::new(Record::new(self.journal.sequence(), &decision, &facts));
        self.journal.push(Arc::clone(&record));
        let settled = Settled {
            booking,
            record,
            destination: plan.destination,
            route: decision.route.as_str(),
            predicted: predicted(&decision, understood.counted),
            counted: (understood.counted == Counted::Exact).then_some(decision.prompt_tokens.0),
        };
        Ok((plan, settled))
    }

    /// Reads the body and turns its prompt into tokens, on a blocking thread when it is long.
    async fn understand(
        &self,
        head: &Head,
        body: Option<Bytes>,
        began: Instant,
    ) -> Result<Understood, Refusal> {
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

    fn admit(
        &self,
        policy: &Policy,
        head: &Head,
        understood: &Understood,
        span: &mut PickSpan,
    ) -> Result<Admitted, Refusal> {
        let now = Instant::now();
        let session = session(policy, head, understood);
        if let Some((session, _)) = &session {
            span.turn_of(session.as_str());
        }
        let names: Vec<&ModelName> = understood.names.iter().collect();
        let mut observation = self.observer.look(&names, &understood.chains, now);
        let mut ask = understood.ask(head, self.draws.next());
        let mut before = None;
        let mut stages = Times::default();
        let observed_at = Instant::now();
        stages.observe = observed_at - now;
        let mut decided_at = observed_at;
        let admission = Admission {
            chains: &understood.chains,
            session: session.as_ref().map(|(id, ttl)| (id, *ttl)),
            now,
        };
        let (decision, booking) = self
            .ledger
            .admit(admission, |loads| {
                observation.with_loads(loads);
                before = loads.session_pod();
                ask.affinity = ask::affinity(&policy.session_affinity, before);
                let result = decide(&ask, &observation.snapshot, policy);
                decided_at = Instant::now();
                result
            })
            .map_err(refuse)?;
        stages.decide = decided_at - observed_at;
        stages.book = decided_at.elapsed();
        let session = match (&session, before) {
            (None, _) => SessionOutcome::None,
            (Some(_), None) => SessionOutcome::New,
            (Some(_), Some(pod)) if pod == decision.route.decode().candidate.pod => {
                SessionOutcome::Kept
            }
            (Some(_), Some(_)) => SessionOutcome::Moved,
        };
        Ok(Admitted {
            decision,
            booking,
            observation,
            session,
            stages,
        })
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
                "no prefill pod is ready, so decode pods prefill too; check the pods of role prefill (/v1/pods)"
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
            route: settled.route,
            predicted: settled.predicted,
            counted: settled.counted,
            status: None,
            progress: Progress::Waiting,
            tail: Tail::default(),
        }
    }

    /// Puts a policy in force for requests that are decided from now on.
    pub fn set_policy(&self, mut in_force: InForce) {
        in_force.policy.generation = self.in_force.load().policy.generation + 1;
        self.metrics.generation(in_force.policy.generation);
        self.in_force.store(Arc::new(in_force));
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

/// A decision that has been booked.
struct Admitted {
    decision: Decision,
    booking: Booking,
    observation: Observation,
    session: SessionOutcome,
    stages: Times,
}

/// What a decision leaves behind for its flight.
struct Settled {
    booking: Booking,
    record: Arc<Record>,
    destination: crate::names::Endpoint,
    route: &'static str,
    predicted: Option<u64>,
    counted: Option<u64>,
}

fn session(policy: &Policy, head: &Head, understood: &Understood) -> Option<(SessionId, Duration)> {
    let key = match &policy.session_affinity {
        SessionAffinity::Off => return None,
        SessionAffinity::Soft(key) | SessionAffinity::Hard(key) => key,
    };
    head.headers
        .get(&key.header)
        .filter(|value| !value.is_empty())
        .map(SessionId::from)
        .or_else(|| understood.session.clone())
        .map(|id| (id, key.ttl))
}

/// The prediction that the engine's own `cached_tokens` can be held against: on a local route the
/// decode pod reports its own cache; on a remote one engines report the prefill pod's.
fn predicted(decision: &Decision, counted: Counted) -> Option<u64> {
    let exact = counted == Counted::Exact;
    (exact && decision.route.prefill().is_none()).then(|| decision.route.decode().cached_tokens.0)
}

fn refuse(cause: NoRoute) -> Refusal {
    let status = match cause {
        NoRoute::UnknownModel => 404,
        _ => 503,
    };
    let refusal = Refusal::new(status, cause.as_str(), cause.to_string());
    match cause {
        NoRoute::UnknownModel => refusal.with_param(Some("model")),
        _ => refusal.retry_after(Duration::from_secs(1)),
    }
}

fn stopping() -> Refusal {
    Refusal::new(503, "stopping", "the picker is stopping").retry_after(Duration::from_secs(1))
}

/// Chains of a prompt, for the ledger and the index.
type Chains = smallvec::SmallVec<[BlockChain; 1]>;

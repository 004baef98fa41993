//! What a pick would do and why, without doing it.
//!
//! Lives here: [`Picker::explain`], and [`Explainer`], which bounds how often it may be asked.
//! Never here: bookings, counters of decisions, prompt text.
//! Invariant: an explanation leaves the ledger as it was, and nothing of the body outlives it but
//! what the prompt memo keeps of any prompt.

use crate::decide::ask::{Ask, Subset, SubsetEntry};
use crate::decide::cost::Cost;
use crate::decide::eligibility::Ineligible;
use crate::decide::select::{Pick, Purpose, Terms, survey};
use crate::decide::{Decision, NoRoute, Policy, decide, nearest_flip};
use crate::names::{Endpoint, ModelName, PodId};
use crate::observe::Observation;
use crate::pick::ask::Understood;
use crate::pick::question::Question;
use crate::pick::{Head, Picker, Refusal};
use crate::route::names::SUBSET;
use crate::telemetry::explanation::{
    Explanation, PodLine, PodName, PolicyName, RequestLine, ShadowVerdict, Standing, Verdict,
    flip_sentence,
};
use crate::telemetry::record::SessionOutcome;
use crate::telemetry::shadow::ShadowFacts;
use bytes::Bytes;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

/// Bounds on explaining.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExplainLimits {
    /// Explanations per second, over any longer time.
    pub per_second: u32,
    /// Explanations at once, their bodies still on the way included.
    pub at_once: usize,
    /// The longest body, in bytes.
    pub body: usize,
    /// Most pods listed.
    pub pods: usize,
}

impl Default for ExplainLimits {
    fn default() -> Self {
        ExplainLimits {
            per_second: 10,
            at_once: 4,
            body: 16 << 20,
            pods: 1024,
        }
    }
}

/// Explains requests, so many and no more.
#[derive(Debug)]
pub struct Explainer {
    picker: Arc<Picker>,
    limits: ExplainLimits,
    running: Arc<Semaphore>,
    bucket: Mutex<Bucket>,
}

/// The right to one explanation.
#[derive(Debug)]
#[must_use = "dropping the turn gives it back"]
pub struct Turn(OwnedSemaphorePermit);

/// A token bucket that holds one second's worth.
#[derive(Debug)]
struct Bucket {
    left: f64,
    filled: Instant,
}

impl Explainer {
    /// Explains what `picker` would do.
    #[must_use]
    pub fn new(picker: Arc<Picker>, limits: ExplainLimits) -> Explainer {
        Explainer {
            picker,
            limits,
            running: Arc::new(Semaphore::new(limits.at_once)),
            bucket: Mutex::new(Bucket {
                left: f64::from(limits.per_second),
                filled: Instant::now(),
            }),
        }
    }

    /// The bounds.
    #[must_use]
    pub fn limits(&self) -> ExplainLimits {
        self.limits
    }

    /// Asks for the right to one explanation; to be had before a body is read.
    ///
    /// # Errors
    /// A refusal with status 429 when there were too many lately, or are too many now.
    pub fn turn(&self) -> Result<Turn, Refusal> {
        let permit = Arc::clone(&self.running)
            .try_acquire_owned()
            .map_err(|_| too_many(Duration::from_secs(1)))?;
        let rate = f64::from(self.limits.per_second);
        let mut bucket = self.bucket.lock();
        let now = Instant::now();
        let since = now.saturating_duration_since(bucket.filled).as_secs_f64();
        bucket.left = (bucket.left + since * rate).min(rate);
        bucket.filled = now;
        if bucket.left < 1.0 {
            return Err(too_many(Duration::from_secs(1)));
        }
        bucket.left -= 1.0;
        Ok(Turn(permit))
    }

    /// A decision that was made, if it is among the last ones.
    #[must_use]
    pub fn decision(&self, id: &str) -> Option<Explanation> {
        let record = self.picker.journal().find(id)?;
        Some(record.explanation())
    }

    /// Explains one request. Here alone the subset that a gateway sends as metadata may be a header.
    ///
    /// # Errors
    /// What the request itself would be answered when it cannot be read.
    pub async fn explain(
        &self,
        turn: Turn,
        mut head: Head,
        body: Option<Bytes>,
    ) -> Result<Explanation, Refusal> {
        let Turn(_permit) = turn;
        if let Some(subset) = head.headers.get(SUBSET) {
            let entries = subset.split(',').filter_map(|entry| {
                let entry = entry.trim();
                let endpoint = entry.parse().map(|at| SubsetEntry::Endpoint(Endpoint(at)));
                endpoint
                    .or_else(|_| entry.parse().map(SubsetEntry::Ip))
                    .ok()
            });
            head.subset = Subset::Only(entries.collect());
        }
        self.picker.explain(&head, body, self.limits.pods).await
    }
}

fn too_many(after: Duration) -> Refusal {
    Refusal::new(429, "too_many_explanations", "too many explanations").retry_after(after)
}

impl Picker {
    /// Says what [`Picker::pick`] would do with a request now, and why; `pods` bounds the list of pods.
    /// Nothing is booked, counted, traced or written down.
    ///
    /// # Errors
    /// What the request itself would be answered when it cannot be read. That no pod can be had is an
    /// explanation, not an error.
    pub async fn explain(
        &self,
        head: &Head,
        body: Option<Bytes>,
        pods: usize,
    ) -> Result<Explanation, Refusal> {
        let in_force = self.in_force.load_full();
        let in_shadow = self.in_shadow.load_full();
        let understood = self.understand(head, body).await?;
        let policies = (&*in_force, in_shadow.policy());
        let question = Question::new(policies, head, &understood, self.draws.next())?;
        let names: Vec<&ModelName> = understood.names.iter().collect();
        let mut observation = self.observer.look(&names, &understood.chains, question.now);
        let mut ask = question.ask.clone();
        let admission = question.admission(&understood.chains);
        self.ledger.preview(admission, |loads| {
            observation.with_loads(loads);
            Question::bind(&mut ask, question.policy, loads);
        });
        let result = decide(&ask, &observation.snapshot, question.policy);
        let shadow = question.shadow(&ask, &observation.snapshot, &result);
        let seen = Seen {
            ask: &ask,
            observation: &observation,
            policy: question.policy,
        };
        let session = match &result {
            Ok(decision) => question.session_outcome(&ask, decision),
            Err(_) => SessionOutcome::None,
        };
        let (listed, pods_left_out) = seen.pods(&result, pods);
        Ok(Explanation {
            decision: None,
            policy: policy_name(question.policy),
            request: request_line(&understood, session),
            verdict: seen.verdict(&result),
            shadow: shadow.map(|facts| seen.shadow(&facts)),
            pods: listed,
            pods_left_out,
        })
    }
}

/// What one explanation is made from.
struct Seen<'a> {
    ask: &'a Ask,
    observation: &'a Observation,
    policy: &'a Policy,
}

impl Seen<'_> {
    fn named(&self, pod: PodId, endpoint: Endpoint) -> PodName {
        PodName {
            name: Some(self.observation.name(pod).to_string()),
            endpoint: endpoint.to_string(),
        }
    }

    fn at(&self, endpoint: Endpoint) -> PodName {
        let pod = self.observation.view.at(endpoint);
        PodName {
            name: pod.map(|pod| pod.spec.name.to_string()),
            endpoint: endpoint.to_string(),
        }
    }

    fn verdict(&self, result: &Result<Decision, NoRoute>) -> Verdict {
        match result {
            Ok(decision) => {
                let name = |pick: &Pick| self.named(pick.candidate.pod, pick.candidate.endpoint);
                Verdict {
                    decode: Some(name(decision.route.decode())),
                    prefill: decision.route.prefill().map(name),
                    flip: nearest_flip(decision, self.policy)
                        .as_ref()
                        .map(flip_sentence),
                    ..Verdict::routed(decision.because, decision.rule, &decision.checks)
                }
            }
            Err(cause) => Verdict::refused(*cause, self.policy.rule_for(self.ask).0),
        }
    }

    fn shadow(&self, facts: &ShadowFacts) -> ShadowVerdict {
        let rule = facts.opinion.rule;
        let verdict = match &facts.opinion.verdict {
            Ok(course) => Verdict {
                decode: Some(self.at(course.decode)),
                prefill: course.prefill.map(|endpoint| self.at(endpoint)),
                ..Verdict::routed(course.because, rule, &course.checks)
            },
            Err(cause) => Verdict::refused(*cause, rule),
        };
        ShadowVerdict {
            policy: PolicyName {
                name: facts.policy.to_string(),
                generation: facts.generation,
            },
            agrees: facts.agrees,
            verdict,
        }
    }

    /// Up to `most` pods, those that were selected first, and how many more there are.
    fn pods(&self, result: &Result<Decision, NoRoute>, most: usize) -> (Vec<PodLine>, usize) {
        let snapshot = &self.observation.snapshot;
        let (_, rule) = self.policy.rule_for(self.ask);
        let terms = Terms::new(self.ask, snapshot, self.policy, rule).ok();
        let standings = |purpose| -> Vec<Option<Result<Cost, Ineligible>>> {
            match &terms {
                Some(terms) => survey(self.ask, snapshot, terms, purpose)
                    .map(|(_, cost)| Some(cost))
                    .collect(),
                None => vec![None; snapshot.len()],
            }
        };
        let considered = result.as_ref().map(|found| found.considered);
        let considered = considered.unwrap_or_default();
        let columns = [
            (standings(Purpose::PrefillAndDecode), considered.local),
            (standings(Purpose::Prefill), considered.prefill),
            (standings(Purpose::DecodeOnly), considered.decode),
        ];
        let selected = |pod: PodId| {
            let picks = columns.iter().filter_map(|(_, pick)| pick.as_ref());
            picks.into_iter().any(|pick| pick.candidate.pod == pod)
        };
        let mut order: Vec<usize> = (0..snapshot.len()).collect();
        order.sort_by_key(|index| !selected(snapshot.board().members()[*index].pod));
        let lines: Vec<PodLine> = order
            .iter()
            .take(most)
            .map(|index| {
                let candidate = snapshot.candidate(*index);
                let name = self.observation.name(candidate.pod).to_string();
                let mut line = PodLine::new(&candidate, Some(name));
                let [local, prefill, decode] = columns.each_ref().map(|(costs, pick)| {
                    let chosen = pick.is_some_and(|pick| pick.candidate.pod == candidate.pod);
                    costs[*index]
                        .as_ref()
                        .map_or(Standing::default(), |cost| Standing::new(cost, chosen))
                });
                (line.local, line.prefill, line.decode) = (local, prefill, decode);
                line
            })
            .collect();
        let left_out = order.len() - lines.len();
        (lines, left_out)
    }
}

fn policy_name(policy: &Policy) -> PolicyName {
    PolicyName {
        name: policy.name.to_string(),
        generation: policy.generation,
    }
}

fn request_line(understood: &Understood, session: SessionOutcome) -> RequestLine {
    RequestLine {
        operation: understood.operation.map(str::to_owned),
        model: understood.label.as_deref().map(str::to_owned),
        prompt_tokens: understood.tokens.0,
        counted: understood.counted.as_str().to_owned(),
        encode_trouble: understood.trouble.map(str::to_owned),
        session: session.as_str().to_owned(),
    }
}

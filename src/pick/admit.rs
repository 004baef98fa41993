//! The step in which a request is decided and booked.
//!
//! Lives here: [`Picker::admit`], and what a cause for no pod is to a client.
//! Never here: reading bodies, plans, spans.
//! Invariant: decision and booking come from one snapshot under one lock.

use crate::decide::ask::Ask;
use crate::decide::reason::NoRoute;
use crate::decide::{Decision, decide};
use crate::load::Booking;
use crate::names::ModelName;
use crate::observe::Observation;
use crate::pick::ask::Understood;
use crate::pick::question::Question;
use crate::pick::{Head, InForce, InShadow, Picker, Refusal};
use crate::telemetry::record::{SessionOutcome, Times};
use crate::telemetry::trace::PickSpan;
use std::time::{Duration, Instant};

/// A request that was decided and booked.
pub(super) struct Admitted {
    pub(super) decision: Decision,
    pub(super) booking: Booking,
    pub(super) ask: Ask,
    pub(super) observation: Observation,
    pub(super) session: SessionOutcome,
    pub(super) stages: Times,
}

impl Picker {
    pub(super) fn admit(
        &self,
        (in_force, in_shadow): (&InForce, &InShadow),
        head: &Head,
        understood: &Understood,
        span: &mut PickSpan,
    ) -> Result<Admitted, Refusal> {
        let draw = self.draws.next();
        let question = Question::new((in_force, in_shadow.policy()), head, understood, draw)?;
        if let Some(session) = question.session() {
            span.turn_of(session.as_str());
        }
        let names: Vec<&ModelName> = understood.names.iter().collect();
        let mut observation = self.observer.look(&names, &understood.chains, question.now);
        let observed_at = Instant::now();
        let mut decided_at = observed_at;
        let mut ask = question.ask.clone();
        let admitted = self
            .ledger
            .admit(question.admission(&understood.chains), |loads| {
                observation.with_loads(loads);
                Question::bind(&mut ask, question.policy, loads);
                let result = decide(&ask, &observation.snapshot, question.policy);
                decided_at = Instant::now();
                result
            });
        let stages = Times {
            observe: observed_at - question.now,
            decide: decided_at - observed_at,
            book: decided_at.elapsed(),
            ..Times::default()
        };
        let (decision, booking) = match admitted {
            Ok(admitted) => admitted,
            Err(cause) => {
                // No flight will ask it.
                let shadow = question.shadow(&ask, &observation.snapshot, &Err(cause));
                if let Some(shadow) = shadow {
                    self.metrics.shadow(shadow.taken, shadow.words);
                }
                return Err(refuse(cause));
            }
        };
        Ok(Admitted {
            session: question.session_outcome(&ask, &decision),
            decision,
            booking,
            ask,
            observation,
            stages,
        })
    }
}

fn refuse(cause: NoRoute) -> Refusal {
    let status = match cause {
        NoRoute::UnknownModel => 404,
        // What the client names does not exist; that is not a matter of time.
        NoRoute::PinnedPodUnknown(_) | NoRoute::PinNeedsPort(_) => 400,
        NoRoute::NoPodInSubset
        | NoRoute::NoDecodePod
        | NoRoute::NoPrefillPod
        | NoRoute::NoPodCanPrefill
        | NoRoute::PinnedPodUnavailable(_) => 503,
    };
    let refusal = Refusal::new(status, cause.as_str(), cause.to_string());
    match cause {
        NoRoute::UnknownModel => refusal.with_param(Some("model")),
        NoRoute::PinnedPodUnknown(_) | NoRoute::PinNeedsPort(_) => refusal,
        _ => refusal.retry_after(Duration::from_secs(1)),
    }
}

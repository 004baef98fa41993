//! One request in the form that is decided, booked or only explained.
//!
//! Lives here: [`Question`], which both the real pick and its explanation put to the ledger.
//! Never here: waiting, bookings.
//! Invariant: a pick and its explanation ask the same question of the same kernel.

use crate::decide::Decision;
use crate::decide::ask::Ask;
use crate::decide::policy::{Policy, SessionAffinity};
use crate::decide::reason::NoRoute;
use crate::decide::snapshot::Snapshot;
use crate::load::{Admission, Loads};
use crate::names::SessionId;
use crate::pick::ask::{self, Understood};
use crate::pick::beside;
use crate::pick::{Chains, Head, InForce, Refusal};
use crate::telemetry::record::SessionOutcome;
use crate::telemetry::shadow::ShadowFacts;
use std::time::{Duration, Instant};

/// A request, the policy in force and the one in its shadow.
#[derive(Debug)]
pub(super) struct Question<'a> {
    pub(super) policy: &'a Policy,
    shadow: Option<&'a Policy>,
    pub(super) ask: Ask,
    session: Option<(SessionId, Duration)>,
    pub(super) now: Instant,
}

impl<'a> Question<'a> {
    pub(super) fn new(
        (in_force, shadow): (&'a InForce, Option<&'a Policy>),
        head: &Head,
        understood: &Understood,
        draw: u64,
    ) -> Result<Question<'a>, Refusal> {
        let policy = &in_force.policy;
        Ok(Question {
            policy,
            shadow,
            ask: understood.ask(head, in_force, draw)?,
            session: session(policy, head, understood),
            now: Instant::now(),
        })
    }

    pub(super) fn admission<'b>(&'b self, chains: &'b Chains) -> Admission<'b> {
        Admission {
            chains,
            session: self.session.as_ref().map(|(id, ttl)| (id, *ttl)),
            now: self.now,
        }
    }

    /// The conversation it belongs to.
    pub(super) fn session(&self) -> Option<&SessionId> {
        self.session.as_ref().map(|(id, _)| id)
    }

    /// Notes the pods of the session, which only the ledger knows.
    pub(super) fn bind(ask: &mut Ask, policy: &Policy, loads: &Loads<'_>) {
        ask.affinity = ask::affinity(&policy.session_affinity, loads.session_pod());
        ask.prefill_affinity = loads.session_prefill_pod();
    }

    /// What the shadow says of `result`, made of the same snapshot.
    pub(super) fn shadow(
        &self,
        ask: &Ask,
        snapshot: &Snapshot,
        result: &Result<Decision, NoRoute>,
    ) -> Option<ShadowFacts> {
        let shadow = self.shadow?;
        Some(beside::facts(
            (ask, snapshot),
            (self.policy, result),
            shadow,
        ))
    }

    /// What becomes of the session with `decision`, made for `ask`.
    pub(super) fn session_outcome(&self, ask: &Ask, decision: &Decision) -> SessionOutcome {
        match (&self.session, ask.affinity.pod()) {
            (None, _) => SessionOutcome::None,
            (Some(_), None) => SessionOutcome::New,
            (Some(_), Some(pod)) if pod == decision.route.decode().candidate.pod => {
                SessionOutcome::Kept
            }
            (Some(_), Some(_)) => SessionOutcome::Moved,
        }
    }
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

//! The shadow's opinion of a request that is on its way.
//!
//! Lives here: [`Beside`], everything such an opinion needs, kept until the answer is out.
//! Never here: choices; an opinion is recorded, never obeyed.
//! Invariant: the opinion is of the very snapshot that was decided on, and nobody waits for it.

use crate::decide::ask::Ask;
use crate::decide::shadow::{Decided, opinion};
use crate::decide::snapshot::Snapshot;
use crate::decide::{Decision, NoRoute, Policy};
use crate::pick::InShadow;
use crate::pick::ask;
use crate::pick::recent::Remembered;
use crate::telemetry::shadow::ShadowFacts;
use std::sync::Arc;

/// A decision whose shadow was not asked yet.
#[derive(Debug)]
pub(super) struct Beside {
    pub(super) remembered: Arc<Remembered>,
    pub(super) decision: Decision,
    pub(super) in_shadow: Arc<InShadow>,
}

impl Beside {
    /// What the shadow says, if there is one.
    pub(super) fn facts(self) -> Option<ShadowFacts> {
        let Remembered {
            ask,
            observation,
            in_force,
            ..
        } = &*self.remembered;
        let seen = (ask, &observation.snapshot);
        let result = Ok(self.decision);
        let shadow = self.in_shadow.policy()?;
        Some(facts(seen, (&in_force.policy, &result), shadow))
    }
}

/// The opinion of `shadow`, beside what `policy` made of the same.
pub(super) fn facts(
    (ask, snapshot): (&Ask, &Snapshot),
    (policy, result): (&Policy, &Result<Decision, NoRoute>),
    shadow: &Policy,
) -> ShadowFacts {
    // The shadow's own session affinity decides what the session's pod means to it.
    let affinity = ask::affinity(&shadow.session_affinity, ask.affinity.pod());
    let opinion = opinion(ask, affinity, snapshot, Decided { policy, result }, shadow);
    ShadowFacts::new(shadow, opinion, result.as_ref().map_err(|cause| *cause))
}

//! How the policy of a file stands: its conditions, and what it and the other files together do not mean.
//!
//! Lives here: what was last read of policy, pods and models, and saying what changed about it.
//! Never here: what a condition is (see `config::conditions`), what a policy in the cluster is told.
//! Invariant: whatever file changes, conditions and warnings are about the content in force; a policy
//! that was refused is said to be so until the next one.

use crate::config::conditions::{Condition, Offered, Scope, World, conditions};
use crate::config::{Diagnostics, LoadedPolicy, ModelConfig, across};
use crate::fleet::PodSpec;
use crate::pick::{Picker, PolicyCondition};
use parking_lot::Mutex;
use std::path::Path;
use std::sync::{Arc, Weak};

/// What is known of policy, pods and models. Cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct Standing {
    picker: Weak<Picker>,
    state: Arc<Mutex<State>>,
}

#[derive(Debug)]
struct State {
    policy: LoadedPolicy,
    /// Why a later content of the file was refused, if it was.
    refused: Option<Diagnostics>,
    pods: Vec<PodSpec>,
    models: Vec<ModelConfig>,
    /// What has been said.
    conditions: Vec<Condition>,
    warnings: Vec<String>,
}

impl Standing {
    /// The standing at the start, whose warnings have been given already.
    pub(super) fn new(
        picker: &Arc<Picker>,
        policy: LoadedPolicy,
        (pods, models): (Vec<PodSpec>, Vec<ModelConfig>),
    ) -> Standing {
        let warnings = across((&policy.policy, &pods, &models), Path::new(""));
        let state = State {
            policy,
            refused: None,
            pods,
            models,
            conditions: Vec::new(),
            warnings: warnings.into_iter().map(|one| one.message).collect(),
        };
        let standing = Standing {
            picker: Arc::downgrade(picker),
            state: Arc::new(Mutex::new(state)),
        };
        standing.change(|_| {});
        standing
    }

    /// This policy is in force.
    pub(super) fn policy(&self, policy: LoadedPolicy) {
        self.change(|state| {
            state.policy = policy;
            state.refused = None;
        });
    }

    /// The file has these faults; what was in force stays.
    pub(super) fn refused(&self, faults: Diagnostics) {
        self.change(|state| state.refused = Some(faults));
    }

    /// These are the pods.
    pub(super) fn pods(&self, pods: Vec<PodSpec>) {
        self.change(|state| state.pods = pods);
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let Some(picker) = self.picker.upgrade() else {
            return;
        };
        let mut state = self.state.lock();
        change(&mut state);
        state.warn();
        let now = state.judge();
        // First shown, then logged: who reads the log finds it there.
        picker.set_conditions(now.iter().map(readable).collect());
        for condition in now.iter().filter(|one| !state.conditions.contains(one)) {
            say(condition);
        }
        state.conditions = now;
    }
}

impl State {
    fn judge(&self) -> Vec<Condition> {
        let offered = Offered {
            name: &self.policy.policy.name,
            created: 0,
            policy: match &self.refused {
                Some(faults) => Err(faults),
                None => Ok(&self.policy),
            },
        };
        let world = World {
            scope: Scope::File,
            models: &self.models,
            pods: &self.pods,
        };
        conditions(&[offered], &world)
            .into_iter()
            .flatten()
            .collect()
    }

    /// Warns of what the files together do not mean, unless that has been said.
    fn warn(&mut self) {
        let parts = (&self.policy.policy, &*self.pods, &*self.models);
        let found = across(parts, Path::new(""));
        let messages: Vec<String> = found.into_iter().map(|one| one.message).collect();
        for message in messages.iter().filter(|one| !self.warnings.contains(one)) {
            tracing::warn!("{message}");
        }
        self.warnings = messages;
    }
}

fn say(condition: &Condition) {
    let (kind, reason) = (condition.kind.as_str(), condition.reason.as_str());
    let message = &condition.message;
    if condition.holds {
        tracing::info!(condition = kind, reason, "{message}");
    } else {
        tracing::warn!(condition = kind, reason, "not so: {message}");
    }
}

/// A condition for the admin port.
pub(super) fn readable(condition: &Condition) -> PolicyCondition {
    PolicyCondition {
        kind: condition.kind.as_str(),
        status: if condition.holds { "True" } else { "False" },
        reason: condition.reason.as_str(),
        message: condition.message.clone(),
    }
}

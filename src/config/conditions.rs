//! What stands between a policy and its effect, in the words of Kubernetes.
//!
//! Lives here: [`Condition`], and one function from policies and what is known of the cluster to their
//! conditions; [`Observed`], the decisions of the last minutes.
//! Never here: writing them anywhere (a controller does, and the admin port shows them), validity (see
//! `parse`).
//! Invariant: every policy gets each condition exactly once, whatever is wrong with it; nothing here
//! changes what a policy does.

use crate::config::node::quoted;
use crate::config::{Diagnostics, LoadedPolicy, ModelConfig, Shadow, TargetRef, lint};
use crate::decide::reason::Because;
use crate::fleet::PodSpec;
use std::collections::BTreeMap;
use std::collections::VecDeque;
use std::time::Duration;

macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($(#[doc = $vdoc:literal])+ $variant:ident,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $name {
            $($(#[doc = $vdoc])+ $variant,)+
        }

        impl $name {
            /// Every value, in order.
            pub const ALL: &'static [$name] = &[$($name::$variant,)+];

            /// The word in status, logs and docs.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self {
                    $($name::$variant => stringify!($variant),)+
                }
            }

            /// What it means, in a sentence; the documentation's table is made of these.
            #[must_use]
            pub fn meaning(self) -> &'static str {
                match self {
                    $($name::$variant => concat!($($vdoc),+).trim_ascii(),)+
                }
            }
        }
    };
}

words! {
    /// What a condition is about.
    ConditionType {
        /// Whether the policy is valid and the only one of its target.
        Accepted,
        /// Whether all that it names is there.
        ResolvedRefs,
        /// Whether requests are judged by it, and can bypass by it.
        Effective,
    }
}

words! {
    /// Why a condition is as it is.
    ConditionReason {
        /// Accepted: it is valid and the only one of its target.
        Accepted,
        /// Not accepted: it has faults; what was in force stays.
        Invalid,
        /// Not accepted: an older policy applies to the same target.
        Conflicted,

        /// Resolved: all that it names is there.
        ResolvedRefs,
        /// Not resolved: its target is of a kind that no policy applies to.
        InvalidKind,
        /// Not resolved: its target is not there.
        TargetNotFound,
        /// Not resolved: its shadow is not there.
        ShadowNotFound,
        /// Not resolved: a rule names models of which none is known.
        ModelNotFound,

        /// Effective: requests are judged by it.
        Effective,
        /// Effective in part: some pods lack what it needs.
        EffectiveInPart,
        /// Not effective: it is not accepted; an older version of it, if any, stays in force.
        NotAccepted,
        /// Not effective: it names no target. It may be the shadow of another policy.
        NoTarget,
        /// Not effective: its target is not there, or of a wrong kind.
        NotResolved,
        /// Not effective: no pod decodes.
        NoDecodePod,
        /// Not effective: no pod can do what its bypass needs.
        NothingBypasses,
    }
}

/// One condition of one policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    /// What it is about.
    pub kind: ConditionType,
    /// Whether it holds.
    pub holds: bool,
    /// Why, in a word.
    pub reason: ConditionReason,
    /// Why, for people.
    pub message: String,
}

/// A policy as it is offered: in an object or a file.
#[derive(Clone, Copy, Debug)]
pub struct Offered<'a> {
    /// Its name.
    pub name: &'a str,
    /// When it was made, in any unit; the older of two comes first. Of equals, the name decides.
    pub created: i64,
    /// What it says.
    pub policy: Result<&'a LoadedPolicy, &'a Diagnostics>,
}

/// Where a policy applies.
#[derive(Clone, Copy, Debug)]
pub enum Scope<'a> {
    /// The process that reads it obeys it, whatever its target.
    File,
    /// It applies to its target, which must be one of these.
    Targets(&'a [TargetRef]),
}

/// What is known beside the policies.
#[derive(Clone, Copy, Debug)]
pub struct World<'a> {
    /// Where policies apply.
    pub scope: Scope<'a>,
    /// The models that clients may name; empty when any may be.
    pub models: &'a [ModelConfig],
    /// The pods of the target.
    pub pods: &'a [PodSpec],
}

/// The kinds of objects a policy can apply to.
const TARGET_KINDS: [(&str, &str); 2] = [
    ("inference.networking.k8s.io", "InferencePool"),
    ("", "Service"),
];

/// The conditions of each of `policies`, in their order.
#[must_use]
pub fn conditions(policies: &[Offered<'_>], world: &World<'_>) -> Vec<[Condition; 3]> {
    policies
        .iter()
        .map(|one| {
            let accepted = accepted(one, policies, world);
            let resolved = resolved(one, policies, world);
            let effective = effective(one, (&accepted, &resolved), world);
            [accepted, resolved, effective]
        })
        .collect()
}

fn condition(
    kind: ConditionType,
    holds: bool,
    reason: ConditionReason,
    message: impl Into<String>,
) -> Condition {
    let message = message.into();
    Condition {
        kind,
        holds,
        reason,
        message: if message.is_empty() {
            reason.meaning().to_owned()
        } else {
            message
        },
    }
}

fn accepted(one: &Offered<'_>, all: &[Offered<'_>], world: &World<'_>) -> Condition {
    let say =
        |holds, reason, message: String| condition(ConditionType::Accepted, holds, reason, message);
    let policy = match one.policy {
        Ok(policy) => policy,
        Err(faults) => {
            let mut message = faults
                .faults
                .first()
                .map(|fault| format!("{}: {}", fault.path, fault.message))
                .unwrap_or_default();
            let more = faults.faults.len().saturating_sub(1) + faults.left_out;
            if more != 0 {
                message.push_str(&format!(" (and {more} more)"));
            }
            return say(false, ConditionReason::Invalid, message);
        }
    };
    let older = |other: &&Offered<'_>| {
        (other.created, other.name) < (one.created, one.name)
            && other
                .policy
                .is_ok_and(|other| other.target == policy.target)
    };
    let first = match world.scope {
        Scope::File => None,
        Scope::Targets(_) if policy.target.is_none() => None,
        Scope::Targets(_) => all
            .iter()
            .filter(older)
            .min_by_key(|other| (other.created, other.name)),
    };
    match first {
        Some(first) => say(
            false,
            ConditionReason::Conflicted,
            format!(
                "{} is older and applies to the same target",
                quoted(first.name)
            ),
        ),
        None => say(true, ConditionReason::Accepted, String::new()),
    }
}

fn resolved(one: &Offered<'_>, all: &[Offered<'_>], world: &World<'_>) -> Condition {
    let say = |holds, reason, message: String| {
        condition(ConditionType::ResolvedRefs, holds, reason, message)
    };
    let Ok(policy) = one.policy else {
        // What a faulty policy names is not known.
        return say(true, ConditionReason::ResolvedRefs, String::new());
    };
    if let (Some(target), Scope::Targets(targets)) = (&policy.target, world.scope) {
        if !TARGET_KINDS.contains(&(&*target.group, &*target.kind)) {
            let message = format!(
                "expected an InferencePool or a Service, found a {} of the group {}",
                quoted(&target.kind),
                quoted(&target.group)
            );
            return say(false, ConditionReason::InvalidKind, message);
        }
        if !targets.contains(target) {
            let message = format!("there is no {} {}", target.kind, quoted(&target.name));
            return say(false, ConditionReason::TargetNotFound, message);
        }
    }
    if let Some(message) = lost_shadow(&policy.shadow, all, world) {
        return say(false, ConditionReason::ShadowNotFound, message);
    }
    let unknown = lint::unmatched_patterns(&policy.policy, world.models);
    if !unknown.is_empty() {
        let message = format!("no configured model matches {}", lint::listed(&unknown));
        return say(false, ConditionReason::ModelNotFound, message);
    }
    say(true, ConditionReason::ResolvedRefs, String::new())
}

fn lost_shadow(shadow: &Shadow, all: &[Offered<'_>], world: &World<'_>) -> Option<String> {
    match (shadow, world.scope) {
        (Shadow::Off, _) | (Shadow::File(_), Scope::File) => None,
        (Shadow::Named(name), Scope::Targets(_)) => {
            let found = all
                .iter()
                .any(|other| other.name == &**name && other.policy.is_ok());
            (!found).then(|| format!("there is no valid policy {}", quoted(name)))
        }
        // Files have no names by which one could be found.
        (Shadow::Named(name), Scope::File) => Some(format!(
            "a policy in a file names its shadow by file, not by the name {}",
            quoted(name)
        )),
        (Shadow::File(_), Scope::Targets(_)) => {
            Some("a policy in a cluster names its shadow by name, not by file".to_owned())
        }
    }
}

fn effective(
    one: &Offered<'_>,
    (accepted, resolved): (&Condition, &Condition),
    world: &World<'_>,
) -> Condition {
    let say = |holds, reason, message: String| {
        condition(ConditionType::Effective, holds, reason, message)
    };
    let policy = match one.policy {
        Ok(policy) if accepted.holds => policy,
        _ => return say(false, ConditionReason::NotAccepted, String::new()),
    };
    if let Scope::Targets(_) = world.scope {
        if policy.target.is_none() {
            return say(false, ConditionReason::NoTarget, String::new());
        }
        let lost = [
            ConditionReason::InvalidKind,
            ConditionReason::TargetNotFound,
        ];
        if lost.contains(&resolved.reason) {
            return say(
                false,
                ConditionReason::NotResolved,
                resolved.message.clone(),
            );
        }
    }
    if !world.pods.iter().any(|pod| pod.role.decodes()) {
        return say(false, ConditionReason::NoDecodePod, String::new());
    }
    let lacks = lint::prerequisites(&policy.policy, world.pods);
    let messages: Vec<&str> = lacks.iter().map(|lack| &*lack.message).collect();
    let message = messages.join("; ");
    if lacks.iter().any(|lack| lack.of_all) {
        return say(false, ConditionReason::NothingBypasses, message);
    }
    if !lacks.is_empty() {
        return say(true, ConditionReason::EffectiveInPart, message);
    }
    say(true, ConditionReason::Effective, String::new())
}

/// The decisions of the last minutes, by reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Observed {
    /// How long that is.
    pub window: Duration,
    /// How many there were of each reason that occurred.
    pub by_reason: BTreeMap<Because, u64>,
}

impl Observed {
    /// How many there were.
    #[must_use]
    pub fn decisions(&self) -> u64 {
        self.by_reason.values().sum()
    }
}

/// Turns counters that only grow into [`Observed`]. Memory is bounded by the number of samples.
#[derive(Clone, Debug)]
pub struct Samples {
    most: usize,
    taken: VecDeque<(Duration, BTreeMap<Because, u64>)>,
}

impl Samples {
    /// Room for `most` samples, at least two.
    #[must_use]
    pub fn new(most: usize) -> Samples {
        Samples {
            most: most.max(2),
            taken: VecDeque::new(),
        }
    }

    /// Adds the counters as they are `now`, a time since any fixed moment.
    pub fn take(&mut self, now: Duration, counters: BTreeMap<Because, u64>) {
        while self.most <= self.taken.len() {
            self.taken.pop_front();
        }
        self.taken.push_back((now, counters));
    }

    /// What was decided between the oldest sample and the newest. Counters that shrank, because the
    /// counting began anew, count from 0.
    #[must_use]
    pub fn observed(&self) -> Observed {
        let (Some((began, before)), Some((now, counted))) = (self.taken.front(), self.taken.back())
        else {
            return Observed {
                window: Duration::ZERO,
                by_reason: BTreeMap::new(),
            };
        };
        let by_reason = counted.iter().filter_map(|(because, count)| {
            let before = before.get(because).copied().unwrap_or(0);
            let since = count.checked_sub(before).unwrap_or(*count);
            (since != 0).then_some((*because, since))
        });
        Observed {
            window: now.saturating_sub(*began),
            by_reason: by_reason.collect(),
        }
    }
}

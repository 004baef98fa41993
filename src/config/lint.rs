//! What no file says wrong by itself, and what the files together probably do not mean.
//!
//! Lives here: the warnings that need policy, pods and models at once.
//! Never here: faults, warnings about one file (see `parse`).
//! Invariant: nothing here changes what a process does.

use crate::config::diagnostic::{Finding, Position};
use crate::config::node::quoted;
use crate::config::{ModelConfig, Tokenizer};
use crate::decide::policy::{Bypass, DecodeGate, Policy, Rule};
use crate::decide::snapshot::{CapacitySource, LocalPrefill};
use crate::fleet::{PodSpec, Probe};
use crate::units::Tokens;
use std::path::Path;
use std::sync::Arc;

/// Most findings of one kind that are spelled out.
const MOST_NAMED: usize = 5;

/// The warnings about a policy, the pods and the models together, as found in `file`.
#[must_use]
pub fn across(
    (policy, pods, models): (&Policy, &[PodSpec], &[ModelConfig]),
    file: &Path,
) -> Vec<Finding> {
    let mut notes = Vec::new();
    for lack in prerequisites(policy, pods) {
        notes.push(("pods", lack.message));
    }
    unknown_models((policy, pods, models), &mut notes);
    let file: Arc<Path> = Arc::from(file);
    notes
        .into_iter()
        .map(|(path, message)| Finding {
            path: path.to_owned(),
            message,
            hint: String::new(),
            file: Arc::clone(&file),
            position: Position::WholeFile,
        })
        .collect()
}

type Notes = Vec<(&'static str, String)>;

/// What pods lack that a policy needs of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Lack {
    /// For people.
    pub(crate) message: String,
    /// Whether for want of it nothing bypasses anywhere.
    pub(crate) of_all: bool,
}

/// What `pods` lack that the bypasses of `policy` need.
pub(crate) fn prerequisites(policy: &Policy, pods: &[PodSpec]) -> Vec<Lack> {
    let decode: Vec<&PodSpec> = pods.iter().filter(|pod| pod.role.decodes()).collect();
    let mut lacks = Vec::new();
    lacks.extend(bypass_without_events(policy, &decode));
    lacks.extend(gate_without_capacity(policy, &decode));
    lacks.extend(nobody_prefills_locally(policy, &decode));
    lacks
}

fn bounds_isl(rule: &Rule) -> bool {
    matches!(rule.bypass, Bypass::IslBounding(_) | Bypass::IslOrLoad(..))
}

/// Whether the rule bypasses only by net-new tokens, and only when some of them are cached.
fn needs_events(rule: &Rule) -> bool {
    match rule.bypass {
        Bypass::Never => true,
        Bypass::IslBounding(bound) => bound.cold_bypass_below == Tokens::ZERO,
        Bypass::Always | Bypass::PrefillLoad(_) | Bypass::IslOrLoad(..) => false,
    }
}

/// A pod without events looks empty for ever: its share of net-new tokens is always 1.
fn bypass_without_events(policy: &Policy, decode: &[&PodSpec]) -> Option<Lack> {
    if !policy.rules.iter().any(bounds_isl) {
        return None;
    }
    let silent: Vec<&str> = decode
        .iter()
        .filter(|pod| pod.kv_events.is_none())
        .map(|pod| &*pod.name)
        .collect();
    (!silent.is_empty()).then(|| Lack {
        message: format!(
            "the policy compares net-new tokens, and no kvEvents are configured for {}: nothing \
             ever counts as cached there",
            listed(&silent)
        ),
        of_all: silent.len() == decode.len() && policy.rules.iter().all(needs_events),
    })
}

/// Nobody will ever know the capacity of a pod that is neither asked nor told.
fn gate_without_capacity(policy: &Policy, decode: &[&PodSpec]) -> Option<Lack> {
    let gates = policy.rules.iter().map(|rule| &rule.gate);
    let trusted = |source| {
        gates.clone().any(|gate| match gate {
            DecodeGate::On { trust, .. } => trust.contains(&source),
            DecodeGate::Off => false,
        })
    };
    if gates.clone().all(|gate| *gate == DecodeGate::Off) {
        return None;
    }
    let known = |pod: &PodSpec| match (pod.kv_blocks, &pod.probe) {
        (Some(_), _) => trusted(CapacitySource::Configured),
        (None, Probe::Metrics { .. }) => trusted(CapacitySource::Reported),
        (None, Probe::Off) => false,
    };
    let unknown: Vec<&str> = decode
        .iter()
        .filter(|pod| !known(pod))
        .map(|pod| &*pod.name)
        .collect();
    let gated = |rule: &Rule| rule.bypass == Bypass::Never || rule.gate != DecodeGate::Off;
    (!unknown.is_empty()).then(|| Lack {
        message: format!(
            "the policy has a decodeBusyThreshold, and no trusted capacity can be had of {}: the \
             gate never lets a request bypass there",
            listed(&unknown)
        ),
        of_all: unknown.len() == decode.len() && policy.rules.iter().all(gated),
    })
}

fn nobody_prefills_locally(policy: &Policy, decode: &[&PodSpec]) -> Option<Lack> {
    let bypasses = |rule: &Rule| rule.bypass != Bypass::Never;
    let unable = |pod: &&PodSpec| pod.local_prefill == LocalPrefill::Unable;
    let nobody = !decode.is_empty() && decode.iter().all(unable);
    (nobody && policy.rules.iter().any(bypasses)).then(|| Lack {
        message: "the policy has a bypass, and no decode pod can prefill: nothing bypasses"
            .to_owned(),
        of_all: true,
    })
}

/// The names that clients may call `models` by.
fn names(models: &[ModelConfig]) -> Vec<&str> {
    models
        .iter()
        .flat_map(|model| {
            std::iter::once(&model.name)
                .chain(&model.aliases)
                .chain(&model.adapters)
        })
        .map(|name| name.as_str())
        .collect()
}

/// The patterns of `policy` that match none of `models`; none when any model may be named.
pub(crate) fn unmatched_patterns<'a>(policy: &'a Policy, models: &[ModelConfig]) -> Vec<&'a str> {
    if models.is_empty() {
        return Vec::new();
    }
    let known = names(models);
    let patterns = policy.rules.iter().flat_map(|rule| &rule.matches.models);
    patterns
        .map(|pattern| &**pattern)
        .filter(|pattern| match pattern.strip_suffix('*') {
            Some(start) => !known.iter().any(|name| name.starts_with(start)),
            None => !known.contains(pattern),
        })
        .collect()
}

fn unknown_models(
    (policy, pods, models): (&Policy, &[PodSpec], &[ModelConfig]),
    notes: &mut Notes,
) {
    if models.is_empty() {
        return;
    }
    for pattern in unmatched_patterns(policy, models) {
        let message = format!("no configured model matches {}", quoted(pattern));
        notes.push(("policy", message));
    }
    let known = names(models);
    let strangers: std::collections::BTreeSet<&str> = pods
        .iter()
        .flat_map(|pod| &pod.models)
        .map(|model| model.as_str())
        .filter(|model| !known.contains(model))
        .collect();
    if !strangers.is_empty() {
        let strangers: Vec<&str> = strangers.into_iter().collect();
        let message = format!(
            "pods serve models that are not configured: {}",
            listed(&strangers)
        );
        notes.push(("models", message));
    }
    let estimated: Vec<&str> = models
        .iter()
        .filter(|model| model.tokenizer == Tokenizer::ByteEstimate)
        .map(|model| model.name.as_str())
        .collect();
    if !estimated.is_empty() && policy.rules.iter().any(bounds_isl) {
        let message = format!(
            "no tokenizer is configured for {}: its prompts are estimated from bytes, and none of \
             its blocks is ever found",
            listed(&estimated)
        );
        notes.push(("models", message));
    }
}

/// The first few of `names`, and how many more there are.
pub(crate) fn listed(names: &[&str]) -> String {
    let shown: Vec<String> = names
        .iter()
        .take(MOST_NAMED)
        .map(|name| quoted(name))
        .collect();
    match names.len().checked_sub(MOST_NAMED) {
        None | Some(0) => shown.join(", "),
        Some(more) => format!("{} and {more} more", shown.join(", ")),
    }
}

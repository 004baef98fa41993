//! What no file says wrong by itself, and what the files together probably do not mean.
//!
//! Lives here: the warnings that need policy, pods and models at once.
//! Never here: faults, warnings about one file (see `parse`).
//! Invariant: nothing here changes what a process does.

use crate::config::diagnostic::{Finding, Position};
use crate::config::node::quoted;
use crate::config::{Loaded, PodSource, Tokenizer};
use crate::decide::policy::{Bypass, DecodeGate, Rule};
use crate::decide::snapshot::{CapacitySource, LocalPrefill};
use crate::fleet::{PodSpec, Probe};
use std::path::Path;
use std::sync::Arc;

/// Most findings of one kind that are spelled out.
const MOST_NAMED: usize = 5;

/// The warnings about `loaded` as a whole.
pub(crate) fn across(loaded: &Loaded, file: &Arc<Path>) -> Vec<Finding> {
    let mut notes = Vec::new();
    match &loaded.process.pods {
        PodSource::Inline | PodSource::File(_) => {
            bypass_without_events(loaded, &mut notes);
            gate_without_capacity(loaded, &mut notes);
            nobody_prefills_locally(loaded, &mut notes);
        }
        // Which pods there are is not known yet.
        PodSource::Kubernetes(discovery) => {
            let bounds = loaded.policy.rules.iter().any(bounds_isl);
            if bounds && discovery.template.kv_events.is_none() {
                let message = "the policy compares net-new tokens, and no kvEvents are configured: \
                               nothing ever counts as cached";
                notes.push(("pods.kubernetes", message.to_owned()));
            }
        }
    }
    unknown_models(loaded, &mut notes);
    notes
        .into_iter()
        .map(|(path, message)| Finding {
            path: path.to_owned(),
            message,
            file: Arc::clone(file),
            position: Position::WholeFile,
        })
        .collect()
}

type Notes = Vec<(&'static str, String)>;

fn decode_pods(loaded: &Loaded) -> impl Iterator<Item = &PodSpec> {
    loaded.pods.iter().filter(|pod| pod.role.decodes())
}

fn bounds_isl(rule: &Rule) -> bool {
    matches!(rule.bypass, Bypass::IslBounding(_) | Bypass::IslOrLoad(..))
}

/// A pod without events looks empty for ever: its share of net-new tokens is always 1.
fn bypass_without_events(loaded: &Loaded, notes: &mut Notes) {
    if !loaded.policy.rules.iter().any(bounds_isl) {
        return;
    }
    let silent: Vec<&str> = decode_pods(loaded)
        .filter(|pod| pod.kv_events.is_none())
        .map(|pod| &*pod.name)
        .collect();
    if !silent.is_empty() {
        let message = format!(
            "the policy compares net-new tokens, and no kvEvents are configured for {}: nothing \
             ever counts as cached there",
            listed(&silent)
        );
        notes.push(("pods", message));
    }
}

/// Nobody will ever know the capacity of a pod that is neither asked nor told.
fn gate_without_capacity(loaded: &Loaded, notes: &mut Notes) {
    let gates = loaded.policy.rules.iter().map(|rule| &rule.gate);
    let trusted = |source| {
        gates.clone().any(|gate| match gate {
            DecodeGate::On { trust, .. } => trust.contains(&source),
            DecodeGate::Off => false,
        })
    };
    if gates.clone().all(|gate| *gate == DecodeGate::Off) {
        return;
    }
    let known = |pod: &PodSpec| match (pod.kv_blocks, &pod.probe) {
        (Some(_), _) => trusted(CapacitySource::Configured),
        (None, Probe::Metrics { .. }) => trusted(CapacitySource::Reported),
        (None, Probe::Off) => false,
    };
    let unknown: Vec<&str> = decode_pods(loaded)
        .filter(|pod| !known(pod))
        .map(|pod| &*pod.name)
        .collect();
    if !unknown.is_empty() {
        let message = format!(
            "the policy has a decodeBusyThreshold, and no trusted capacity can be had of {}: the \
             gate never lets a request bypass there",
            listed(&unknown)
        );
        notes.push(("pods", message));
    }
}

fn nobody_prefills_locally(loaded: &Loaded, notes: &mut Notes) {
    let bypasses = |rule: &Rule| rule.bypass != Bypass::Never;
    let mut pods = decode_pods(loaded).peekable();
    if pods.peek().is_some()
        && pods.all(|pod| pod.local_prefill == LocalPrefill::Unable)
        && loaded.policy.rules.iter().any(bypasses)
    {
        let message = "the policy has a bypass, and no decode pod can prefill: nothing bypasses";
        notes.push(("pods", message.to_owned()));
    }
}

fn unknown_models(loaded: &Loaded, notes: &mut Notes) {
    if loaded.models.is_empty() {
        return;
    }
    let known: Vec<&str> = loaded
        .models
        .iter()
        .flat_map(|model| {
            std::iter::once(&model.name)
                .chain(&model.aliases)
                .chain(&model.adapters)
        })
        .map(|name| name.as_str())
        .collect();
    let patterns = loaded
        .policy
        .rules
        .iter()
        .flat_map(|rule| &rule.matches.models);
    for pattern in patterns.take(1000) {
        let found = match pattern.strip_suffix('*') {
            Some(start) => known.iter().any(|name| name.starts_with(start)),
            None => known.contains(&&**pattern),
        };
        if !found {
            let message = format!("no configured model matches {}", quoted(pattern));
            notes.push(("policy", message));
        }
    }
    let strangers: std::collections::BTreeSet<&str> = loaded
        .pods
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
    let estimated: Vec<&str> = loaded
        .models
        .iter()
        .filter(|model| model.tokenizer == Tokenizer::ByteEstimate)
        .map(|model| model.name.as_str())
        .collect();
    if !estimated.is_empty() && loaded.policy.rules.iter().any(bounds_isl) {
        let message = format!(
            "no tokenizer is configured for {}: its prompts are estimated from bytes, and none of \
             its blocks is ever found",
            listed(&estimated)
        );
        notes.push(("models", message));
    }
}

/// The first few of `names`, and how many more there are.
fn listed(names: &[&str]) -> String {
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

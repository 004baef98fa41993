//! The policy in force as an operator reads it, and what the one before it said otherwise.
//!
//! Lives here: [`PolicySummary`], the sentence of a rule, the last generations.
//! Never here: what a threshold does (`decide`), YAML.
//! Invariant: keys are those of the policy file, and two policies that decide alike read alike.

use crate::decide::policy::{
    Bypass, ClientPins, DecodeGate, IslBound, Match, OnNoPrefill, Policy, Rule, SessionAffinity,
    TierCredit,
};
use crate::decide::snapshot::CapacitySource;
use crate::pick::{InForce, InShadow};
use serde::Serialize;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// Generations that are remembered.
const GENERATIONS: usize = 8;

/// The policy in force, readable.
#[derive(Clone, Debug, Serialize)]
pub struct PolicySummary {
    /// Its name.
    pub name: Arc<str>,
    /// Its version.
    pub generation: u64,
    /// How engines are told.
    pub dialect: &'static str,
    /// When it came into force, in milliseconds since 1970.
    pub since_ms: u64,
    /// The rules, in order, as the program understood them.
    pub rules: Vec<RuleSummary>,
    /// Every setting, defaults included.
    pub settings: Vec<Setting>,
    /// The generations before it, newest first; each with what changed when it came into force.
    pub history: Vec<Generation>,
    /// What it changed.
    pub changes: Vec<Change>,
    /// How the policy stands.
    pub conditions: Vec<PolicyCondition>,
    /// The policy in its shadow.
    pub shadow: ShadowSummary,
}

/// One thing about how a policy stands, readable.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PolicyCondition {
    /// What it is about.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// True or False, in the words of Kubernetes.
    pub status: &'static str,
    /// Why, in a word.
    pub reason: &'static str,
    /// Why, for people.
    pub message: String,
}

/// The policy in the shadow of the one in force, readable.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum ShadowSummary {
    /// There is none.
    Off,
    /// It cannot be had.
    Unresolved {
        /// The name or file that was asked for.
        name: Arc<str>,
    },
    /// It is evaluated.
    Evaluated {
        /// Its name.
        name: Arc<str>,
        /// Its version.
        generation: u64,
        /// Its rules, in order, as the program understood them.
        rules: Vec<RuleSummary>,
    },
}

impl From<&InShadow> for ShadowSummary {
    fn from(shadow: &InShadow) -> Self {
        match shadow {
            InShadow::Nothing => ShadowSummary::Off,
            InShadow::Unresolved(name) => ShadowSummary::Unresolved {
                name: Arc::clone(name),
            },
            InShadow::Policy(policy) => ShadowSummary::Evaluated {
                name: Arc::clone(&policy.name),
                generation: policy.generation,
                rules: policy.rules.iter().map(rule_summary).collect(),
            },
        }
    }
}

/// One rule, readable.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RuleSummary {
    /// Whom it concerns.
    pub concerns: String,
    /// What it does, in a sentence.
    pub says: String,
    /// Its bypass, under the keys of the policy file.
    pub bypass: BypassSummary,
    /// `Local` or `Fail`.
    pub on_no_prefill: &'static str,
}

/// A bypass under the keys of the policy file; a threshold that its type does not look at is absent.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct BypassSummary {
    /// One of the five types.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// In tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub effective_isl_threshold: Option<u64>,
    /// A share, 0..=1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub effective_isl_ratio_threshold: Option<f64>,
    /// In tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cold_bypass_below: Option<u64>,
    /// `Full` or `Weighted`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tier_credit: Option<&'static str>,
    /// In batches of the prefill pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_busy_threshold: Option<f64>,
    /// A share of the decode pod's KV blocks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decode_busy_threshold: Option<f64>,
    /// Sources of a capacity that the gate believes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub trust_capacity: Vec<&'static str>,
}

/// One setting: where it stands in the policy file, and what it says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Setting {
    /// Such as `rules[0].bypass.type`.
    pub key: String,
    /// As text.
    pub value: String,
}

/// A setting that two generations do not share; nothing where one lacks it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Change {
    /// Such as `rules[0].bypass.type`.
    pub key: String,
    /// Before.
    pub from: Option<String>,
    /// After.
    pub to: Option<String>,
}

/// One generation that was in force.
#[derive(Clone, Debug, Serialize)]
pub struct Generation {
    /// Name of the policy.
    pub name: Arc<str>,
    /// Its version.
    pub generation: u64,
    /// When it came into force, in milliseconds since 1970.
    pub since_ms: u64,
    /// What it changed.
    pub changes: Vec<Change>,
    #[serde(skip)]
    settings: Vec<Setting>,
}

/// The last generations, the one in force last.
#[derive(Debug, Default)]
pub(super) struct History(VecDeque<Generation>);

impl History {
    /// Notes that `in_force` came into force now.
    pub(super) fn push(&mut self, in_force: &InForce) {
        let settings = settings(in_force);
        let changes = self
            .0
            .back()
            .map_or_else(Vec::new, |before| changes(&before.settings, &settings));
        if self.0.len() == GENERATIONS {
            self.0.pop_front();
        }
        self.0.push_back(Generation {
            name: Arc::clone(&in_force.policy.name),
            generation: in_force.policy.generation,
            since_ms: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(0, |since| since.as_millis() as u64),
            changes,
            settings,
        });
    }

    /// `in_force`, readable, with what was before it and how it stands.
    pub(super) fn summary(
        &self,
        in_force: &InForce,
        conditions: Vec<PolicyCondition>,
        shadow: &InShadow,
    ) -> PolicySummary {
        let policy = &in_force.policy;
        let own = self
            .0
            .iter()
            .find(|entry| entry.generation == policy.generation);
        PolicySummary {
            name: Arc::clone(&policy.name),
            generation: policy.generation,
            dialect: in_force.dialect.as_str(),
            since_ms: own.map_or(0, |own| own.since_ms),
            rules: policy.rules.iter().map(rule_summary).collect(),
            conditions,
            shadow: shadow.into(),
            settings: settings(in_force),
            changes: own.map_or_else(Vec::new, |own| own.changes.clone()),
            history: self
                .0
                .iter()
                .rev()
                .filter(|entry| entry.generation < policy.generation)
                .cloned()
                .collect(),
        }
    }
}

/// What `after` says otherwise than `before`, in the order of the file.
fn changes(before: &[Setting], after: &[Setting]) -> Vec<Change> {
    let find = |settings: &[Setting], key: &str| {
        let found = settings.iter().find(|setting| setting.key == key);
        found.map(|setting| setting.value.clone())
    };
    let gone = before
        .iter()
        .filter(|setting| find(after, &setting.key).is_none());
    after
        .iter()
        .chain(gone)
        .map(|setting| Change {
            key: setting.key.clone(),
            from: find(before, &setting.key),
            to: find(after, &setting.key),
        })
        .filter(|change| change.from != change.to)
        .collect()
}

fn settings(in_force: &InForce) -> Vec<Setting> {
    let policy = &in_force.policy;
    let mut out = Vec::new();
    let mut put = |key: String, value: String| out.push(Setting { key, value });
    put("name".into(), policy.name.to_string());
    for (index, rule) in policy.rules.iter().enumerate() {
        rule_settings(index, rule, &mut put);
    }
    let scoring = &policy.scoring;
    for (key, value) in [
        ("overlapCredit", scoring.overlap_credit),
        ("hostTier", scoring.host_tier),
        ("diskTier", scoring.disk_tier),
        ("prefillLoadScale", scoring.prefill_load_scale),
        ("activeRequestWeight", scoring.active_request_weight),
        ("temperature", scoring.temperature),
    ] {
        put(format!("scoring.{key}"), value.get().to_string());
    }
    affinity(policy, &mut put);
    let pins = match policy.client_pins {
        ClientPins::Ignore => "Ignore",
        ClientPins::Honor => "Honor",
    };
    put("clientPins".into(), pins.into());
    put("handoff.dialect".into(), in_force.dialect.as_str().into());
    out
}

fn rule_settings(index: usize, rule: &Rule, put: &mut impl FnMut(String, String)) {
    let bypass = bypass_summary(rule);
    put(format!("rules[{index}].match"), concerns(&rule.matches));
    let mut bypass_key =
        |key: &str, value: String| put(format!("rules[{index}].bypass.{key}"), value);
    bypass_key("type", bypass.kind.into());
    for (key, value) in [
        ("effectiveIslThreshold", bypass.effective_isl_threshold),
        ("coldBypassBelow", bypass.cold_bypass_below),
    ] {
        if let Some(value) = value {
            bypass_key(key, value.to_string());
        }
    }
    for (key, value) in [
        (
            "effectiveIslRatioThreshold",
            bypass.effective_isl_ratio_threshold,
        ),
        ("prefillBusyThreshold", bypass.prefill_busy_threshold),
        ("decodeBusyThreshold", bypass.decode_busy_threshold),
    ] {
        if let Some(value) = value {
            bypass_key(key, value.to_string());
        }
    }
    if let Some(credit) = bypass.tier_credit {
        bypass_key("tierCredit", credit.into());
    }
    if !bypass.trust_capacity.is_empty() {
        bypass_key("trustCapacity", bypass.trust_capacity.join(", "));
    }
    put(
        format!("rules[{index}].onNoPrefill"),
        on_no_prefill(rule).into(),
    );
}

fn affinity(policy: &Policy, put: &mut impl FnMut(String, String)) {
    let (mode, key) = match &policy.session_affinity {
        SessionAffinity::Off => ("Off", None),
        SessionAffinity::Soft(key) => ("Soft", Some(key)),
        SessionAffinity::Hard(key) => ("Hard", Some(key)),
    };
    put("sessionAffinity.mode".into(), mode.into());
    if let Some(key) = key {
        put("sessionAffinity.header".into(), key.header.to_string());
        put("sessionAffinity.ttl".into(), format!("{:?}", key.ttl));
    }
}

fn rule_summary(rule: &Rule) -> RuleSummary {
    RuleSummary {
        concerns: concerns(&rule.matches),
        says: says(rule),
        bypass: bypass_summary(rule),
        on_no_prefill: on_no_prefill(rule),
    }
}

fn on_no_prefill(rule: &Rule) -> &'static str {
    match rule.on_no_prefill {
        OnNoPrefill::Local => "Local",
        OnNoPrefill::Fail => "Fail",
    }
}

fn bypass_summary(rule: &Rule) -> BypassSummary {
    let (kind, busy) = match &rule.bypass {
        Bypass::Never => ("Never", None),
        Bypass::Always => ("Always", None),
        Bypass::IslBounding(_) => ("IslBounding", None),
        Bypass::PrefillLoad(busy) => ("PrefillLoad", Some(busy)),
        Bypass::IslOrLoad(_, busy) => ("IslOrLoad", Some(busy)),
    };
    let bound = rule.bypass.isl_bound();
    let (gate, trust) = match &rule.gate {
        DecodeGate::Off => (None, Vec::new()),
        DecodeGate::On { threshold, trust } => (Some(threshold.get()), trust.clone()),
    };
    BypassSummary {
        kind,
        effective_isl_threshold: bound.map(|bound| bound.threshold.0),
        effective_isl_ratio_threshold: bound.map(|bound| bound.ratio.get()),
        cold_bypass_below: bound.map(|bound| bound.cold_bypass_below.0),
        tier_credit: bound.map(|bound| match bound.tier_credit {
            TierCredit::Full => "Full",
            TierCredit::Weighted => "Weighted",
        }),
        prefill_busy_threshold: busy.map(|busy| busy.threshold.get()),
        decode_busy_threshold: gate,
        trust_capacity: trust
            .iter()
            .map(|source| match source {
                CapacitySource::Reported => "Reported",
                CapacitySource::Configured => "Configured",
                CapacitySource::Assumed => "Assumed",
            })
            .collect(),
    }
}

fn concerns(matches: &Match) -> String {
    let mut parts = Vec::new();
    if !matches.models.is_empty() {
        parts.push(format!("models {}", matches.models.join(", ")));
    }
    if !matches.policy_classes.is_empty() {
        parts.push(format!("classes {}", matches.policy_classes.join(", ")));
    }
    if let Some(least) = matches.min_priority {
        parts.push(format!("priority of at least {least}"));
    }
    if parts.is_empty() {
        "every request".to_owned()
    } else {
        parts.join("; ")
    }
}

/// A rule in a sentence.
fn says(rule: &Rule) -> String {
    let isl = |bound: &IslBound| {
        let mut text = format!(
            "fewer than {} tokens are new to the decode pod, and less than {} of the prompt",
            bound.threshold.0,
            percent(bound.ratio.get())
        );
        if bound.cold_bypass_below.0 != 0 {
            text.push_str(&format!(
                "; or the prompt is shorter than {} tokens",
                bound.cold_bypass_below.0
            ));
        }
        text
    };
    let load = |threshold: f64| {
        format!("the prefill pod has more than {threshold} batches of tokens ahead of it")
    };
    let mut text = match &rule.bypass {
        Bypass::Never => return "Remote prefill is never skipped.".to_owned(),
        Bypass::Always => "Remote prefill is always skipped".to_owned(),
        Bypass::IslBounding(bound) => format!("Remote prefill is skipped when {}", isl(bound)),
        Bypass::PrefillLoad(busy) => {
            format!(
                "Remote prefill is skipped when {}",
                load(busy.threshold.get())
            )
        }
        Bypass::IslOrLoad(bound, busy) => format!(
            "Remote prefill is skipped when {}; or {}",
            isl(bound),
            load(busy.threshold.get())
        ),
    };
    if let DecodeGate::On { threshold, .. } = &rule.gate {
        text.push_str(&format!(
            "; but not while the decode pod would use more than {} of its KV blocks",
            percent(threshold.get())
        ));
    }
    text.push('.');
    text
}

fn percent(share: f64) -> String {
    format!("{} %", (share * 1e4).round() / 1e2)
}

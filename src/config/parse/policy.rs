//! The policy: `kind: DisaggregationPolicy`, or its `spec` inside a process config.
//!
//! Lives here: its defaults, its ranges, which keys a bypass type needs, and what has no effect.
//! Never here: what a threshold does (`decide`).
//! Invariant: the rules are not empty and the last one matches everything.

use crate::config::diagnostic::Wrong;
use crate::config::parse::values::{self, LARGEST_FACTOR};
use crate::config::parse::{Reading, bypass, policy_lint};
use crate::config::raw;
use crate::config::rules::{
    self, AFFINITY_MODES, AffinityMode, CLIENT_PINS, DIALECTS, MOST_NAMES, MOST_RULES,
    ON_NO_PREFILL,
};
use crate::config::shape::{Field, Number, Spot};
use crate::config::{Handoff, Shadow, TargetRef};
use crate::decide::policy::{
    Bypass, ClientPins, DecodeGate, Match, OnNoPrefill, Policy, Rule, Scoring, SessionAffinity,
    SessionKey,
};
use std::sync::Arc;
use std::time::Duration;

/// The kind of a policy file.
pub(crate) const KIND: &str = "DisaggregationPolicy";

/// `sessionAffinity.header` when absent.
const SESSION_HEADER: &str = "x-session-id";
/// `sessionAffinity.ttl` when absent.
const SESSION_TTL: Duration = Duration::from_secs(300);

/// What a policy's `spec` says.
#[derive(Debug)]
pub(crate) struct Spec {
    pub(crate) policy: Policy,
    pub(crate) handoff: Handoff,
    pub(crate) shadow: Shadow,
    pub(crate) target: Option<TargetRef>,
}

/// Reads a policy file.
pub(crate) fn document(raw: &raw::Policy, reading: &mut Reading<'_>) -> Option<Spec> {
    reading.version(&raw.api_version, &raw.kind, raw.at, KIND);
    let name = match &raw.metadata {
        Field::Given(meta) => reading.required(
            &meta.value.name,
            (meta.value.at, "name"),
            "the name of the policy",
            values::object_name,
        ),
        Field::Faulty => None,
        Field::Absent => {
            let expected = "a mapping with the name of the policy";
            reading.report.missing(raw.at, "metadata", expected);
            None
        }
    };
    match &raw.spec {
        Field::Given(raw) => Some(spec(&raw.value, name.unwrap_or_default(), reading)),
        Field::Faulty => None,
        Field::Absent => {
            let expected = "a mapping with the rules of the policy";
            reading.report.missing(raw.at, "spec", expected);
            None
        }
    }
}

/// Reads the `spec` of the policy called `name`.
pub(crate) fn spec(raw: &raw::PolicySpec, name: Arc<str>, reading: &mut Reading<'_>) -> Spec {
    let policy = Policy {
        name,
        generation: 1,
        rules: rules(raw, reading),
        scoring: scoring(&raw.scoring, reading),
        session_affinity: session_affinity(&raw.session_affinity, reading),
        client_pins: reading.or(&raw.client_pins, ClientPins::Ignore, |text| {
            values::word(text, CLIENT_PINS.meanings)
        }),
    };
    Spec {
        policy,
        handoff: handoff(&raw.handoff, reading),
        shadow: shadow(&raw.shadow, reading),
        target: target(&raw.target_ref, reading),
    }
}

/// A policy called `name` that says nothing: every request is prefilled remotely.
pub(crate) fn never(name: Arc<str>) -> Spec {
    Spec {
        policy: Policy {
            name,
            generation: 1,
            rules: vec![remainder()],
            scoring: Scoring::default(),
            session_affinity: SessionAffinity::Off,
            client_pins: ClientPins::Ignore,
        },
        handoff: Handoff::DecodeFirst,
        shadow: Shadow::Off,
        target: None,
    }
}

/// The rule for what no rule mentions.
fn remainder() -> Rule {
    Rule {
        matches: Match::default(),
        bypass: Bypass::Never,
        gate: DecodeGate::Off,
        on_no_prefill: OnNoPrefill::Local,
    }
}

/// The rules in order. Unless the last one matches everything already, a rule follows that does, and
/// that never bypasses: what no rule mentions is prefilled remotely.
fn rules(raw: &raw::PolicySpec, reading: &mut Reading<'_>) -> Vec<Rule> {
    reading.at_most(&raw.rules, MOST_RULES);
    let mut rules: Vec<Rule> = match &raw.rules {
        Field::Given(list) => {
            let rules = list.value.iter();
            rules.map(|raw| rule(&raw.value, reading)).collect()
        }
        Field::Absent | Field::Faulty => Vec::new(),
    };
    policy_lint::rules(&raw.rules, raw.at, &rules, reading);
    if rules
        .last()
        .is_none_or(|rule| rule.matches != Match::default())
    {
        rules.push(remainder());
    }
    rules
}

fn rule(raw: &raw::Rule, reading: &mut Reading<'_>) -> Rule {
    let on_no_prefill = reading.or(&raw.on_no_prefill, OnNoPrefill::Local, |text| {
        values::word(text, ON_NO_PREFILL.meanings)
    });
    let (bypass, gate) = match &raw.bypass {
        Field::Given(section) => (
            bypass::bypass(&section.value, reading),
            bypass::gate(&section.value, reading),
        ),
        Field::Faulty => (Bypass::Never, DecodeGate::Off),
        Field::Absent => {
            let expected = "a mapping with the type of the bypass";
            reading.report.missing(raw.at, "bypass", expected);
            (Bypass::Never, DecodeGate::Off)
        }
    };
    Rule {
        matches: matches(&raw.matches, reading),
        bypass,
        gate,
        on_no_prefill,
    }
}

/// A match on everything has one form: no lists and no priority.
fn matches(raw: &Field<raw::Match>, reading: &mut Reading<'_>) -> Match {
    let Some(Spot { value: raw, .. }) = raw.given() else {
        return Match::default();
    };
    reading.at_most(&raw.models, MOST_NAMES);
    reading.at_most(&raw.policy_classes, MOST_NAMES);
    let mut models = reading.each(&raw.models, values::model_pattern);
    if models.iter().any(|pattern| &**pattern == "*") {
        models.clear();
    }
    Match {
        models,
        policy_classes: reading.each(&raw.policy_classes, values::name),
        min_priority: reading
            .optional(&raw.min_priority, |value| {
                values::whole(value, i32::MIN.into(), i32::MAX.into())
            })
            .filter(|priority| *priority != i32::MIN),
    }
}

fn scoring(raw: &Field<raw::Scoring>, reading: &mut Reading<'_>) -> Scoring {
    let default = Scoring::default();
    let Some(Spot { value: raw, .. }) = raw.given() else {
        return default;
    };
    let factor = |value: &Number| values::ratio(value, LARGEST_FACTOR);
    // Above 1, blocks in a slow tier would count for more than the prompt.
    let share = |value: &Number| values::ratio(value, 1.0);
    Scoring {
        overlap_credit: reading.or(&raw.overlap_credit, default.overlap_credit, factor),
        host_tier: reading.or(&raw.host_tier, default.host_tier, share),
        disk_tier: reading.or(&raw.disk_tier, default.disk_tier, share),
        prefill_load_scale: reading.or(&raw.prefill_load_scale, default.prefill_load_scale, factor),
        active_request_weight: reading.or(
            &raw.active_request_weight,
            default.active_request_weight,
            factor,
        ),
        temperature: reading.or(&raw.temperature, default.temperature, factor),
    }
}

fn session_affinity(
    raw: &Field<raw::SessionAffinity>,
    reading: &mut Reading<'_>,
) -> SessionAffinity {
    let Some(Spot { value: raw, .. }) = raw.given() else {
        return SessionAffinity::Off;
    };
    let key = SessionKey {
        header: reading.or(&raw.header, Arc::from(SESSION_HEADER), values::header),
        ttl: reading.or(&raw.ttl, SESSION_TTL, values::duration),
    };
    let expected = rules::AN_AFFINITY_MODE.expected();
    let mode = reading
        .required(&raw.mode, (raw.at, "mode"), &expected, |text| {
            values::word(text, AFFINITY_MODES.meanings)
        })
        .unwrap_or(AffinityMode::None);
    match mode {
        AffinityMode::Soft => SessionAffinity::Soft(key),
        AffinityMode::Hard => SessionAffinity::Hard(key),
        AffinityMode::None => {
            if raw.mode.given().is_some() {
                reading.no_effect(&raw.header, "the mode is None");
                reading.no_effect(&raw.ttl, "the mode is None");
            }
            SessionAffinity::Off
        }
    }
}

fn handoff(raw: &Field<raw::Handoff>, reading: &mut Reading<'_>) -> Handoff {
    let Some(Spot { value: raw, .. }) = raw.given() else {
        return Handoff::DecodeFirst;
    };
    let expected = rules::A_DIALECT.expected();
    reading
        .required(&raw.dialect, (raw.at, "dialect"), &expected, |text| {
            values::word(text, DIALECTS.meanings)
        })
        .unwrap_or(Handoff::DecodeFirst)
}

fn shadow(raw: &Field<raw::Shadow>, reading: &mut Reading<'_>) -> Shadow {
    let Some(Spot { at, value: raw }) = raw.given() else {
        return Shadow::Off;
    };
    let name = reading.optional(&raw.name, values::object_name);
    let file = reading.file(&raw.file);
    match (&raw.name, &raw.file) {
        (Field::Absent, Field::Absent) | (Field::Given(_), Field::Given(_)) => {
            let found = match &raw.name {
                Field::Given(_) => "both",
                _ => "neither",
            };
            reading
                .report
                .fault(*at, Wrong::new(rules::NAME_OR_FILE, found));
        }
        _ => {}
    }
    match (name, file) {
        (Some(name), _) => Shadow::Named(name),
        (None, Some(file)) => Shadow::File(file),
        (None, None) => Shadow::Off,
    }
}

fn target(raw: &Field<raw::TargetRef>, reading: &mut Reading<'_>) -> Option<TargetRef> {
    let Spot { value: raw, .. } = raw.given()?;
    let group = reading.or(&raw.group, Arc::from(""), values::api_group);
    let kind = reading.required(
        &raw.kind,
        (raw.at, "kind"),
        values::OBJECT_KIND.expected,
        values::object_kind,
    );
    let name = reading.required(
        &raw.name,
        (raw.at, "name"),
        values::OBJECT_NAME.expected,
        values::object_name,
    );
    Some(TargetRef {
        group,
        kind: kind?,
        name: name?,
    })
}

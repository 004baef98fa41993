//! What a policy may say and probably does not mean.
//!
//! Lives here: the warnings about rules.
//! Never here: faults.
//! Invariant: nothing here changes what a policy does.

use crate::config::parse::Reading;
use crate::config::parse::policy::Kind;
use crate::config::raw;
use crate::config::shape::{Field, Spot};

/// Rules that no request can reach, and a policy without rules.
pub(crate) fn rules(raw: &raw::PolicySpec, reading: &mut Reading<'_>) {
    let rules = match &raw.rules {
        Field::Given(list) if !list.value.is_empty() => &list.value,
        Field::Given(list) => {
            let message = "no rule: remote prefill is never skipped";
            reading.report.warn(list.at, message);
            return;
        }
        Field::Absent => {
            let message = "no rule under rules: remote prefill is never skipped";
            reading.report.warn(raw.at, message);
            return;
        }
        Field::Faulty => return,
    };
    for (index, rule) in rules.iter().enumerate() {
        let earlier = rules[..index]
            .iter()
            .position(|earlier| covers(&earlier.value, &rule.value));
        if let Some(earlier) = earlier {
            let message = format!(
                "is never reached: rule {earlier} matches every request that this one does"
            );
            reading.report.warn(rule.at, message);
        }
    }
}

/// Whether `wide` matches every request that `narrow` does.
fn covers(wide: &raw::Rule, narrow: &raw::Rule) -> bool {
    let Some(Spot { value: wide, .. }) = wide.matches.given() else {
        return matches!(wide.matches, Field::Absent);
    };
    let narrow = narrow.matches.given().map(|spot| &spot.value);
    let models = texts(&wide.models);
    let classes = texts(&wide.policy_classes);
    let narrow_models = narrow.map_or(Vec::new(), |narrow| texts(&narrow.models));
    let narrow_classes = narrow.map_or(Vec::new(), |narrow| texts(&narrow.policy_classes));
    let priority = wide.min_priority.given().map(|spot| spot.value);
    let narrow_priority = narrow.and_then(|narrow| narrow.min_priority.given());

    let models_cover = models.is_empty()
        || models.contains(&"*")
        || (!narrow_models.is_empty()
            && narrow_models
                .iter()
                .all(|narrow| models.iter().any(|wide| pattern_covers(wide, narrow))));
    let classes_cover = classes.is_empty()
        || (!narrow_classes.is_empty()
            && narrow_classes.iter().all(|narrow| classes.contains(narrow)));
    let priority_covers =
        priority.is_none_or(|wide| narrow_priority.is_some_and(|narrow| wide <= narrow.value));
    models_cover && classes_cover && priority_covers
}

fn texts(field: &Field<Vec<Spot<String>>>) -> Vec<&str> {
    field.given().map_or(Vec::new(), |list| {
        list.value.iter().map(|spot| spot.value.as_str()).collect()
    })
}

fn pattern_covers(wide: &str, narrow: &str) -> bool {
    match wide.strip_suffix('*') {
        Some(start) => narrow
            .strip_suffix('*')
            .unwrap_or(narrow)
            .starts_with(start),
        None => wide == narrow,
    }
}

/// Keys that the bypass type does not look at, and thresholds that decide once and for all.
pub(crate) fn bypass(raw: &raw::Bypass, kind: Kind, reading: &mut Reading<'_>) {
    if !kind.bounds_isl() {
        let why = format!("the type {} does not look at net-new tokens", kind.word());
        reading.no_effect(&raw.isl_threshold, &why);
        reading.no_effect(&raw.isl_ratio_threshold, &why);
        reading.no_effect(&raw.cold_bypass_below, &why);
        reading.no_effect(&raw.tier_credit, &why);
    }
    if !kind.reads_load() {
        let why = format!("the type {} does not look at prefill load", kind.word());
        reading.no_effect(&raw.prefill_busy_threshold, &why);
    }
    if kind == Kind::Never {
        let why = "the type Never leaves nothing to veto";
        reading.no_effect(&raw.decode_busy_threshold, why);
        reading.no_effect(&raw.trust_capacity, why);
    } else if let Field::Absent = raw.decode_busy_threshold {
        let why = "there is no decodeBusyThreshold, so no gate";
        reading.no_effect(&raw.trust_capacity, why);
    }
    if kind.bounds_isl() {
        // Both comparisons are strict, so nothing is below 0.
        if let Some(spot) = raw.isl_threshold.given().filter(|spot| spot.value == 0) {
            let message = "no prompt has fewer than 0 net-new tokens, so none bypasses by them";
            reading.report.warn(spot.at, message);
        }
        if let Some(spot) = raw
            .isl_ratio_threshold
            .given()
            .filter(|spot| spot.value == 0.0)
        {
            let message = "no share of net-new tokens is below 0, so none bypasses by it";
            reading.report.warn(spot.at, message);
        }
    }
    if kind != Kind::Never
        && let Some(spot) = raw
            .decode_busy_threshold
            .given()
            .filter(|spot| spot.value == 0.0)
    {
        let message = "every decode pod that takes a request is above 0, so nothing bypasses";
        reading.report.warn(spot.at, message);
    }
}

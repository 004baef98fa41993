//! What a policy may say and probably does not mean.
//!
//! Lives here: the warnings about rules.
//! Never here: faults.
//! Invariant: nothing here changes what a policy does.

use crate::config::node::NodeId;
use crate::config::parse::Reading;
use crate::config::raw;
use crate::config::rules::{BypassType, MOST_RULES};
use crate::config::shape::{Field, Number, Spot};
use crate::decide::policy::{Match, Rule};

/// Rules that no request can reach, and a policy without rules, whose spec is `at`.
pub(crate) fn rules(
    raw: &Field<Vec<Spot<raw::Rule>>>,
    at: NodeId,
    rules: &[Rule],
    reading: &mut Reading<'_>,
) {
    let spots = match raw {
        Field::Given(list) => &list.value,
        Field::Absent => &Vec::new(),
        Field::Faulty => return,
    };
    if spots.is_empty() {
        let at = raw.given().map_or(at, |list| list.at);
        let message = "without rules, remote prefill is never skipped";
        reading.report.warn(at, message);
    }
    if MOST_RULES < spots.len() {
        // That is a fault; comparing them all with each other would only take long.
        return;
    }
    for (index, (rule, spot)) in rules.iter().zip(spots).enumerate() {
        let earlier = rules[..index]
            .iter()
            .position(|earlier| covers(&earlier.matches, &rule.matches));
        if let Some(earlier) = earlier {
            let message =
                format!("is never reached: rules[{earlier}] matches all that this one does");
            reading.report.warn(spot.at, message);
        }
    }
}

/// Whether `wide` matches every request that `narrow` does.
fn covers(wide: &Match, narrow: &Match) -> bool {
    let models = wide.models.is_empty()
        || (!narrow.models.is_empty()
            && narrow.models.iter().all(|narrow| {
                let mut wide = wide.models.iter();
                wide.any(|wide| pattern_covers(wide, narrow))
            }));
    let classes = wide.policy_classes.is_empty()
        || (!narrow.policy_classes.is_empty()
            && narrow
                .policy_classes
                .iter()
                .all(|class| wide.policy_classes.contains(class)));
    let priority = wide.min_priority.is_none_or(|wide| {
        let narrow = narrow.min_priority;
        narrow.is_some_and(|narrow| wide <= narrow)
    });
    models && classes && priority
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
pub(crate) fn bypass(raw: &raw::Bypass, kind: BypassType, reading: &mut Reading<'_>) {
    if kind.bounds_isl() {
        // Both comparisons are strict, and nothing is below 0.
        let tokens = raw.isl_threshold.given();
        if let Some(spot) = tokens.filter(|spot| spot.value.value == Some(0)) {
            let message = "no prompt has fewer than 0 net-new tokens, so none bypasses by them";
            reading.report.warn(spot.at, message);
        }
        if let Some(spot) = zero(&raw.isl_ratio_threshold) {
            let message = "no share of net-new tokens is below 0, so none bypasses by it";
            reading.report.warn(spot.at, message);
        }
    } else {
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
    if kind == BypassType::Never {
        let why = "the type Never leaves nothing to veto";
        reading.no_effect(&raw.decode_busy_threshold, why);
        reading.no_effect(&raw.trust_capacity, why);
    } else if let Field::Absent = raw.decode_busy_threshold {
        let why = "there is no decodeBusyThreshold, so no gate";
        reading.no_effect(&raw.trust_capacity, why);
    } else if let Some(spot) = zero(&raw.decode_busy_threshold) {
        let message = "every decode pod that takes a request is above 0, so nothing bypasses";
        reading.report.warn(spot.at, message);
    }
}

fn zero(field: &Field<Number>) -> Option<&Spot<Number>> {
    field.given().filter(|spot| spot.value.value == Some(0.0))
}

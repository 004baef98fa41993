//! One rule's bypass: its type, its thresholds, its gate.
//!
//! Lives here: their defaults and ranges, and which keys a type needs.
//! Never here: what a threshold does (`decide`).
//! Invariant: a type that looks at load has a threshold for it.

use crate::config::diagnostic::Wrong;
use crate::config::parse::values::{self, LARGEST_FACTOR, MOST_TOKENS};
use crate::config::parse::{Reading, policy_lint};
use crate::config::raw;
use crate::config::rules::{self, BYPASS_TYPES, BypassType, CAPACITY_SOURCES, TIER_CREDITS};
use crate::config::shape::{Field, Whole};
use crate::decide::policy::{Bypass, DecodeGate, IslBound, PrefillBusy, TierCredit};
use crate::decide::snapshot::CapacitySource;
use crate::units::{Ratio, Tokens};

/// `effectiveIslThreshold` when absent, in tokens.
const ISL_THRESHOLD: Tokens = Tokens(2048);
/// `effectiveIslRatioThreshold` when absent.
const ISL_RATIO_THRESHOLD: f64 = 0.7;
/// `coldBypassBelow` when absent: off.
const COLD_BYPASS_BELOW: Tokens = Tokens::ZERO;
/// `trustCapacity` when absent.
const TRUST: [CapacitySource; 2] = [CapacitySource::Reported, CapacitySource::Configured];

/// Reads a bypass without its gate.
pub(crate) fn bypass(raw: &raw::Bypass, reading: &mut Reading<'_>) -> Bypass {
    let isl = isl_bound(raw, reading);
    let busy = reading.optional(&raw.prefill_busy_threshold, |value| {
        values::ratio(value, LARGEST_FACTOR)
    });
    let expected = rules::A_BYPASS_TYPE.expected();
    let kind = reading.required(&raw.kind, (raw.at, "type"), &expected, |text| {
        values::word(text, BYPASS_TYPES.meanings)
    });
    let Some(kind) = kind else {
        return Bypass::Never;
    };
    if kind.reads_load() && matches!(raw.prefill_busy_threshold, Field::Absent) {
        let expected = rules::needs_busy_threshold(kind.word());
        reading
            .report
            .missing(raw.at, "prefillBusyThreshold", &expected);
    }
    policy_lint::bypass(raw, kind, reading);
    let busy = PrefillBusy {
        threshold: busy.unwrap_or(Ratio::ZERO),
    };
    match kind {
        BypassType::Never => Bypass::Never,
        BypassType::Always => Bypass::Always,
        BypassType::IslBounding => Bypass::IslBounding(isl),
        BypassType::PrefillLoad => Bypass::PrefillLoad(busy),
        BypassType::IslOrLoad => Bypass::IslOrLoad(isl, busy),
    }
}

fn isl_bound(raw: &raw::Bypass, reading: &mut Reading<'_>) -> IslBound {
    let tokens = |value: &Whole| values::whole(value, 0, MOST_TOKENS).map(Tokens);
    IslBound {
        threshold: reading.or(&raw.isl_threshold, ISL_THRESHOLD, tokens),
        ratio: reading.or(
            &raw.isl_ratio_threshold,
            ratio(ISL_RATIO_THRESHOLD),
            |value| values::ratio(value, 1.0),
        ),
        cold_bypass_below: reading.or(&raw.cold_bypass_below, COLD_BYPASS_BELOW, tokens),
        tier_credit: reading.or(&raw.tier_credit, TierCredit::Full, |text| {
            values::word(text, TIER_CREDITS.meanings)
        }),
    }
}

/// Reads the veto of a busy decode pod.
pub(crate) fn gate(raw: &raw::Bypass, reading: &mut Reading<'_>) -> DecodeGate {
    let mut trust: Vec<CapacitySource> = Vec::new();
    reading.at_most(&raw.trust_capacity, rules::MOST_SOURCES);
    let words = CAPACITY_SOURCES.meanings;
    for source in reading.each(&raw.trust_capacity, |text| values::word(text, words)) {
        if !trust.contains(&source) {
            trust.push(source);
        }
    }
    match &raw.trust_capacity {
        Field::Given(list) if list.value.is_empty() => {
            let expected = rules::at_least_one(&rules::A_CAPACITY_SOURCE);
            reading
                .report
                .fault(list.at, Wrong::new(expected, "an empty list"));
        }
        Field::Given(_) => {}
        Field::Absent | Field::Faulty => trust.extend(TRUST),
    }
    let threshold = reading.optional(&raw.decode_busy_threshold, |value| {
        values::ratio(value, LARGEST_FACTOR)
    });
    match threshold {
        Some(threshold) => DecodeGate::On { threshold, trust },
        None => DecodeGate::Off,
    }
}

/// A constant as a ratio.
fn ratio(value: f64) -> Ratio {
    Ratio::new(value).unwrap_or(Ratio::ZERO)
}

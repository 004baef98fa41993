//! How policies stand: from what is offered and what is there to conditions.

use sidestep::config::conditions::{
    ConditionReason as Reason, ConditionType as Type, Offered, Samples, Scope, World, conditions,
};
use sidestep::config::{self, Diagnostics, LoadedPods, LoadedPolicy, ModelConfig, TargetRef};
use sidestep::decide::reason::Because;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const ISL: &str = "rules: [{bypass: {type: IslBounding}}]";
const POOL: &str =
    "targetRef: {group: inference.networking.k8s.io, kind: InferencePool, name: pool}";

fn policy(spec: &str) -> Result<LoadedPolicy, Diagnostics> {
    let head =
        "apiVersion: sidestep.dev/v1alpha1\nkind: DisaggregationPolicy\nmetadata: {name: p}\n";
    config::parse_policy(&format!("{head}spec: {{{spec}}}\n"), Path::new("p.yaml"))
}

fn pods(text: &str) -> LoadedPods {
    config::parse_pods(&format!("pods: [{text}]"), Path::new("pods.yaml")).unwrap()
}

fn target(name: &str) -> TargetRef {
    TargetRef {
        group: Arc::from("inference.networking.k8s.io"),
        kind: Arc::from("InferencePool"),
        name: Arc::from(name),
    }
}

const GOOD_POD: &str =
    "{name: d, address: '10.0.0.1:1', role: decode, kvEvents: {address: '10.0.0.1:2'}}";

/// Policies by name, age and spec; their conditions as `Type=reason`, a `!` before what does not hold.
fn stand(
    policies: &[(&str, i64, &str)],
    scope: Scope<'_>,
    pod: &str,
    models: &[ModelConfig],
) -> Vec<[String; 3]> {
    let parsed: Vec<_> = policies.iter().map(|(_, _, spec)| policy(spec)).collect();
    let offered: Vec<Offered<'_>> = policies
        .iter()
        .zip(&parsed)
        .map(|((name, created, _), policy)| Offered {
            name,
            created: *created,
            policy: policy.as_ref(),
        })
        .collect();
    let pods = pods(pod);
    let world = World {
        scope,
        models,
        pods: &pods.pods,
    };
    let all = conditions(&offered, &world);
    all.iter()
        .map(|three| {
            for (condition, kind) in three.iter().zip(Type::ALL) {
                assert_eq!(condition.kind, *kind);
                assert!(!condition.message.is_empty());
            }
            three.each_ref().map(|condition| {
                let not = if condition.holds { "" } else { "!" };
                format!("{not}{}", condition.reason.as_str())
            })
        })
        .collect()
}

fn one(spec: &str, scope: Scope<'_>, pod: &str) -> [String; 3] {
    stand(&[("p", 1, spec)], scope, pod, &[]).remove(0)
}

#[test]
fn a_policy_on_an_existing_pool_is_in_force() {
    let targets = [target("pool")];
    let found = one(
        &format!("{POOL}, {ISL}"),
        Scope::Targets(&targets),
        GOOD_POD,
    );
    assert_eq!(found, ["Accepted", "ResolvedRefs", "Effective"]);
}

#[test]
fn what_a_policy_names_must_be_there() {
    let targets = [target("other")];
    let scope = Scope::Targets(&targets);
    for (spec, expected) in [
        (
            format!("{POOL}, {ISL}"),
            ["Accepted", "!TargetNotFound", "!NotResolved"],
        ),
        (ISL.to_owned(), ["Accepted", "ResolvedRefs", "!NoTarget"]),
        (
            format!("targetRef: {{kind: ConfigMap, name: other}}, {ISL}"),
            ["Accepted", "!InvalidKind", "!NotResolved"],
        ),
        (
            format!(
                "{}, {ISL}, shadow: {{name: nobody}}",
                POOL.replace("pool}", "other}")
            ),
            ["Accepted", "!ShadowNotFound", "Effective"],
        ),
        (
            format!(
                "{}, {ISL}, shadow: {{file: /dev/null}}",
                POOL.replace("pool}", "other}")
            ),
            ["Accepted", "!ShadowNotFound", "Effective"],
        ),
        (
            "rules: 7".to_owned(),
            ["!Invalid", "ResolvedRefs", "!NotAccepted"],
        ),
    ] {
        assert_eq!(one(&spec, scope, GOOD_POD), expected, "{spec}");
    }
}

#[test]
fn of_several_policies_on_one_target_the_oldest_counts_and_of_equals_the_first_name() {
    let targets = [target("pool"), target("two")];
    let scope = Scope::Targets(&targets);
    let spec = format!("{POOL}, {ISL}");
    let other = format!("{}, {ISL}", POOL.replace("pool}", "two}"));
    let first = ["Accepted", "ResolvedRefs", "Effective"].map(str::to_owned);
    let later = ["!Conflicted", "ResolvedRefs", "!NotAccepted"].map(str::to_owned);
    let found = stand(
        &[("a", 2, &spec), ("b", 1, &spec), ("c", 3, &other)],
        scope,
        GOOD_POD,
        &[],
    );
    assert_eq!(found, [later.clone(), first.clone(), first.clone()]);
    let found = stand(&[("b", 1, &spec), ("a", 1, &spec)], scope, GOOD_POD, &[]);
    assert_eq!(found, [later, first.clone()]);
    // One that is not valid takes no target from another, nor do candidates without a target.
    let found = stand(
        &[("a", 1, "rules: 7"), ("b", 2, &spec)],
        scope,
        GOOD_POD,
        &[],
    );
    assert_eq!(found[1], first);
    let shadowed = format!("{spec}, shadow: {{name: b}}");
    let found = stand(
        &[("a", 1, &shadowed), ("b", 2, ISL), ("c", 3, ISL)],
        scope,
        GOOD_POD,
        &[],
    );
    assert_eq!(found[0], first);
    assert_eq!(found[1], ["Accepted", "ResolvedRefs", "!NoTarget"]);
    assert_eq!(found[2], found[1]);
}

#[test]
fn a_file_is_obeyed_whatever_its_target() {
    for spec in [
        ISL.to_owned(),
        format!("{POOL}, {ISL}"),
        format!("{ISL}, shadow: {{file: /dev/null}}"),
    ] {
        assert_eq!(
            one(&spec, Scope::File, GOOD_POD),
            ["Accepted", "ResolvedRefs", "Effective"],
            "{spec}"
        );
    }
    let named = one(
        &format!("{ISL}, shadow: {{name: other}}"),
        Scope::File,
        GOOD_POD,
    );
    assert_eq!(named, ["Accepted", "!ShadowNotFound", "Effective"]);
}

#[test]
fn models_that_nobody_serves_are_not_found() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sidestep.yaml");
    let text = "apiVersion: sidestep.dev/v1alpha1\nkind: SidestepConfig\nmodels: [{name: llama, aliases: [chat]}]\n\
                pods: {inline: [{name: d, address: '10.0.0.1:1', role: decode}]}\n\
                policy: {inline: {rules: [{bypass: {type: Never}}]}}\n";
    std::fs::write(&path, text).unwrap();
    let models = config::load(&path).unwrap().models;
    for (pattern, reason) in [
        ("llama", "ResolvedRefs"),
        ("ch*", "ResolvedRefs"),
        ("*", "ResolvedRefs"),
        ("lama", "!ModelNotFound"),
        ("llama-*", "!ModelNotFound"),
    ] {
        let spec =
            format!("rules: [{{match: {{models: ['{pattern}']}}, bypass: {{type: Never}}}}]");
        let found = stand(&[("p", 1, &spec)], Scope::File, GOOD_POD, &models);
        assert_eq!(found[0][1], reason, "{pattern}");
        assert_eq!(found[0][0], "Accepted");
    }
}

#[test]
fn a_policy_whose_pods_lack_what_it_needs_says_so() {
    const SILENT: &str = "{name: s, address: '10.0.0.2:1', role: decode}";
    const UNABLE: &str = "{name: u, address: '10.0.0.3:1', role: decode, kvEvents: {address: '10.0.0.3:2'}, localPrefill: unable}";
    const UNKNOWN: &str = "{name: c, address: '10.0.0.4:1', role: decode, kvEvents: {address: '10.0.0.4:2'}, probe: off}";
    let bypass = |keys: &str| format!("rules: [{{bypass: {{{keys}}}}}]");
    let both = format!("{GOOD_POD}, {SILENT}");
    for (spec, pod, expected) in [
        (ISL.to_owned(), "", "!NoDecodePod"),
        (
            ISL.to_owned(),
            "{name: p, address: '10.0.0.9:1', role: prefill}",
            "!NoDecodePod",
        ),
        (ISL.to_owned(), SILENT, "!NothingBypasses"),
        (ISL.to_owned(), &*both, "EffectiveInPart"),
        (
            bypass("type: IslBounding, coldBypassBelow: 9"),
            SILENT,
            "EffectiveInPart",
        ),
        (
            bypass("type: IslOrLoad, prefillBusyThreshold: 1"),
            SILENT,
            "EffectiveInPart",
        ),
        (
            bypass("type: PrefillLoad, prefillBusyThreshold: 1"),
            SILENT,
            "Effective",
        ),
        (bypass("type: Never"), SILENT, "Effective"),
        (bypass("type: Never"), UNABLE, "Effective"),
        (bypass("type: Always"), UNABLE, "!NothingBypasses"),
        (
            bypass("type: Always, decodeBusyThreshold: 0.9"),
            UNKNOWN,
            "!NothingBypasses",
        ),
        (
            bypass("type: Always, decodeBusyThreshold: 0.9"),
            GOOD_POD,
            "Effective",
        ),
        (
            bypass("type: Always, decodeBusyThreshold: 0.9, trustCapacity: [Configured]"),
            GOOD_POD,
            "!NothingBypasses",
        ),
    ] {
        assert_eq!(
            one(&spec, Scope::File, pod)[2],
            expected,
            "{spec} with {pod}"
        );
    }
}

#[test]
fn every_reason_has_a_meaning_and_a_word_of_its_own() {
    let mut words = std::collections::BTreeSet::new();
    for reason in Reason::ALL {
        assert!(words.insert(reason.as_str()));
        assert!(reason.meaning().len() > 10);
        assert!(reason.as_str().chars().all(|c| c.is_ascii_alphanumeric()));
    }
}

#[test]
fn the_decisions_of_the_last_minutes_are_the_growth_of_the_counters() {
    let counters =
        |never, busy| BTreeMap::from([(Because::PolicyNever, never), (Because::DecodeBusy, busy)]);
    let minute = |n: u64| Duration::from_secs(60 * n);
    let mut samples = Samples::new(3);
    assert_eq!(samples.observed().decisions(), 0);
    samples.take(minute(0), counters(5, 0));
    assert_eq!(samples.observed().decisions(), 0);
    samples.take(minute(1), counters(7, 0));
    samples.take(minute(2), counters(9, 4));
    let observed = samples.observed();
    assert_eq!((observed.window, observed.decisions()), (minute(2), 8));
    assert_eq!(
        observed.by_reason,
        BTreeMap::from([(Because::PolicyNever, 4), (Because::DecodeBusy, 4)])
    );
    // The oldest sample is forgotten, and a reason without decisions is not listed.
    samples.take(minute(3), counters(9, 5));
    let observed = samples.observed();
    assert_eq!(
        observed.by_reason,
        BTreeMap::from([(Because::PolicyNever, 2), (Because::DecodeBusy, 5)])
    );
    // A counter that began anew counts from 0.
    samples.take(minute(4), counters(1, 5));
    assert_eq!(
        samples.observed().by_reason,
        BTreeMap::from([(Because::PolicyNever, 1), (Because::DecodeBusy, 1)])
    );
}

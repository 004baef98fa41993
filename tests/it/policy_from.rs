//! Settings of other routers as policies: the same decisions come out, and what differs is said.

use crate::decide_fixture::{ask, decode, prefill, snapshot};
use proptest::prelude::*;
use sidestep::config::convert::{Converted, Settings, Sort, from_dynamo, from_llm_d};
use sidestep::config::{self, Diagnostics, LoadedPolicy};
use sidestep::decide::decide as judge;
use sidestep::decide::policy::Policy;
use sidestep::decide::reason::Because;
use sidestep::decide::snapshot::{Capacity, TierBlocks};
use sidestep::units::{Blocks, Tokens};
use std::path::Path;

const ORIGIN: &str = "settings";

fn dynamo(text: &str) -> Result<Converted, Diagnostics> {
    from_dynamo(Settings::Text(text, Path::new(ORIGIN)), None)
}

fn dynamo_env(variables: &[(&str, &str)]) -> Result<Converted, Diagnostics> {
    let owned: Vec<(String, String)> = variables
        .iter()
        .map(|(name, value)| (format!("DYN_ROUTER_{name}"), (*value).to_owned()))
        .collect();
    from_dynamo(Settings::Environment(&owned), None)
}

fn llm_d(text: &str) -> Result<Converted, Diagnostics> {
    from_llm_d(text, Path::new(ORIGIN))
}

/// What comes out is a policy without faults and without warnings.
fn loaded(converted: &Converted) -> LoadedPolicy {
    let loaded = config::parse_policy(&converted.yaml, Path::new("out.yaml"));
    let loaded = loaded.unwrap_or_else(|faults| panic!("{faults}\n{}", converted.yaml));
    assert_eq!(loaded.warnings, Vec::new(), "{}", converted.yaml);
    loaded
}

/// The keys of the bypass, as they stand in the policy.
fn keys(converted: &Converted) -> Vec<&str> {
    loaded(converted);
    let lines = converted.yaml.lines();
    lines
        .filter_map(|line| line.strip_prefix("      "))
        .collect()
}

fn because(policy: &Policy, prompt: u64, cached: TierBlocks) -> Because {
    let mut pod = decode(0);
    pod.cached = cached;
    let snapshot = snapshot([pod, prefill(1)]);
    judge(&ask(prompt), &snapshot, policy).unwrap().because
}

fn device(blocks: u64) -> TierBlocks {
    TierBlocks {
        device: Blocks(u32::try_from(blocks).unwrap()),
        ..TierBlocks::default()
    }
}

#[test]
fn settings_of_dynamo_become_the_keys_of_a_bypass() {
    for (json, expected) in [
        (
            "{}",
            &[
                "type: IslBounding",
                "effectiveIslThreshold: 2048",
                "effectiveIslRatioThreshold: 0.7",
                "tierCredit: Weighted",
            ][..],
        ),
        (
            r#"{"policy": "isl_bounding", "eff_isl_threshold": 512, "eff_isl_ratio_threshold": 1,
                "decode_busy_threshold": 0.9, "prefill_busy_threshold": null}"#,
            &[
                "type: IslBounding",
                "effectiveIslThreshold: 512",
                "effectiveIslRatioThreshold: 1",
                "tierCredit: Weighted",
                "decodeBusyThreshold: 0.9",
            ],
        ),
        (
            r#"{"policy": "prefill_load", "prefill_busy_threshold": 1.5}"#,
            &["type: PrefillLoad", "prefillBusyThreshold: 1.5"],
        ),
        (
            r#"{"policy": "isl_or_load", "prefill_busy_threshold": 0}"#,
            &[
                "type: IslOrLoad",
                "effectiveIslThreshold: 2048",
                "effectiveIslRatioThreshold: 0.7",
                "tierCredit: Weighted",
                "prefillBusyThreshold: 0",
            ],
        ),
        (
            r#"{"policy": "prefill_load", "prefill_busy_threshold": 1e300}"#,
            &["type: PrefillLoad", "prefillBusyThreshold: 1000000"],
        ),
    ] {
        assert_eq!(keys(&dynamo(json).unwrap()), expected, "{json}");
    }
}

#[test]
fn what_dynamo_refuses_is_refused_with_its_place() {
    for (json, expected) in [
        ("{", "file: expected well-formed YAML or JSON"),
        ("[]", "found"),
        (
            r#"{"policy": null}"#,
            "policy: expected isl_bounding, prefill_load or isl_or_load, found null",
        ),
        (r#"{"policy": "always"}"#, "policy: expected isl_bounding"),
        (
            r#"{"eff_isl_threshold": true}"#,
            "eff_isl_threshold: expected a whole number of at least 0, found true",
        ),
        (
            r#"{"eff_isl_threshold": 1.5}"#,
            "eff_isl_threshold: expected a whole number",
        ),
        (
            r#"{"eff_isl_threshold": -1}"#,
            "eff_isl_threshold: expected a whole number",
        ),
        (
            r#"{"eff_isl_threshold": null}"#,
            "eff_isl_threshold: expected a whole number",
        ),
        (
            r#"{"eff_isl_ratio_threshold": null}"#,
            "eff_isl_ratio_threshold: expected a number from 0 to 1, found null",
        ),
        (
            r#"{"eff_isl_ratio_threshold": 1.5}"#,
            "eff_isl_ratio_threshold: expected a number from 0 to 1",
        ),
        (
            r#"{"eff_isl_ratio_threshold": false}"#,
            "eff_isl_ratio_threshold: expected a number from 0 to 1",
        ),
        (
            r#"{"decode_busy_threshold": -0.1}"#,
            "decode_busy_threshold: expected a number of at least 0, or null",
        ),
        (
            r#"{"prefill_busy_threshold": true}"#,
            "prefill_busy_threshold: expected a number of at least 0, or null",
        ),
        (
            r#"{"policy": "prefill_load"}"#,
            "prefill_busy_threshold: expected a number, or the router's queue threshold",
        ),
        (
            r#"{"eff_isl": 1}"#,
            "eff_isl: expected one of the keys policy, eff_isl_threshold",
        ),
        (
            "--router-conditional-disagg-config '{}'",
            "expected --router-conditional-disagg beside",
        ),
        (
            "--router-conditional-disagg --router-queue-threshold -1",
            "--router-queue-threshold: expected a number",
        ),
    ] {
        let said = dynamo(json).unwrap_err().to_string();
        assert!(said.contains(expected), "{json}: {said}");
    }
}

#[test]
fn flags_are_found_in_a_command_line() {
    let config = r#"{"policy": "isl_or_load", "eff_isl_threshold": 100}"#;
    for line in [
        format!(
            "python -m dynamo.frontend --router-mode kv --router-conditional-disagg \\\n  --router-conditional-disagg-config '{config}' --router-queue-threshold 2"
        ),
        format!(
            "--router-queue-threshold=2 --router-conditional-disagg --router-conditional-disagg-config='{config}'"
        ),
        format!(
            "--router-queue-threshold=2 --router-conditional-disagg=true --router-conditional-disagg-config=\"{}\"",
            config.replace('"', "\\\"")
        ),
    ] {
        let converted = dynamo(&line).unwrap();
        let keys = keys(&converted);
        assert!(
            keys.contains(&"effectiveIslThreshold: 100"),
            "{line}: {keys:?}"
        );
        assert!(
            keys.contains(&"prefillBusyThreshold: 2"),
            "{line}: {keys:?}"
        );
        assert!(
            converted
                .notes
                .iter()
                .any(|note| note.text.contains("queue threshold 2 counts"))
        );
    }
    let off = dynamo("--router-mode kv").unwrap();
    assert_eq!(keys(&off), ["type: Never"]);
    assert_eq!(off.notes[0].sort, Sort::Assumed);
}

#[test]
fn the_environment_is_read_as_dynamo_reads_it() {
    let on = ("CONDITIONAL_DISAGG", "true");
    for (variables, expected) in [
        (&[][..], &["type: Never"][..]),
        (&[("CONDITIONAL_DISAGG", "0")], &["type: Never"]),
        (&[("CONDITIONAL_DISAGG", "perhaps")], &["type: Never"]),
        (
            &[
                on,
                ("CONDITIONAL_DISAGG_POLICY", "prefill_load"),
                ("CONDITIONAL_DISAGG_PREFILL_BUSY_THRESHOLD", "0.5"),
            ],
            &["type: PrefillLoad", "prefillBusyThreshold: 0.5"],
        ),
        (
            &[
                on,
                ("CONDITIONAL_DISAGG_POLICY", "prefill_load"),
                ("QUEUE_THRESHOLD", "4"),
            ],
            &["type: PrefillLoad", "prefillBusyThreshold: 4"],
        ),
        (
            &[
                on,
                ("CONDITIONAL_DISAGG_EFF_ISL_THRESHOLD", "1k"),
                ("CONDITIONAL_DISAGG_EFF_ISL_RATIO_THRESHOLD", "7"),
            ],
            &[
                "type: IslBounding",
                "effectiveIslThreshold: 2048",
                "effectiveIslRatioThreshold: 0.7",
                "tierCredit: Weighted",
            ],
        ),
    ] {
        assert_eq!(
            keys(&dynamo_env(variables).unwrap()),
            expected,
            "{variables:?}"
        );
    }
    let ignored = dynamo_env(&[on, ("CONDITIONAL_DISAGG_EFF_ISL_THRESHOLD", "1k")]).unwrap();
    let said = ignored.notes[0].to_string();
    assert_eq!(
        said,
        "assumed: DYN_ROUTER_CONDITIONAL_DISAGG_EFF_ISL_THRESHOLD: Dynamo ignores \"1k\" and keeps 2048"
    );
    let refused = dynamo_env(&[on, ("CONDITIONAL_DISAGG_POLICY", "isl_or_load")]).unwrap_err();
    assert!(refused.to_string().contains("--queue-threshold"));
    let given = from_dynamo(
        Settings::Text(r#"{"policy": "prefill_load"}"#, Path::new(ORIGIN)),
        Some(3.0),
    );
    assert_eq!(
        keys(&given.unwrap()),
        ["type: PrefillLoad", "prefillBusyThreshold: 3"]
    );
}

#[test]
fn the_translated_policy_decides_as_dynamo_does() {
    let bypasses = |json: &str, prompt: u64, cached: u64| {
        let policy = loaded(&dynamo(json).unwrap()).policy;
        because(&policy, prompt, device(cached / 16)).is_bypass()
    };
    // Prompt, cached, whether it bypasses, at 2048 tokens and a share of 0.7.
    for (prompt, cached, expected) in [
        (1000, 896, true),
        (100_000, 64_000, false),
        (200, 0, false),
        (2064, 16, false),
        (2064 + 2048, 2064, false),
        (2064 + 2047, 2064, true),
    ] {
        assert_eq!(
            bypasses("{}", prompt, cached),
            expected,
            "{prompt} {cached}"
        );
    }
    // Nothing is rounded up to a block; equal is not below; 0 is below nothing.
    assert!(!bypasses(r#"{"eff_isl_ratio_threshold": 0.99}"#, 2100, 48));
    assert!(bypasses(r#"{"eff_isl_ratio_threshold": 0.99}"#, 2095, 48));
    for json in [
        r#"{"eff_isl_threshold": 0}"#,
        r#"{"eff_isl_ratio_threshold": 0}"#,
    ] {
        let converted = dynamo(json).unwrap();
        let policy = config::parse_policy(&converted.yaml, Path::new("out.yaml"))
            .unwrap()
            .policy;
        assert!(!because(&policy, 1600, device(100)).is_bypass(), "{json}");
    }
    assert!(!bypasses(r#"{"eff_isl_ratio_threshold": 1.0}"#, 200, 0));
}

#[test]
fn slower_tiers_count_by_their_weight_as_in_dynamo() {
    let policy =
        loaded(&dynamo(r#"{"eff_isl_threshold": 53, "eff_isl_ratio_threshold": 1}"#).unwrap())
            .policy;
    // 100 tokens, four blocks of 16 in host memory: 48 of them count, so 52 are new.
    let host = TierBlocks {
        host: Blocks(4),
        ..TierBlocks::default()
    };
    assert!(because(&policy, 100, host).is_bypass());
    let policy =
        loaded(&dynamo(r#"{"eff_isl_threshold": 52, "eff_isl_ratio_threshold": 1}"#).unwrap())
            .policy;
    assert!(!because(&policy, 100, host).is_bypass());
}

#[test]
fn a_busy_prefill_pod_is_passed_by_as_in_dynamo() {
    let policy =
        loaded(&dynamo(r#"{"policy": "prefill_load", "prefill_busy_threshold": 1}"#).unwrap())
            .policy;
    for (queued, capacity, expected) in [
        (8192, Capacity::Reported(Tokens(8192)), false),
        (8193, Capacity::Reported(Tokens(8192)), true),
        (9_000_000, Capacity::Unknown, false),
    ] {
        let mut busy = prefill(1);
        busy.load.prefill_tokens = Tokens(queued);
        busy.prefill_capacity = capacity;
        let snapshot = snapshot([decode(0), busy]);
        let decided = judge(&ask(1000), &snapshot, &policy).unwrap().because;
        assert_eq!(decided.is_bypass(), expected, "{queued}: {decided}");
    }
}

/// A config whose decider is `decider`.
fn picker_config(decider: &str) -> String {
    format!(
        "apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: disagg-profile-handler
  parameters: {{deciders: {{prefill: prefix-based-pd-decider}}}}
- {decider}
- {{type: decode-filter}}
- {{type: prefill-filter}}
- {{type: max-score-picker}}
schedulingProfiles:
- name: decode
  plugins: [{{pluginRef: decode-filter}}]
"
    )
}

fn prefix_config(uncached: u64, prompt: u64) -> String {
    picker_config(&format!(
        "{{type: prefix-based-pd-decider, parameters: {{nonCachedTokens: {uncached}, promptTokens: {prompt}}}}}"
    ))
}

#[test]
fn deciders_of_llm_d_become_the_keys_of_a_bypass() {
    let exact = |tokens: u64, cold: u64| {
        vec![
            "type: IslBounding".to_owned(),
            format!("effectiveIslThreshold: {tokens}"),
            "effectiveIslRatioThreshold: 1".to_owned(),
            format!("coldBypassBelow: {cold}"),
            "tierCredit: Full".to_owned(),
        ]
    };
    let word = |word: &str| vec![format!("type: {word}")];
    let legacy = |handler: &str| {
        format!(
            "kind: EndpointPickerConfig\nplugins:\n- {handler}\n- {{name: mine, type: prefix-based-pd-decider, \
             parameters: {{nonCachedTokens: 16}}}}\n"
        )
    };
    for (text, expected) in [
        (prefix_config(512, 0), exact(512, 512)),
        (prefix_config(512, 1024), exact(512, 1024)),
        (prefix_config(1024, 512), exact(1024, 1024)),
        (prefix_config(0, 512), word("Always")),
        (
            picker_config("{type: prefix-based-pd-decider}"),
            word("Always"),
        ),
        (
            picker_config("{name: prefix-based-pd-decider, type: always-disagg-pd-decider}"),
            word("Never"),
        ),
        (
            legacy("{type: pd-profile-handler, parameters: {deciderPluginName: mine}}"),
            exact(16, 16),
        ),
        (
            legacy("{type: disagg-profile-handler, parameters: {prefillDeciderPluginName: mine}}"),
            exact(16, 16),
        ),
        (legacy("{type: disagg-profile-handler}"), word("Always")),
        (legacy("{type: single-profile-handler}"), word("Always")),
        (
            legacy("{type: disagg-profile-handler, parameters: {stageOrder: prefill-first}}"),
            word("Never"),
        ),
        ("kind: EndpointPickerConfig\n".to_owned(), word("Always")),
    ] {
        assert_eq!(keys(&llm_d(&text).unwrap()), expected, "{text}");
    }
}

#[test]
fn what_is_no_config_of_llm_d_is_refused_with_its_place() {
    for (text, expected) in [
        (
            "kind: ConfigMap\n".to_owned(),
            "kind: expected a file of the kind EndpointPickerConfig",
        ),
        (
            "- a\n".to_owned(),
            "expected a file of the kind EndpointPickerConfig, found a list",
        ),
        (": :".to_owned(), "expected"),
        (
            picker_config("{type: prefix-based-pd-decider, parameters: {nonCachedTokens: 2k}}"),
            "plugins[1].parameters.nonCachedTokens: expected a whole number of at least 0, found the text \"2k\"",
        ),
        (
            picker_config("{type: prefix-based-pd-decider, parameters: {nonCachedTokens: -1}}"),
            "plugins[1].parameters.nonCachedTokens: expected a whole number",
        ),
        (
            picker_config("{name: other, type: prefix-based-pd-decider}"),
            "found the name \"prefix-based-pd-decider\", which no plugin has",
        ),
        (
            picker_config("{name: prefix-based-pd-decider, type: my-decider}"),
            "plugins[0]: expected a plugin of the type prefix-based-pd-decider or always-disagg-pd-decider",
        ),
        (
            picker_config("{name: no-type}"),
            "plugins[1]: expected a plugin with a type, found a mapping",
        ),
    ] {
        let said = llm_d(&text).unwrap_err().to_string();
        assert!(said.contains(expected), "{text}: {said}");
    }
}

#[test]
fn plugins_without_an_equivalent_are_listed_each_once() {
    let text = "kind: EndpointPickerConfig
featureGates: [flowControl]
plugins:
- {type: disagg-profile-handler, parameters: {deciders: {prefill: d, encode: e}}}
- {name: d, type: prefix-based-pd-decider, parameters: {nonCachedTokens: 16}}
- {name: e, type: always-disagg-multimodal-decider}
- {type: queue-scorer}
- {type: queue-scorer, name: again}
- {type: session-affinity-scorer, parameters: {strategy: session_id}}
- {type: weighted-random-picker}
- {type: label-selector-filter}
- {type: my-own-plugin}
flowControl: {maxBytes: 1}
";
    let converted = llm_d(text).unwrap();
    let yaml = &converted.yaml;
    assert!(
        yaml.contains(
            "  sessionAffinity:\n    mode: Soft\n    header: x-session-id\n    ttl: 5m\n"
        ),
        "{yaml}"
    );
    loaded(&converted);
    let missing: Vec<&str> = converted
        .notes
        .iter()
        .filter(|note| note.sort == Sort::NoEquivalent)
        .map(|note| note.text.split(':').next().unwrap())
        .collect();
    assert_eq!(
        missing,
        [
            "the encode stage",
            "\"always-disagg-multimodal-decider\"",
            "\"queue-scorer\"",
            "\"weighted-random-picker\"",
            "\"label-selector-filter\"",
            "\"my-own-plugin\"",
            "featureGates",
            "flowControl",
        ]
    );
    let header = text.replace("strategy: session_id", "strategy: encoded_endpoint_header");
    let converted = llm_d(&header).unwrap();
    assert!(!converted.yaml.contains("sessionAffinity"));
    assert!(
        converted
            .notes
            .iter()
            .any(|note| note.text.contains("x-session-token"))
    );
}

proptest! {
    /// The decider's own rule, as its users know it.
    #[test]
    fn the_translated_policy_decides_as_the_decider_of_llm_d(
        prompt in 1_u64..3000,
        cached in 0_u64..200,
        uncached in prop::sample::select(vec![0_u64, 1, 8, 16, 512, 1024, 2048]),
        gate in prop::sample::select(vec![0_u64, 1, 100, 600, 5000]),
    ) {
        let blocks = cached.min(prompt / 16);
        let new = prompt - blocks * 16;
        let remote = uncached != 0 && gate <= prompt && uncached <= new;
        let policy = loaded(&llm_d(&prefix_config(uncached, gate)).unwrap()).policy;
        let decided = because(&policy, prompt, device(blocks));
        prop_assert_eq!(decided.is_bypass(), !remote, "{}", decided);
    }

    #[test]
    fn any_text_gives_a_policy_or_faults(text in "[-a-z{}:\\[\\]\"' \n,0-9]{0,80}") {
        for (name, converted) in [("dynamo", dynamo(&text)), ("llm-d", llm_d(&text))] {
            match converted {
                Ok(converted) => {
                    prop_assert!(config::parse_policy(&converted.yaml, Path::new(name)).is_ok());
                }
                Err(faults) => prop_assert!(!faults.faults.is_empty()),
            }
        }
    }
}

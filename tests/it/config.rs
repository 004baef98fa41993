//! Files of operators: the bad ones with what is said of them, the good ones with what they become.

use proptest::prelude::*;
use sidestep::config::{
    self, Diagnostics, Explain, Finding, Handoff, PodSource, PolicySource, Position, Shadow,
    Telemetry, Template, Tls, Tokenizer,
};
use sidestep::decide::policy::{
    Bypass, ClientPins, DecodeGate, Match, OnNoPrefill, Scoring, SessionAffinity, TierCredit,
};
use sidestep::decide::snapshot::{CapacitySource, LocalPrefill, Role};
use sidestep::fleet::Probe;
use sidestep::units::{BlockSize, Blocks, Ratio, Tokens};
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::time::Duration;

const GOLDEN: &str = "tests/golden/config";

fn yaml_files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|ending| ending == "yaml"))
        .collect();
    files.sort();
    files
}

/// Compares what is said of every bad file in `folder` with the file of the same name that ends in
/// `.expected`; returns their number. `BLESS=1` writes the latter anew.
fn golden(folder: &str, load: impl Fn(&Path) -> Result<(), Diagnostics>) -> usize {
    let folder = Path::new(GOLDEN).join(folder);
    let files = yaml_files(&folder);
    let prefix = format!("{}/", folder.display());
    let mut wrong = Vec::new();
    for path in &files {
        let said = match load(path) {
            Ok(()) => "accepted\n".to_owned(),
            Err(faults) => format!("{faults}\n").replace(&prefix, ""),
        };
        let expected_at = path.with_extension("expected");
        if std::env::var_os("BLESS").is_some() {
            std::fs::write(&expected_at, &said).unwrap();
        }
        let expected = std::fs::read_to_string(&expected_at).unwrap_or_default();
        if said != expected {
            wrong.push(format!(
                "{}\n  expected:\n{expected}\n  found:\n{said}",
                path.display()
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    files.len()
}

#[test]
fn each_bad_policy_is_refused_with_its_faults() {
    let cases = golden("policy", |path| config::load_policy(path).map(drop));
    assert!(70 <= cases, "{cases} cases");
}

#[test]
fn each_bad_list_of_pods_is_refused_with_its_faults() {
    let cases = golden("pods", |path| config::load_pods(path).map(drop));
    assert!(10 <= cases, "{cases} cases");
}

#[test]
fn each_bad_process_config_is_refused_with_its_faults() {
    let cases = golden("process", |path| config::load(path).map(drop));
    assert!(15 <= cases, "{cases} cases");
}

#[test]
fn checking_a_file_of_any_kind_finds_the_same_faults() {
    for path in yaml_files(&Path::new(GOLDEN).join("policy")) {
        let loaded = config::load_policy(&path).map(drop).unwrap_err();
        let kind_is_ours = std::fs::read_to_string(&path)
            .is_ok_and(|text| text.contains("kind: DisaggregationPolicy\n"));
        let checked = config::check(&path).unwrap_err();
        if kind_is_ours {
            assert_eq!(checked, loaded, "{}", path.display());
        }
    }
    for path in yaml_files(&Path::new(GOLDEN).join("process")) {
        let loaded = config::load(&path).unwrap_err();
        assert_eq!(config::check(&path).unwrap_err(), loaded);
    }
}

#[test]
fn each_example_policy_parses_without_a_warning() {
    let files = yaml_files(Path::new("manifests/policies"));
    assert!(4 <= files.len());
    for path in files {
        let loaded = config::load_policy(&path).unwrap_or_else(|faults| panic!("{faults}"));
        assert_eq!(loaded.warnings, Vec::new(), "{}", path.display());
        let name = path.file_stem().unwrap().to_str().unwrap();
        assert_eq!(&*loaded.policy.name, name);
        assert_eq!(config::check(&path).unwrap(), Vec::new());
    }
}

fn ratio(value: f64) -> Ratio {
    Ratio::new(value).unwrap()
}

#[test]
fn the_chat_example_becomes_what_it_says() {
    let loaded = config::load_policy(Path::new("manifests/policies/chat.yaml")).unwrap();
    let target = loaded.target.unwrap();
    assert_eq!(&*target.kind, "InferencePool");
    assert_eq!(loaded.handoff, Handoff::DecodeFirst);
    assert_eq!(loaded.shadow, Shadow::Off);
    let policy = loaded.policy;
    assert_eq!(policy.generation, 1);
    assert_eq!(policy.scoring, Scoring::default());
    assert_eq!(policy.client_pins, ClientPins::Ignore);
    let SessionAffinity::Soft(key) = policy.session_affinity else {
        panic!("{:?}", policy.session_affinity);
    };
    assert_eq!(&*key.header, "x-session-id");
    assert_eq!(key.ttl, Duration::from_secs(300));

    let [rule, last] = policy.rules.as_slice() else {
        panic!("{:?}", policy.rules);
    };
    assert_eq!(&*rule.matches.models[0], "llama-3.1-70b*");
    assert_eq!(&*rule.matches.policy_classes[0], "interactive");
    assert_eq!(rule.matches.min_priority, Some(0));
    let Bypass::IslOrLoad(bound, busy) = rule.bypass else {
        panic!("{:?}", rule.bypass);
    };
    assert_eq!(bound.threshold, Tokens(2048));
    assert_eq!(bound.ratio, ratio(0.7));
    assert_eq!(bound.cold_bypass_below, Tokens(256));
    assert_eq!(bound.tier_credit, TierCredit::Full);
    assert_eq!(busy.threshold, ratio(1.0));
    assert_eq!(
        rule.gate,
        DecodeGate::On {
            threshold: ratio(0.85),
            trust: vec![CapacitySource::Reported, CapacitySource::Configured],
        }
    );
    // What no rule mentions is prefilled remotely.
    assert_eq!(last.matches, Match::default());
    assert_eq!(last.bypass, Bypass::Never);
    assert_eq!(last.on_no_prefill, OnNoPrefill::Local);
}

fn policy(spec: &str) -> Result<config::LoadedPolicy, Diagnostics> {
    let head = "apiVersion: sidestep.dev/v1alpha1\nkind: DisaggregationPolicy\n\
                metadata: {name: p}\nspec:\n";
    config::parse_policy(&format!("{head}{spec}"), Path::new("p.yaml"))
}

#[test]
fn absent_thresholds_have_the_documented_defaults() {
    let loaded = policy("  rules:\n  - bypass: {type: IslBounding}\n").unwrap();
    let [rule] = loaded.policy.rules.as_slice() else {
        panic!("a rule that matches everything needs no other after it");
    };
    let Bypass::IslBounding(bound) = rule.bypass else {
        panic!("{:?}", rule.bypass);
    };
    assert_eq!(bound.threshold, Tokens(2048));
    assert_eq!(bound.ratio, ratio(0.7));
    assert_eq!(bound.cold_bypass_below, Tokens(0));
    assert_eq!(rule.gate, DecodeGate::Off);
    assert_eq!(loaded.policy.session_affinity, SessionAffinity::Off);
}

#[test]
fn both_ends_of_every_range_are_allowed() {
    for bypass in [
        "type: IslBounding, effectiveIslRatioThreshold: 0.0001, effectiveIslThreshold: 1",
        "type: IslBounding, effectiveIslRatioThreshold: 1, effectiveIslThreshold: 1000000000",
        "type: IslBounding, coldBypassBelow: 0",
        "type: PrefillLoad, prefillBusyThreshold: 0",
        "type: PrefillLoad, prefillBusyThreshold: 1.0e+6, decodeBusyThreshold: 1000000",
        "type: Always, decodeBusyThreshold: 1.5",
    ] {
        let loaded = policy(&format!("  rules:\n  - bypass: {{{bypass}}}\n"));
        let loaded = loaded.unwrap_or_else(|faults| panic!("{faults}"));
        assert_eq!(loaded.warnings, Vec::new(), "{bypass}");
    }
}

fn warnings(spec: &str) -> Vec<String> {
    let loaded = policy(spec).unwrap_or_else(|faults| panic!("{faults}"));
    let text = |warning: &Finding| warning.to_string();
    loaded.warnings.iter().map(text).collect()
}

#[test]
fn what_has_no_effect_is_warned_of_with_the_reason() {
    let found = warnings(
        "  rules:
  - bypass: {type: PrefillLoad, prefillBusyThreshold: 1, effectiveIslThreshold: 10}
  - match: {models: [a]}
    bypass: {type: Never, trustCapacity: [Reported]}
  sessionAffinity: {mode: None, ttl: 5m}
",
    );
    assert_eq!(
        found,
        [
            "spec.rules[0].bypass.effectiveIslThreshold: has no effect: the type PrefillLoad does not \
             look at net-new tokens (p.yaml, line 6, column 81)",
            "spec.rules[1]: is never reached: rules[0] matches all that this one does (p.yaml, line 7, \
             column 5)",
            "spec.rules[1].bypass.trustCapacity: has no effect: the type Never leaves nothing to veto \
             (p.yaml, line 8, column 42)",
            "spec.sessionAffinity.ttl: has no effect: the mode is None (p.yaml, line 9, column 38)",
        ]
    );
}

#[test]
fn thresholds_that_nothing_is_below_are_warned_of() {
    let found = warnings(
        "  rules:
  - bypass: {type: IslBounding, effectiveIslThreshold: 0, effectiveIslRatioThreshold: 0, decodeBusyThreshold: 0}
",
    );
    assert_eq!(found.len(), 3, "{found:#?}");
    assert_eq!(warnings("  rules: []\n").len(), 1);
    assert_eq!(warnings("  scoring: {}\n").len(), 1);
}

#[test]
fn only_rules_that_no_request_reaches_are_called_so() {
    let unreached = |first: &str, second: &str| {
        let rule = |text: &str| format!("  - match: {{{text}}}\n    bypass: {{type: Never}}\n");
        let spec = format!("  rules:\n{}{}", rule(first), rule(second));
        !warnings(&spec).is_empty()
    };
    for (first, second) in [
        ("", "models: [a]"),
        ("models: ['*']", ""),
        ("models: ['ll*']", "models: ['llama*', llm]"),
        ("minPriority: 1", "minPriority: 1"),
        (
            "policyClasses: [a, b]",
            "policyClasses: [b], minPriority: 3",
        ),
    ] {
        assert!(unreached(first, second), "{first} before {second}");
    }
    for (first, second) in [
        ("models: [a]", ""),
        ("models: ['llama*']", "models: ['ll*']"),
        ("models: ['ll*']", "models: [llama, qwen]"),
        ("minPriority: 1", "minPriority: 0"),
        ("minPriority: 1", "models: [a]"),
        ("policyClasses: [a]", "models: [a]"),
    ] {
        assert!(!unreached(first, second), "{first} before {second}");
    }
}

#[test]
fn a_pod_in_full_becomes_what_it_says() {
    let text = "pods:
- name: decode-0
  address: '[fd00::7]:8000'
  role: both
  models: [llama]
  adapters: [support]
  kvEvents: {address: '10.0.0.7:5557', replay: 'tcp://10.0.0.7:5558', topic: kv}
  capacity: {kvBlocks: 4096, prefillTokens: 8192, blockSize: 16}
  localPrefill: unable
  probe: off
- {name: prefill-0, address: '10.0.0.8:8000', role: prefill, probe: {}}
- {name: prefill-1, address: '10.0.0.9:8000', role: prefill, probe: {path: /m, failureThreshold: 5}}
";
    let loaded = config::parse_pods(text, Path::new("pods.yaml")).unwrap();
    assert_eq!(loaded.warnings, Vec::new());
    let [full, least, patient] = loaded.pods.as_slice() else {
        panic!("{:?}", loaded.pods);
    };
    assert_eq!(full.endpoint.to_string(), "[fd00::7]:8000");
    assert_eq!(full.role, Role::Both);
    assert_eq!(full.models[0].as_str(), "llama");
    assert_eq!(full.adapters[0].as_str(), "support");
    let events = full.kv_events.as_ref().unwrap();
    assert_eq!(events.events, "tcp://10.0.0.7:5557");
    assert_eq!(events.replay.as_deref(), Some("tcp://10.0.0.7:5558"));
    assert_eq!(events.topic, "kv");
    assert_eq!(full.kv_blocks, Some(Blocks(4096)));
    assert_eq!(full.prefill_batch_tokens, Some(Tokens(8192)));
    assert_eq!(full.block_size, BlockSize::new(16));
    assert_eq!(full.local_prefill, LocalPrefill::Unable);
    assert_eq!(full.probe, Probe::Off);

    assert_eq!(least.local_prefill, LocalPrefill::Able);
    assert_eq!(least.kv_events, None);
    let probe = |path: &str, failures| Probe::Metrics {
        path: path.into(),
        failure_threshold: NonZeroU32::new(failures).unwrap(),
    };
    assert_eq!(least.probe, probe("/metrics", 2));
    assert_eq!(patient.probe, probe("/m", 5));
}

#[test]
fn pods_that_cannot_serve_are_warned_of() {
    let warned = |text| {
        let loaded = config::parse_pods(text, Path::new("pods.yaml")).unwrap();
        loaded.warnings.first().map(ToString::to_string)
    };
    assert_eq!(
        warned("pods: []").unwrap(),
        "pods: no pod: every request is refused (pods.yaml, line 1, column 7)"
    );
    assert_eq!(
        warned("pods: [{name: p, address: '10.0.0.1:1', role: prefill}]").unwrap(),
        "pods: no pod decodes: every request is refused (pods.yaml, line 1, column 7)"
    );
}

#[test]
fn a_large_file_full_of_faults_names_the_first_places_and_every_path() {
    let text = format!("pods:\n{}", "- {name: '', role: decode}\n".repeat(20_000));
    let said = config::parse_pods(&text, Path::new("pods.yaml")).unwrap_err();
    let placed = |fault: &&Finding| fault.position != Position::WholeFile;
    let places = said.faults.iter().filter(placed).count();
    assert!((1..10).contains(&places), "{places}");
    assert!(said.faults[0].to_string().contains("line 2, column 3"));
    let last = said.faults.last().unwrap().to_string();
    assert!(last.starts_with("pods[24].name: expected"), "{last}");
}

/// A folder with `files`, by name and content.
fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, content) in files {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }
    folder
}

const LEAST: &str = "apiVersion: sidestep.dev/v1alpha1
kind: SidestepConfig
pods: {inline: [{name: d, address: '10.0.0.1:8000', role: decode}]}
policy: {inline: {rules: [{bypass: {type: Never}}]}}
";

#[test]
fn the_least_process_config_has_the_documented_defaults() {
    let folder = folder(&[("sidestep.yaml", LEAST)]);
    let loaded = config::load(&folder.path().join("sidestep.yaml")).unwrap();
    assert_eq!(loaded.warnings, Vec::new());
    let process = loaded.process;
    assert_eq!(process.listen.ext_proc.to_string(), "0.0.0.0:9002");
    assert_eq!(process.listen.health.to_string(), "0.0.0.0:9003");
    assert_eq!(process.listen.admin.to_string(), "127.0.0.1:9090");
    assert_eq!(process.tls, Tls::SelfSigned);
    assert_eq!(process.limits.request_bytes, 16 << 20);
    assert_eq!(process.limits.in_flight, 4096);
    assert_eq!(process.limits.body_timeout, Duration::from_secs(30));
    assert_eq!(process.limits.decision_timeout, Duration::from_secs(5));
    assert_eq!(process.limits.drain_timeout, Duration::from_secs(30));
    assert_eq!(
        (process.pods, process.policy),
        (PodSource::Inline, PolicySource::Inline)
    );
    assert_eq!(process.telemetry, Telemetry::default());
    assert_eq!(process.admin.explain, Explain::Disabled);
    assert_eq!(
        &*process.data_plane.subset_hint.namespace,
        "envoy.lb.subset_hint"
    );
    assert_eq!(&*process.data_plane.destination.namespace, "envoy.lb");
    assert_eq!(&*loaded.policy.name, "inline");
    assert_eq!(loaded.pods.len(), 1);
    assert_eq!(loaded.models, Vec::new());
}

#[test]
fn every_range_ends_where_its_message_says() {
    let folder = folder(&[]);
    let path = folder.path().join("sidestep.yaml");
    let accepted = |section: &str, value: &str| {
        std::fs::write(&path, format!("{LEAST}{}\n", section.replace('#', value))).unwrap();
        config::load(&path).is_ok()
    };
    for (section, right, wrong) in [
        (
            "limits: {requestBytes: #}",
            vec!["1024", "1Ki", "16Mi", "1Gi", "1073741824"],
            vec![
                "1023",
                "0",
                "-1",
                "1073741825",
                "2Gi",
                "1.5Mi",
                "Mi",
                "16M",
                "16 Mi",
                "+1Ki",
                "true",
            ],
        ),
        (
            "admin: {explain: #}",
            vec!["Enabled", "Disabled", "'Enabled'"],
            vec!["true", "false", "enabled", "On", "null", "{}", "''"],
        ),
        (
            "limits: {inFlight: #}",
            vec!["1", "1000000", "0x10"],
            vec!["0", "1000001", "-1", "1.0", "'1'", "null", "{}"],
        ),
        (
            "limits: {drainTimeout: #}",
            vec!["1ms", "720h", "1h30m", "0h1s", "'5m'"],
            vec![
                "0s",
                "720h1ms",
                "5",
                "5 m",
                "5min",
                "-5s",
                "1.5s",
                "''",
                "s",
                "ms",
                "5m3",
                "99999999999999999999h",
                "5124095576030431h",
                "١s",
            ],
        ),
        (
            "telemetry: {otlpEndpoint: 'http://c:4317', sampleRatio: #}",
            vec!["0", "1", "0.5", "-0.0", "1e-9"],
            vec!["1.0000001", "-0.1", ".nan", "'1'", "[1]"],
        ),
        (
            "telemetry: {otlpProtocol: #}",
            vec!["grpc", "http/protobuf"],
            vec!["http/json", "http", "GRPC", "1", "''"],
        ),
        (
            "telemetry: {otlpEndpoint: #}",
            vec![
                "http://10.0.0.1:4317",
                "'https://[::1]:4317'",
                "http://c/v1",
            ],
            vec!["c:4317", "grpc://c:4317", "http://", "'http://a b'", "/x"],
        ),
        (
            "listen: {admin: #}",
            vec!["127.0.0.1:0", "127.0.0.1:65535", "'[::1]:9090'"],
            vec![
                "127.0.0.1",
                "127.0.0.1:65536",
                ":9090",
                "9090",
                "localhost:1",
                "0.0.0.0:9002",
            ],
        ),
        (
            "index: {maxBlocks: #}",
            vec!["1", "1000000000"],
            vec!["0", "1000000001", "1e6"],
        ),
        (
            "models: [{name: m, blockSize: #}]",
            vec!["1", "65536"],
            vec!["0", "65537", "16.0"],
        ),
        (
            "models: [{name: #}]",
            vec!["m", "a/b:c", "'7'"],
            vec!["''", "' m'", "7", "\"a\\nb\""],
        ),
    ] {
        for value in right {
            assert!(accepted(section, value), "{section} with {value}");
        }
        for value in wrong {
            assert!(!accepted(section, value), "{section} with {value}");
        }
    }
}

#[test]
fn the_files_a_process_config_names_are_found_beside_it() {
    let process = "apiVersion: sidestep.dev/v1alpha1
kind: SidestepConfig
listen: {extProc: '[::1]:0', health: '127.0.0.1:0', admin: '127.0.0.1:0'}
tls: {mode: Files, certFile: tls/cert.pem, keyFile: tls/key.pem}
limits: {requestBytes: 64Ki, inFlight: 10, bodyTimeout: 1m30s, decisionTimeout: 250ms}
models:
- name: llama
  aliases: [chat]
  adapters: [support]
  tokenizer: {file: models/tokenizer.json}
  chatTemplate: {file: models/template.jinja}
  blockSize: 32
- {name: qwen, tokenizer: {file: models/tokenizer.json}}
- {name: tiny, tokenizer: {builtin: true}}
pods: {file: fleet/pods.yaml}
policy: {file: policy.yaml}
index: {maxBlocks: 1000}
telemetry: {otlpEndpoint: 'http://collector:4317', sampleRatio: 0.1, resource: {region: eu}}
dataPlane: {served: {namespace: other.lb}}
";
    let policy = "apiVersion: sidestep.dev/v1alpha1
kind: DisaggregationPolicy
metadata: {name: named}
spec: {rules: [{bypass: {type: Never}}]}
";
    let folder = folder(&[
        ("sidestep.yaml", process),
        ("tls/cert.pem", ""),
        ("tls/key.pem", ""),
        ("models/tokenizer.json", "{}"),
        ("models/template.jinja", ""),
        (
            "fleet/pods.yaml",
            "pods: [{name: d, address: '10.0.0.1:1', role: decode}]",
        ),
        ("policy.yaml", policy),
    ]);
    let loaded = config::load(&folder.path().join("sidestep.yaml"))
        .unwrap_or_else(|faults| panic!("{faults}"));
    assert_eq!(loaded.warnings, Vec::new());
    let at = |name: &str| folder.path().join(name);
    assert_eq!(
        loaded.process.tls,
        Tls::Files {
            cert: at("tls/cert.pem"),
            key: at("tls/key.pem"),
        }
    );
    assert_eq!(loaded.process.pods, PodSource::File(at("fleet/pods.yaml")));
    assert_eq!(loaded.process.policy, PolicySource::File(at("policy.yaml")));
    assert_eq!(loaded.process.limits.request_bytes, 65536);
    assert_eq!(loaded.process.limits.body_timeout, Duration::from_secs(90));
    assert_eq!(loaded.process.index.max_blocks_per_pod, 1000);
    assert_eq!(&*loaded.process.data_plane.served.namespace, "other.lb");
    assert_eq!(&*loaded.policy.name, "named");
    let [llama, qwen, tiny] = loaded.models.as_slice() else {
        panic!("{:?}", loaded.models);
    };
    assert_eq!(
        llama.tokenizer,
        Tokenizer::File {
            tokenizer: at("models/tokenizer.json"),
            template: Template::File(at("models/template.jinja")),
        }
    );
    assert_eq!(llama.block_size, BlockSize::new(32));
    assert!(matches!(
        &qwen.tokenizer,
        Tokenizer::File {
            template: Template::BesideTokenizer,
            ..
        }
    ));
    assert_eq!(tiny.tokenizer, Tokenizer::Builtin);
}

#[test]
fn what_the_files_together_do_not_mean_is_warned_of() {
    let process = "apiVersion: sidestep.dev/v1alpha1
kind: SidestepConfig
models: [{name: llama}]
pods:
  inline:
  - {name: d1, address: '10.0.0.1:1', role: decode, probe: off, localPrefill: unable}
  - {name: d2, address: '10.0.0.2:1', role: both, probe: off, localPrefill: unable, models: [mistral]}
policy:
  inline:
    rules: [{match: {models: [lama]}, bypass: {type: IslBounding, decodeBusyThreshold: 0.5}}]
";
    let folder = folder(&[("sidestep.yaml", process)]);
    let loaded = config::load(&folder.path().join("sidestep.yaml")).unwrap();
    let said: Vec<&str> = loaded.warnings.iter().map(|w| w.message.as_str()).collect();
    for part in [
        "no kvEvents are configured for \"d1\", \"d2\"",
        "no trusted capacity can be had of \"d1\", \"d2\"",
        "no decode pod can prefill",
        "no configured model matches \"lama\"",
        "models that are not configured: \"mistral\"",
        "no tokenizer is configured for \"llama\"",
    ] {
        let times = said.iter().filter(|said| said.contains(part)).count();
        assert_eq!(times, 1, "{part} in {said:#?}");
    }
    assert_eq!(said.len(), 6);
    assert_eq!(loaded.warnings[0].position, Position::WholeFile);
}

#[test]
fn an_admin_port_on_the_network_without_a_token_is_warned_of() {
    let warnings = |listen: &str, admin: &str| {
        let config = format!("{LEAST}listen: {{admin: '{listen}'}}\n{admin}");
        let folder = folder(&[("sidestep.yaml", &config), ("token", "0123456789abcdef")]);
        let loaded = config::load(&folder.path().join("sidestep.yaml")).unwrap();
        let said = loaded.warnings.iter().map(ToString::to_string);
        (said.collect::<Vec<String>>(), loaded.process.admin.access)
    };
    let (said, access) = warnings("0.0.0.0:9090", "");
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(
        said[0].starts_with("listen.admin: is reached over the network"),
        "{said:?}"
    );
    assert_eq!(access, config::AdminAccess::Loopback);
    for listen in ["127.0.0.1:9090", "[::1]:9090"] {
        assert_eq!(warnings(listen, "").0, Vec::<String>::new(), "{listen}");
    }
    let (said, access) = warnings("0.0.0.0:9090", "admin: {token: {file: token}}\n");
    assert_eq!(said, Vec::<String>::new());
    assert!(matches!(access, config::AdminAccess::TokenFile(path) if path.ends_with("token")));
}

#[test]
fn a_missing_file_and_a_folder_are_faults() {
    let folder = folder(&[]);
    for (path, found) in [
        (folder.path().join("none"), "nothing"),
        (folder.path().into(), "a folder"),
    ] {
        for said in [
            config::load(&path).unwrap_err(),
            config::load_policy(&path).unwrap_err(),
            config::load_pods(&path).unwrap_err(),
            config::check(&path).unwrap_err(),
        ] {
            assert_eq!(
                said.to_string(),
                format!(
                    "file: expected a file that can be read, found {found} ({})",
                    path.display()
                )
            );
        }
    }
}

#[test]
fn a_file_above_the_bound_is_refused_and_one_at_it_is_read() {
    let head = "pods: []\n#";
    let at_bound = format!("{head}{}", "x".repeat(config::MAX_FILE_BYTES - head.len()));
    let above = format!("{at_bound}x");
    let folder = folder(&[("at.yaml", &at_bound), ("above.yaml", &above)]);
    config::load_pods(&folder.path().join("at.yaml")).unwrap();
    let said = config::load_pods(&folder.path().join("above.yaml")).unwrap_err();
    assert!(said.to_string().contains("expected at most 2097152 bytes"));
}

#[test]
fn a_file_of_a_megabyte_is_read_and_its_last_fault_found() {
    let mut text = String::from("pods:\n");
    let mut pods = 0;
    while text.len() < 1 << 20 {
        let (a, b) = (pods / 250, pods % 250 + 1);
        text.push_str(&format!(
            "- {{name: decode-{pods}, address: '10.0.{a}.{b}:8000', role: decode, localPrefill: able, \
             capacity: {{kvBlocks: 4096, blockSize: 16}}}}\n"
        ));
        pods += 1;
    }
    let loaded = config::parse_pods(&text, Path::new("pods.yaml")).unwrap();
    assert_eq!(loaded.pods.len(), pods);
    text.push_str("- {name: last, address: '10.1.0.1:8000', role: decoder}\n");
    let said = config::parse_pods(&text, Path::new("pods.yaml")).unwrap_err();
    let line = pods + 2;
    assert_eq!(
        said.to_string(),
        format!(
            "pods[{pods}].role: expected prefill, decode or both, found the text \"decoder\"; is \
             decode meant? (pods.yaml, line {line}, column 48)"
        )
    );
}

#[test]
fn a_policy_of_a_megabyte_is_refused_for_its_rules_alone_and_soon() {
    let rule = "  - {match: {models: ['a*'], policyClasses: [b]}, bypass: {type: Never}}\n";
    let rules = (1 << 20) / rule.len() - 2;
    let began = std::time::Instant::now();
    let said = policy(&format!("  rules:\n{}", rule.repeat(rules))).unwrap_err();
    assert_eq!(said.faults.len(), 1, "{said}");
    assert_eq!(
        said.faults[0].message,
        format!("expected at most 64 items, found {rules}")
    );
    assert!(
        began.elapsed() < Duration::from_secs(20),
        "{:?}",
        began.elapsed()
    );
}

#[test]
fn a_flood_of_faults_is_cut_short_and_counted() {
    let text = format!("pods:\n{}", "- {}\n".repeat(1000));
    let said = config::parse_pods(&text, Path::new("pods.yaml")).unwrap_err();
    assert_eq!(said.faults.len() + said.left_out, 3000);
    let shown = said.to_string();
    assert_eq!(shown.lines().count(), 51);
    assert!(shown.ends_with("\nand 2950 more"));
}

#[test]
fn text_that_blows_up_is_refused_within_bounds() {
    let laughs = {
        let mut text = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
        for level in 1..12 {
            let below = format!("*a{}, ", level - 1).repeat(10);
            text.push_str(&format!("a{level}: &a{level} [{below}]\n"));
        }
        text
    };
    for text in [
        laughs,
        "[".repeat(1 << 20),
        "{a: ".repeat(1 << 18),
        "- ".repeat(10_000),
        format!("[{}]", "1,".repeat(400_000)),
        "&a [*a]".to_owned(),
        "pods: *nobody".to_owned(),
        "%YAML 9.9\n---\npods: []".to_owned(),
        "\u{feff}pods: {".to_owned(),
        "? [complex, key]\n: value\n".to_owned(),
        "pods: \u{0}".to_owned(),
    ] {
        let said = config::parse_pods(&text, Path::new("pods.yaml")).unwrap_err();
        assert!(said.to_string().len() < 20_000, "{}", &text[..7]);
    }
}

#[test]
fn what_is_found_is_shown_on_one_line_of_bounded_length() {
    let long = "x".repeat(10_000);
    for value in [
        format!("\"a\\nb\\u001b[31m{long}\""),
        format!("{{\"{long}\\n\": 1}}"),
    ] {
        let said = config::parse_pods(&format!("pods: {value}"), Path::new("p")).unwrap_err();
        for fault in &said.faults {
            let line = fault.to_string();
            assert!(line.len() < 600, "{line}");
            assert!(!line.contains(char::is_control), "{line:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn any_bytes_give_a_value_or_faults(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("any.yaml");
        std::fs::write(&path, &bytes).unwrap();
        for faults in [
            config::load(&path).err(),
            config::load_policy(&path).err(),
            config::check(&path).err(),
        ] {
            let said = faults.unwrap().to_string();
            prop_assert!(!said.is_empty());
        }
    }

    /// Lines of a right policy, mixed up.
    #[test]
    fn any_mixture_of_lines_gives_a_value_or_faults(
        picked in prop::collection::vec((0..40_usize, 0..8_usize), 0..40),
    ) {
        let text = include_str!("../../manifests/policies/chat.yaml");
        let lines: Vec<&str> = text.lines().collect();
        let mixed: String = picked
            .iter()
            .map(|(line, indent)| {
                let line = lines.get(line % lines.len()).copied().unwrap_or_default();
                format!("{}{}\n", " ".repeat(*indent), line.trim_start())
            })
            .collect();
        if let Err(faults) = config::parse_policy(&mixed, Path::new("p.yaml")) {
            prop_assert!(!faults.faults.is_empty());
        }
    }

    /// One value of a right policy replaced.
    #[test]
    fn any_value_gives_a_policy_or_a_fault_at_its_place(
        key in prop::sample::select(vec![
            "effectiveIslThreshold", "effectiveIslRatioThreshold", "coldBypassBelow",
            "prefillBusyThreshold", "decodeBusyThreshold", "trustCapacity", "tierCredit",
        ]),
        value in prop::sample::select(vec![
            "0", "1", "-1", "0.5", "1.5", "-0.0", ".nan", ".inf", "-.inf", "null", "~", "true",
            "'0.5'", "2k", "[]", "{}", "[Reported]", "Full", "1e400", "0x10", "1_000",
            "99999999999999999999999999999999999999999999", "!tag 1", "\"\"",
        ]),
    ) {
        let spec = format!(
            "  rules:\n  - bypass:\n      type: IslOrLoad\n      {}{key}: {value}\n",
            if key == "prefillBusyThreshold" { "" } else { "prefillBusyThreshold: 1\n      " },
        );
        match policy(&spec) {
            Ok(loaded) => {
                let Bypass::IslOrLoad(bound, busy) = loaded.policy.rules[0].bypass else {
                    panic!("{:?}", loaded.policy.rules);
                };
                prop_assert!(bound.ratio.get() <= 1.0);
                prop_assert!(busy.threshold.get().is_finite());
            }
            Err(faults) => {
                let at = format!("spec.rules[0].bypass.{key}: expected ");
                let said = faults.to_string();
                prop_assert!(said.starts_with(&at), "{said}");
                prop_assert!(said.contains(", line "), "{said}");
            }
        }
    }
}

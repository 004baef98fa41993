//! What a policy needs of its pods: each need with both its sides, and how it is seen from outside.

use crate::decide_fixture::{bound, busy, decode, gate, gated, isl, policy, prefill, rule};
use sidestep::app::App;
use sidestep::decide::Prerequisite;
use sidestep::decide::policy::{Bypass, DecodeGate, Policy};
use sidestep::decide::prerequisite::{PrefixCaching, missing};
use sidestep::decide::snapshot::{Candidate, Capacity, CapacitySource, KvSource, LocalPrefill};
use sidestep::pick::Head;
use sidestep::units::{Blocks, Tokens};

fn lacks(pod: Candidate, policy: &Policy) -> Vec<&'static str> {
    let found = missing(&pod, PrefixCaching::Unknown, policy);
    found.iter().map(|what| what.as_str()).collect()
}

fn with(change: impl Fn(&mut Candidate)) -> Candidate {
    let mut pod = decode(0);
    change(&mut pod);
    pod
}

#[test]
fn a_rule_on_net_new_tokens_needs_the_decode_pods_events() {
    let source = |source| with(|pod| pod.kv_source = source);
    for (given, expected) in [
        (KvSource::Live, vec![]),
        (KvSource::Syncing, vec![]),
        (KvSource::Lost, vec!["kv_events"]),
        (KvSource::Absent, vec!["kv_events"]),
    ] {
        assert_eq!(lacks(source(given), &isl()), expected, "{given:?}");
    }
    let load = policy([rule(Bypass::PrefillLoad(busy(1.0)))]);
    assert_eq!(lacks(source(KvSource::Absent), &load), Vec::<&str>::new());
    let mut silent = prefill(1);
    silent.kv_source = KvSource::Absent;
    assert_eq!(lacks(silent, &isl()), Vec::<&str>::new());
}

#[test]
fn a_rule_on_net_new_tokens_needs_an_engine_that_keeps_prefixes() {
    let caching = |caching| missing(&decode(0), caching, &isl()).to_vec();
    assert_eq!(caching(PrefixCaching::Off), [Prerequisite::PrefixCaching]);
    assert_eq!(caching(PrefixCaching::On), []);
    assert_eq!(caching(PrefixCaching::Unknown), []);
    let always = policy([rule(Bypass::Always)]);
    assert!(missing(&decode(0), PrefixCaching::Off, &always).is_empty());
}

#[test]
fn a_bypass_needs_an_engine_that_prefills_what_it_decodes() {
    let unable = with(|pod| pod.local_prefill = LocalPrefill::Unable);
    let always = policy([rule(Bypass::Always)]);
    assert_eq!(lacks(unable, &always), ["local_prefill"]);
    assert_eq!(lacks(decode(0), &always), Vec::<&str>::new());
    let never = policy([rule(Bypass::Never)]);
    assert_eq!(lacks(unable, &never), Vec::<&str>::new());
}

#[test]
fn a_gate_needs_a_capacity_that_it_trusts() {
    let capacity = |capacity| with(|pod| pod.kv_capacity = capacity);
    let gate_of = |trust: Vec<CapacitySource>| {
        let threshold = crate::decide_fixture::ratio(0.9);
        gated(isl(), DecodeGate::On { threshold, trust })
    };
    let both = gated(isl(), gate(0.9));
    for (given, expected) in [
        (Capacity::Reported(Blocks(1)), vec![]),
        (Capacity::Configured(Blocks(1)), vec![]),
        (Capacity::Reported(Blocks(0)), vec!["kv_capacity"]),
        (Capacity::Assumed(Blocks(1)), vec!["kv_capacity"]),
        (Capacity::Unknown, vec!["kv_capacity"]),
    ] {
        assert_eq!(lacks(capacity(given), &both), expected, "{given:?}");
    }
    let assumed = capacity(Capacity::Assumed(Blocks(1)));
    let trusting = gate_of(vec![CapacitySource::Assumed]);
    assert_eq!(lacks(assumed, &trusting), Vec::<&str>::new());
    assert_eq!(
        lacks(capacity(Capacity::Unknown), &isl()),
        Vec::<&str>::new()
    );
    let never = gated(policy([rule(Bypass::Never)]), gate(0.9));
    assert_eq!(
        lacks(capacity(Capacity::Unknown), &never),
        Vec::<&str>::new()
    );
}

#[test]
fn a_rule_on_prefill_load_needs_the_prefill_pods_capacity() {
    let load = policy([rule(Bypass::IslOrLoad(bound(2048, 0.7), busy(1.0)))]);
    let capacity = |capacity| {
        let mut pod = prefill(1);
        pod.prefill_capacity = capacity;
        pod
    };
    let unknown = capacity(Capacity::Unknown);
    assert_eq!(lacks(unknown, &load), ["prefill_capacity"]);
    assert_eq!(
        lacks(capacity(Capacity::Reported(Tokens(0))), &load),
        ["prefill_capacity"]
    );
    assert_eq!(
        lacks(capacity(Capacity::Assumed(Tokens(1))), &load),
        Vec::<&str>::new()
    );
    assert_eq!(lacks(unknown, &isl()), Vec::<&str>::new());
    let unknown = with(|pod| pod.prefill_capacity = Capacity::Unknown);
    assert_eq!(lacks(unknown, &load), Vec::<&str>::new());
}

const CONFIG: &str = "apiVersion: sidestep.dev/v1alpha1
kind: SidestepConfig
listen: {extProc: '127.0.0.1:0', health: '127.0.0.1:0', admin: '127.0.0.1:0'}
tls: {mode: Plaintext}
pods:
  inline:
  - {name: d1, address: '127.0.0.11:8000', role: decode, probe: off, kvEvents: {address: 'tcp://127.0.0.1:1'}, capacity: {kvBlocks: 100}}
  - {name: d2, address: '127.0.0.12:8000', role: decode, probe: off, localPrefill: unable}
  - {name: p1, address: '127.0.0.21:8000', role: prefill, probe: off}
policy: {inline: {rules: [{bypass: {type: IslBounding, decodeBusyThreshold: 0.9}}]}}
";

#[tokio::test]
async fn what_pods_lack_is_a_metric_and_a_word_beside_each_pod_and_they_serve_all_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sidestep.yaml");
    std::fs::write(&path, CONFIG).unwrap();
    let app = App::start(sidestep::config::load(&path).unwrap())
        .await
        .unwrap();
    let metrics = app.picker().metrics().encode();
    let missing = |pod: &str, what: &str| {
        let series =
            format!("sidestep_policy_prerequisite_missing{{pod=\"{pod}\",what=\"{what}\"}} 1");
        metrics.contains(&series)
    };
    for what in ["kv_events", "local_prefill", "kv_capacity"] {
        assert!(missing("d2", what), "{what}: {metrics}");
        assert!(!missing("d1", what), "{what}: {metrics}");
    }
    let pods = serde_json::to_value(app.picker().pods()).unwrap();
    let words = serde_json::json!(["kv_events", "local_prefill", "kv_capacity"]);
    assert_eq!(pods[1]["missing"], words);
    assert_eq!(pods[2]["missing"], serde_json::json!([]));

    let mut served = std::collections::BTreeSet::new();
    for _ in 0..40 {
        let head = Head {
            method: "POST".into(),
            path: "/v1/completions".into(),
            ..Head::default()
        };
        let body = r#"{"model": "m", "prompt": "one two three"}"#.into();
        let picked = app.picker().pick(head, Some(body)).await.unwrap();
        served.insert(picked.plan.destination.to_string());
    }
    assert!(served.contains("127.0.0.12:8000"), "{served:?}");
}

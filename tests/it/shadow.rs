//! A policy in the shadow: its opinion is what it would have decided, and changes nothing.

use crate::decide_fixture::{
    ask, bound, busy, decode, gate, gated, holding, id, isl, policy, prefill, ratio, rule, snapshot,
};
use crate::decide_properties::{asks, candidates, policies};
use proptest::prelude::*;
use sidestep::app::App;
use sidestep::decide::ask::{Affinity, Ask};
use sidestep::decide::policy::{Bypass, OnNoPrefill, Policy, SessionAffinity, SessionKey};
use sidestep::decide::shadow::{Decided, Opinion, opinion};
use sidestep::decide::snapshot::Snapshot;
use sidestep::decide::{Because, Decision, NoRoute, decide};
use sidestep::pick::{Head, InShadow};
use std::path::Path;
use std::time::Duration;

/// What `shadow` thinks of a request, with the decision it stands beside.
fn beside(
    ask: &Ask,
    snapshot: &Snapshot,
    policy: &Policy,
    shadow: &Policy,
) -> (Result<Decision, NoRoute>, Opinion) {
    let result = decide(ask, snapshot, policy);
    let decided = Decided {
        policy,
        result: &result,
    };
    let opinion = opinion(ask, ask.affinity, snapshot, decided, shadow);
    (result, opinion)
}

/// Fails unless `opinion` is what `shadow` decides when it is asked itself.
fn same(opinion: &Opinion, own: &Result<Decision, NoRoute>) -> Result<(), TestCaseError> {
    match (&opinion.verdict, own) {
        (Ok(course), Ok(decision)) => {
            prop_assert_eq!(course.because, decision.because);
            prop_assert_eq!(course.because.route(), decision.route.as_str());
            prop_assert_eq!(opinion.rule, decision.rule);
            let decode = decision.route.decode().candidate.endpoint;
            prop_assert_eq!(course.decode, decode);
            let prefill = decision.route.prefill();
            prop_assert_eq!(course.prefill, prefill.map(|pick| pick.candidate.endpoint));
            prop_assert_eq!(&course.checks, &decision.checks);
        }
        (Err(cause), Err(own)) => prop_assert_eq!(cause, own),
        (verdict, own) => prop_assert!(false, "{:?} is not {:?}", verdict, own.is_ok()),
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        cases: 1024,
        ..ProptestConfig::default()
    })]

    #[test]
    fn an_opinion_is_what_the_shadow_would_decide_itself(
        pods in candidates(true),
        ask in asks(),
        policy in policies(),
        shadow in policies(),
        alike in any::<bool>(),
    ) {
        let mut shadow = shadow;
        if alike {
            // The short cut is for policies that choose pods alike.
            shadow.scoring = policy.scoring;
            shadow.client_pins = policy.client_pins;
        }
        let snapshot = snapshot(pods);
        let (_, opinion) = beside(&ask, &snapshot, &policy, &shadow);
        same(&opinion, &decide(&ask, &snapshot, &shadow))?;
    }

    #[test]
    fn an_opinion_on_another_session_is_the_shadows_own(
        pods in candidates(true),
        ask in asks(),
        policy in policies(),
        slot in 0..8_u16,
    ) {
        let snapshot = snapshot(pods);
        let result = decide(&ask, &snapshot, &policy);
        let decided = Decided { policy: &policy, result: &result };
        let affinity = Affinity::Hard(id(slot));
        let opinion = opinion(&ask, affinity, &snapshot, decided, &policy);
        let other = Ask { affinity, ..ask };
        same(&opinion, &decide(&other, &snapshot, &policy))?;
    }
}

#[test]
fn a_shadow_that_moves_one_threshold_differs_exactly_there() {
    let pods = snapshot([holding(decode(0), 640), prefill(1)]);
    let tight = policy([rule(Bypass::IslBounding(bound(360, 0.7)))]);
    let (taken, opinion) = beside(&ask(1000), &pods, &isl(), &tight);
    assert_eq!(taken.unwrap().because, Because::NetNewBelowThresholds);
    let course = opinion.verdict.unwrap();
    assert_eq!(course.because, Because::NetNewAboveThreshold);
    assert_eq!(course.prefill, Some(prefill(1).endpoint));
    assert_eq!(course.checks[0].threshold, 360.0);
}

#[test]
fn a_shadow_may_refuse_what_is_served() {
    let pods = snapshot([decode(0)]);
    let mut strict = isl();
    strict.rules[0].on_no_prefill = OnNoPrefill::Fail;
    let (taken, opinion) = beside(&ask(1000), &pods, &isl(), &strict);
    assert_eq!(taken.unwrap().because, Because::NoPrefillPod);
    assert_eq!(opinion.verdict, Err(NoRoute::NoPrefillPod));
    let (taken, opinion) = beside(&ask(1000), &pods, &strict, &isl());
    assert_eq!(taken.unwrap_err(), NoRoute::NoPrefillPod);
    assert_eq!(opinion.verdict.unwrap().because, Because::NoPrefillPod);
}

#[test]
fn a_shadow_that_scores_otherwise_looks_at_every_pod_again() {
    let pods = snapshot([
        holding(decode(0), 640),
        {
            let mut pod = holding(decode(2), 320);
            pod.cached.host = pod.cached.device;
            pod
        },
        prefill(1),
    ]);
    let mut other = isl();
    other.scoring.host_tier = ratio(1.0);
    other.scoring.overlap_credit = ratio(0.1);
    let (taken, opinion) = beside(&ask(1000), &pods, &isl(), &other);
    assert_eq!(taken.unwrap().route.decode().candidate.pod, id(0));
    assert_eq!(opinion.verdict.unwrap().decode, decode(2).endpoint);
}

const CONFIG: &str = "apiVersion: sidestep.dev/v1alpha1
kind: SidestepConfig
listen: {extProc: '127.0.0.1:0', health: '127.0.0.1:0', admin: '127.0.0.1:0'}
tls: {mode: Plaintext}
pods:
  inline:
  - {name: d1, address: '127.0.0.11:8000', role: decode, probe: off}
  - {name: p1, address: '127.0.0.21:8000', role: prefill, probe: off}
policy: {file: policy.yaml}
";

fn yaml(name: &str, bypass: &str, shadow: &str) -> String {
    format!(
        "apiVersion: sidestep.dev/v1alpha1\nkind: DisaggregationPolicy\nmetadata: {{name: {name}}}\n\
         spec:\n  rules: [{{bypass: {bypass}}}]\n{shadow}"
    )
}

fn write(folder: &Path, name: &str, text: &str) {
    std::fs::write(folder.join(name), text).unwrap();
}

async fn started(folder: &Path) -> App {
    let loaded = sidestep::config::load(&folder.join("sidestep.yaml")).unwrap();
    App::start(loaded).await.unwrap()
}

async fn pick(app: &App) -> &'static str {
    let head = Head {
        method: "POST".into(),
        path: "/v1/completions".into(),
        ..Head::default()
    };
    let body = r#"{"model": "m", "prompt": "one two three"}"#;
    let picked = app.picker().pick(head, Some(body.into())).await.unwrap();
    let goes = picked.plan.destination.to_string();
    assert_eq!(goes, "127.0.0.11:8000");
    let records = app.picker().journal().after(0, 1000);
    let json = serde_json::to_value(records.last().unwrap()).unwrap();
    match json["route"].as_str().unwrap() {
        "local" => "local",
        _ => "remote",
    }
}

/// The last decision's record.
fn last(app: &App) -> serde_json::Value {
    let records = app.picker().journal().after(0, 1000);
    serde_json::to_value(records.last().unwrap()).unwrap()
}

async fn until(what: impl Fn() -> bool) {
    let tries = async {
        while !what() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), tries)
        .await
        .expect("in time");
}

#[tokio::test]
async fn a_shadow_from_a_file_is_recorded_never_obeyed_and_follows_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let never = yaml("main", "{type: Never}", "  shadow: {file: shadow.yaml}\n");
    write(folder.path(), "sidestep.yaml", CONFIG);
    write(folder.path(), "policy.yaml", &never);
    write(
        folder.path(),
        "shadow.yaml",
        &yaml("candidate", "{type: Always}", ""),
    );
    let app = started(folder.path()).await;

    assert_eq!(pick(&app).await, "remote");
    let shadow = &last(&app)["shadow"];
    assert_eq!(shadow["policy"], "candidate");
    assert_eq!(shadow["route"], "local");
    assert_eq!(shadow["because"], "policy_always");
    assert_eq!(
        (&shadow["bypass"], &shadow["agrees"]),
        (&true.into(), &false.into())
    );
    let metrics = app.picker().metrics().encode();
    let series = "sidestep_shadow_decisions_total{route=\"remote\",shadow_route=\"local\",\
                  because=\"policy_never\",shadow_because=\"policy_always\"} 1";
    assert!(metrics.contains(series), "{metrics}");
    assert!(
        metrics.contains("sidestep_shadow_would_bypass_total 1"),
        "{metrics}"
    );

    // A bad edit leaves the candidate, and the policy in force, as they are.
    write(folder.path(), "shadow.yaml", "kind: Nonsense");
    until(|| {
        app.picker()
            .metrics()
            .encode()
            .contains("sidestep_config_reload_failures_total 1")
    })
    .await;
    assert_eq!(pick(&app).await, "remote");
    assert_eq!(last(&app)["shadow"]["because"], "policy_always");

    write(
        folder.path(),
        "shadow.yaml",
        &yaml("candidate", "{type: Never}", ""),
    );
    until(
        || matches!(&*app.picker().in_shadow(), InShadow::Policy(policy) if policy.generation == 2),
    )
    .await;
    assert_eq!(pick(&app).await, "remote");
    assert_eq!(last(&app)["shadow"]["agrees"], true);

    // The policy in force lets go of its shadow.
    write(
        folder.path(),
        "policy.yaml",
        &yaml("main", "{type: Always}", ""),
    );
    until(|| *app.picker().in_shadow() == InShadow::Nothing).await;
    assert_eq!(pick(&app).await, "local");
    assert_eq!(last(&app)["shadow"], serde_json::Value::Null);
}

#[tokio::test]
async fn a_shadow_known_by_name_alone_is_a_condition_not_an_error() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "sidestep.yaml", CONFIG);
    let named = yaml("main", "{type: Never}", "  shadow: {name: elsewhere}\n");
    write(folder.path(), "policy.yaml", &named);
    let loaded = sidestep::config::load(&folder.path().join("sidestep.yaml")).unwrap();
    let warned = loaded
        .warnings
        .iter()
        .any(|warning| warning.path == "spec.shadow");
    assert!(warned, "{:?}", loaded.warnings);
    let app = App::start(loaded).await.unwrap();
    let metrics = app.picker().metrics().encode();
    assert!(
        metrics.contains("sidestep_shadow_unresolved 1"),
        "{metrics}"
    );
    let summary = serde_json::to_value(app.picker().policy_summary()).unwrap();
    assert_eq!(summary["shadow"]["state"], "unresolved");
    assert_eq!(summary["shadow"]["name"], "elsewhere");
    assert_eq!(pick(&app).await, "remote");
}

#[test]
fn faults_of_a_shadow_stop_the_start_and_are_reported_with_the_others() {
    let folder = tempfile::tempdir().unwrap();
    let file = "  shadow: {file: shadow.yaml}\n";
    write(folder.path(), "sidestep.yaml", CONFIG);
    write(
        folder.path(),
        "policy.yaml",
        &yaml("main", "{type: Never}", file),
    );
    write(
        folder.path(),
        "shadow.yaml",
        &yaml("candidate", "{type: Sometimes}", ""),
    );
    let faults = sidestep::config::load(&folder.path().join("sidestep.yaml")).unwrap_err();
    assert!(
        faults.to_string().contains("shadow.yaml, line 5"),
        "{faults}"
    );
    let faults = sidestep::config::check(&folder.path().join("policy.yaml")).unwrap_err();
    assert!(
        faults.to_string().contains("shadow.yaml, line 5"),
        "{faults}"
    );

    write(
        folder.path(),
        "shadow.yaml",
        &yaml("candidate", "{type: Never}", "  shadow: {name: third}\n"),
    );
    let warnings = sidestep::config::check(&folder.path().join("policy.yaml")).unwrap();
    assert!(
        warnings
            .iter()
            .any(|warning| warning.to_string().contains("no shadow of its own"))
    );
}

#[test]
fn sessions_bind_the_shadow_as_its_own_mode_says() {
    let key = SessionKey {
        header: "x-session-id".into(),
        ttl: Duration::from_secs(60),
    };
    let pods = snapshot([holding(decode(0), 896), decode(2), prefill(1)]);
    let mut sticky = isl();
    sticky.session_affinity = SessionAffinity::Soft(key);
    let mut ask = ask(1000);
    ask.affinity = Affinity::Soft(id(2));
    let result = decide(&ask, &pods, &sticky);
    assert_eq!(result.as_ref().unwrap().route.decode().candidate.pod, id(2));
    let decided = Decided {
        policy: &sticky,
        result: &result,
    };
    let free = gated(
        policy([rule(Bypass::IslOrLoad(bound(2048, 0.7), busy(1.0)))]),
        gate(0.9),
    );
    let opinion = opinion(&ask, Affinity::None, &pods, decided, &free);
    assert_eq!(opinion.verdict.unwrap().decode, decode(0).endpoint);
}

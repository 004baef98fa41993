//! What `/metrics` says: bounded whatever clients and engines send, complete enough to be alerted on.

use crate::telemetry_support::{completion, head, named, picker, policy, remote_policy, rig};
use sidestep::app::App;
use sidestep::config;
use sidestep::pick::Picker;
use sidestep::telemetry::shadow::Words;
use sidestep::telemetry::trace::Tracing;
use sidestep::telemetry::trace::settings::{Parent, QueueSettings, Sampling};
use std::collections::BTreeSet;
use std::fmt::Write;
use std::time::Instant;

fn series(text: &str) -> BTreeSet<&str> {
    text.lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| {
            line.split(" # ")
                .next()
                .unwrap()
                .rsplit_once(' ')
                .unwrap()
                .0
        })
        .collect()
}

/// The value of one series, written as in the text.
fn value(picker: &Picker, series: &str) -> Option<f64> {
    let text = picker.metrics().encode();
    text.lines().find_map(|line| {
        line.strip_prefix(series)?
            .strip_prefix(' ')?
            .split(' ')
            .next()?
            .parse()
            .ok()
    })
}

async fn answer(picker: &Picker, body: &[u8]) {
    let picked = picker
        .pick(head(None, None), completion("hello"))
        .await
        .unwrap();
    let mut flight = picked.flight;
    flight.response_headers(Some(200), None);
    flight.response_bytes(body);
    flight.finish();
}

/// Field report 40: a model's name comes from the body.
#[tokio::test]
async fn five_thousand_model_names_make_no_series_of_their_own() {
    let picker = picker(policy(), &Tracing::Off);
    answer(&picker, b"{}").await;
    let before = picker.metrics().encode();
    for n in 0..5000 {
        let filler = if n < 2000 {
            "x".repeat(4096)
        } else {
            String::new()
        };
        let body = named(&format!("name-{n}-{filler}"), "hello");
        drop(picker.pick(head(None, None), body).await);
    }
    for _ in 0..10 {
        answer(&picker, b"{}").await;
    }
    let began = Instant::now();
    let after = picker.metrics().encode();
    println!("/metrics: {} bytes in {:?}", after.len(), began.elapsed());
    let grown = series(&after).difference(&series(&before)).count();
    assert!(grown < 50, "{grown} new series");
    assert!(after.len() < 1 << 20, "{} bytes", after.len());
    let ours =
        "sidestep_decisions_total{model=\"m\",route=\"local\",because=\"cold_prompt_short\"}";
    assert_eq!(value(&picker, ours), Some(11.0));
    assert!(!after.contains("name-"), "no name of a client's");
}

/// Field report 41: `usage` may be anything.
#[tokio::test]
async fn odd_usage_counts_as_unreadable_and_nothing_else() {
    let picker = picker(policy(), &Tracing::Off);
    for (n, odd) in [
        r#"{"usage":"oops"}"#,
        r#"{"usage":{"prompt_tokens":"1024"}}"#,
        r#"{"usage":{"prompt_token_details":0}}"#,
        r#"{"usage":null}"#,
        r#"{"usage":{"completion_tokens":-1}}"#,
        r#"{"usage":{"completion_tokens":1e300}}"#,
    ]
    .iter()
    .enumerate()
    {
        answer(&picker, odd.as_bytes()).await;
        let misses = value(&picker, "sidestep_usage_unreadable_total");
        assert_eq!(misses, Some((n + 1) as f64), "{odd}");
    }
    let text = picker.metrics().encode();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let number: f64 = line
            .split(" # ")
            .next()
            .unwrap()
            .rsplit(' ')
            .next()
            .unwrap()
            .parse()
            .unwrap();
        let bound = line.contains("le=\"+Inf\"") || number.is_finite();
        assert!(bound && 0.0 <= number, "{line}");
    }
    assert_eq!(
        value(&picker, "sidestep_cached_tokens_reported_total"),
        Some(0.0)
    );
}

#[tokio::test]
async fn ends_are_counted_by_what_the_client_got() {
    let picker = picker(policy(), &Tracing::Off);
    for (status, finish) in [
        (Some(200), true),
        (Some(404), true),
        (Some(503), true),
        (None, false),
    ] {
        let picked = picker
            .pick(head(None, None), completion("hello"))
            .await
            .unwrap();
        let mut flight = picked.flight;
        flight.response_headers(status, None);
        if finish {
            flight.finish();
        }
    }
    for (end, status) in [
        ("completed", "2xx"),
        ("completed", "4xx"),
        ("completed", "5xx"),
        ("aborted", "none"),
    ] {
        let series = format!("sidestep_requests_ended_total{{end=\"{end}\",status=\"{status}\"}}");
        assert_eq!(value(&picker, &series), Some(1.0), "{series}");
    }
    assert_eq!(value(&picker, "sidestep_requests_in_flight"), Some(0.0));
}

#[tokio::test]
async fn exemplars_carry_the_trace_of_recorded_requests_only() {
    let trace = "4bf92f3577b34da6a3ce929d0e0e4736";
    for (flag, carried) in [("01", true), ("00", false)] {
        let sampling = Sampling {
            ratio: 1.0,
            parent: Parent::Decides,
        };
        let tracing = Tracing::in_memory(sampling, QueueSettings::default());
        let picker = picker(remote_policy(), &tracing);
        let parent = format!("00-{trace}-00f067aa0ba902b7-{flag}");
        let picked = picker
            .pick(head(Some(&parent), None), completion("hello"))
            .await
            .unwrap();
        let mut flight = picked.flight;
        flight.response_bytes(b"x");
        flight.finish();
        let text = picker.metrics().encode();
        for metric in [
            "sidestep_decision_seconds_bucket",
            "sidestep_time_to_first_bytes_seconds_bucket",
        ] {
            let exemplar = format!("# {{trace_id=\"{trace}\"}}");
            let found = text
                .lines()
                .any(|line| line.starts_with(metric) && line.contains(&exemplar));
            assert_eq!(found, carried, "{metric} with flag {flag}");
        }
    }
}

#[tokio::test]
async fn a_prompt_that_the_engine_counts_differently_is_counted_as_wrong_only_when_ours_is_exact() {
    // The support's model is estimated from bytes, so there is nothing to compare.
    let picker = rig(
        policy(),
        &Tracing::Off,
        vec![crate::telemetry_support::pod(
            "d1",
            "127.0.0.11:8000",
            sidestep::decide::snapshot::Role::Decode,
        )],
    );
    answer(
        &picker,
        br#"{"usage":{"prompt_tokens":77,"completion_tokens":1}}"#,
    )
    .await;
    assert_eq!(
        value(&picker, "sidestep_prompt_counts_checked_total"),
        Some(0.0)
    );
    assert_eq!(
        value(&picker, "sidestep_prompt_counts_wrong_total"),
        Some(0.0)
    );
}

/// The text of a process in which every metric has a value.
pub(crate) async fn everything() -> String {
    let app = app_with(2).await;
    let metrics = app.picker().metrics();
    metrics.encode_trouble("template");
    let words = |route| Words {
        route,
        because: "policy_always",
        bypass: false,
    };
    metrics.shadow(words("local"), words("remote"));
    answer(
        app.picker(),
        br#"{"usage":{"prompt_tokens":1,"completion_tokens":1}}"#,
    )
    .await;
    metrics.encode()
}

/// A thousand pods with long names, as Kubernetes gives them, each with a KV feed.
async fn thousand_pods() -> App {
    app_with(1000).await
}

async fn app_with(pod_count: usize) -> App {
    let mut pods = String::new();
    for n in 0..pod_count {
        let role = if n % 4 == 0 { "prefill" } else { "decode" };
        let name = format!("llama-3-70b-instruct-{role}-7c9f4d5b8-{n:05}");
        let address = format!("127.1.{}.{}", n / 250, n % 250 + 1);
        writeln!(
            pods,
            "  - {{name: {name}, address: '{address}:8000', role: {role}, kvEvents: {{address: '{address}:5557'}}, probe: off}}"
        )
        .unwrap();
    }
    let config = format!(
        "apiVersion: sidestep.dev/v1alpha1
kind: SidestepConfig
listen: {{extProc: '127.0.0.1:0', health: '127.0.0.1:0', admin: '127.0.0.1:0'}}
tls: {{mode: Plaintext}}
models: [{{name: m}}]
telemetry: {{otlpEndpoint: 'http://127.0.0.1:1'}}
pods:
  inline:
{pods}policy:
  inline: {{rules: [{{bypass: {{type: Never}}}}]}}
"
    );
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sidestep.yaml");
    std::fs::write(&path, config).unwrap();
    let loaded = config::load(&path).unwrap_or_else(|faults| panic!("{faults}"));
    App::start(loaded).await.unwrap()
}

#[tokio::test]
async fn a_thousand_pods_fit_in_two_mebibytes() {
    let app = thousand_pods().await;
    let metrics = app.picker().metrics();
    let _ = metrics.encode();
    let began = Instant::now();
    let text = metrics.encode();
    let took = began.elapsed();
    println!(
        "/metrics at 1,000 pods: {} bytes, {} series, {took:?}",
        text.len(),
        series(&text).len()
    );
    assert!(text.ends_with("# EOF\n"));
    // Engines that answer add what they report (3 gauges) and when their last event came.
    let gauge = |line: &&str| line.starts_with("sidestep_pod_booked_requests{");
    let per_gauge: usize = text.lines().filter(gauge).map(|line| line.len() + 20).sum();
    assert!(100_000 < per_gauge);
    let whole = text.len() + 4 * per_gauge;
    println!("with reports of all engines: {whole} bytes");
    assert!(whole <= 2 << 20, "{whole} bytes");
}

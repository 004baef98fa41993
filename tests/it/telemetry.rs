//! What a request leaves in the trace: the schema of its spans, byte for byte as a receiver decodes it.

use crate::telemetry_support::{
    Span, attribute, completion, decode, head, picker, policy, remote_policy, rig,
};
use bytes::Bytes;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use sidestep::telemetry::fields;
use sidestep::telemetry::trace::Tracing;
use sidestep::telemetry::trace::settings::{Parent, QueueSettings, Sampling};
use std::collections::BTreeSet;

const CLIENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
const SECRET: &str = "SECRET-4711";

fn in_memory(ratio: f64) -> Tracing {
    let sampling = Sampling {
        ratio,
        parent: Parent::Decides,
    };
    Tracing::in_memory(sampling, QueueSettings::default())
}

fn keys(span: &Span) -> BTreeSet<&str> {
    span.attributes
        .iter()
        .map(|pair| pair.key.as_str())
        .collect()
}

fn drained(tracing: &Tracing) -> Vec<Span> {
    decode(&tracing.drain())
}

fn pick_of(spans: &[Span]) -> &Span {
    let mut picks = spans.iter().filter(|span| span.name == fields::SPAN_PICK);
    let pick = picks.next().expect("a pick span");
    assert!(picks.next().is_none(), "one request, one pick span");
    pick
}

#[tokio::test]
async fn a_local_decision_leaves_one_server_span_with_a_child_per_stage() {
    let tracing = in_memory(1.0);
    let picker = picker(policy(), &tracing);
    let picked = picker
        .pick(head(Some(CLIENT), Some("chat-1")), completion(SECRET))
        .await
        .unwrap();
    let mut flight = picked.flight;
    flight.response_headers(Some(200), None);
    flight.response_bytes(
        br#"{"usage":{"prompt_tokens":9,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}}"#,
    );
    flight.finish();
    let bytes = tracing.drain();
    let spans = decode(&bytes);
    let pick = pick_of(&spans);
    assert_eq!(pick.kind(), SpanKind::Server);
    assert_eq!(
        pick.trace_id,
        0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736_u128.to_be_bytes()
    );
    assert_eq!(pick.parent_span_id, 0x00f0_67aa_0ba9_02b7_u64.to_be_bytes());
    assert_eq!(pick.flags, 1);
    let below: Vec<&Span> = spans
        .iter()
        .filter(|span| span.name != fields::SPAN_PICK)
        .collect();
    let names: Vec<&str> = below.iter().map(|span| span.name.as_str()).collect();
    assert_eq!(names, ["parse", "encode", "observe", "decide", "book"]);
    let mut at = pick.start_time_unix_nano;
    for span in below {
        assert_eq!(span.kind(), SpanKind::Internal);
        assert_eq!(
            (&span.trace_id, &span.parent_span_id),
            (&pick.trace_id, &pick.span_id)
        );
        assert!(
            at <= span.start_time_unix_nano,
            "{} begins in order",
            span.name
        );
        assert!(span.start_time_unix_nano <= span.end_time_unix_nano);
        at = span.end_time_unix_nano;
    }
    assert!(at <= pick.end_time_unix_nano);
    let events: Vec<&str> = pick
        .events
        .iter()
        .map(|event| event.name.as_str())
        .collect();
    assert_eq!(events, [fields::EVENT_FIRST_BYTES, fields::EVENT_END]);
    let end = &pick.events[1].attributes;
    assert_eq!(
        attribute(end, fields::CACHE_READ_TOKENS).as_deref(),
        Some("4")
    );
    assert_eq!(attribute(end, fields::INPUT_TOKENS).as_deref(), Some("9"));
    assert_eq!(attribute(end, fields::END).as_deref(), Some("completed"));
    // Neither the prompt nor the session's name is anywhere.
    for secret in [SECRET, "chat-1"] {
        assert!(
            !bytes
                .windows(secret.len())
                .any(|window| window == secret.as_bytes())
        );
    }
}

#[tokio::test]
async fn the_attributes_of_decisions_are_pinned() {
    let always: &[&str] = &[
        fields::OPERATION,
        fields::MODEL,
        fields::STREAM,
        fields::PROMPT_TOKENS,
        fields::COUNTED,
        fields::SESSION,
        fields::CANDIDATES,
        fields::DECISION_ID,
        fields::ROUTE,
        fields::BECAUSE,
        fields::BYPASS,
        fields::POLICY,
        fields::GENERATION,
        fields::RULE,
        fields::SERVER_ADDRESS,
        fields::SERVER_PORT,
        fields::DECODE_ENDPOINT,
        fields::DECODE_POD,
        fields::DECODE_KV_SOURCE,
        fields::CACHED_TOKENS,
        fields::NET_NEW_TOKENS,
        fields::LOCAL_POD,
        fields::LOCAL_COST,
        fields::LOCAL_DEVICE,
        fields::LOCAL_HOST,
        fields::LOCAL_DISK,
        fields::LOCAL_KV_SOURCE,
        fields::LOCAL_PREFILL_TOKENS,
        fields::LOCAL_DECODE_BLOCKS,
        fields::END,
        fields::STATUS,
        fields::REMOTE_PREFILL,
        fields::REMOTE_PREFILL_COST,
        fields::REMOTE_PREFILL_DEVICE,
        fields::REMOTE_PREFILL_HOST,
        fields::REMOTE_PREFILL_DISK,
        fields::REMOTE_PREFILL_CACHED,
        fields::REMOTE_PREFILL_TOKENS,
        fields::REMOTE_DECODE,
        fields::REMOTE_DECODE_COST,
        fields::REMOTE_DECODE_BLOCKS,
    ];
    let checked: &[&str] = &[
        fields::CHECKS,
        fields::PROMPT_VALUE,
        fields::PROMPT_THRESHOLD,
        fields::FLIP,
    ];
    let prefilled: &[&str] = &[
        fields::PREFILL_ENDPOINT,
        fields::PREFILL_POD,
        fields::PREFILL_KV_SOURCE,
    ];
    for (policy, more) in [(policy(), checked), (remote_policy(), prefilled)] {
        let tracing = in_memory(1.0);
        let picker = picker(policy, &tracing);
        let picked = picker
            .pick(head(None, None), completion("hello"))
            .await
            .unwrap();
        let mut flight = picked.flight;
        flight.response_headers(Some(200), None);
        flight.finish();
        let spans = drained(&tracing);
        let pick = pick_of(&spans);
        let expected: BTreeSet<&str> = always.iter().chain(more).copied().collect();
        assert_eq!(keys(pick), expected);
        assert_eq!(pick.attributes.len(), expected.len(), "no attribute twice");
        let table: BTreeSet<&str> = fields::TABLE.iter().map(|(key, _)| *key).collect();
        assert!(keys(pick).is_subset(&table));
    }
}

#[tokio::test]
async fn a_turn_links_to_the_turn_before_it_in_its_conversation() {
    let tracing = in_memory(1.0);
    let picker = picker(policy(), &tracing);
    let mut seen = Vec::new();
    for session in ["a", "b", "a"] {
        let picked = picker
            .pick(head(None, Some(session)), completion("hello"))
            .await
            .unwrap();
        picked.flight.finish();
        seen.push(pick_of(&drained(&tracing)).clone());
    }
    assert!(seen[0].links.is_empty() && seen[1].links.is_empty());
    let link = &seen[2].links[0];
    assert_eq!(
        (&link.trace_id, &link.span_id),
        (&seen[0].trace_id, &seen[0].span_id)
    );
    assert_ne!(
        seen[2].trace_id, seen[0].trace_id,
        "turns are traces of their own"
    );
}

#[tokio::test]
async fn a_trace_that_is_not_sampled_leaves_nothing_and_is_passed_on() {
    let tracing = in_memory(0.0);
    let picker = picker(policy(), &tracing);
    for parent in [
        None,
        Some("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"),
    ] {
        let picked = picker
            .pick(head(parent, None), completion("hello"))
            .await
            .unwrap();
        let told = format!("{:?}", picked.plan.edits);
        assert!(told.contains("traceparent"), "{told}");
        assert!(told.contains("-00\""), "the flag stays off: {told}");
        assert_eq!(
            parent.is_some(),
            told.contains("4bf92f3577b34da6a3ce929d0e0e4736")
        );
    }
    assert!(drained(&tracing).is_empty());
    assert_eq!(tracing.stats().unwrap().exported, 0);
}

#[tokio::test]
async fn a_parent_that_cannot_be_read_begins_a_new_trace() {
    let tracing = in_memory(1.0);
    let picker = picker(policy(), &tracing);
    let picked = picker
        .pick(head(Some("00-nonsense"), None), completion("hello"))
        .await
        .unwrap();
    drop(picked);
    let spans = drained(&tracing);
    let pick = pick_of(&spans);
    assert!(pick.parent_span_id.is_empty());
    assert_eq!(
        attribute(&pick.attributes, fields::END).as_deref(),
        Some("aborted")
    );
}

#[tokio::test]
async fn refusals_are_spans_with_their_cause() {
    let tracing = in_memory(1.0);
    let picker = picker(policy(), &tracing);
    let broken = Bytes::from(format!(r#"{{"model":"m","prompt":"{SECRET}","#));
    let refusal = picker
        .pick(head(None, None), Some(broken))
        .await
        .unwrap_err();
    assert_eq!(refusal.status, 400);
    assert!(!refusal.message.contains(SECRET));
    let nobody = rig(policy(), &tracing, Vec::new());
    let refusal = nobody
        .pick(head(None, None), completion("hello"))
        .await
        .unwrap_err();
    assert_eq!(refusal.status, 503);
    let bytes = tracing.drain();
    assert!(
        !bytes
            .windows(SECRET.len())
            .any(|window| window == SECRET.as_bytes())
    );
    let spans = decode(&bytes);
    let said: Vec<_> = spans
        .iter()
        .map(|span| {
            let code = span
                .status
                .as_ref()
                .map_or(StatusCode::Unset, |status| status.code());
            let error = attribute(&span.attributes, fields::ERROR).unwrap();
            let because = attribute(&span.attributes, fields::BECAUSE);
            assert_eq!(because.as_ref(), Some(&error));
            let route = attribute(&span.attributes, fields::ROUTE);
            assert_eq!(route.as_deref(), Some("refused"));
            (error, code)
        })
        .collect();
    // A fault of the client is no fault of the server (OpenTelemetry, HTTP spans).
    assert_eq!(
        said,
        [
            ("invalid_body".to_owned(), StatusCode::Unset),
            (refusal.code.to_owned(), StatusCode::Error)
        ]
    );
}

/// Whoever gives up a pick tells how its request ended, in a span of its own.
#[test]
fn a_pick_that_is_given_up_exports_no_span() {
    let tracing = in_memory(1.0);
    let picker = picker(policy(), &tracing);
    // A long prompt waits for a blocking thread, and the only one is busy.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .max_blocking_threads(1)
        .build()
        .unwrap();
    let (free, busy) = std::sync::mpsc::channel::<()>();
    runtime.spawn_blocking(move || busy.recv());
    runtime.block_on(async {
        let long = completion(&"word ".repeat(20_000));
        let mut waits = Box::pin(picker.pick(head(None, None), long));
        assert!(futures_util::poll!(waits.as_mut()).is_pending());
        drop(waits);
    });
    drop(free);
    assert!(drained(&tracing).is_empty());
}

#[tokio::test]
async fn a_full_queue_drops_spans_and_counts_them() {
    let sampling = Sampling {
        ratio: 1.0,
        parent: Parent::Decides,
    };
    let queue = QueueSettings {
        spans: 12,
        ..QueueSettings::default()
    };
    let tracing = Tracing::in_memory(sampling, queue);
    let picker = picker(policy(), &tracing);
    for _ in 0..5 {
        let picked = picker
            .pick(head(None, None), completion("hello"))
            .await
            .unwrap();
        picked.flight.finish();
    }
    let stats = tracing.stats().unwrap();
    assert_eq!(stats.dropped_queue_full, 3 * 6);
    assert_eq!(drained(&tracing).len(), 12);
}

//! One request is one trace: Envoy's span, the picker's below it, and what the pod is told.

use crate::collector::{Collector, Span};
use crate::recorder::{Answer, Recorder, Seen};
use crate::stack::{Setup, Stack, eventually, recorded};
use http::{Request, StatusCode, header};
use serde_json::json;
use sidestep::cli::demo::gateway::Tracing;
use sidestep::cli::demo::picker::MODEL;

struct Traced {
    stack: Stack,
    pod: Recorder,
    collector: Collector,
}

impl Traced {
    async fn start() -> Traced {
        let collector = Collector::start().await;
        let pod = Recorder::start(Answer::Json).await;
        let address = collector.address;
        let mut setup = Setup::new(vec![recorded("decode", "decode", &pod)]);
        setup.otlp = Some(address);
        let setup = setup.gateway(move |config| config.tracing = Tracing::Otlp(address));
        Traced {
            stack: Stack::start(setup).await,
            pod,
            collector,
        }
    }

    async fn ask(&mut self, traceparent: Option<&str>) -> Seen {
        let mut request = Request::post(self.stack.url("/v1/chat/completions"));
        request = request.header(header::CONTENT_TYPE, "application/json");
        if let Some(parent) = traceparent {
            request = request.header("traceparent", parent);
        }
        let body =
            json!({"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}).to_string();
        let (status, _) = self.stack.ask(request, body).await;
        assert_eq!(status, StatusCode::OK);
        self.pod.next().await
    }

    /// The picker's only `pick` span of a trace; a span per stage lies below it.
    async fn picker_span(&self, trace: &str) -> Span {
        let of_trace = || {
            self.collector
                .of("sidestep")
                .into_iter()
                .filter(|span| span.trace == trace)
        };
        eventually("the picker's span is exported", async || of_trace().next()).await;
        // The spans of one request are exported together.
        let (picks, below): (Vec<Span>, Vec<Span>) =
            of_trace().partition(|span| span.name == "pick");
        assert_eq!(picks.len(), 1, "{picks:?}");
        let names: Vec<&str> = below.iter().map(|span| span.name.as_str()).collect();
        assert_eq!(names, ["parse", "encode", "observe", "decide", "book"]);
        assert!(below.iter().all(|span| span.parent == picks[0].id));
        picks.into_iter().next().unwrap()
    }

    /// Envoy's spans of a trace, its server span among them.
    async fn envoy_spans(&self, trace: &str, least: usize) -> Vec<Span> {
        eventually("Envoy's spans are exported", async || {
            let spans = self.collector.of("gateway").into_iter();
            let spans: Vec<Span> = spans.filter(|span| span.trace == trace).collect();
            (least <= spans.len()).then_some(spans)
        })
        .await
    }
}

/// Trace id, parent id and flags of a `traceparent`.
fn parts(traceparent: &str) -> (String, String, String) {
    let parts: Vec<&str> = traceparent.split('-').collect();
    assert_eq!(parts.len(), 4, "{traceparent}");
    (parts[1].into(), parts[2].into(), parts[3].into())
}

#[tokio::test]
async fn without_a_client_trace_all_spans_share_the_trace_that_envoy_began() {
    let mut traced = Traced::start().await;
    let seen = traced.ask(None).await;
    let (trace, _, flags) = parts(&seen.only("traceparent"));
    assert_eq!(flags, "01");
    let span = traced.picker_span(&trace).await;
    let envoy = traced.envoy_spans(&trace, 2).await;
    assert!(
        envoy.iter().any(|parent| parent.id == span.parent),
        "{span:?} is below none of {envoy:?}"
    );
    assert!(
        envoy.iter().any(|span| span.parent.is_empty()),
        "one of them is the root"
    );
    let decision = traced.stack.last_decision().await;
    assert_eq!(decision["trace_id"], trace.as_str());
    // The span says what the journal says.
    assert_eq!(span.name, "pick");
    for (attribute, field) in [
        ("sidestep.decision.id", "id"),
        ("sidestep.because", "because"),
        ("sidestep.decode.endpoint", "decode"),
    ] {
        let said = span.attributes.get(attribute).map(String::as_str);
        assert_eq!(said, decision[field].as_str(), "{attribute}: {span:?}");
    }
}

#[tokio::test]
async fn a_clients_trace_goes_on_through_envoy_picker_and_pod() {
    let mut traced = Traced::start().await;
    let client = "4bf92f3577b34da6a3ce929d0e0e4736";
    let seen = traced
        .ask(Some(&format!("00-{client}-00f067aa0ba902b7-01")))
        .await;
    let (trace, parent, flags) = parts(&seen.only("traceparent"));
    assert_eq!((trace.as_str(), flags.as_str()), (client, "01"));
    assert_ne!(
        parent, "00f067aa0ba902b7",
        "the pod's parent is the gateway, not the client"
    );
    let span = traced.picker_span(client).await;
    assert_ne!(
        span.parent, "00f067aa0ba902b7",
        "the picker is below the gateway's span"
    );
    let envoy = traced.envoy_spans(client, 2).await;
    assert!(envoy.iter().any(|parent| parent.id == span.parent));
    assert!(envoy.iter().any(|span| span.parent == "00f067aa0ba902b7"));
}

#[tokio::test]
async fn a_gateway_that_does_not_trace_leaves_the_pods_traceparent_to_the_picker() {
    let collector = Collector::start().await;
    let pod = Recorder::start(Answer::Json).await;
    let mut setup = Setup::new(vec![recorded("decode", "decode", &pod)]);
    setup.otlp = Some(collector.address);
    let mut traced = Traced {
        stack: Stack::start(setup).await,
        pod,
        collector,
    };
    let client = "4bf92f3577b34da6a3ce929d0e0e4736";
    for (sent, flag) in [
        (Some(format!("00-{client}-00f067aa0ba902b7-01")), "01"),
        (Some("garbage".to_owned()), "01"),
        (None, "01"),
        (Some(format!("00-{client}-00f067aa0ba902b7-00")), "00"),
    ] {
        let seen = traced.ask(sent.as_deref()).await;
        let (trace, parent, flags) = parts(&seen.only("traceparent"));
        assert_eq!(flags, flag, "{sent:?}");
        let goes_on = sent.is_some_and(|sent| sent.contains(client));
        assert_eq!(trace == client, goes_on);
        assert_ne!(parent, "00f067aa0ba902b7", "the pod's parent is the picker");
        if flag == "01" {
            let span = traced.picker_span(&trace).await;
            assert_eq!(span.id, parent);
            let above = if goes_on { "00f067aa0ba902b7" } else { "" };
            assert_eq!(span.parent, above);
        }
    }
}

#[tokio::test]
async fn a_trace_that_is_not_sampled_is_not_exported() {
    let mut traced = Traced::start().await;
    let client = "11111111111111111111111111111111";
    let seen = traced
        .ask(Some(&format!("00-{client}-2222222222222222-00")))
        .await;
    let (trace, _, flags) = parts(&seen.only("traceparent"));
    assert_eq!((trace.as_str(), flags.as_str()), (client, "00"));
    // The exporter sends spans in order: once a later one is there, an earlier one would be.
    let later = traced.ask(None).await;
    let (trace, _, _) = parts(&later.only("traceparent"));
    traced.picker_span(&trace).await;
    assert!(
        !traced
            .collector
            .of("sidestep")
            .iter()
            .any(|span| span.trace == client)
    );
}

#[tokio::test]
async fn a_request_that_is_refused_before_its_pick_is_in_its_trace_too() {
    let collector = Collector::start().await;
    let address = collector.address;
    let pod = Recorder::start(Answer::Json).await;
    let mut setup =
        Setup::new(vec![recorded("decode", "decode", &pod)]).limit("requestBytes", "4Ki");
    setup.otlp = Some(address);
    let stack = Stack::start(setup.gateway(move |config| config.tracing = Tracing::Otlp(address)));
    let mut traced = Traced {
        stack: stack.await,
        pod,
        collector,
    };
    let client = "4bf92f3577b34da6a3ce929d0e0e4736";
    let request = Request::post(traced.stack.url("/v1/chat/completions"))
        .header("traceparent", format!("00-{client}-00f067aa0ba902b7-01"));
    let (status, _) = traced.stack.ask(request, "x".repeat(5_000)).await;
    assert_eq!(status, StatusCode::PAYLOAD_TOO_LARGE);
    assert!(traced.pod.arrived().is_none());
    let span = eventually("the picker's span is exported", async || {
        let spans = traced.collector.of("sidestep");
        spans.into_iter().find(|span| span.trace == client)
    })
    .await;
    let envoy = traced.envoy_spans(client, 2).await;
    assert!(
        envoy.iter().any(|parent| parent.id == span.parent),
        "{span:?} is below none of {envoy:?}"
    );
    let said = |key: &str| span.attributes.get(key).map(String::as_str);
    assert_eq!(said("error.type"), Some("body_too_large"), "{span:?}");
    assert_eq!(said("sidestep.route"), Some("refused"));
    assert_eq!(said("http.response.status_code"), Some("413"));
}

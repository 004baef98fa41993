//! Requests that end before a pod is chosen leave a span too: the traces that operators look for.

use crate::extproc_gateway::{Gateway, http_body, http_headers, until};
use crate::telemetry_export::{Received, grpc_receiver, tracing};
use crate::telemetry_support::{Span, attribute, decode, picker, policy};
use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::processing_mode::BodySendMode;
use envoy_types::pb::envoy::service::ext_proc::v3::HttpTrailers;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request as Ask;
use flate2::Compression;
use flate2::write::GzEncoder;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use sidestep::extproc::conformance::Conformance;
use sidestep::extproc::counters::Counters;
use sidestep::extproc::server::{Limits, ServerError, Settings, Tls, serve, tls_material};
use sidestep::extproc::wire::MetadataKeys;
use sidestep::telemetry::fields;
use sidestep::telemetry::trace::Tracing;
use sidestep::telemetry::trace::settings::Protocol;
use std::collections::BTreeMap;
use std::io::Write;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::transport::Channel;

const TRACE: u128 = 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736;
const PARENT: u64 = 0x00f0_67aa_0ba9_02b7;
const SAMPLED: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
const NOT_SAMPLED: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00";
const SECRET: &str = "SECRET-4711";
const STALL: Duration = Duration::from_millis(60);
const DUPLEX: BodySendMode = BodySendMode::FullDuplexStreamed;

/// A picker behind its gRPC port, and where its spans go.
struct Served {
    channel: Channel,
    counters: Arc<Counters>,
    tracing: Tracing,
    received: UnboundedReceiver<Received>,
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<(), ServerError>>,
}

impl Served {
    async fn start(limits: Limits) -> Served {
        let (receiver, received) = grpc_receiver().await;
        // Spans are sent when the test asks for them, and not before.
        let vars = [("OTEL_BSP_SCHEDULE_DELAY", "600000")];
        let tracing = tracing(receiver, Protocol::Grpc, &vars);
        let picker = picker(policy(), &tracing);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let counters = Arc::new(Counters::default());
        let settings = Settings {
            limits,
            tls: tls_material(&Tls::Plaintext).unwrap(),
            metadata: MetadataKeys::default(),
            conformance: Conformance::Disabled,
            counters: Arc::clone(&counters),
        };
        let (stop, stopped) = oneshot::channel::<()>();
        let task = tokio::spawn(serve(listener, picker, settings, async move {
            let _ = stopped.await;
        }));
        let channel = Channel::from_shared(format!("http://{address}")).unwrap();
        Served {
            channel: channel.connect().await.unwrap(),
            counters,
            tracing,
            received,
            stop,
            task,
        }
    }

    /// All spans so far; no request text is in them.
    async fn spans(&mut self) -> Vec<Span> {
        self.tracing.shutdown().await;
        let mut spans = Vec::new();
        while let Ok((bytes, _)) = self.received.try_recv() {
            let secret = SECRET.as_bytes();
            assert!(!bytes.windows(secret.len()).any(|window| window == secret));
            spans.extend(decode(&bytes));
        }
        spans
    }
}

/// One way to be refused.
struct Kind {
    code: &'static str,
    status: u16,
    request: BodySendMode,
    limits: Limits,
    /// Further request headers; none are sent at all when there is no head.
    head: Option<&'static [(&'static str, &'static str)]>,
    rest: Vec<Ask>,
}

fn kind(code: &'static str, status: u16, rest: Vec<Ask>) -> Kind {
    Kind {
        code,
        status,
        request: DUPLEX,
        limits: Limits {
            body: 64 << 10,
            ..Limits::default()
        },
        head: Some(&[]),
        rest,
    }
}

fn body(bytes: &[u8], end: bool) -> Ask {
    Ask::RequestBody(http_body(bytes, end))
}

fn unfinished() -> Vec<Ask> {
    vec![body(SECRET.as_bytes(), false)]
}

fn gzip(text: &str) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(text.as_bytes()).unwrap();
    encoder.finish().unwrap()
}

fn kinds() -> Vec<Kind> {
    let small = Limits {
        body: 64 << 10,
        ..Limits::default()
    };
    let long = SECRET.repeat(10_000);
    let prompt = format!("{{\"model\":\"m\",\"prompt\":\"{SECRET}\"}}");
    vec![
        Kind {
            head: Some(&[("content-length", "65537")]),
            ..kind("body_too_large", 413, Vec::new())
        },
        kind("body_too_large", 413, vec![body(long.as_bytes(), false)]),
        // Longer than any message that is read.
        kind("body_too_large", 413, vec![body(&[b' '; 2 << 20], true)]),
        Kind {
            head: Some(&[("content-encoding", "gzip")]),
            ..kind("body_too_large", 413, vec![body(&gzip(&long), true)])
        },
        Kind {
            head: Some(&[("content-encoding", "gzip")]),
            ..kind(
                "malformed_content_encoding",
                400,
                vec![body(SECRET.as_bytes(), true)],
            )
        },
        Kind {
            limits: Limits {
                body_stall: STALL,
                ..small
            },
            ..kind("body_timeout", 408, unfinished())
        },
        Kind {
            limits: Limits {
                decision: Duration::ZERO,
                ..small
            },
            ..kind("decision_timeout", 504, vec![body(prompt.as_bytes(), true)])
        },
        Kind {
            limits: Limits {
                held_requests: 0,
                ..small
            },
            ..kind("too_many_requests_held", 503, unfinished())
        },
        Kind {
            request: BodySendMode::Streamed,
            ..kind("unsupported_processing_mode", 500, unfinished())
        },
        // The gateway's own trace is all that is known of it.
        Kind {
            head: None,
            ..kind("unsupported_processing_mode", 500, unfinished())
        },
        Kind {
            request: BodySendMode::Buffered,
            ..kind(
                "empty_body",
                400,
                vec![Ask::RequestTrailers(HttpTrailers::default())],
            )
        },
        // Refused by the picker itself.
        kind("invalid_body", 400, vec![body(SECRET.as_bytes(), true)]),
    ]
}

/// The stream of a request in `trace`, everything told.
async fn ask(served: &Served, kind: &Kind, trace: &'static str) -> Gateway {
    let modes = (kind.request, BodySendMode::Streamed);
    let metadata = kind.head.is_none().then_some(trace);
    let gateway = Gateway::with_trace(&served.channel, modes, metadata).await;
    if let Some(more) = kind.head {
        let usual = [
            (":method", "POST"),
            (":path", "/v1/completions"),
            ("traceparent", trace),
        ];
        let head: Vec<_> = usual.iter().chain(more).copied().collect();
        gateway.tell(Ask::RequestHeaders(http_headers(&head, false)));
    }
    for message in &kind.rest {
        gateway.tell(message.clone());
    }
    gateway
}

fn said(span: &Span) -> BTreeMap<&str, String> {
    let keys = span.attributes.iter().map(|pair| pair.key.as_str());
    keys.map(|key| (key, attribute(&span.attributes, key).unwrap()))
        .collect()
}

fn assert_refused(spans: &[Span], code: &str, status: u16) {
    let [span] = spans else {
        panic!("{code}: one request, one span, not {spans:?}");
    };
    assert_eq!(
        (span.name.as_str(), span.kind()),
        (fields::SPAN_PICK, SpanKind::Server),
        "{code}"
    );
    assert_eq!(span.trace_id, TRACE.to_be_bytes(), "{code}");
    assert_eq!(span.parent_span_id, PARENT.to_be_bytes(), "{code}");
    let expected = [
        (fields::ROUTE, "refused".to_owned()),
        (fields::BECAUSE, code.to_owned()),
        (fields::END, "refused".to_owned()),
        (fields::ERROR, code.to_owned()),
        (fields::STATUS, status.to_string()),
    ];
    assert_eq!(said(span), BTreeMap::from(expected));
    // A fault of the client is no fault of the server (OpenTelemetry, HTTP spans).
    let failed = match status {
        500.. => StatusCode::Error,
        _ => StatusCode::Unset,
    };
    let told = span.status.as_ref().map(|status| status.code());
    assert_eq!(told.unwrap_or_default(), failed, "{code}");
    let took = span.end_time_unix_nano - span.start_time_unix_nano;
    if code == "body_timeout" {
        assert!(
            STALL.as_nanos() <= u128::from(took),
            "it begins with the headers"
        );
    }
}

#[tokio::test]
async fn every_refusal_leaves_one_span_below_its_parent() {
    for kind in kinds() {
        let mut served = Served::start(kind.limits).await;
        let mut gateway = ask(&served, &kind, SAMPLED).await;
        if kind.request == BodySendMode::Buffered {
            gateway.answer().await;
        }
        let refusal = gateway.refusal().await;
        assert_eq!(refusal.details, kind.code);
        assert_eq!(refusal.status.unwrap().code, i32::from(kind.status));
        drop(gateway);
        assert_refused(&served.spans().await, kind.code, kind.status);
    }
}

#[tokio::test]
async fn no_refusal_is_exported_of_a_trace_that_is_not_sampled() {
    for kind in kinds() {
        let mut served = Served::start(kind.limits).await;
        let mut gateway = ask(&served, &kind, NOT_SAMPLED).await;
        if kind.request == BodySendMode::Buffered {
            gateway.answer().await;
        }
        assert_eq!(gateway.refusal().await.details, kind.code);
        drop(gateway);
        assert!(served.spans().await.is_empty(), "{}", kind.code);
    }
}

#[tokio::test]
async fn a_request_that_a_shutdown_cuts_leaves_its_span() {
    let mut waits = kind("shutting_down", 503, unfinished());
    waits.limits.drain = Duration::ZERO;
    let mut served = Served::start(waits.limits).await;
    let mut gateway = ask(&served, &waits, SAMPLED).await;
    until("its body began", || {
        served.counters.request_bytes.get() == SECRET.len() as u64
    })
    .await;
    let stop = std::mem::replace(&mut served.stop, oneshot::channel().0);
    stop.send(()).unwrap();
    assert_eq!(gateway.refusal().await.details, waits.code);
    (&mut served.task).await.unwrap().unwrap();
    assert_refused(&served.spans().await, waits.code, waits.status);
}

#[tokio::test]
async fn a_client_that_gives_up_before_the_pick_leaves_a_span_that_says_so() {
    let gives_up = kind("", 0, unfinished());
    let mut served = Served::start(gives_up.limits).await;
    let gateway = ask(&served, &gives_up, SAMPLED).await;
    until("its body began", || {
        served.counters.request_bytes.get() == SECRET.len() as u64
    })
    .await;
    drop(gateway);
    until("the stream is gone", || served.counters.open_streams() == 0).await;
    let spans = served.spans().await;
    assert_eq!(spans.len(), 1, "{spans:?}");
    assert_eq!(spans[0].parent_span_id, PARENT.to_be_bytes());
    let expected = [(fields::END, "aborted".to_owned())];
    assert_eq!(said(&spans[0]), BTreeMap::from(expected));
}

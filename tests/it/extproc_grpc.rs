//! The gRPC service as a gateway sees it, over loopback, with a stand-in picker.

use crate::extproc_gateway::{Gateway, PATIENCE, http_body, streamed, until};
use bytes::Bytes;
use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::processing_mode::BodySendMode;
use envoy_types::pb::envoy::service::ext_proc::v3::HttpTrailers;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request as Ask;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response as Answer;
use sidestep::extproc::conformance::Conformance;
use sidestep::extproc::counters::Counters;
use sidestep::extproc::exchange::{Follow, PickPods};
use sidestep::extproc::server::{
    Limits, ServerError, Settings, Tls, serve, serve_health, tls_material,
};
use sidestep::extproc::wire::MetadataKeys;
use sidestep::names::Endpoint;
use sidestep::pick::{Arrival, Ended, Head, Refusal};
use sidestep::route::{DecisionId, Plan};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tonic::Code;
use tonic::transport::{Certificate, Channel, ClientTlsConfig};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

/// Answers every pick with the same pod, except for paths that ask for something else.
#[derive(Default)]
struct StandIn {
    flights: Arc<AtomicUsize>,
    picks: AtomicUsize,
    finished: Arc<AtomicUsize>,
    last_trace: parking_lot::Mutex<Option<Arc<str>>>,
    not_ready: AtomicBool,
}

struct Flight {
    open: Arc<AtomicUsize>,
    finished: Arc<AtomicUsize>,
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.open.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Follow for Flight {
    fn response_headers(&mut self, _: Option<u16>, _: Option<Endpoint>) {}
    fn first_bytes(&mut self) {}
    fn response_bytes(&mut self, _: &[u8]) {}
    fn finish(self) {
        self.finished.fetch_add(1, Ordering::SeqCst);
    }
}

impl PickPods for StandIn {
    type Flight = Flight;

    fn ended_early(&self, _: &Arrival, _: Ended<'_>) {}

    fn ready(&self) -> bool {
        !self.not_ready.load(Ordering::SeqCst)
    }

    async fn pick(&self, head: Head, _: Option<Bytes>) -> Result<(Plan, Flight), Refusal> {
        self.picks.fetch_add(1, Ordering::SeqCst);
        *self.last_trace.lock() = head.trace_parent.clone();
        if head.path == "/never" {
            std::future::pending::<()>().await;
        }
        self.flights.fetch_add(1, Ordering::SeqCst);
        let plan = Plan {
            destination: Endpoint("10.0.0.1:8000".parse().unwrap()),
            edits: Vec::new(),
            decision_id: DecisionId::from_raw(7),
        };
        let flight = Flight {
            open: Arc::clone(&self.flights),
            finished: Arc::clone(&self.finished),
        };
        Ok((plan, flight))
    }
}

struct Server {
    address: SocketAddr,
    picker: Arc<StandIn>,
    counters: Arc<Counters>,
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<Result<(), ServerError>>,
}

impl Server {
    async fn start(limits: Limits, tls: Tls) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let picker = Arc::new(StandIn::default());
        let counters = Arc::new(Counters::default());
        let (stop, stopped) = oneshot::channel();
        let settings = Settings {
            limits,
            tls: tls_material(&tls).unwrap(),
            metadata: MetadataKeys::default(),
            conformance: Conformance::Disabled,
            counters: Arc::clone(&counters),
        };
        let task = tokio::spawn(serve(listener, Arc::clone(&picker), settings, async move {
            let _ = stopped.await;
        }));
        Server {
            address,
            picker,
            counters,
            stop: Some(stop),
            task,
        }
    }

    async fn plain(limits: Limits) -> Server {
        Server::start(limits, Tls::Plaintext).await
    }

    async fn channel(&self) -> Channel {
        Channel::from_shared(format!("http://{}", self.address))
            .unwrap()
            .connect()
            .await
            .unwrap()
    }

    async fn stop(mut self) {
        self.begin_stop();
        self.task.await.unwrap().unwrap();
    }

    fn begin_stop(&mut self) {
        let _ = self.stop.take().map(|stop| stop.send(()));
    }

    fn open_flights(&self) -> usize {
        self.picker.flights.load(Ordering::SeqCst)
    }
}

fn small() -> Limits {
    Limits {
        body: 1 << 20,
        held_requests: 8,
        ..Limits::default()
    }
}

#[tokio::test]
async fn long_bodies_come_back_whole_in_messages_below_64_kib() {
    let server = Server::plain(Limits::default()).await;
    let channel = server.channel().await;
    for size in [63 << 10, 64 << 10, (128 << 10) + 1, 10 << 20] {
        let body: Vec<u8> = (0..size).map(|i| (i % 253) as u8).collect();
        let mut gateway = Gateway::duplex(&channel).await;
        gateway.headers("POST", "/v1/chat/completions", false);
        let pieces: Vec<_> = body.chunks(16 << 10).collect();
        for (at, piece) in pieces.iter().enumerate() {
            gateway.body(piece, at + 1 == pieces.len());
        }
        assert!(matches!(gateway.answer().await, Answer::RequestHeaders(_)));
        let mut back = Vec::new();
        loop {
            let (piece, end) = streamed(gateway.answer().await);
            assert!(piece.len() < 64 << 10);
            back.extend_from_slice(&piece);
            if end {
                break;
            }
        }
        assert_eq!(back.len(), body.len());
        assert!(back == body, "the bytes differ at size {size}");
    }
    assert_eq!(server.picker.picks.load(Ordering::SeqCst), 4);
}

#[tokio::test]
async fn a_body_above_the_limit_is_a_413_and_the_stream_ends_well() {
    let server = Server::plain(small()).await;
    let channel = server.channel().await;
    let mut gateway = Gateway::duplex(&channel).await;
    gateway.headers("POST", "/v1/chat/completions", false);
    for _ in 0..40 {
        gateway.body(&[b' '; 64 << 10], false);
    }
    let refusal = gateway.refusal().await;
    assert_eq!(refusal.status.unwrap().code, 413);
    assert_eq!(refusal.details, "body_too_large");
    let end = tokio::time::timeout(PATIENCE, gateway.answers.message());
    assert!(end.await.unwrap().unwrap().is_none());
}

#[tokio::test]
async fn a_buffered_body_longer_than_any_message_is_a_413_and_not_skipped() {
    let server = Server::plain(small()).await;
    let channel = server.channel().await;
    let mut gateway = Gateway::open(&channel, (BodySendMode::Buffered, BodySendMode::None)).await;
    gateway.headers("POST", "/v1/chat/completions", false);
    assert!(matches!(gateway.answer().await, Answer::RequestHeaders(_)));
    gateway.body(&vec![b' '; 6 << 20], true);
    assert_eq!(gateway.refusal().await.status.unwrap().code, 413);
    assert_eq!(server.picker.picks.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn a_get_is_answered_at_once_beside_a_response_that_runs() {
    let server = Server::plain(small()).await;
    let channel = server.channel().await;
    let mut runs = Gateway::duplex(&channel).await;
    runs.planned().await;
    runs.respond();
    runs.answer().await;

    let mut get = Gateway::duplex(&channel).await;
    get.headers("GET", "/v1/models", true);
    assert!(matches!(get.answer().await, Answer::RequestHeaders(_)));
    get.respond();
    assert!(matches!(get.answer().await, Answer::ResponseHeaders(_)));
    get.tell(Ask::ResponseBody(http_body(b"{}", true)));
    assert!(matches!(get.answer().await, Answer::ResponseBody(_)));
    drop(get);
    until("the get is released", || server.open_flights() == 1).await;

    runs.tell(Ask::ResponseBody(http_body(b"data", false)));
    assert!(matches!(runs.answer().await, Answer::ResponseBody(_)));
}

#[tokio::test]
async fn request_trailers_end_a_body() {
    let server = Server::plain(small()).await;
    let channel = server.channel().await;
    let mut gateway = Gateway::duplex(&channel).await;
    gateway.headers("POST", "/v1/chat/completions", false);
    gateway.body(b"{}", false);
    gateway.tell(Ask::RequestTrailers(HttpTrailers::default()));
    assert!(matches!(gateway.answer().await, Answer::RequestHeaders(_)));
    assert_eq!(streamed(gateway.answer().await), (b"{}".to_vec(), false));
    assert!(matches!(gateway.answer().await, Answer::RequestTrailers(_)));
}

#[tokio::test]
async fn two_hundred_streams_reset_at_every_point_leave_nothing_behind() {
    let server = Server::plain(Limits {
        held_requests: 1_000,
        ..small()
    })
    .await;
    let channel = server.channel().await;
    let mut streams = Vec::new();
    for at in 0..200 {
        let mut gateway = Gateway::duplex(&channel).await;
        match at % 6 {
            0 => gateway.headers("POST", "/v1/chat/completions", false),
            1 => {
                gateway.headers("POST", "/v1/chat/completions", false);
                gateway.body(b"{", false);
            }
            2 => {
                gateway.headers("POST", "/never", false);
                gateway.body(b"{}", true);
            }
            3 => gateway.planned().await,
            4 => {
                gateway.planned().await;
                gateway.respond();
                gateway.answer().await;
            }
            _ => {
                gateway.planned().await;
                gateway.respond();
                gateway.answer().await;
                gateway.tell(Ask::ResponseBody(http_body(b"data", false)));
                gateway.answer().await;
            }
        }
        streams.push(gateway);
    }
    assert_eq!(server.open_flights(), 99);
    drop(streams);
    until("all streams are gone", || {
        server.counters.open_streams() == 0 && server.open_flights() == 0
    })
    .await;
    assert_eq!(server.picker.finished.load(Ordering::SeqCst), 0);
    assert_eq!(server.counters.aborted.get(), 99);
}

#[tokio::test]
async fn streams_above_the_limit_are_refused_at_once_and_dropped_ones_make_room() {
    let server = Server::plain(small()).await;
    let channel = server.channel().await;
    let mut held = Vec::new();
    for _ in 0..8 {
        let gateway = Gateway::duplex(&channel).await;
        gateway.headers("POST", "/v1/chat/completions", false);
        gateway.body(&[b' '; 512 << 10], false);
        held.push(gateway);
    }
    until("the bodies are held", || {
        server.counters.request_bytes.get() == 8 * (512 << 10)
    })
    .await;
    for _ in 0..100 {
        let mut gateway = Gateway::duplex(&channel).await;
        gateway.headers("POST", "/v1/chat/completions", false);
        gateway.body(&[b' '; 64 << 10], false);
        let refusal = gateway.refusal().await;
        assert_eq!(refusal.status.unwrap().code, 503);
    }
    assert_eq!(
        server.counters.refusals(),
        [("too_many_requests_held", 503, 100)]
    );
    drop(held);
    until("the held streams are gone", || {
        server.counters.open_streams() == 0
    })
    .await;
    Gateway::duplex(&channel).await.planned().await;
}

#[tokio::test]
async fn the_gateways_trace_is_taken_from_the_streams_metadata() {
    let server = Server::plain(small()).await;
    let channel = server.channel().await;
    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let modes = (BodySendMode::FullDuplexStreamed, BodySendMode::None);
    let mut gateway = Gateway::with_trace(&channel, modes, Some(trace)).await;
    gateway.planned().await;
    assert_eq!(server.picker.last_trace.lock().as_deref(), Some(trace));
}

async fn grpc_health(channel: &Channel, service: &str) -> Result<ServingStatus, Code> {
    let request = HealthCheckRequest {
        service: service.to_owned(),
    };
    HealthClient::new(channel.clone())
        .check(request)
        .await
        .map(|answer| answer.into_inner().status())
        .map_err(|status| status.code())
}

#[tokio::test]
async fn health_follows_readiness_under_every_name_and_liveness_does_not() {
    let server = Server::plain(small()).await;
    let channel = server.channel().await;
    let names = [
        "",
        "readiness",
        "envoy.service.ext_proc.v3.ExternalProcessor",
        "inference-extension",
    ];
    for name in names {
        assert_eq!(
            grpc_health(&channel, name).await,
            Ok(ServingStatus::Serving)
        );
    }
    assert_eq!(grpc_health(&channel, "other").await, Err(Code::NotFound));
    server.picker.not_ready.store(true, Ordering::SeqCst);
    assert_eq!(
        grpc_health(&channel, "warm").await,
        Ok(ServingStatus::Serving)
    );
    for name in names {
        assert_eq!(
            grpc_health(&channel, name).await,
            Ok(ServingStatus::NotServing)
        );
    }
    assert_eq!(
        grpc_health(&channel, "liveness").await,
        Ok(ServingStatus::Serving)
    );
}

#[tokio::test]
async fn warm_is_not_serving_before_the_first_time_that_the_picker_is_ready() {
    let server = Server::plain(small()).await;
    server.picker.not_ready.store(true, Ordering::SeqCst);
    let channel = server.channel().await;
    assert_eq!(
        grpc_health(&channel, "warm").await,
        Ok(ServingStatus::NotServing)
    );
    server.picker.not_ready.store(false, Ordering::SeqCst);
    assert_eq!(
        grpc_health(&channel, "warm").await,
        Ok(ServingStatus::Serving)
    );
}

#[tokio::test]
async fn the_health_port_serves_until_draining_begins_and_tells_those_who_watch() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let picker = Arc::new(StandIn::default());
    let (draining, drains) = watch::channel(false);
    let (stop, stopped) = oneshot::channel::<()>();
    let task = tokio::spawn(serve_health(listener, picker, drains, async move {
        let _ = stopped.await;
    }));
    let channel = Channel::from_shared(format!("http://{address}"))
        .unwrap()
        .connect()
        .await
        .unwrap();
    let mut watching = HealthClient::new(channel.clone())
        .watch(HealthCheckRequest::default())
        .await
        .unwrap()
        .into_inner();
    let first = watching.message().await.unwrap().unwrap();
    assert_eq!(first.status(), ServingStatus::Serving);
    draining.send(true).unwrap();
    let second = watching.message().await.unwrap().unwrap();
    assert_eq!(second.status(), ServingStatus::NotServing);
    assert!(watching.message().await.unwrap().is_none());
    for name in ["readiness", "warm"] {
        assert_eq!(
            grpc_health(&channel, name).await,
            Ok(ServingStatus::NotServing)
        );
    }
    assert_eq!(
        grpc_health(&channel, "liveness").await,
        Ok(ServingStatus::Serving)
    );
    stop.send(()).unwrap();
    tokio::time::timeout(PATIENCE, task).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_shutdown_lets_running_responses_end_and_takes_no_new_connections() {
    let mut server = Server::plain(small()).await;
    let channel = server.channel().await;
    let watching = {
        let mut client = HealthClient::new(channel.clone());
        let request = HealthCheckRequest::default();
        client.watch(request).await.unwrap().into_inner()
    };
    let mut runs = Gateway::duplex(&channel).await;
    runs.planned().await;
    runs.respond();
    runs.answer().await;

    server.begin_stop();
    let refused = tokio::time::timeout(PATIENCE, async {
        while tokio::net::TcpStream::connect(server.address).await.is_ok() {}
    });
    assert!(refused.await.is_ok(), "the port stays open");
    for _ in 0..3 {
        runs.tell(Ask::ResponseBody(http_body(b"data", false)));
        assert!(matches!(runs.answer().await, Answer::ResponseBody(_)));
    }
    runs.tell(Ask::ResponseBody(http_body(b"", true)));
    runs.answer().await;
    assert_eq!(server.picker.finished.load(Ordering::SeqCst), 1);
    drop(runs);
    let counters = Arc::clone(&server.counters);
    tokio::time::timeout(PATIENCE, server.stop()).await.unwrap();
    assert_eq!(counters.cut.get(), 0);
    drop(watching);
}

#[tokio::test]
async fn streams_that_outlast_the_drain_are_cut_and_counted() {
    let server = Server::plain(Limits {
        drain: Duration::from_millis(50),
        ..small()
    })
    .await;
    let channel = server.channel().await;
    let mut runs = Gateway::duplex(&channel).await;
    runs.planned().await;
    let mut waits = Gateway::duplex(&channel).await;
    waits.headers("POST", "/never", true);
    until("the second pick waits", || {
        server.picker.picks.load(Ordering::SeqCst) == 2
    })
    .await;
    let picker = Arc::clone(&server.picker);
    let counters = Arc::clone(&server.counters);
    tokio::time::timeout(PATIENCE, server.stop()).await.unwrap();
    assert_eq!(counters.cut.get(), 2);
    assert_eq!(runs.status().await.code(), Code::Unavailable);
    assert_eq!(waits.refusal().await.details, "shutting_down");
    assert_eq!(picker.flights.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn tls_with_files_serves_those_who_trust_them() {
    let dir = tempfile::tempdir().unwrap();
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let (cert, key) = (dir.path().join("tls.crt"), dir.path().join("tls.key"));
    std::fs::write(&cert, made.cert.pem()).unwrap();
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    let server = Server::start(small(), Tls::Files { cert, key }).await;
    let trusting = ClientTlsConfig::new()
        .ca_certificate(Certificate::from_pem(made.cert.pem()))
        .domain_name("localhost");
    let channel = Channel::from_shared(format!("https://{}", server.address))
        .unwrap()
        .tls_config(trusting)
        .unwrap()
        .connect()
        .await
        .unwrap();
    Gateway::duplex(&channel).await.planned().await;
}

#[tokio::test]
async fn tls_by_default_shows_a_certificate_that_only_the_unverifying_accept() {
    let server = Server::start(small(), Tls::default()).await;
    let other = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let verifying = ClientTlsConfig::new()
        .ca_certificate(Certificate::from_pem(other.cert.pem()))
        .domain_name("localhost");
    let error = Channel::from_shared(format!("https://{}", server.address))
        .unwrap()
        .tls_config(verifying)
        .unwrap()
        .connect()
        .await
        .unwrap_err();
    let shown = format!("{error:?}");
    assert!(shown.contains("InvalidCertificate"), "{shown}");
    let plain = Channel::from_shared(format!("http://{}", server.address)).unwrap();
    let plain = plain.connect().await;
    let refused = match plain {
        Err(_) => true,
        Ok(channel) => grpc_health(&channel, "").await.is_err(),
    };
    assert!(refused, "plaintext is not served beside TLS");
}

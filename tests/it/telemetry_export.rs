//! Spans on their way: both protocols, headers, a receiver that is gone or slow, the flush at the end.

use crate::telemetry_support::{Span, completion, decode, head, picker, policy};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::service::service_fn;
use hyper::{HeaderMap, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use prost::Message;
use sidestep::telemetry::trace::Tracing;
use sidestep::telemetry::trace::settings::{FileSettings, Protocol, resolve};
use std::net::SocketAddr;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};

const PATIENCE: Duration = Duration::from_secs(10);

pub(crate) type Received = (Vec<u8>, HeaderMap);

struct Grpc(UnboundedSender<Received>);

#[tonic::async_trait]
impl TraceService for Grpc {
    async fn export(
        &self,
        request: tonic::Request<ExportTraceServiceRequest>,
    ) -> Result<tonic::Response<ExportTraceServiceResponse>, tonic::Status> {
        let headers = request.metadata().clone().into_headers();
        let _ = self.0.send((request.into_inner().encode_to_vec(), headers));
        Ok(tonic::Response::new(Default::default()))
    }
}

pub(crate) async fn grpc_receiver() -> (SocketAddr, UnboundedReceiver<Received>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (sender, receiver) = mpsc::unbounded_channel();
    let service = TraceServiceServer::new(Grpc(sender));
    tokio::spawn(
        tonic::transport::Server::builder()
            .add_service(service)
            .serve_with_incoming(tokio_stream::wrappers::TcpListenerStream::new(listener)),
    );
    (address, receiver)
}

/// Answers the first exports with the statuses in `failures`, then with 200.
async fn http_receiver(failures: &[u16]) -> (SocketAddr, UnboundedReceiver<Received>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (sender, receiver) = mpsc::unbounded_channel();
    let failures = std::sync::Arc::new(parking_lot::Mutex::new(failures.to_vec()));
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (sender, failures) = (sender.clone(), std::sync::Arc::clone(&failures));
            let service = service_fn(move |request: hyper::Request<hyper::body::Incoming>| {
                let (sender, failures) = (sender.clone(), std::sync::Arc::clone(&failures));
                async move {
                    assert_eq!(request.uri().path(), "/v1/traces");
                    let headers = request.headers().clone();
                    let body = request.into_body().collect().await.unwrap().to_bytes();
                    let failure = failures.lock().pop();
                    let mut response = Response::new(Full::new(Bytes::new()));
                    match failure {
                        Some(status) => *response.status_mut() = status.try_into().unwrap(),
                        None => drop(sender.send((body.to_vec(), headers))),
                    }
                    Ok::<_, std::convert::Infallible>(response)
                }
            });
            tokio::spawn(async move {
                let builder = auto::Builder::new(TokioExecutor::new());
                let _ = builder
                    .serve_connection(TokioIo::new(stream), service)
                    .await;
            });
        }
    });
    (address, receiver)
}

pub(crate) fn tracing(address: SocketAddr, protocol: Protocol, vars: &[(&str, &str)]) -> Tracing {
    let file = FileSettings {
        endpoint: Some(format!("http://{address}")),
        protocol: Some(protocol),
        resource: vec![("deployment".into(), "test".into())],
        ..FileSettings::default()
    };
    let env = |name: &str| {
        let found = vars.iter().find(|(key, _)| *key == name);
        found.map(|(_, value)| (*value).to_owned())
    };
    Tracing::start(&resolve(file, env).unwrap().unwrap()).unwrap()
}

async fn ask(tracing: &Tracing) {
    let picked = picker(policy(), tracing)
        .pick(head(None, None), completion("hello"))
        .await;
    picked.unwrap().flight.finish();
}

async fn next(receiver: &mut UnboundedReceiver<Received>) -> (Vec<Span>, Received) {
    let received = tokio::time::timeout(PATIENCE, receiver.recv()).await;
    let received = received.expect("spans arrive").unwrap();
    (decode(&received.0), received)
}

const HEADERS: (&str, &str) = ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20t");

#[tokio::test]
async fn spans_arrive_by_grpc_and_by_http_with_headers_and_resource() {
    for protocol in [Protocol::Grpc, Protocol::HttpProtobuf] {
        let (address, mut receiver) = match protocol {
            Protocol::Grpc => grpc_receiver().await,
            Protocol::HttpProtobuf => http_receiver(&[]).await,
        };
        let tracing = tracing(
            address,
            protocol,
            &[HEADERS, ("OTEL_BSP_SCHEDULE_DELAY", "10")],
        );
        ask(&tracing).await;
        let (spans, (bytes, headers)) = next(&mut receiver).await;
        assert_eq!(spans.len(), 6, "{protocol:?}");
        assert_eq!(headers["authorization"], "Bearer t");
        let request = ExportTraceServiceRequest::decode(&*bytes).unwrap();
        let resource = request.resource_spans[0]
            .resource
            .clone()
            .unwrap()
            .attributes;
        let value = |key| crate::telemetry_support::attribute(&resource, key);
        assert_eq!(value("service.name").as_deref(), Some("sidestep"));
        assert_eq!(value("deployment").as_deref(), Some("test"));
        let scope = request.resource_spans[0].scope_spans[0]
            .scope
            .clone()
            .unwrap();
        assert_eq!(scope.name, "sidestep");
        tracing.shutdown().await;
        assert_eq!(tracing.stats().unwrap().exported, 6);
    }
}

#[tokio::test]
async fn what_waits_is_sent_when_the_program_stops() {
    let (address, mut receiver) = grpc_receiver().await;
    let tracing = tracing(
        address,
        Protocol::Grpc,
        &[("OTEL_BSP_SCHEDULE_DELAY", "600000")],
    );
    ask(&tracing).await;
    assert_eq!(tracing.stats().unwrap().exported, 0);
    tracing.shutdown().await;
    assert_eq!(next(&mut receiver).await.0.len(), 6);
}

#[tokio::test]
async fn a_receiver_that_is_overloaded_is_asked_again() {
    let (address, mut receiver) = http_receiver(&[503]).await;
    let tracing = tracing(
        address,
        Protocol::HttpProtobuf,
        &[("OTEL_BSP_SCHEDULE_DELAY", "10")],
    );
    ask(&tracing).await;
    assert_eq!(next(&mut receiver).await.0.len(), 6);
    tracing.shutdown().await;
    assert_eq!(tracing.stats().unwrap().dropped_export_failed, 0);
}

#[tokio::test]
async fn a_receiver_that_is_gone_or_never_answers_costs_spans_and_nothing_else() {
    let gone = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let nobody = gone.local_addr().unwrap();
    drop(gone);
    // Accepts into its backlog and never answers.
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    for address in [nobody, silent.local_addr().unwrap()] {
        for protocol in [Protocol::Grpc, Protocol::HttpProtobuf] {
            let vars = [
                ("OTEL_EXPORTER_OTLP_TIMEOUT", "50"),
                ("OTEL_BSP_SCHEDULE_DELAY", "1"),
            ];
            let tracing = tracing(address, protocol, &vars);
            ask(&tracing).await;
            tokio::time::timeout(PATIENCE, tracing.shutdown())
                .await
                .expect("the flush is bounded");
            let stats = tracing.stats().unwrap();
            assert_eq!(
                (stats.exported, stats.dropped_export_failed),
                (0, 6),
                "{protocol:?}"
            );
        }
    }
}

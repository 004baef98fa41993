//! A collector of spans (OTLP by gRPC) in this process.
//!
//! Lives here: [`Collector`], [`Span`].
//! Never here: what the spans should say.
//! Invariant: every span that arrives is kept.

use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use tokio::task::JoinSet;
use tonic::{Request, Response, Status};

/// One span as it was exported.
#[derive(Clone, Debug)]
pub(crate) struct Span {
    /// `service.name` of its resource.
    pub(crate) service: String,
    pub(crate) name: String,
    /// 32 hex digits.
    pub(crate) trace: String,
    /// 16 hex digits.
    pub(crate) id: String,
    /// 16 hex digits; empty for a root.
    pub(crate) parent: String,
    /// Attributes as text.
    pub(crate) attributes: BTreeMap<String, String>,
}

/// A collector on a loopback port. Ends when dropped.
pub(crate) struct Collector {
    pub(crate) address: SocketAddr,
    spans: Arc<Mutex<Vec<Span>>>,
    _server: JoinSet<()>,
}

impl Collector {
    pub(crate) async fn start() -> Collector {
        let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
            .await
            .unwrap();
        let address = listener.local_addr().unwrap();
        let spans = Arc::default();
        let service = TraceServiceServer::new(Keep(Arc::clone(&spans)));
        let mut server = JoinSet::new();
        server.spawn(async move {
            let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
            let router = tonic::transport::Server::builder().add_service(service);
            router.serve_with_incoming(incoming).await.unwrap();
        });
        Collector {
            address,
            spans,
            _server: server,
        }
    }

    /// The spans of a service so far.
    pub(crate) fn of(&self, service: &str) -> Vec<Span> {
        let spans = self.spans.lock();
        spans
            .iter()
            .filter(|span| span.service == service)
            .cloned()
            .collect()
    }
}

struct Keep(Arc<Mutex<Vec<Span>>>);

#[tonic::async_trait]
impl TraceService for Keep {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        for resource in request.into_inner().resource_spans {
            let of_resource = resource
                .resource
                .map(|resource| text_of(&resource.attributes))
                .unwrap_or_default();
            let service = of_resource.get("service.name").cloned().unwrap_or_default();
            for span in resource
                .scope_spans
                .into_iter()
                .flat_map(|scope| scope.spans)
            {
                self.0.lock().push(Span {
                    service: service.clone(),
                    attributes: text_of(&span.attributes),
                    trace: hex(&span.trace_id),
                    id: hex(&span.span_id),
                    parent: hex(&span.parent_span_id),
                    name: span.name,
                });
            }
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

fn text_of(
    attributes: &[opentelemetry_proto::tonic::common::v1::KeyValue],
) -> BTreeMap<String, String> {
    let text = |value: &Value| match value {
        Value::StringValue(text) => text.clone(),
        Value::BoolValue(value) => value.to_string(),
        Value::IntValue(value) => value.to_string(),
        Value::DoubleValue(value) => value.to_string(),
        other => format!("{other:?}"),
    };
    attributes
        .iter()
        .filter_map(|pair| Some((pair.key.clone(), text(pair.value.as_ref()?.value.as_ref()?))))
        .collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

//! The gRPC service that gateways connect to.
//!
//! Lives here: the port, its transport settings, health, and the end of it all.
//! Never here: what is answered (see `session`), what is decided (see `pick`).
//! Invariant: after a shutdown began, streams that run go on until they end or the time to drain
//! is over; how many were cut is counted and returned.

use crate::extproc::exchange::{Broken, Exchange, PickPods, Received, Shared};
use crate::extproc::health;
use crate::extproc::wire::{self, GatewayTrace, MetadataKeys};
use crate::pick::Arrival;
use envoy_types::pb::envoy::service::ext_proc::v3::external_processor_server::{
    ExternalProcessor, ExternalProcessorServer,
};
use envoy_types::pb::envoy::service::ext_proc::v3::{ProcessingRequest, ProcessingResponse};
use futures_util::{Stream, StreamExt};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::metadata::MetadataMap;
use tonic::service::Routes;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Code, Request, Response, Status, Streaming};

pub use crate::extproc::settings::{Limits, Settings};
pub use crate::extproc::tls::{Tls, TlsError, TlsMaterial};
pub use crate::extproc::wire::MetadataKey;

/// Bytes of a message beyond the body in it.
const MESSAGE_SLACK: usize = 1 << 20;
/// HTTP/2 windows: the default of 64 KiB would stop bodies of a few MiB again and again.
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = 16 << 20;
/// One stream per running response; gateways open few connections.
const STREAMS_PER_CONNECTION: u32 = 65_536;
/// Streams that were reset before they were looked at. Gateways reset every stream they are done
/// with, and clients give up in bursts; the default of 20 takes that for an attack.
const RESETS_PENDING: usize = 8_192;
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(30);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long connections may take to close once nothing runs on them.
const CLOSING: Duration = Duration::from_secs(1);

/// Why a port cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// It could not be secured.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The transport failed.
    #[error("gRPC transport: {0}")]
    Transport(#[from] tonic::transport::Error),
}

/// Reads or makes what `tls` needs, so that faults are found before a port is served.
///
/// # Errors
/// When a file cannot be read, its content does not fit, or no certificate can be made.
pub fn tls_material(tls: &Tls) -> Result<TlsMaterial, ServerError> {
    Ok(tls.material()?)
}

/// Serves gateways on `listener` until `shutdown` resolves and the streams that run have ended.
///
/// Then: health turns NOT_SERVING, the port closes, connections get GOAWAY (so that gateways open
/// new streams elsewhere), streams that run may end by themselves for as long as
/// [`Limits::drain`], and the rest is cut; [`Counters::cut`] says how many.
///
/// [`Counters::cut`]: crate::extproc::counters::Counters::cut
///
/// # Errors
/// When the port cannot be secured or the transport fails.
pub async fn serve<P: PickPods>(
    listener: TcpListener,
    picker: Arc<P>,
    settings: Settings,
    shutdown: impl Future<Output = ()>,
) -> Result<(), ServerError> {
    let Settings {
        limits,
        tls,
        metadata,
        counters,
        conformance,
    } = settings;
    let mut shared = Shared::new(Arc::clone(&picker), limits, counters);
    shared.conformance = conformance;
    let shared = Arc::new(shared);
    let (draining, drains) = watch::channel(false);
    let stop = CancellationToken::new();
    let server = transport(tls)?
        .add_service(service(Arc::clone(&shared), metadata))
        .add_service(health::service(picker, drains))
        .serve_with_incoming_shutdown(
            TcpIncoming::from(listener).with_nodelay(Some(true)),
            stop.clone().cancelled_owned(),
        );
    tokio::pin!(server);

    tokio::select! {
        served = &mut server => return Ok(served?),
        () = shutdown => {}
    }
    draining.send_replace(true);
    stop.cancel();
    let before = shared.counters.cut.get();
    let drained = drain(server.as_mut(), &shared).await;
    let cut_streams = shared.counters.cut.get().saturating_sub(before);
    if 0 < cut_streams {
        tracing::warn!(cut_streams, "streams were cut: the time to drain was over");
    }
    drained
}

/// Serves gRPC health, in plaintext, for probes: the same names as on the gateways' port.
/// `draining` turns readiness off; `shutdown` ends it.
pub async fn serve_health<P: PickPods>(
    listener: TcpListener,
    picker: Arc<P>,
    draining: watch::Receiver<bool>,
    shutdown: impl Future<Output = ()>,
) {
    serve_health_and(listener, picker, draining, Routes::default(), shutdown).await;
}

/// Serves gRPC health and, beside it, `further` services.
pub async fn serve_health_and<P: PickPods>(
    listener: TcpListener,
    picker: Arc<P>,
    draining: watch::Receiver<bool>,
    further: Routes,
    shutdown: impl Future<Output = ()>,
) {
    let served = Server::builder()
        .add_routes(further.add_service(health::service(picker, draining)))
        .serve_with_incoming_shutdown(TcpIncoming::from(listener), shutdown)
        .await;
    if let Err(error) = served {
        tracing::error!(%error, "the health port stopped");
    }
}

/// Lets streams end, then cuts the rest, then lets connections close.
async fn drain<P>(
    mut server: Pin<&mut impl Future<Output = Result<(), tonic::transport::Error>>>,
    shared: &Shared<P>,
) -> Result<(), ServerError> {
    shared.open.close();
    let over = tokio::time::sleep(shared.limits.drain);
    tokio::select! {
        served = &mut server => return Ok(served?),
        () = shared.open.wait() => {}
        () = over => shared.cut.cancel(),
    }
    // A stream that came in just before its connection's GOAWAY may still run: it gets a second,
    // then it is cut like the others.
    for _ in 0..2 {
        if let Ok(served) = tokio::time::timeout(CLOSING, &mut server).await {
            return Ok(served?);
        }
        shared.cut.cancel();
    }
    Ok(())
}

fn transport(tls: TlsMaterial) -> Result<Server, ServerError> {
    let server = Server::builder()
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_concurrent_streams(STREAMS_PER_CONNECTION)
        .http2_max_pending_accept_reset_streams(Some(RESETS_PENDING))
        .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT));
    Ok(tls.secure(server)?)
}

fn service<P: PickPods>(
    shared: Arc<Shared<P>>,
    keys: MetadataKeys,
) -> ExternalProcessorServer<Service<P>> {
    let largest = shared.limits.body.saturating_add(MESSAGE_SLACK);
    ExternalProcessorServer::new(Service {
        shared,
        keys: Arc::new(keys),
    })
    .max_decoding_message_size(largest)
}

struct Service<P> {
    shared: Arc<Shared<P>>,
    keys: Arc<MetadataKeys>,
}

#[tonic::async_trait]
impl<P: PickPods> ExternalProcessor for Service<P> {
    type ProcessStream = Pin<Box<dyn Stream<Item = Result<ProcessingResponse, Status>> + Send>>;

    async fn process(
        &self,
        request: Request<Streaming<ProcessingRequest>>,
    ) -> Result<Response<Self::ProcessStream>, Status> {
        let trace = trace(request.metadata());
        let keys = Arc::clone(&self.keys);
        let arrival = Arrival {
            at: Instant::now(),
            trace_parent: trace.parent.clone(),
            trace_state: trace.state.clone(),
        };
        let inbound = request
            .into_inner()
            .map(move |received| receive(received, &keys, &trace));
        let keys = Arc::clone(&self.keys);
        let answers = Exchange::answers(inbound, Arc::clone(&self.shared), arrival)
            .map(move |answer| answer.map(|outgoing| wire::write(outgoing, &keys)));
        Ok(Response::new(Box::pin(answers)))
    }
}

fn trace(metadata: &MetadataMap) -> GatewayTrace {
    let text = |name| {
        let value = metadata.get(name)?.to_str().ok()?;
        Some(Arc::from(value))
    };
    GatewayTrace {
        parent: text("traceparent"),
        state: text("tracestate"),
    }
}

fn receive(
    received: Result<ProcessingRequest, Status>,
    keys: &MetadataKeys,
    trace: &GatewayTrace,
) -> Received {
    match received {
        Ok(message) => Ok(wire::read(message, keys, trace)),
        Err(status) if status.code() == Code::OutOfRange => Err(Broken::TooLong),
        Err(_) => Err(Broken::Reset),
    }
}

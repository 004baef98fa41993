//! gRPC health: what gateways and probes ask before they send requests.
//!
//! Lives here: the names that are answered, and what each follows.
//! Never here: what makes the picker ready.
//! Invariant: once a shutdown began, nothing but liveness serves.

use std::convert::Infallible;
use std::future::Future;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic_health::ServingStatus;
use tonic_health::pb::health_server::HealthServer;
use tonic_health::server::{HealthReporter, HealthService};

/// Serves as long as the process runs.
const LIVENESS: &str = "liveness";
/// Names that follow readiness: the server as a whole, the probe's own, the service as gateways
/// check it, and the name that endpoint pickers are deployed with.
const READINESS: [&str; 4] = [
    "",
    "readiness",
    "envoy.service.ext_proc.v3.ExternalProcessor",
    "inference-extension",
];

/// Serves health alone, in plaintext, on a port of its own: what a kubelet's gRPC probe can reach.
///
/// # Errors
/// When the transport fails.
pub async fn serve(
    listener: TcpListener,
    ready: watch::Receiver<bool>,
    shutdown: impl Future<Output = ()>,
) -> Result<(), tonic::transport::Error> {
    let mut reporter = HealthReporter::new();
    let ready_now = *ready.borrow();
    register(&reporter, ready_now).await;
    let service = HealthServer::new(HealthService::from_health_reporter(reporter.clone()));
    let server = Server::builder()
        .add_service(service)
        .serve_with_incoming(TcpIncoming::from(listener).with_nodelay(Some(true)));
    tokio::select! {
        served = server => served,
        never = follow(reporter.clone(), ready) => match never {},
        () = shutdown => {
            clear(&mut reporter).await;
            Ok(())
        }
    }
}

/// Registers every name, as things are now.
pub(crate) async fn register(reporter: &HealthReporter, ready: bool) {
    reporter
        .set_service_status(LIVENESS, ServingStatus::Serving)
        .await;
    set_ready(reporter, ready).await;
}

/// Follows `ready`, for ever: when its sender is gone, readiness stays as it is.
pub(crate) async fn follow(
    reporter: HealthReporter,
    mut ready: watch::Receiver<bool>,
) -> Infallible {
    while ready.changed().await.is_ok() {
        let now = *ready.borrow_and_update();
        set_ready(&reporter, now).await;
    }
    std::future::pending().await
}

/// A shutdown began.
pub(crate) async fn stop(reporter: &HealthReporter) {
    set_ready(reporter, false).await;
}

/// Ends the streams of those who watch a name, which would keep their connections open.
pub(crate) async fn clear(reporter: &mut HealthReporter) {
    for name in READINESS.iter().chain([&LIVENESS]) {
        reporter.clear_service_status(name).await;
    }
}

async fn set_ready(reporter: &HealthReporter, ready: bool) {
    let status = if ready {
        ServingStatus::Serving
    } else {
        ServingStatus::NotServing
    };
    for name in READINESS {
        reporter.set_service_status(name, status).await;
    }
}

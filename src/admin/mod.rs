//! The admin port: metrics, readiness, the last decisions, the pods, explanations.
//!
//! Lives here: a small HTTP/1.1 server and its routes.
//! Never here: anything that changes a decision; prompt text.
//! Invariant: every answer is bounded, and nothing here waits on a request path's lock for longer
//! than a copy.

mod explain;
pub mod grpc;
mod routes;

use crate::pick::{Explainer, Picker};
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

/// Longest time a client may take to send its request head.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);
/// Most connections served at once; further ones wait to be accepted.
const CONNECTIONS: usize = 64;

/// Serves the admin port until `shutdown` resolves. Without an `explainer` no request is explained.
///
/// # Errors
/// When the listener fails for another reason than one connection.
pub async fn serve(
    listener: TcpListener,
    picker: Arc<Picker>,
    explainer: Option<Arc<Explainer>>,
    shutdown: impl Future<Output = ()>,
) -> std::io::Result<()> {
    let mut connections = JoinSet::new();
    tokio::pin!(shutdown);
    loop {
        let accepted = tokio::select! {
            () = &mut shutdown => return Ok(()),
            Some(_) = connections.join_next() => continue,
            accepted = listener.accept(), if connections.len() < CONNECTIONS => accepted,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Running out of descriptors passes; the loop must not spin meanwhile.
                tracing::warn!(%error, "an admin connection could not be accepted");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let (picker, explainer) = (Arc::clone(&picker), explainer.clone());
        connections.spawn(async move {
            let service = service_fn(move |request: Request<Incoming>| {
                let (picker, explainer) = (Arc::clone(&picker), explainer.clone());
                async move {
                    let answer = match request.uri().path() {
                        "/v1/explain" => explain::answer(explainer.as_deref(), request).await,
                        _ => routes::answer(&picker, request.method(), request.uri()),
                    };
                    Ok::<_, std::convert::Infallible>(answer)
                }
            });
            let served = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEAD_TIMEOUT)
                .serve_connection(TokioIo::new(stream), service)
                .await;
            if let Err(error) = served {
                tracing::debug!(%error, "an admin connection ended early");
            }
        });
    }
}

//! gRPC health: what gateways and probes ask before they send requests.
//!
//! Lives here: the names that are answered, and what each follows.
//! Never here: what makes the picker ready.
//! Invariant: once draining began, nothing but liveness serves, and those who watch are let go, so
//! that their connections can close.

use crate::extproc::exchange::PickPods;
use futures_util::{Stream, stream};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use tokio::sync::watch;
use tonic::{Request, Response, Status};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_server::{Health, HealthServer};
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

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
/// Serves from the first time the picker was ready until it drains. Orchestrators ask for this one:
/// a new replica gets no requests before it knows a pod to send them to, and when all pods go away
/// later, it stays where its answer (503, with the reason) can be had.
const WARM: &str = "warm";
/// How often readiness is looked at for those who watch.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// The health service of a picker.
pub(crate) fn service<P: PickPods>(
    picker: Arc<P>,
    draining: watch::Receiver<bool>,
) -> HealthServer<Checks<P>> {
    HealthServer::new(Checks {
        picker,
        draining,
        warm: Arc::default(),
    })
}

/// Answers from what the picker says now.
pub(crate) struct Checks<P> {
    picker: Arc<P>,
    draining: watch::Receiver<bool>,
    warm: Arc<AtomicBool>,
}

/// What a watching client knows.
struct Watch<P> {
    checks: Checks<P>,
    name: &'static str,
    told: Option<ServingStatus>,
    last: bool,
}

impl<P: PickPods> Checks<P> {
    fn status(&self, name: &str) -> ServingStatus {
        let ready = self.picker.ready();
        let warm = self.warm.fetch_or(ready, Relaxed) || ready;
        let able = if name == WARM { warm } else { ready };
        let serves = name == LIVENESS || (able && !*self.draining.borrow());
        if serves {
            ServingStatus::Serving
        } else {
            ServingStatus::NotServing
        }
    }
}

impl<P: PickPods> Watch<P> {
    async fn next(mut self) -> Option<(Result<HealthCheckResponse, Status>, Self)> {
        loop {
            if self.last {
                return None;
            }
            self.last = *self.checks.draining.borrow_and_update();
            let now = self.checks.status(self.name);
            if self.told != Some(now) {
                self.told = Some(now);
                return Some((Ok(response(now)), self));
            }
            if self.last {
                return None;
            }
            tokio::select! {
                changed = self.checks.draining.changed() => self.last = changed.is_err(),
                () = tokio::time::sleep(LOOK_EVERY) => {}
            }
        }
    }
}

#[tonic::async_trait]
impl<P: PickPods> Health for Checks<P> {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<HealthCheckResponse, Status>> + Send>>;

    async fn check(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        let name = known(&request.get_ref().service)?;
        Ok(Response::new(response(self.status(name))))
    }

    async fn watch(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let watch = Watch {
            checks: Checks {
                picker: Arc::clone(&self.picker),
                draining: self.draining.clone(),
                warm: Arc::clone(&self.warm),
            },
            name: known(&request.get_ref().service)?,
            told: None,
            last: false,
        };
        Ok(Response::new(Box::pin(stream::unfold(watch, Watch::next))))
    }
}

fn known(name: &str) -> Result<&'static str, Status> {
    READINESS
        .into_iter()
        .chain([LIVENESS, WARM])
        .find(|known| *known == name)
        .ok_or_else(|| Status::not_found("health: expected a name that is served here"))
}

fn response(status: ServingStatus) -> HealthCheckResponse {
    HealthCheckResponse {
        status: status.into(),
    }
}

//! The admin port: metrics, readiness, the decision page and what it shows, explanations.
//!
//! Lives here: a small HTTP/1.1 server, its routes, who may see what.
//! Never here: anything that changes a decision; prompt text.
//! Invariant: every answer is bounded, nothing here waits on a request path's lock for longer than a
//! copy, and what takes milliseconds is done on threads that serve no request.

pub mod access;
mod attentive;
mod explain;
pub mod grpc;
mod live;
mod page;
mod routes;
mod what_if;

use crate::admin::access::{Access, Denied, Ends};
use crate::admin::attentive::Attentive;
use crate::admin::routes::Answer;
use crate::decide::{Because, Ineligible};
use crate::pick::{Explainer, Picker};
use bytes::Bytes;
use http_body_util::{Either, Full};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode, header};
use hyper_util::rt::{TokioIo, TokioTimer};
use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

/// Longest time a client may take to send its request head.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);
/// Most connections served at once; further ones wait to be accepted.
const CONNECTIONS: usize = 64;

/// How often memory that is no longer held for a reader is given back.
const TIDY: Duration = Duration::from_secs(30);

/// Answers worked on at once; further ones wait, so that watching leaves the cores to requests.
const WORKING: usize = 2;

/// An answer: whole, or a live stream.
type Body = Either<Full<Bytes>, live::Feed>;

/// What the admin port shows, and to whom.
#[derive(Debug)]
pub struct Admin {
    /// Whose decisions.
    pub picker: Arc<Picker>,
    /// What explains requests; without, none is explained.
    pub explainer: Option<Arc<Explainer>>,
    /// Who may see them.
    pub access: Access,
    /// Where a trace can be looked at: an address with `{trace_id}` in it.
    pub trace_link: Option<Arc<str>>,
}

/// An [`Admin`] in service.
#[derive(Debug)]
struct Service {
    admin: Admin,
    live: Arc<Semaphore>,
    what_if: Arc<Semaphore>,
    working: Arc<Semaphore>,
}

/// Serves the admin port until `shutdown` resolves.
///
/// # Errors
/// When the listener fails for another reason than one connection.
pub async fn serve(
    listener: TcpListener,
    admin: Admin,
    shutdown: impl Future<Output = ()>,
) -> std::io::Result<()> {
    let service = Arc::new(Service {
        admin,
        live: Arc::new(Semaphore::new(live::CLIENTS)),
        what_if: Arc::new(Semaphore::new(1)),
        working: Arc::new(Semaphore::new(WORKING)),
    });
    let mut connections = JoinSet::new();
    let mut tidy = tokio::time::interval(TIDY);
    tokio::pin!(shutdown);
    loop {
        let accepted = tokio::select! {
            () = &mut shutdown => return Ok(()),
            Some(_) = connections.join_next() => continue,
            _ = tidy.tick() => {
                let picker = Arc::clone(&service.admin.picker);
                tokio::task::spawn_blocking(move || picker.end_holds(Instant::now()));
                continue;
            }
            accepted = listener.accept(), if connections.len() < CONNECTIONS => accepted,
        };
        let (stream, ends) = match accepted {
            Ok((stream, peer)) => match stream.local_addr() {
                Ok(local) => (stream, Ends::new(local, peer)),
                // It is gone already.
                Err(_) => continue,
            },
            Err(error) => {
                // Running out of descriptors passes; the loop must not spin meanwhile.
                tracing::warn!(%error, "an admin connection could not be accepted");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let service = Arc::clone(&service);
        connections.spawn(async move {
            let service = service_fn(move |request| {
                let service = Arc::clone(&service);
                async move { Ok::<_, std::convert::Infallible>(service.answer(ends, request).await) }
            });
            let served = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEAD_TIMEOUT)
                .serve_connection(TokioIo::new(Attentive::new(stream)), service)
                .await;
            if let Err(error) = served {
                tracing::debug!(%error, "an admin connection ended early");
            }
        });
    }
}

impl Service {
    async fn answer(&self, ends: Ends, request: Request<Incoming>) -> Response<Body> {
        let mut response = self.route(ends, request).await;
        let nosniff = header::HeaderValue::from_static("nosniff");
        response
            .headers_mut()
            .insert(header::X_CONTENT_TYPE_OPTIONS, nosniff);
        response
    }

    async fn route(&self, ends: Ends, request: Request<Incoming>) -> Response<Body> {
        let picker = &self.admin.picker;
        let path = request.uri().path();
        let get = matches!(*request.method(), Method::GET | Method::HEAD);
        if let (true, Some(file)) = (get, page::find(path)) {
            return match self.admin.access.check_page(ends, request.headers()) {
                Ok(()) => page::answer(file),
                Err(denied) => refused(denied),
            };
        }
        if !matches!(path, "/metrics" | "/healthz" | "/readyz")
            && let Err(denied) = self.admin.access.check(ends, request.headers())
        {
            return refused(denied);
        }
        match (request.method(), path) {
            (&Method::GET, "/v1/decisions/stream") => {
                match Arc::clone(&self.live).try_acquire_owned() {
                    Ok(permit) => live::answer(picker, permit),
                    Err(_) => whole(routes::error(
                        StatusCode::SERVICE_UNAVAILABLE,
                        "too many watch already; close another page, or use /v1/decisions",
                    )),
                }
            }
            (&Method::POST, "/v1/what-if") => {
                whole(what_if::answer(picker, &self.what_if, request).await)
            }
            (_, "/v1/explain") => {
                let explainer = self.admin.explainer.as_deref();
                whole(explain::answer(explainer, request).await)
            }
            (&Method::GET, "/v1/settings") => whole(routes::json(&self.settings())),
            (method, path) if routes::quick(path) => {
                whole(routes::answer(picker, method, request.uri()))
            }
            _ => whole(self.aside(request).await),
        }
    }

    /// Answers on a thread that serves no request.
    async fn aside(&self, request: Request<Incoming>) -> Answer {
        let stopping = || routes::error(StatusCode::SERVICE_UNAVAILABLE, "the picker is stopping");
        let Ok(turn) = Arc::clone(&self.working).acquire_owned().await else {
            return stopping();
        };
        let picker = Arc::clone(&self.admin.picker);
        let (head, _) = request.into_parts();
        let answer = move || {
            // Until the work is done, not only until the client leaves.
            let _turn = turn;
            routes::answer(&picker, &head.method, &head.uri)
        };
        match tokio::task::spawn_blocking(answer).await {
            Ok(answer) => answer,
            Err(_) => stopping(),
        }
    }

    /// What the page needs to know once: links, and what the words mean.
    fn settings(&self) -> serde_json::Value {
        let reasons = Because::ALL
            .iter()
            .map(|word| (word.as_str(), word.meaning()));
        let ineligible = Ineligible::ALL
            .iter()
            .map(|word| (word.as_str(), word.meaning()));
        serde_json::json!({
            "trace_link": self.admin.trace_link,
            "version": env!("CARGO_PKG_VERSION"),
            "reasons": reasons.collect::<BTreeMap<_, _>>(),
            "ineligible": ineligible.collect::<BTreeMap<_, _>>(),
        })
    }
}

fn whole(response: Response<Full<Bytes>>) -> Response<Body> {
    response.map(Either::Left)
}

fn refused(denied: Denied) -> Response<Body> {
    let status = match denied {
        Denied::WrongToken => StatusCode::UNAUTHORIZED,
        Denied::NotFromHere | Denied::OtherHost | Denied::OtherPage => StatusCode::FORBIDDEN,
    };
    let mut response = routes::error(status, denied.message());
    if denied == Denied::WrongToken {
        let bearer = header::HeaderValue::from_static("Bearer");
        response
            .headers_mut()
            .insert(header::WWW_AUTHENTICATE, bearer);
    }
    whole(response)
}

//! The HTTP side: connections, paths, heads.
//!
//! Lives here: [`serve`] (the accept loop) and the table of paths.
//! Never here: generation (`generate`), the text of metrics (`metrics`).
//! Invariant: every request gets an answer or its connection ends; a body beyond the limit is not
//! read to its end.

use super::app::App;
use super::generate::{self, Answered};
use super::handoff::{KV_DONE, KV_OPEN};
use super::metrics;
use super::refusal::Refusal;
use super::request;
use super::stream::{Payload, Sse};
use crate::prompt::Api;
use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use http::request::Parts;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use serde_json::{Value, json};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

/// How long a connection may take to send the head of its next request. Idle time counts, so it is
/// long: a proxy that reuses a connection just as it is closed would see a failure.
const HEAD_TIMEOUT: Duration = Duration::from_secs(600);
/// Pause after a failed accept, which is usually a lack of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Accepts connections for ever; dropped, it ends them all.
pub(super) async fn serve(app: Arc<App>, listener: TcpListener) {
    let mut connections = JoinSet::new();
    loop {
        let stream = tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::warn!(%error, "http: a connection could not be accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            },
            Some(_) = connections.join_next() => continue,
        };
        // Tokens are small; waiting to fill a packet would distort every latency.
        let _ = stream.set_nodelay(true);
        let app = app.clone();
        connections.spawn(async move {
            let service = service_fn(|request| answer(app.clone(), request));
            let connection = hyper::server::conn::http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEAD_TIMEOUT)
                .serve_connection(TokioIo::new(stream), service);
            if let Err(error) = connection.await {
                tracing::debug!(%error, "http: a connection ended early");
            }
        });
    }
}

async fn answer(
    app: Arc<App>,
    request: Request<Incoming>,
) -> Result<Response<Payload>, Infallible> {
    let (head, body) = request.into_parts();
    let response = match body_of(&app, body).await {
        Ok(body) => route(&app, &head, body).await,
        Err(refusal) => Err(refusal),
    };
    Ok(response.unwrap_or_else(|refusal| whole(refusal.status, JSON, refusal.body())))
}

async fn body_of(app: &App, body: Incoming) -> Result<Bytes, Refusal> {
    let most = app.config.max_body_bytes;
    match Limited::new(body, most).collect().await {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(Refusal::with(
            StatusCode::PAYLOAD_TOO_LARGE,
            format!("request body: expected at most {most} bytes, found more"),
        )),
        Err(_) => Err(Refusal::bad_request(
            "request body: expected all of it, found a broken connection",
        )),
    }
}

const JSON: HeaderValue = HeaderValue::from_static("application/json");
const EVENTS: HeaderValue = HeaderValue::from_static("text/event-stream; charset=utf-8");
const METRICS: HeaderValue = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");

async fn route(app: &Arc<App>, head: &Parts, body: Bytes) -> Result<Response<Payload>, Refusal> {
    match (&head.method, head.uri.path()) {
        (&Method::POST, path @ ("/v1/chat/completions" | "/v1/completions")) => {
            let api = match path {
                "/v1/completions" => Api::Completions,
                _ => Api::ChatCompletions,
            };
            app.recorder.add(head, &body);
            let answered = generate::generate(app, api, head, body).await?;
            Ok(respond(answered))
        }
        (&Method::POST, "/tokenize") => tokenize(app, &body).map(json_of),
        (&Method::POST, "/reset_prefix_cache") => {
            if !app.handle.reset() {
                tracing::warn!("reset: expected no block in use, found some; nothing was dropped");
            }
            Ok(whole(StatusCode::OK, JSON, Vec::new()))
        }
        (&Method::POST, KV_OPEN) => kept(app, &body, Claim::Open).map(json_of),
        (&Method::POST, KV_DONE) => kept(app, &body, Claim::Done).map(json_of),
        (&Method::GET | &Method::HEAD, path) => look(app, path),
        _ => Err(not_found()),
    }
}

fn look(app: &App, path: &str) -> Result<Response<Payload>, Refusal> {
    match path {
        "/health" | "/ping" => Ok(whole(StatusCode::OK, JSON, Vec::new())),
        "/version" => Ok(json_of(json!({"version": env!("CARGO_PKG_VERSION")}))),
        "/v1/models" => Ok(json_of(models(app))),
        "/metrics" => {
            let (load, totals) = app.handle.look();
            let page = metrics::render(&app.config, load, totals);
            Ok(whole(StatusCode::OK, METRICS, page.into_bytes()))
        }
        "/sim/requests" => match app.recorder.all() {
            Some(records) => Ok(json_of(json!({"requests": records}))),
            None => Err(not_found()),
        },
        _ => Err(not_found()),
    }
}

fn not_found() -> Refusal {
    Refusal::with(
        StatusCode::NOT_FOUND,
        "path: expected a known one, found another".into(),
    )
}

fn models(app: &App) -> Value {
    let base = app.config.model.as_str();
    let resolved = app.config.encoder.profiles().resolve(&app.config.model);
    let adapters = resolved.iter().flat_map(|model| model.profile.adapters());
    let card = |id: &str, parent: Option<&str>| {
        json!({
            "id": id,
            "object": "model",
            "created": 0,
            "owned_by": "sidestep",
            "root": id,
            "parent": parent,
            "max_model_len": app.config.max_model_len,
        })
    };
    let mut cards = vec![card(base, None)];
    cards.extend(adapters.map(|adapter| card(adapter.as_str(), Some(base))));
    json!({"object": "list", "data": cards})
}

/// vLLM's `/tokenize`: `{model, prompt}` or `{model, messages}`.
fn tokenize(app: &App, body: &[u8]) -> Result<Value, Refusal> {
    let tokens = request::tokenize(body, &app.config)?;
    Ok(json!({
        "count": tokens.len(),
        "max_model_len": app.config.max_model_len,
        "tokens": tokens,
        "token_strs": null,
    }))
}

/// What a decode engine wants of blocks kept for it.
#[derive(Clone, Copy)]
enum Claim {
    /// To know that they are there.
    Open,
    /// To give them back.
    Done,
}

fn kept(app: &App, body: &[u8], claim: Claim) -> Result<Value, Refusal> {
    let body: Value = serde_json::from_slice(body)
        .map_err(|_| Refusal::bad_request("request body: expected JSON, found something else"))?;
    let text = |name: &str| body.get(name).and_then(Value::as_str).unwrap_or_default();
    let sequence =
        generate::sequence_of(text("request_id")).filter(|_| text("engine_id") == app.engine_id);
    let there = sequence.is_some_and(|sequence| match claim {
        Claim::Open => app.handle.keeps(sequence),
        Claim::Done => app.handle.release(sequence),
    });
    match there {
        true => Ok(json!({})),
        false => Err(Refusal::with(
            StatusCode::NOT_FOUND,
            "request_id: expected blocks kept for it, found none".into(),
        )),
    }
}

fn respond(answered: Answered) -> Response<Payload> {
    match answered {
        Answered::Whole(value) => json_of(value),
        Answered::Verbatim(status, body) => response(status, JSON, Payload::Whole(Some(body))),
        Answered::Stream(speech, usage) => {
            let stream = Payload::Stream(Box::new(Sse::new(*speech, usage)));
            let mut response = response(StatusCode::OK, EVENTS, stream);
            let headers = response.headers_mut();
            headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
            response
        }
        Answered::Relay(relayed) => {
            let kind = relayed.headers().get(CONTENT_TYPE).cloned();
            let (head, body) = relayed.into_parts();
            response(head.status, kind.unwrap_or(JSON), Payload::Relay(body))
        }
    }
}

fn json_of(value: Value) -> Response<Payload> {
    whole(StatusCode::OK, JSON, value.to_string().into_bytes())
}

fn whole(status: StatusCode, kind: HeaderValue, body: Vec<u8>) -> Response<Payload> {
    let body = (!body.is_empty()).then(|| Bytes::from(body));
    response(status, kind, Payload::Whole(body))
}

fn response(status: StatusCode, kind: HeaderValue, body: Payload) -> Response<Payload> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, kind);
    response
}

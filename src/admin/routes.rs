//! What the admin port answers.
//!
//! Lives here: one function from method and URI to a response.
//! Never here: sockets, waiting. Some answers take milliseconds, so `admin` asks for them on threads
//! that serve no request.
//! Invariant: unknown paths and methods get a JSON error that says what exists.

use crate::pick::Picker;
use crate::pick::seen::PODS_SHOWN;
use crate::telemetry::record::Record;
use bytes::Bytes;
use http_body_util::Full;
use hyper::{Method, Response, StatusCode, Uri, header};
use serde::Serialize;

/// Most records one answer holds.
const MOST_RECORDS: usize = 1000;

/// What exists, for the answer to an unknown path.
const PATHS: &str = "/, /metrics, /healthz, /readyz, /v1/pods, /v1/policy, /v1/settings, /v1/decisions?after=N&limit=N, /v1/decisions/stream, /v1/decisions/ID, /v1/decisions/ID/candidates?most=N, /v1/explain/ID, POST /v1/decisions/hold?instead=N, POST /v1/explain, POST /v1/what-if";

/// What the admin port answers.
pub(super) type Answer = Response<Full<Bytes>>;

/// Whether the answer is so quick that nothing is gained by making it elsewhere; probes must not wait
/// behind anything.
pub(super) fn quick(path: &str) -> bool {
    matches!(path, "/healthz" | "/readyz")
}

/// Answers one request.
pub(super) fn answer(picker: &Picker, method: &Method, uri: &Uri) -> Answer {
    if (method, uri.path()) == (&Method::POST, "/v1/decisions/hold") {
        return hold(picker, uri);
    }
    if method != Method::GET && method != Method::HEAD {
        return error(StatusCode::METHOD_NOT_ALLOWED, "expected GET");
    }
    match uri.path() {
        "/metrics" => text(
            StatusCode::OK,
            "application/openmetrics-text; version=1.0.0; charset=utf-8",
            picker.metrics().encode(),
        ),
        "/healthz" => text(StatusCode::OK, "text/plain", "ok\n".into()),
        "/readyz" if picker.ready() => text(StatusCode::OK, "text/plain", "ready\n".into()),
        "/readyz" => text(
            StatusCode::SERVICE_UNAVAILABLE,
            "text/plain",
            format!("not ready: {}\n", picker.hindrance()),
        ),
        "/v1/pods" => json(&picker.pods()),
        "/v1/policy" => json(&picker.policy_summary()),
        "/v1/decisions" => decisions(picker, uri),
        path => match (
            path.strip_prefix("/v1/decisions/"),
            path.strip_prefix("/v1/explain/"),
        ) {
            (Some(rest), _) if rest.ends_with("/candidates") => {
                candidates(picker, rest.trim_end_matches("/candidates"), uri)
            }
            (Some(id), _) => found(picker, id, json),
            (None, Some(id)) => found(picker, id, |record| json(&record.explanation())),
            (None, None) => error(
                StatusCode::NOT_FOUND,
                &format!("unknown path; there are {PATHS}"),
            ),
        },
    }
}

fn decisions(picker: &Picker, uri: &Uri) -> Answer {
    let (Ok(after), Ok(limit)) = (number(uri, "after"), number(uri, "limit")) else {
        return not_a_number("after, limit");
    };
    let limit = limit.map_or(100, |limit| limit.min(MOST_RECORDS as u64) as usize);
    json(&picker.journal().after(after.unwrap_or(0), limit))
}

fn candidates(picker: &Picker, id: &str, uri: &Uri) -> Answer {
    let Ok(most) = number(uri, "most") else {
        return not_a_number("most");
    };
    let most = most.map_or(PODS_SHOWN, |most| {
        usize::try_from(most).unwrap_or(usize::MAX)
    });
    match picker.candidates(id, most) {
        Some(candidates) => json(&candidates),
        None => error(
            StatusCode::NOT_FOUND,
            "what this decision was made from is no longer remembered",
        ),
    }
}

/// Holds what is remembered, for a reader whose list stands still.
fn hold(picker: &Picker, uri: &Uri) -> Answer {
    let Ok(instead) = number(uri, "instead") else {
        return not_a_number("instead");
    };
    let (hold, decisions) = picker.hold(instead);
    json(&serde_json::json!({ "hold": hold, "decisions": decisions }))
}

/// The number that the query has under `name`, if any.
fn number(uri: &Uri, name: &str) -> Result<Option<u64>, std::num::ParseIntError> {
    query(uri, name).map(str::parse).transpose()
}

fn not_a_number(names: &str) -> Answer {
    let message = format!("{names}: expected a whole number of at least 0");
    error(StatusCode::BAD_REQUEST, &message)
}

fn found(picker: &Picker, id: &str, show: impl FnOnce(&Record) -> Answer) -> Answer {
    match picker.record(id) {
        Some(record) => show(&record),
        None => error(
            StatusCode::NOT_FOUND,
            "no decision with this id among the last ones",
        ),
    }
}

pub(super) fn query<'a>(uri: &'a Uri, name: &str) -> Option<&'a str> {
    uri.query()?.split('&').find_map(|pair| {
        let (key, value) = pair.split_once('=')?;
        (key == name).then_some(value)
    })
}

pub(super) fn json(value: &impl Serialize) -> Answer {
    match serde_json::to_string(value) {
        Ok(body) => text(StatusCode::OK, "application/json", body),
        Err(cause) => error(StatusCode::INTERNAL_SERVER_ERROR, &cause.to_string()),
    }
}

pub(super) fn error(status: StatusCode, message: &str) -> Answer {
    let body = serde_json::json!({ "error": { "message": message } }).to_string();
    text(status, "application/json", body)
}

/// An answer to a request that was understood and cannot be done: every fault with its place.
pub(super) fn unprocessable(faults: &[impl Serialize]) -> Answer {
    let message = "the request has faults";
    let body = serde_json::json!({ "error": { "message": message, "faults": faults } });
    text(
        StatusCode::UNPROCESSABLE_ENTITY,
        "application/json",
        body.to_string(),
    )
}

pub(super) fn text(status: StatusCode, content_type: &'static str, body: String) -> Answer {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        header::HeaderValue::from_static(content_type),
    );
    response
}

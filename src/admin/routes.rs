//! What the admin port answers.
//!
//! Lives here: one function from method and URI to a response.
//! Never here: sockets, waiting.
//! Invariant: unknown paths and methods get a JSON error that says what exists.

use crate::pick::Picker;
use crate::telemetry::record::Record;
use bytes::Bytes;
use http_body_util::Full;
use hyper::{Method, Response, StatusCode, Uri, header};
use serde::Serialize;

/// Most records one answer holds.
const MOST_RECORDS: usize = 1000;

/// What exists, for the answer to an unknown path.
const PATHS: &str = "/, /metrics, /healthz, /readyz, /v1/pods, /v1/policy, /v1/settings, /v1/decisions?after=N&limit=N, /v1/decisions/stream, /v1/decisions/ID, /v1/decisions/ID/candidates, /v1/explain/ID, POST /v1/explain, POST /v1/what-if";

/// What the admin port answers.
pub(super) type Answer = Response<Full<Bytes>>;

/// Answers one request.
pub(super) fn answer(picker: &Picker, method: &Method, uri: &Uri) -> Answer {
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
        "/v1/decisions" => {
            let number = |name| query(uri, name).map_or(Ok(None), |text| text.parse().map(Some));
            match (number("after"), number("limit")) {
                (Ok(after), Ok(limit)) => {
                    let limit = limit.map_or(100, |limit: u64| {
                        usize::try_from(limit).unwrap_or(MOST_RECORDS)
                    });
                    json(
                        &picker
                            .journal()
                            .after(after.unwrap_or(0), limit.min(MOST_RECORDS)),
                    )
                }
                _ => error(
                    StatusCode::BAD_REQUEST,
                    "after, limit: expected a whole number of at least 0",
                ),
            }
        }
        path => match (
            path.strip_prefix("/v1/decisions/"),
            path.strip_prefix("/v1/explain/"),
        ) {
            (Some(rest), _) if rest.ends_with("/candidates") => {
                match picker.candidates(rest.trim_end_matches("/candidates")) {
                    Some(candidates) => json(&candidates),
                    None => error(
                        StatusCode::NOT_FOUND,
                        "what this decision was made from is no longer remembered",
                    ),
                }
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

fn found(picker: &Picker, id: &str, show: impl FnOnce(&Record) -> Answer) -> Answer {
    match picker.journal().find(id) {
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

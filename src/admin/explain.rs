//! `POST /v1/explain`: a request as a client would send it, explained and not sent.
//!
//! Lives here: how an HTTP request becomes what the picker is asked.
//! Never here: what is explained (see `pick`), prompt text in any answer.
//! Invariant: a turn is had before the first byte of a body is read, and a body is bounded in length
//! and time.

use crate::admin::routes::{self, Answer};
use crate::pick::{Explainer, Head, Refusal};
use bytes::Bytes;
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper::{Method, Request, StatusCode};
use std::time::Duration;

/// The path a body is read for, unless `?path=` names another.
pub(super) const DEFAULT_PATH: &str = "/v1/chat/completions";
/// Longest time a body may take to arrive.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);

/// Answers `/v1/explain`.
pub(super) async fn answer(explainer: Option<&Explainer>, request: Request<Incoming>) -> Answer {
    let Some(explainer) = explainer else {
        let message = "explaining is off; set admin: {explain: Enabled} in the process config";
        return routes::error(StatusCode::FORBIDDEN, message);
    };
    if request.method() != Method::POST {
        return routes::error(StatusCode::METHOD_NOT_ALLOWED, "expected POST");
    }
    match explain(explainer, request).await {
        // A thousand pods are half a megabyte: written out where it holds up no request.
        Ok(explanation) => tokio::task::spawn_blocking(move || routes::json(&explanation))
            .await
            .unwrap_or_else(|_| {
                routes::error(StatusCode::SERVICE_UNAVAILABLE, "the picker is stopping")
            }),
        Err(refusal) => refused(&refusal),
    }
}

async fn explain(
    explainer: &Explainer,
    request: Request<Incoming>,
) -> Result<crate::telemetry::explanation::Explanation, Refusal> {
    let turn = explainer.turn()?;
    let path = routes::query(request.uri(), "path").map_or(DEFAULT_PATH.to_owned(), decoded);
    let mut head = Head {
        method: Method::POST.to_string(),
        path,
        ..Head::default()
    };
    for (name, value) in request.headers() {
        let value = Bytes::copy_from_slice(value.as_bytes());
        head.headers.push(name.as_str(), value);
    }
    let limit = explainer.limits().body;
    let body = Limited::new(request.into_body(), limit).collect();
    let body = match tokio::time::timeout(BODY_TIMEOUT, body).await {
        Ok(Ok(body)) => body.to_bytes(),
        Ok(Err(cause)) if cause.is::<LengthLimitError>() => {
            let message = format!("expected a body of at most {limit} bytes, found more");
            return Err(Refusal::new(413, "body_too_long", message));
        }
        Ok(Err(_)) => return Err(Refusal::new(400, "body_broken", "the body broke off")),
        Err(_) => return Err(Refusal::new(408, "body_timeout", "the body took too long")),
    };
    explainer.explain(turn, head, Some(body)).await
}

/// `%2F` and the like undone; what is not an escape stays.
fn decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let escape = after
            .get(..2)
            .filter(|_| *first == b'%')
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 16).ok());
        match escape {
            Some(byte) => {
                bytes.push(byte);
                rest = &after[2..];
            }
            None => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn refused(refusal: &Refusal) -> Answer {
    let status = StatusCode::from_u16(refusal.status).unwrap_or(StatusCode::BAD_REQUEST);
    let mut answer = routes::text(status, "application/json", refusal.to_json());
    if let Some(after) = refusal.retry_after {
        answer
            .headers_mut()
            .insert(hyper::header::RETRY_AFTER, after.as_secs().max(1).into());
    }
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_are_undone_and_the_rest_stays() {
        assert_eq!(decoded("%2Fv1%2fcompletions"), "/v1/completions");
        assert_eq!(decoded("/v1/models%"), "/v1/models%");
        assert_eq!(decoded("%zz%2"), "%zz%2");
        assert_eq!(decoded(""), "");
    }
}

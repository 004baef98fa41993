//! `POST /v1/what-if`: edited thresholds in, the last decisions decided again out.
//!
//! Lives here: reading the request, with the rules and messages of a policy file.
//! Never here: decisions.
//! Invariant: a body of at most [`MOST_BYTES`]; one computation at a time; nothing in the request can
//! name a file.

use crate::admin::routes::{error, json, unprocessable};
use crate::config;
use crate::pick::Picker;
use crate::pick::whatif::{Edit, MOST_DECISIONS, Rules};
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::{Request, Response, StatusCode, header};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;

/// Longest request body.
pub(super) const MOST_BYTES: usize = 16 << 10;
/// Longest time to send it.
const BODY_TIMEOUT: Duration = Duration::from_secs(5);

/// What is asked. Keys of `bypass` are those of a rule's `bypass` in a policy file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Asked {
    /// When remote prefill is skipped, and the gate.
    bypass: Value,
    /// Index of the rule that gets it; absent: every rule.
    rule: Option<usize>,
    /// How many of the last decisions.
    last: Option<usize>,
}

/// One fault of the request.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct Fault {
    /// Where, such as `bypass.effectiveIslThreshold`.
    path: String,
    /// What was expected and what was found.
    message: String,
}

/// Answers one request.
pub(super) async fn answer(
    picker: &Arc<Picker>,
    one_at_a_time: &Arc<Semaphore>,
    request: Request<Incoming>,
) -> Response<Full<Bytes>> {
    // A page of another site can send other types without asking first.
    let is_json = request
        .headers()
        .get(header::CONTENT_TYPE)
        .is_some_and(|value| value.as_bytes().starts_with(b"application/json"));
    if !is_json {
        let message = "content-type: expected application/json, found another or none";
        return error(StatusCode::UNSUPPORTED_MEDIA_TYPE, message);
    }
    let body = Limited::new(request.into_body(), MOST_BYTES).collect();
    let body = match tokio::time::timeout(BODY_TIMEOUT, body).await {
        Ok(Ok(body)) => body.to_bytes(),
        Ok(Err(_)) => {
            let message =
                format!("body: expected at most {MOST_BYTES} bytes, found more or a broken one");
            return error(StatusCode::PAYLOAD_TOO_LARGE, &message);
        }
        Err(_) => {
            return error(
                StatusCode::REQUEST_TIMEOUT,
                "body: expected within 5 s, found none",
            );
        }
    };
    let (edit, last) = match read(&body) {
        Ok(asked) => asked,
        Err(faults) => return unprocessable(&faults),
    };
    let Ok(turn) = Arc::clone(one_at_a_time).acquire_owned().await else {
        return error(StatusCode::SERVICE_UNAVAILABLE, "the picker is stopping");
    };
    let picker = Arc::clone(picker);
    let answer = move || {
        // Until the work is done, not only until the client leaves.
        let _turn = turn;
        match picker.what_if(&edit, last) {
            Some(answer) => json(&answer),
            None => unprocessable(&[Fault {
                path: "rule".to_owned(),
                message: "expected the index of a rule, found none such".to_owned(),
            }]),
        }
    };
    match tokio::task::spawn_blocking(answer).await {
        Ok(answer) => answer,
        Err(_) => error(StatusCode::SERVICE_UNAVAILABLE, "the picker is stopping"),
    }
}

fn read(body: &[u8]) -> Result<(Edit, usize), Vec<Fault>> {
    let asked: Asked = serde_json::from_slice(body).map_err(|error| {
        vec![Fault {
            path: "body".to_owned(),
            message: format!("expected an object with a bypass, found an error: {error}"),
        }]
    })?;
    // JSON is YAML: a policy of one rule goes through the very code that reads policy files.
    let document = serde_json::json!({
        "apiVersion": "sidestep.dev/v1alpha1",
        "kind": "DisaggregationPolicy",
        "metadata": {"name": "what-if"},
        "spec": {"rules": [{"bypass": asked.bypass}]},
    });
    let loaded =
        config::parse_policy(&document.to_string(), Path::new("what-if")).map_err(|found| {
            let faults = found.faults.into_iter();
            faults
                .map(|finding| Fault {
                    path: finding.path.replacen("spec.rules[0].", "", 1),
                    message: match &*finding.hint {
                        "" => finding.message,
                        hint => format!("{}; {hint}", finding.message),
                    },
                })
                .collect::<Vec<_>>()
        })?;
    let rule = loaded
        .policy
        .rules
        .into_iter()
        .next()
        .ok_or_else(Vec::new)?;
    let edit = Edit {
        rules: asked.rule.map_or(Rules::All, Rules::At),
        bypass: rule.bypass,
        gate: rule.gate,
    };
    Ok((edit, asked.last.unwrap_or(MOST_DECISIONS)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::policy::{Bypass, DecodeGate};
    use crate::units::Tokens;

    fn faults(body: &str) -> Vec<(String, String)> {
        let faults = read(body.as_bytes()).unwrap_err();
        faults
            .into_iter()
            .map(|fault| (fault.path, fault.message))
            .collect()
    }

    #[test]
    fn a_bypass_is_read_as_a_policy_file_would_be() {
        let body = r#"{"bypass":{"type":"IslOrLoad","effectiveIslThreshold":512,
            "prefillBusyThreshold":0.5,"decodeBusyThreshold":0.9},"rule":1,"last":9}"#;
        let (edit, last) = read(body.as_bytes()).unwrap();
        assert_eq!((edit.rules, last), (Rules::At(1), 9));
        let Bypass::IslOrLoad(bound, busy) = edit.bypass else {
            panic!("{:?}", edit.bypass);
        };
        assert_eq!(bound.threshold, Tokens(512));
        assert_eq!(busy.threshold.get(), 0.5);
        assert!(matches!(edit.gate, DecodeGate::On { .. }));
        let (edit, last) = read(br#"{"bypass":{"type":"Never"}}"#).unwrap();
        assert_eq!((edit.rules, last), (Rules::All, MOST_DECISIONS));
        assert_eq!((edit.bypass, edit.gate), (Bypass::Never, DecodeGate::Off));
    }

    #[test]
    fn faults_are_those_of_a_policy_file() {
        assert_eq!(
            faults(
                r#"{"bypass":{"type":"IslBounding","effectiveIslRatioThreshold":1.5,"effectiveIslThreshold":-1}}"#
            ),
            [
                (
                    "bypass.effectiveIslRatioThreshold".to_owned(),
                    "expected a number from 0 to 1, found 1.5".to_owned()
                ),
                (
                    "bypass.effectiveIslThreshold".to_owned(),
                    "expected a whole number from 0 to 1000000000, found -1".to_owned()
                ),
            ]
        );
        let misspelt = &faults(r#"{"bypass":{"type":"PrefilLoad"}}"#)[0];
        assert_eq!(misspelt.0, "bypass.type");
        assert!(
            misspelt.1.contains("is PrefillLoad meant?"),
            "{}",
            misspelt.1
        );
    }

    #[test]
    fn nothing_but_a_bypass_can_be_said() {
        for body in [
            "",
            "[]",
            "{}",
            r#"{"bypass":{"type":"Never"},"shadow":{"file":"/etc/passwd"}}"#,
            r#"{"bypass":{"type":"Never"},"rule":-1}"#,
            r#"{"bypass":{"type":"Never"},"last":1e400}"#,
            r#"{"bypass":"Never"}"#,
            r#"{"bypass":{"type":"Never","file":"/etc/passwd"}}"#,
        ] {
            assert!(read(body.as_bytes()).is_err(), "{body}");
        }
        let deep = format!(r#"{{"bypass":{}{}}}"#, "[".repeat(4000), "]".repeat(4000));
        assert!(read(deep.as_bytes()).is_err());
    }
}

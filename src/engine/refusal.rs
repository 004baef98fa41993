//! Answers that are not tokens: errors in vLLM's shape.
//!
//! Lives here: [`Refusal`] and the errors an engine gives.
//! Never here: text of the request; a message names fields and sizes only.
//! Invariant: `{"error": {"message", "type", "param", "code"}}`, with `code` the HTTP status.

use http::StatusCode;
use serde_json::json;

/// An error answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) status: StatusCode,
    pub(super) message: String,
    pub(super) param: Option<&'static str>,
}

impl Refusal {
    /// 400.
    pub(super) fn bad_request(message: impl Into<String>) -> Refusal {
        Refusal {
            status: StatusCode::BAD_REQUEST,
            message: message.into(),
            param: None,
        }
    }

    /// 400 for one field.
    pub(super) fn bad_field(param: &'static str, message: impl Into<String>) -> Refusal {
        Refusal {
            param: Some(param),
            ..Refusal::bad_request(message)
        }
    }

    /// 404 for a model that is not served here.
    pub(super) fn unknown_model() -> Refusal {
        Refusal {
            status: StatusCode::NOT_FOUND,
            message: "model: expected a model served here, found another".into(),
            param: Some("model"),
        }
    }

    /// 500: what vLLM answers when the KV of a request cannot be loaded
    /// (`kv_load_failure_policy: fail`). `why` goes to the log of the engine only.
    pub(super) fn kv_load_failed(why: &str) -> Refusal {
        tracing::warn!(why, "kv transfer: the prompt could not be fetched");
        Refusal::with(
            StatusCode::INTERNAL_SERVER_ERROR,
            "Internal server error".into(),
        )
    }

    /// Any other status.
    pub(super) fn with(status: StatusCode, message: String) -> Refusal {
        Refusal {
            status,
            message,
            param: None,
        }
    }

    /// The body.
    pub(super) fn body(&self) -> Vec<u8> {
        let kind = match self.status {
            StatusCode::BAD_REQUEST => "BadRequestError",
            StatusCode::NOT_FOUND => "NotFoundError",
            StatusCode::INTERNAL_SERVER_ERROR => "InternalServerError",
            StatusCode::SERVICE_UNAVAILABLE => "ServiceUnavailableError",
            _ => "Error",
        };
        let error = json!({"error": {
            "message": self.message,
            "type": kind,
            "param": self.param,
            "code": self.status.as_u16(),
        }});
        error.to_string().into_bytes()
    }
}

impl From<super::fields::Wrong> for Refusal {
    fn from(wrong: super::fields::Wrong) -> Refusal {
        Refusal::bad_field(wrong.field, wrong.to_string())
    }
}

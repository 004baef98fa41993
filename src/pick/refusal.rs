//! An answer given instead of a pod.
//!
//! Lives here: [`Refusal`] and its OpenAI-style JSON.
//! Never here: prompt text; a refusal says what was expected and what to do, never what the client wrote.
//! Invariant: the body is valid JSON of the shape `{"error":{"message","type","param","code"}}`.

use std::borrow::Cow;
use std::time::Duration;

/// An answer given instead of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// HTTP status.
    pub status: u16,
    /// Machine-readable cause, also the response-code detail in the gateway's access log.
    pub code: &'static str,
    /// One sentence for the client.
    pub message: Cow<'static, str>,
    /// The request field at fault, if it is one.
    pub param: Option<&'static str>,
    /// When to try again.
    pub retry_after: Option<Duration>,
}

impl Refusal {
    /// A refusal with `status`, `code` and `message`.
    pub fn new(status: u16, code: &'static str, message: impl Into<Cow<'static, str>>) -> Refusal {
        Refusal {
            status,
            code,
            message: message.into(),
            param: None,
            retry_after: None,
        }
    }

    /// Names the request field at fault.
    #[must_use]
    pub fn with_param(mut self, param: Option<&'static str>) -> Refusal {
        self.param = param;
        self
    }

    /// Says when to try again.
    #[must_use]
    pub fn retry_after(mut self, after: Duration) -> Refusal {
        self.retry_after = Some(after);
        self
    }

    /// The body, in the shape of OpenAI's errors.
    #[must_use]
    pub fn to_json(&self) -> String {
        let kind = match self.status {
            400..=499 if self.status != 429 => "invalid_request_error",
            429 => "rate_limit_error",
            _ => "server_error",
        };
        serde_json::json!({"error": {
            "message": self.message,
            "type": kind,
            "param": self.param,
            "code": self.code,
        }})
        .to_string()
    }
}

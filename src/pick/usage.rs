//! Reading `usage` from the end of an answer without holding the answer.
//!
//! Lives here: [`Tail`], a bounded window over the last response bytes, and the reading of it.
//! Never here: changes to the bytes; they pass through untouched.
//! Invariant: at most `WINDOW` bytes are held per stream; odd values are "not said", never a panic.

use crate::telemetry::record::Usage;
use serde_json::Value;

/// Bytes kept from the end of an answer. Engines write `usage` last, in well under this.
const WINDOW: usize = 2048;

/// The end of an answer.
#[derive(Debug, Default)]
pub struct Tail(Vec<u8>);

/// What the end of an answer says about usage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Said {
    /// There is no `usage`.
    Nothing,
    /// There is one, but not as an object of numbers.
    Unreadable,
    /// There is one.
    Usage(Usage),
}

impl Tail {
    /// Adds bytes, dropping the oldest beyond the window.
    pub fn push(&mut self, chunk: &[u8]) {
        if WINDOW <= chunk.len() {
            self.0.clear();
            self.0.extend_from_slice(&chunk[chunk.len() - WINDOW..]);
            return;
        }
        let excess = (self.0.len() + chunk.len()).saturating_sub(WINDOW);
        self.0.drain(..excess);
        self.0.extend_from_slice(chunk);
    }

    /// Reads the last `usage` in the window.
    #[must_use]
    pub fn read(&self) -> Said {
        const KEY: &[u8] = b"\"usage\"";
        let Some(at) = self.0.windows(KEY.len()).rposition(|window| window == KEY) else {
            return Said::Nothing;
        };
        let rest = &self.0[at + KEY.len()..];
        let Some(colon) = rest.iter().position(|byte| !byte.is_ascii_whitespace()) else {
            return Said::Nothing;
        };
        if rest[colon] != b':' {
            return Said::Nothing;
        }
        let mut values =
            serde_json::Deserializer::from_slice(&rest[colon + 1..]).into_iter::<Value>();
        match values.next() {
            Some(Ok(Value::Object(usage))) => read_object(&usage),
            _ => Said::Unreadable,
        }
    }
}

/// Reads the fields of OpenAI's `usage`: `prompt_tokens`, `completion_tokens` and
/// `prompt_tokens_details.cached_tokens`. A field of another type makes the whole unreadable.
fn read_object(usage: &serde_json::Map<String, Value>) -> Said {
    let number = |value: Option<&Value>| match value {
        None | Some(Value::Null) => Ok(None),
        Some(value) => value.as_u64().map(Some).ok_or(()),
    };
    let details = match usage.get("prompt_tokens_details") {
        None | Some(Value::Null) => None,
        Some(Value::Object(details)) => Some(details),
        Some(_) => return Said::Unreadable,
    };
    let fields = (
        number(usage.get("prompt_tokens")),
        number(usage.get("completion_tokens")),
        number(details.and_then(|details| details.get("cached_tokens"))),
    );
    match fields {
        (Ok(None), Ok(None), Ok(None)) => Said::Unreadable,
        (Ok(prompt_tokens), Ok(completion_tokens), Ok(cached_tokens)) => Said::Usage(Usage {
            prompt_tokens,
            completion_tokens,
            cached_tokens,
        }),
        _ => Said::Unreadable,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(text: &str) -> Said {
        let mut tail = Tail::default();
        for chunk in text.as_bytes().chunks(7) {
            tail.push(chunk);
        }
        tail.read()
    }

    #[test]
    fn usage_is_read_from_a_json_answer_and_from_the_last_event_of_a_stream() {
        let json = r#"{"id":"x","choices":[],"usage":{"prompt_tokens":12,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":8}}}"#;
        let stream = format!("data: {{\"usage\":null}}\n\ndata: {json}\n\ndata: [DONE]\n\n");
        let expected = Said::Usage(Usage {
            prompt_tokens: Some(12),
            completion_tokens: Some(3),
            cached_tokens: Some(8),
        });
        assert_eq!(said(json), expected);
        assert_eq!(said(&stream), expected);
        assert_eq!(said(&format!("{}{json}", "x".repeat(10_000))), expected);
    }

    #[test]
    fn odd_usage_is_unreadable_and_absent_usage_is_nothing() {
        for odd in [
            r#"{"usage":"oops"}"#,
            r#"{"usage":{"prompt_tokens":"1024"}}"#,
            r#"{"usage":{"prompt_token_details":0}}"#,
            r#"{"usage":null}"#,
            r#"{"usage":{"completion_tokens":-1}}"#,
            r#"{"usage":{"completion_tokens":1e300}}"#,
            r#"{"usage":{"prompt_tokens_details":7}}"#,
            r#"{"usage":{"prompt_tokens":1"#,
        ] {
            assert_eq!(said(odd), Said::Unreadable, "{odd}");
        }
        for none in ["", "{}", r#"{"usage"}"#, r#""usage""#, "plain text"] {
            assert_eq!(said(none), Said::Nothing, "{none}");
        }
    }
}

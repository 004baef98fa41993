//! What a client is told about a body that cannot be routed.
//!
//! Lives here: [`BodyError`].
//! Never here: any byte of the body. An error names the field, the JSON type and the place.
//! Invariant: `Display` and `Debug` are built from constants and numbers only.

use std::fmt;

/// The type of a JSON value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JsonType {
    /// `null`
    Null,
    /// `true` or `false`
    Bool,
    /// A number.
    Number,
    /// A string.
    String,
    /// A list.
    Array,
    /// An object.
    Object,
}

impl fmt::Display for JsonType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            JsonType::Null => "null",
            JsonType::Bool => "a boolean",
            JsonType::Number => "a number",
            JsonType::String => "a string",
            JsonType::Array => "a list",
            JsonType::Object => "an object",
        })
    }
}

/// Why a body cannot be routed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BodyError {
    /// The bytes are not JSON.
    #[error(
        "request body: expected JSON, found {fault} at byte {offset} (line {line}, column {column})"
    )]
    Syntax {
        /// The reader's words for the fault: one of a fixed list.
        fault: &'static str,
        /// Bytes before the fault.
        offset: usize,
        /// Line of the fault, from 1.
        line: usize,
        /// Column of the fault in bytes, from 1; 0 when the fault is the end of the line before.
        column: usize,
    },
    /// The body is JSON, but not an object.
    #[error("request body: expected an object, found {found}")]
    NotAnObject {
        /// What the body is.
        found: JsonType,
    },
    /// A field without which no engine can serve the request.
    #[error("{param}: expected {expected}, found nothing")]
    Missing {
        /// The field.
        param: &'static str,
        /// What it should hold.
        expected: &'static str,
    },
    /// A field of the wrong shape.
    #[error("{param}: expected {expected}, found {found} at byte {offset}")]
    Wrong {
        /// The field.
        param: &'static str,
        /// What it should hold.
        expected: &'static str,
        /// The type of the offending value, which may be inside the field's list.
        found: JsonType,
        /// Bytes of the body before the field's value.
        offset: usize,
    },
}

impl BodyError {
    /// The field at fault, for the `param` of an OpenAI error.
    #[must_use]
    pub fn param(&self) -> Option<&'static str> {
        match self {
            BodyError::Syntax { .. } | BodyError::NotAnObject { .. } => None,
            BodyError::Missing { param, .. } | BodyError::Wrong { param, .. } => Some(param),
        }
    }

    /// The error for what `serde_json` says about `body`.
    pub(super) fn syntax(body: &[u8], error: &serde_json::Error) -> BodyError {
        let line_start = match error.line() {
            0 | 1 => 0,
            line => newline_end(body, line - 1),
        };
        BodyError::Syntax {
            fault: fault(error),
            offset: body.len().min(line_start + error.column()),
            line: error.line(),
            column: error.column(),
        }
    }
}

/// The byte after the `count`-th newline.
fn newline_end(body: &[u8], count: usize) -> usize {
    let mut newlines = body.iter().enumerate().filter(|(_, byte)| **byte == b'\n');
    newlines.nth(count - 1).map_or(0, |(at, _)| at + 1)
}

/// The reader's message as a constant, so that a message with body text in it cannot get through.
fn fault(error: &serde_json::Error) -> &'static str {
    const KNOWN: [&str; 14] = [
        "expected `:`",
        "expected `,` or `]`",
        "expected `,` or `}`",
        "expected ident",
        "expected value",
        "invalid escape",
        "invalid number",
        "number out of range",
        "invalid unicode code point",
        "control character (\\u0000-\\u001F) found while parsing a string",
        "key must be a string",
        "trailing comma",
        "trailing characters",
        "recursion limit exceeded",
    ];
    if error.is_eof() {
        return "the end of the body";
    }
    let message = error.to_string();
    let known = KNOWN.iter().find(|known| message.starts_with(**known));
    known.copied().unwrap_or("a syntax error")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prompt::{Api, parse};

    fn syntax(body: &str) -> (&'static str, usize, usize, usize) {
        match parse(Api::Completions, body.as_bytes()) {
            Err(BodyError::Syntax {
                fault,
                offset,
                line,
                column,
            }) => (fault, offset, line, column),
            other => panic!("expected a syntax error, found {other:?}"),
        }
    }

    #[test]
    fn a_syntax_error_names_its_place() {
        assert_eq!(syntax(r#"{"model": }"#), ("expected value", 11, 1, 11));
        assert_eq!(
            syntax("{\"model\":\n \"m\",\n  }"),
            ("trailing comma", 19, 3, 3)
        );
        let (fault, offset, ..) = syntax(r#"{"model":"m""#);
        assert_eq!((fault, offset), ("the end of the body", 12));
    }
}

//! Single values: from what a key holds to a type that cannot hold anything wrong.
//!
//! Lives here: one function per kind of value.
//! Never here: keys, sections, where a value stood.
//! Invariant: pure; every bound is inclusive and named in the message.

use crate::config::diagnostic::Wrong;
use crate::config::node::{number, quoted};
use crate::config::shape::{Size, nearest};
use crate::names::Endpoint;
use crate::units::Ratio;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// The longest duration: far from where adding it to a clock could overflow.
const LONGEST: Duration = Duration::from_secs(30 * 24 * 3600);

/// The longest name.
const LONGEST_NAME: usize = 253;

/// The largest factor or weight: far from where sums of products lose their meaning.
pub(crate) const LARGEST_FACTOR: f64 = 1e6;

/// A number from 0 to `most`.
pub(crate) fn ratio(value: f64, most: f64) -> Result<Ratio, Wrong> {
    Ratio::new(value)
        .filter(|ratio| ratio.get() <= most)
        .ok_or_else(|| Wrong::new(format!("a number from 0 to {most}"), number(value)))
}

/// A whole number from `least` to `most`.
pub(crate) fn whole<T: TryFrom<i128>>(value: i128, least: i128, most: i128) -> Result<T, Wrong> {
    Some(value)
        .filter(|value| least <= *value && *value <= most)
        .and_then(|value| T::try_from(value).ok())
        .ok_or_else(|| {
            Wrong::new(
                format!("a whole number from {least} to {most}"),
                value.to_string(),
            )
        })
}

/// The meaning of one of `words`.
pub(crate) fn word<T: Clone>(text: &str, words: &[(&str, T)]) -> Result<T, Wrong> {
    if let Some((_, meaning)) = words.iter().find(|(word, _)| *word == text) {
        return Ok(meaning.clone());
    }
    let known: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
    let mut expected = match known.as_slice() {
        [only] => (*only).to_owned(),
        [most @ .., last] => format!("{} or {last}", most.join(", ")),
        [] => String::new(),
    };
    if let Some(near) = nearest(text, &known) {
        expected.push_str(&format!(" (is {near} meant?)"));
    }
    Err(Wrong::new(expected, format!("the text {}", quoted(text))))
}

/// Exactly `expected`.
pub(crate) fn exactly(text: &str, expected: &str) -> Result<(), Wrong> {
    if text == expected {
        return Ok(());
    }
    Err(Wrong::new(expected, format!("the text {}", quoted(text))))
}

/// A duration such as `500ms`, `30s`, `5m` or `1h30m`: more than 0, at most 720h.
pub(crate) fn duration(text: &str) -> Result<Duration, Wrong> {
    let wrong = || {
        Wrong::new(
            "a duration of at least 1ms and at most 720h, such as 500ms, 30s or 1h30m",
            format!("the text {}", quoted(text)),
        )
    };
    let mut rest = text;
    let mut total = Duration::ZERO;
    while !rest.is_empty() {
        let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let (amount, unit) = rest.split_at(digits);
        let amount: u32 = amount.parse().map_err(|_| wrong())?;
        let (each, unit_length) = if unit.starts_with("ms") {
            (Duration::from_millis(1), 2)
        } else if unit.starts_with('s') {
            (Duration::from_secs(1), 1)
        } else if unit.starts_with('m') {
            (Duration::from_secs(60), 1)
        } else if unit.starts_with('h') {
            (Duration::from_secs(3600), 1)
        } else {
            return Err(wrong());
        };
        total = each
            .checked_mul(amount)
            .and_then(|part| total.checked_add(part))
            .ok_or_else(wrong)?;
        rest = &unit[unit_length..];
    }
    if Duration::ZERO < total && total <= LONGEST {
        Ok(total)
    } else {
        Err(wrong())
    }
}

/// Bytes: a number, or a number with Ki, Mi or Gi (powers of 1024).
pub(crate) fn bytes(size: &Size, least: u64, most: u64) -> Result<u64, Wrong> {
    let wrong = |found: String| {
        Wrong::new(
            format!(
                "a size from {} to {}, in bytes or with Ki, Mi or Gi",
                in_binary(least),
                in_binary(most)
            ),
            found,
        )
    };
    let (bytes, found) = match size {
        Size::Bytes(bytes) => (u64::try_from(*bytes).ok(), bytes.to_string()),
        Size::Text(text) => {
            let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
            let unit: Option<u64> = match &text[digits.len()..] {
                "" => Some(1),
                "Ki" => Some(1 << 10),
                "Mi" => Some(1 << 20),
                "Gi" => Some(1 << 30),
                _ => None,
            };
            let all_digits = digits.bytes().all(|byte| byte.is_ascii_digit());
            let bytes = Some(digits)
                .filter(|_| all_digits)
                .and_then(|digits| digits.parse::<u64>().ok())
                .zip(unit)
                .and_then(|(amount, unit)| amount.checked_mul(unit));
            (bytes, format!("the text {}", quoted(text)))
        }
    };
    bytes
        .filter(|bytes| least <= *bytes && *bytes <= most)
        .ok_or_else(|| wrong(found))
}

fn in_binary(bytes: u64) -> String {
    for (unit, name) in [(1 << 30, "Gi"), (1 << 20, "Mi"), (1 << 10, "Ki")] {
        if unit <= bytes && bytes % unit == 0 {
            return format!("{}{name}", bytes / unit);
        }
    }
    bytes.to_string()
}

/// An address to listen on.
pub(crate) fn listen_address(text: &str) -> Result<SocketAddr, Wrong> {
    text.parse().map_err(|_| {
        Wrong::new(
            "an address such as 0.0.0.0:9002 or [::]:9002",
            format!("the text {}", quoted(text)),
        )
    })
}

/// Where an engine listens: a definite address and port.
pub(crate) fn endpoint(text: &str) -> Result<Endpoint, Wrong> {
    text.parse()
        .ok()
        .filter(|address: &SocketAddr| address.port() != 0 && !address.ip().is_unspecified())
        .map(Endpoint)
        .ok_or_else(|| {
            Wrong::new(
                "a definite address such as 10.0.0.7:8000 or [fd00::7]:8000",
                format!("the text {}", quoted(text)),
            )
        })
}

/// A ZMQ endpoint, `tcp://ip:port` or `ip:port`, in the former form.
pub(crate) fn zmq_endpoint(text: &str) -> Result<String, Wrong> {
    endpoint(text.strip_prefix("tcp://").unwrap_or(text))
        .map(|endpoint| format!("tcp://{endpoint}"))
        .map_err(|_| {
            Wrong::new(
                "an address such as tcp://10.0.0.7:5557",
                format!("the text {}", quoted(text)),
            )
        })
}

/// A name that clients or engines use: printable, not empty, without white space around it.
pub(crate) fn name(text: &str) -> Result<Arc<str>, Wrong> {
    let fits = !text.is_empty()
        && text.len() <= LONGEST_NAME
        && text.trim() == text
        && !text.chars().any(char::is_control);
    if fits {
        return Ok(Arc::from(text));
    }
    Err(Wrong::new(
        format!("a printable name of 1 to {LONGEST_NAME} bytes"),
        format!("the text {}", quoted(text)),
    ))
}

/// The name of a Kubernetes object (RFC 1123 subdomain).
pub(crate) fn object_name(text: &str) -> Result<Arc<str>, Wrong> {
    let label = |part: &str| {
        let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        !part.is_empty()
            && part.bytes().all(inner)
            && !part.starts_with('-')
            && !part.ends_with('-')
    };
    if text.len() <= LONGEST_NAME && text.split('.').all(label) {
        return Ok(Arc::from(text));
    }
    Err(Wrong::new(
        "a name of lower-case letters, digits, - and .",
        format!("the text {}", quoted(text)),
    ))
}

/// A model name, or the start of one followed by `*`.
pub(crate) fn model_pattern(text: &str) -> Result<Arc<str>, Wrong> {
    let start = text.strip_suffix('*').unwrap_or(text);
    if start.contains('*') || (start.is_empty() && start == text) {
        return Err(Wrong::new(
            "a model name, with at most one * and that at its end",
            format!("the text {}", quoted(text)),
        ));
    }
    if start.is_empty() {
        return Ok(Arc::from(text));
    }
    name(text)
}

/// The name of a request header, in lower case.
pub(crate) fn header(text: &str) -> Result<Arc<str>, Wrong> {
    match http::HeaderName::from_bytes(text.as_bytes()) {
        Ok(header) if text.len() <= LONGEST_NAME => Ok(Arc::from(header.as_str())),
        _ => Err(Wrong::new(
            "the name of a request header, such as x-session-id",
            format!("the text {}", quoted(text)),
        )),
    }
}

/// An OTLP endpoint.
pub(crate) fn url(text: &str) -> Result<Arc<str>, Wrong> {
    text.parse()
        .ok()
        .filter(|uri: &http::Uri| {
            matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some()
        })
        .map(|_| Arc::from(text))
        .ok_or_else(|| {
            Wrong::new(
                "an address such as http://collector:4317",
                format!("the text {}", quoted(text)),
            )
        })
}

/// The path of an HTTP request.
pub(crate) fn url_path(text: &str) -> Result<Arc<str>, Wrong> {
    let fits = text.starts_with('/') && text.parse::<http::uri::PathAndQuery>().is_ok();
    if fits {
        return Ok(Arc::from(text));
    }
    Err(Wrong::new(
        "a path such as /metrics",
        format!("the text {}", quoted(text)),
    ))
}

/// The path of a file.
pub(crate) fn path(text: &str) -> Result<PathBuf, Wrong> {
    if text.is_empty() || text.contains('\0') {
        return Err(Wrong::new(
            "the path of a file",
            format!("the text {}", quoted(text)),
        ));
    }
    Ok(PathBuf::from(text))
}

/// Free text without control characters, such as a label; may be empty.
pub(crate) fn label(text: &str) -> Result<Arc<str>, Wrong> {
    if text.len() <= 4096 && !text.chars().any(char::is_control) {
        return Ok(Arc::from(text));
    }
    Err(Wrong::new(
        "printable text of at most 4096 bytes",
        format!("the text {}", quoted(text)),
    ))
}

//! Single values: from what a key holds to a type that cannot hold anything wrong.
//!
//! Lives here: one function per kind of value; beside those of policies, their [`Form`].
//! Never here: keys, sections, where a value stood.
//! Invariant: pure; every bound is inclusive, and the message names all that is allowed.

use crate::config::diagnostic::Wrong;
use crate::config::rules::{self, Form, Must};
use crate::config::shape::{Leaf, Number, Size, Text, Whole, nearest};
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

/// The longest free text.
const LONGEST_TEXT: usize = 4096;

/// The largest factor or weight: far from where sums of products lose their meaning.
pub(crate) const LARGEST_FACTOR: f64 = 1e6;

/// The most tokens: far above any model's context.
pub(crate) const MOST_TOKENS: i64 = 1_000_000_000;

/// A number from 0 to `most`.
pub(crate) fn ratio(leaf: &Number, most: f64) -> Result<Ratio, Wrong> {
    leaf.parse(Must::Number(most).expected(), |value| {
        Ratio::new(*value).filter(|ratio| ratio.get() <= most)
    })
}

/// A whole number from `least` to `most`.
pub(crate) fn whole<T: TryFrom<i128>>(leaf: &Whole, least: i64, most: i64) -> Result<T, Wrong> {
    leaf.parse(Must::Whole(least, most).expected(), |value| {
        let (least, most) = (i128::from(least), i128::from(most));
        Some(*value)
            .filter(|value| least <= *value && *value <= most)
            .and_then(|value| T::try_from(value).ok())
    })
}

/// The meaning of one of `words`.
pub(crate) fn word<T: Clone>(leaf: &Text, words: &[(&str, T)]) -> Result<T, Wrong> {
    let known: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
    let meaning = leaf.parse(rules::either(&known), |text| {
        let found = words.iter().find(|(word, _)| word == text);
        found.map(|(_, meaning)| meaning.clone())
    });
    meaning.map_err(|wrong| {
        let near = leaf.value.as_ref().and_then(|text| nearest(text, &known));
        match near {
            Some(near) => wrong.hinting(format!("is {near} meant?")),
            // A bare Off or No is false to readers of YAML 1.1, and people write the one for the other.
            None if known.contains(&"None") && is_no(leaf) => wrong.hinting("is None meant?"),
            None => wrong,
        }
    })
}

fn is_no(leaf: &Text) -> bool {
    match &leaf.value {
        Some(text) => ["off", "no", "disabled"].contains(&text.to_ascii_lowercase().as_str()),
        None => leaf.found == "false",
    }
}

/// Text of a certain form.
fn formed(leaf: &Text, form: &Form) -> Result<Arc<str>, Wrong> {
    leaf.parse(form.expected, |text| {
        (form.holds)(text).then(|| Arc::from(text.as_str()))
    })
}

/// A duration such as `500ms`, `30s`, `5m` or `1h30m`: more than 0, at most 720h.
pub(crate) const DURATION: Form = Form::new(
    "a duration from 1ms to 720h, such as 500ms, 30s or 1h30m",
    |text| read_duration(text).is_some(),
    // The digits are so few that no sum of them is too large for the type.
    "self != '' && self.matches('^([0-9]{1,3}h)?([0-9]{1,5}m)?([0-9]{1,7}s)?([0-9]{1,10}ms)?$') && \
     duration('0s') < duration(self) && duration(self) <= duration('720h')",
);

/// A duration.
pub(crate) fn duration(leaf: &Text) -> Result<Duration, Wrong> {
    leaf.parse(DURATION.expected, |text| read_duration(text))
}

/// Each unit at most once, the larger one first.
fn read_duration(text: &str) -> Option<Duration> {
    /// Unit, its milliseconds, the most digits before it.
    const UNITS: [(&str, u64, usize); 4] = [
        ("h", 3_600_000, 3),
        ("m", 60_000, 5),
        ("s", 1000, 7),
        ("ms", 1, 10),
    ];
    let mut rest = text;
    let mut total: u64 = 0;
    let mut units = UNITS.iter();
    while !rest.is_empty() {
        let after = rest.trim_start_matches(|c: char| c.is_ascii_digit());
        let digits = &rest[..rest.len() - after.len()];
        let name = after.split(|c: char| c.is_ascii_digit()).next()?;
        let (unit, millis, most) = units.find(|(unit, ..)| *unit == name)?;
        if *most < digits.len() {
            return None;
        }
        let amount: u64 = digits.parse().ok()?;
        total = total.checked_add(amount.checked_mul(*millis)?)?;
        rest = &after[unit.len()..];
    }
    let time = Duration::from_millis(total);
    (Duration::ZERO < time && time <= LONGEST).then_some(time)
}

/// Bytes: a number, or a number with Ki, Mi or Gi (powers of 1024).
pub(crate) fn bytes(leaf: &Leaf<Size>, least: u64, most: u64) -> Result<u64, Wrong> {
    let (low, high) = (in_binary(least), in_binary(most));
    let expected = format!("a size from {low} to {high}, in bytes or with Ki, Mi or Gi");
    leaf.parse(expected, |size| {
        read_bytes(size).filter(|bytes| least <= *bytes && *bytes <= most)
    })
}

const BINARY: [(&str, u64); 3] = [("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10)];

fn read_bytes(size: &Size) -> Option<u64> {
    let text = match size {
        Size::Bytes(bytes) => return u64::try_from(*bytes).ok(),
        Size::Text(text) => text,
    };
    let unit = BINARY
        .iter()
        .find_map(|(unit, factor)| Some((text.strip_suffix(unit)?, *factor)));
    let (digits, factor) = unit.unwrap_or((text, 1));
    if !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    digits.parse::<u64>().ok()?.checked_mul(factor)
}

fn in_binary(bytes: u64) -> String {
    let unit = BINARY
        .iter()
        .find(|(_, factor)| *factor <= bytes && bytes.is_multiple_of(*factor));
    match unit {
        Some((unit, factor)) => format!("{}{unit}", bytes / factor),
        None => bytes.to_string(),
    }
}

/// An address to listen on.
pub(crate) fn listen_address(leaf: &Text) -> Result<SocketAddr, Wrong> {
    let expected = "an address such as 0.0.0.0:9002 or [::]:9002";
    leaf.parse(expected, |text| text.parse().ok())
}

/// Where an engine listens: a definite address and port.
pub(crate) fn endpoint(leaf: &Text) -> Result<Endpoint, Wrong> {
    let expected = "a definite address such as 10.0.0.7:8000 or [fd00::7]:8000";
    leaf.parse(expected, |text| definite(text))
}

/// A ZMQ endpoint, `tcp://ip:port` or `ip:port`, in the former form.
pub(crate) fn zmq_endpoint(leaf: &Text) -> Result<String, Wrong> {
    let expected = "a definite address such as tcp://10.0.0.7:5557";
    leaf.parse(expected, |text| {
        definite(text.strip_prefix("tcp://").unwrap_or(text))
            .map(|endpoint| format!("tcp://{endpoint}"))
    })
}

fn definite(text: &str) -> Option<Endpoint> {
    let address: SocketAddr = text.parse().ok()?;
    (address.port() != 0 && !address.ip().is_unspecified()).then_some(Endpoint(address))
}

/// A name that clients or engines use: printable, not empty, without white space around it.
pub(crate) const NAME: Form = Form::new(
    "a printable name of 1 to 253 bytes",
    is_name,
    "self != '' && self.trim() == self && !self.matches('\\\\p{Cc}') && size(bytes(self)) <= 253",
);

/// A name that clients or engines use.
pub(crate) fn name(leaf: &Text) -> Result<Arc<str>, Wrong> {
    formed(leaf, &NAME)
}

fn is_name(text: &str) -> bool {
    !text.is_empty()
        && text.len() <= LONGEST_NAME
        && text.trim() == text
        && !text.chars().any(char::is_control)
}

/// The name of a Kubernetes object (RFC 1123 subdomain).
pub(crate) const OBJECT_NAME: Form = Form::new(
    "a name of 1 to 253 lower-case letters, digits, - and ., each part between letters or digits",
    is_object_name,
    "size(self) <= 253 && \
     self.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*$')",
);

/// The name of a Kubernetes object.
pub(crate) fn object_name(leaf: &Text) -> Result<Arc<str>, Wrong> {
    formed(leaf, &OBJECT_NAME)
}

fn is_object_name(text: &str) -> bool {
    let label = |part: &str| {
        let fits = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        !part.is_empty() && part.bytes().all(fits) && !part.starts_with('-') && !part.ends_with('-')
    };
    text.len() <= LONGEST_NAME && text.split('.').all(label)
}

/// The API group of a Kubernetes object; empty for the core group.
pub(crate) const API_GROUP: Form = Form::new(
    "an API group such as inference.networking.k8s.io, or nothing",
    |text| text.is_empty() || is_object_name(text),
    "self == '' || size(self) <= 253 && \
     self.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*$')",
);

/// The API group of a Kubernetes object.
pub(crate) fn api_group(leaf: &Text) -> Result<Arc<str>, Wrong> {
    formed(leaf, &API_GROUP)
}

/// The kind of a Kubernetes object.
pub(crate) const OBJECT_KIND: Form = Form::new(
    "the kind of an object, such as InferencePool",
    |text| {
        text.len() <= 63
            && text.starts_with(|c: char| c.is_ascii_uppercase())
            && text.bytes().all(|byte| byte.is_ascii_alphanumeric())
    },
    "self.matches('^[A-Z][A-Za-z0-9]{0,62}$')",
);

/// The kind of a Kubernetes object.
pub(crate) fn object_kind(leaf: &Text) -> Result<Arc<str>, Wrong> {
    formed(leaf, &OBJECT_KIND)
}

/// The key of a Kubernetes label.
pub(crate) fn label_key(leaf: &Text) -> Result<Arc<str>, Wrong> {
    let expected = "the key of a label, such as llm-d.ai/role";
    leaf.parse(expected, |text| {
        let (prefix, name) = text.split_once('/').unwrap_or(("a", text));
        let fits = is_label_value(name)
            && !name.is_empty()
            && !prefix.is_empty()
            && prefix.len() <= LONGEST_NAME
            && prefix
                .chars()
                .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "-.".contains(c));
        fits.then(|| Arc::from(text.as_str()))
    })
}

/// The value of a Kubernetes label; may be empty.
pub(crate) fn label_value(leaf: &Text) -> Result<Arc<str>, Wrong> {
    let expected = "the value of a label: at most 63 letters, digits, -, _ and .";
    leaf.parse(expected, |text| {
        is_label_value(text).then(|| Arc::from(text.as_str()))
    })
}

fn is_label_value(text: &str) -> bool {
    let inner = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let outer = |c: char| c.is_ascii_alphanumeric();
    text.len() <= 63
        && text.chars().all(inner)
        && text.chars().next().is_none_or(outer)
        && text.chars().next_back().is_none_or(outer)
}

/// A model name, or the start of one followed by `*`.
pub(crate) const MODEL_PATTERN: Form = Form::new(
    "a model name, with at most one * and that at its end",
    |text| {
        let start = text.strip_suffix('*').unwrap_or(text);
        !start.contains('*') && (text == "*" || is_name(start))
    },
    "self == '*' || self.matches('^[^*]+[*]?$') && \
     self.replace('*', '').trim() == self.replace('*', '') && !self.matches('\\\\p{Cc}') && \
     size(bytes(self.replace('*', ''))) <= 253",
);

/// A model name, or the start of one followed by `*`.
pub(crate) fn model_pattern(leaf: &Text) -> Result<Arc<str>, Wrong> {
    formed(leaf, &MODEL_PATTERN)
}

/// The name of a request header.
pub(crate) const HEADER: Form = Form::new(
    "the name of a request header, such as x-session-id",
    |text| text.len() <= LONGEST_NAME && http::HeaderName::from_bytes(text.as_bytes()).is_ok(),
    "size(self) <= 253 && self.matches('^[-!#$%&*+.^_`|~0-9A-Za-z\\']+$')",
);

/// The name of a request header, in lower case.
pub(crate) fn header(leaf: &Text) -> Result<Arc<str>, Wrong> {
    let header = formed(leaf, &HEADER)?;
    Ok(Arc::from(header.to_ascii_lowercase()))
}

/// An OTLP endpoint.
pub(crate) fn url(leaf: &Text) -> Result<Arc<str>, Wrong> {
    let expected = "an address such as http://collector:4317";
    leaf.parse(expected, |text| {
        let uri: http::Uri = text.parse().ok()?;
        let fits = matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some();
        fits.then(|| Arc::from(text.as_str()))
    })
}

/// The address of a trace, with a place for its id.
pub(crate) fn trace_link(leaf: &Text) -> Result<Arc<str>, Wrong> {
    let expected = "an address such as http://jaeger:16686/trace/{trace_id}";
    leaf.parse(expected, |text| {
        let uri: http::Uri = text.replace("{trace_id}", "0").parse().ok()?;
        let fits = matches!(uri.scheme_str(), Some("http" | "https"))
            && uri.host().is_some()
            && text.contains("{trace_id}")
            && text.len() <= LONGEST_TEXT;
        fits.then(|| Arc::from(text.as_str()))
    })
}

/// The path of an HTTP request.
pub(crate) fn url_path(leaf: &Text) -> Result<Arc<str>, Wrong> {
    leaf.parse("a path such as /metrics", |text| {
        let fits = text.starts_with('/') && text.parse::<http::uri::PathAndQuery>().is_ok();
        fits.then(|| Arc::from(text.as_str()))
    })
}

/// The path of a file.
pub(crate) const PATH: Form = Form::new(
    "the path of a file",
    |text| !text.is_empty() && !text.contains('\0'),
    "self.matches('^[^\\\\x00]+$')",
);

/// The path of a file.
pub(crate) fn path(leaf: &Text) -> Result<PathBuf, Wrong> {
    formed(leaf, &PATH).map(|path| PathBuf::from(&*path))
}

/// Free text without control characters, such as a label; may be empty.
pub(crate) fn label(leaf: &Text) -> Result<Arc<str>, Wrong> {
    let expected = format!("printable text of at most {LONGEST_TEXT} bytes");
    leaf.parse(expected, |text| {
        let fits = text.len() <= LONGEST_TEXT && !text.chars().any(char::is_control);
        fits.then(|| Arc::from(text.as_str()))
    })
}

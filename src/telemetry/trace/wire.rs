//! Spans in the bytes of OTLP: protobuf, written as the span goes on.
//!
//! Lives here: [`SpanBytes`], [`Value`], and the framing of an export request.
//! Never here: what a span says, where it is sent.
//! Invariant: what is written is a valid `opentelemetry.proto.trace.v1.Span`; nothing is built first and
//! turned into bytes later, so that a traced request costs little more than copying its attributes.
//!
//! Field numbers are those of `opentelemetry/proto/trace/v1/trace.proto` 1.x.

use crate::telemetry::trace::context::{Context, SpanId};
use std::fmt::Write;

/// Room before a span for its tag and length, which are known only at its end.
const ROOM: usize = 6;
/// Bytes reserved for a span; a decision takes about 4 KiB.
const RESERVED: usize = 5120;

const SPAN_ATTRIBUTE: u8 = 9 << 3 | 2;
const EVENT_ATTRIBUTE: u8 = 3 << 3 | 2;
const RESOURCE_ATTRIBUTE: u8 = 1 << 3 | 2;

/// The kind of a span, as OTLP counts them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Internal = 1,
    Server = 2,
}

/// The value of an attribute.
#[derive(Clone, Copy, Debug)]
pub(super) enum Value<'a> {
    Text(&'a str),
    Flag(bool),
    Int(u64),
    Float(f64),
}

impl Value<'_> {
    /// Length of the value's `AnyValue` message.
    fn len(self) -> usize {
        match self {
            Value::Text(text) => 1 + varint_len(text.len() as u64) + text.len(),
            Value::Flag(_) => 2,
            Value::Int(value) => 1 + varint_len(signed(value)),
            Value::Float(_) => 9,
        }
    }

    fn put(self, out: &mut Vec<u8>) {
        match self {
            Value::Text(text) => bytes_field(out, 1, text.as_bytes()),
            Value::Flag(flag) => out.extend_from_slice(&[2 << 3, u8::from(flag)]),
            Value::Int(value) => {
                out.push(3 << 3);
                varint(out, signed(value));
            }
            Value::Float(value) => {
                out.push(4 << 3 | 1);
                out.extend_from_slice(&value.to_le_bytes());
            }
        }
    }
}

/// OTLP's integers are signed.
fn signed(value: u64) -> u64 {
    value.min(i64::MAX as u64)
}

/// One span in the making, and the finished ones below it.
#[derive(Debug)]
pub(super) struct SpanBytes {
    bytes: Vec<u8>,
    scratch: String,
}

/// Finished spans: framed as the field `spans` of a `ScopeSpans`.
#[derive(Debug)]
pub(super) struct Framed {
    bytes: Vec<u8>,
    start: usize,
}

impl Framed {
    /// The frames.
    pub(super) fn as_slice(&self) -> &[u8] {
        &self.bytes[self.start..]
    }
}

/// What identifies a span.
#[derive(Clone, Copy, Debug)]
pub(super) struct Identity<'a> {
    pub(super) context: &'a Context,
    pub(super) parent: Option<SpanId>,
    pub(super) name: &'a str,
    pub(super) kind: Kind,
    /// Nanoseconds since 1970.
    pub(super) start: u64,
}

impl SpanBytes {
    /// Begins a span.
    pub(super) fn begin(identity: Identity<'_>) -> SpanBytes {
        let mut bytes = Vec::with_capacity(RESERVED);
        bytes.extend_from_slice(&[0; ROOM]);
        identity_fields(&mut bytes, identity);
        SpanBytes {
            bytes,
            scratch: String::new(),
        }
    }

    pub(super) fn put(&mut self, key: &str, value: Value<'_>) {
        attribute(&mut self.bytes, SPAN_ATTRIBUTE, key, value);
    }

    pub(super) fn text(&mut self, key: &str, value: &str) {
        self.put(key, Value::Text(value));
    }

    pub(super) fn int(&mut self, key: &str, value: u64) {
        self.put(key, Value::Int(value));
    }

    pub(super) fn float(&mut self, key: &str, value: f64) {
        self.put(key, Value::Float(value));
    }

    pub(super) fn flag(&mut self, key: &str, value: bool) {
        self.put(key, Value::Flag(value));
    }

    /// An attribute that has to be formatted first.
    pub(super) fn display(&mut self, key: &str, value: impl std::fmt::Display) {
        self.scratch.clear();
        // Writing to a String cannot fail.
        let _ = write!(self.scratch, "{value}");
        attribute(
            &mut self.bytes,
            SPAN_ATTRIBUTE,
            key,
            Value::Text(&self.scratch),
        );
    }

    /// An attribute that is a list of texts.
    pub(super) fn texts(&mut self, key: &str, values: &[String]) {
        let list: usize = values
            .iter()
            .map(|value| framed_len(Value::Text(value).len()))
            .sum();
        let any = framed_len(list);
        let out = &mut self.bytes;
        out.push(SPAN_ATTRIBUTE);
        varint(out, (framed_len(key.len()) + framed_len(any)) as u64);
        bytes_field(out, 1, key.as_bytes());
        out.push(2 << 3 | 2);
        varint(out, any as u64);
        out.push(5 << 3 | 2);
        varint(out, list as u64);
        for value in values {
            out.push(1 << 3 | 2);
            varint(out, Value::Text(value).len() as u64);
            Value::Text(value).put(out);
        }
    }

    /// An event at `time`, nanoseconds since 1970.
    pub(super) fn event(&mut self, name: &str, time: u64, attributes: &[(&str, Value<'_>)]) {
        let length = 9
            + framed_len(name.len())
            + attributes
                .iter()
                .map(|(key, value)| framed_len(pair_len(key, *value)))
                .sum::<usize>();
        let out = &mut self.bytes;
        out.push(11 << 3 | 2);
        varint(out, length as u64);
        fixed64(out, 1, time);
        bytes_field(out, 2, name.as_bytes());
        for (key, value) in attributes {
            attribute(out, EVENT_ATTRIBUTE, key, *value);
        }
    }

    /// A link to another span.
    pub(super) fn link(&mut self, to: &Context) {
        let out = &mut self.bytes;
        out.push(13 << 3 | 2);
        varint(out, 18 + 10);
        bytes_field(out, 1, &to.trace.to_bytes());
        bytes_field(out, 2, &to.span.to_bytes());
    }

    /// Marks the span as failed.
    pub(super) fn failed(&mut self, why: &str) {
        let out = &mut self.bytes;
        out.push(15 << 3 | 2);
        varint(out, (framed_len(why.len()) + 2) as u64);
        bytes_field(out, 2, why.as_bytes());
        out.extend_from_slice(&[3 << 3, 2]);
    }

    /// Ends the span.
    pub(super) fn end(mut self, time: u64) -> Framed {
        fixed64(&mut self.bytes, 8, time);
        let length = (self.bytes.len() - ROOM) as u64;
        let start = ROOM - 1 - varint_len(length);
        self.bytes[start] = 2 << 3 | 2;
        let mut at = start + 1;
        put_varint(length, |byte| {
            self.bytes[at] = byte;
            at += 1;
        });
        Framed {
            bytes: self.bytes,
            start,
        }
    }
}

/// A whole span without attributes, framed, added to `out`.
pub(super) fn child(out: &mut Vec<u8>, identity: Identity<'_>, end: u64) {
    let length = identity_len(&identity) + 9;
    out.push(2 << 3 | 2);
    varint(out, length as u64);
    identity_fields(out, identity);
    fixed64(out, 8, end);
}

/// An `ExportTraceServiceRequest` around `length` bytes of framed spans, which `spans` writes, after
/// `prefix` bytes of room.
pub(super) fn request(
    resource: &[u8],
    length: usize,
    prefix: usize,
    spans: impl FnOnce(&mut Vec<u8>),
) -> Vec<u8> {
    let name = env!("CARGO_PKG_NAME").as_bytes();
    let version = env!("CARGO_PKG_VERSION").as_bytes();
    let scope = framed_len(name.len()) + framed_len(version.len());
    let scope_spans = framed_len(scope) + length;
    let resource_spans = framed_len(resource.len()) + framed_len(scope_spans);
    let mut out = Vec::with_capacity(prefix + framed_len(resource_spans));
    out.resize(prefix, 0);
    out.push(1 << 3 | 2);
    varint(&mut out, resource_spans as u64);
    bytes_field(&mut out, 1, resource);
    out.push(2 << 3 | 2);
    varint(&mut out, scope_spans as u64);
    out.push(1 << 3 | 2);
    varint(&mut out, scope as u64);
    bytes_field(&mut out, 1, name);
    bytes_field(&mut out, 2, version);
    spans(&mut out);
    out
}

/// A `Resource` with these attributes.
pub(super) fn resource(attributes: &[(String, String)]) -> Vec<u8> {
    let mut out = Vec::new();
    for (key, value) in attributes {
        attribute(&mut out, RESOURCE_ATTRIBUTE, key, Value::Text(value));
    }
    out
}

fn identity_len(identity: &Identity<'_>) -> usize {
    18 + 10
        + identity.parent.map_or(0, |_| 10)
        + identity
            .context
            .state
            .as_ref()
            .map_or(0, |state| framed_len(state.len()))
        + framed_len(identity.name.len())
        + 2
        + 9
        + 6
}

fn identity_fields(out: &mut Vec<u8>, identity: Identity<'_>) {
    let Identity {
        context,
        parent,
        name,
        kind,
        start,
    } = identity;
    bytes_field(out, 1, &context.trace.to_bytes());
    bytes_field(out, 2, &context.span.to_bytes());
    if let Some(state) = &context.state {
        bytes_field(out, 3, state.as_bytes());
    }
    if let Some(parent) = parent {
        bytes_field(out, 4, &parent.to_bytes());
    }
    bytes_field(out, 5, name.as_bytes());
    out.extend_from_slice(&[6 << 3, kind as u8]);
    fixed64(out, 7, start);
    // `flags` (16): the trace flags of the span's own context.
    out.extend_from_slice(&[0x85, 0x01]);
    out.extend_from_slice(&u32::from(context.flags).to_le_bytes());
}

fn pair_len(key: &str, value: Value<'_>) -> usize {
    framed_len(key.len()) + framed_len(value.len())
}

fn attribute(out: &mut Vec<u8>, tag: u8, key: &str, value: Value<'_>) {
    out.push(tag);
    varint(out, pair_len(key, value) as u64);
    bytes_field(out, 1, key.as_bytes());
    out.push(2 << 3 | 2);
    varint(out, value.len() as u64);
    value.put(out);
}

/// Length of a length-delimited field (numbers up to 15) with `length` bytes in it.
fn framed_len(length: usize) -> usize {
    1 + varint_len(length as u64) + length
}

fn bytes_field(out: &mut Vec<u8>, number: u8, bytes: &[u8]) {
    out.push(number << 3 | 2);
    varint(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

fn fixed64(out: &mut Vec<u8>, number: u8, value: u64) {
    out.push(number << 3 | 1);
    out.extend_from_slice(&value.to_le_bytes());
}

fn varint(out: &mut Vec<u8>, value: u64) {
    put_varint(value, |byte| out.push(byte));
}

fn put_varint(mut value: u64, mut put: impl FnMut(u8)) {
    while 0x80 <= value {
        put((value & 0x7f) as u8 | 0x80);
        value >>= 7;
    }
    put(value as u8);
}

fn varint_len(value: u64) -> usize {
    let bits = 64 - (value | 1).leading_zeros() as usize;
    bits.div_ceil(7)
}

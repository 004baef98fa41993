//! Who a span is: W3C trace context, and new ids.
//!
//! Lives here: [`Context`], [`TraceId`], [`SpanId`], reading and writing of `traceparent`.
//! Never here: sampling, export.
//! Invariant: ids are never zero; what cannot be read is no parent, never an error (W3C Trace Context,
//! section 3.2).

use std::cell::Cell;
use std::fmt;
use std::hash::{BuildHasher, RandomState};

/// Longest `tracestate` that is passed on (W3C Trace Context asks for at least 512).
const LONGEST_STATE: usize = 512;

/// Id of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TraceId(u128);

/// Id of a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanId(u64);

/// A span's place in the world.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Context {
    /// Its trace.
    pub trace: TraceId,
    /// Itself.
    pub span: SpanId,
    /// Trace flags; bit 0 says sampled.
    pub flags: u8,
    /// `tracestate`, passed on as it came.
    pub state: Option<Box<str>>,
}

impl TraceId {
    /// A new one.
    #[must_use]
    pub(super) fn random() -> TraceId {
        TraceId(u128::from(random()) << 64 | u128::from(random()))
    }

    /// As on the wire.
    #[must_use]
    pub(super) fn to_bytes(self) -> [u8; 16] {
        self.0.to_be_bytes()
    }

    /// The part that ratio sampling looks at, 63 bits: the same as in OpenTelemetry's SDKs, so that
    /// services with the same ratio sample the same traces.
    #[must_use]
    pub(super) fn sampled_part(self) -> u64 {
        (self.0 as u64) >> 1
    }
}

impl SpanId {
    /// A new one.
    #[must_use]
    pub(super) fn random() -> SpanId {
        SpanId(random())
    }

    /// As on the wire.
    #[must_use]
    pub(super) fn to_bytes(self) -> [u8; 8] {
        self.0.to_be_bytes()
    }
}

impl fmt::Display for TraceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Display for SpanId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl Context {
    /// Reads a `traceparent` and the `tracestate` beside it.
    #[must_use]
    pub(super) fn parse(traceparent: &str, state: Option<&str>) -> Option<Context> {
        let text = traceparent.trim();
        let version = text.get(..3)?;
        let (trace, span) = (text.get(3..35)?, text.get(36..52)?);
        let (flags, rest) = (text.get(53..55)?, text.get(55..)?);
        let dashes = [35, 52].map(|at| text.as_bytes().get(at) == Some(&b'-'));
        // Later versions may add fields after the flags; version 00 has none, and ff is forbidden.
        let fits = match version {
            "00-" => rest.is_empty(),
            "ff-" => false,
            _ => {
                version.ends_with('-')
                    && hex(&version[..2]).is_some()
                    && (rest.is_empty() || rest.starts_with('-'))
            }
        };
        if !fits || dashes != [true, true] {
            return None;
        }
        let context = Context {
            trace: TraceId(hex(trace)?),
            span: SpanId(hex(span)? as u64),
            flags: hex(flags)? as u8,
            state: state
                .filter(|state| !state.is_empty() && state.len() <= LONGEST_STATE)
                .map(Into::into),
        };
        (context.trace.0 != 0 && context.span.0 != 0).then_some(context)
    }

    /// Whether the trace is recorded.
    #[must_use]
    pub fn sampled(&self) -> bool {
        self.flags & 1 == 1
    }

    /// As a `traceparent`.
    #[must_use]
    pub fn traceparent(&self) -> String {
        format!("00-{}-{}-{:02x}", self.trace, self.span, self.flags & 1)
    }
}

/// Lower-case hexadecimal digits, as the standard demands.
fn hex(text: &str) -> Option<u128> {
    let lower = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    text.bytes()
        .all(lower)
        .then(|| u128::from_str_radix(text, 16).ok())
        .flatten()
}

/// Not zero, and not guessable enough to collide with other processes: `SplitMix64` (Steele, Lea and
/// Flood, 2014) from a seed that the operating system drew, one sequence per thread.
fn random() -> u64 {
    thread_local! {
        static STATE: Cell<u64> = Cell::new(RandomState::new().hash_one(std::thread::current().id()));
    }
    STATE.with(|state| {
        loop {
            let next = state.get().wrapping_add(0x9e37_79b9_7f4a_7c15);
            state.set(next);
            let mut z = next;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^= z >> 31;
            if z != 0 {
                return z;
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn a_traceparent_is_read_and_written_back() {
        let context = Context::parse(GOOD, Some("vendor=1")).unwrap();
        assert_eq!(context.traceparent(), GOOD);
        assert!(context.sampled());
        assert_eq!(context.state.as_deref(), Some("vendor=1"));
        assert!(
            !Context::parse(&GOOD.replace("-01", "-00"), None)
                .unwrap()
                .sampled()
        );
        // A later version with more fields.
        assert!(Context::parse(&format!("01{}-more", &GOOD[2..]), None).is_some());
    }

    #[test]
    fn what_is_no_traceparent_is_no_parent() {
        let zero_trace = format!("00-{}-00f067aa0ba902b7-01", "0".repeat(32));
        let zero_span = format!("00-4bf92f3577b34da6a3ce929d0e0e4736-{}-01", "0".repeat(16));
        for odd in [
            "",
            "00",
            "garbage",
            &GOOD[..54],
            &format!("{GOOD}-more"),
            &format!("ff{}", &GOOD[2..]),
            &GOOD.to_uppercase(),
            &GOOD.replace('-', "_"),
            &zero_trace,
            &zero_span,
            "00-4bf92f3577b34da6a3ce929d0e0e473é-00f067aa0ba902b7-01",
        ] {
            assert_eq!(Context::parse(odd, None), None, "{odd}");
        }
    }

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig {
            failure_persistence: None,
            ..Default::default()
        })]

        #[test]
        fn whatever_is_said_of_a_trace_is_no_parent_or_one_that_is_passed_on(
            noise in "\\PC{0,70}",
            at in 0..GOOD.len(),
            odd in proptest::char::any(),
            state in "\\PC{0,600}",
        ) {
            let nearly = format!("{}{odd}{}", &GOOD[..at], &GOOD[at + 1..]);
            for text in [noise.clone(), nearly, format!("{GOOD}{noise}")] {
                let Some(read) = Context::parse(&text, Some(&state)) else {
                    continue;
                };
                let passed_on = read.traceparent();
                let again = Context::parse(&passed_on, read.state.as_deref());
                let flags = read.flags & 1;
                proptest::prop_assert_eq!(again, Some(Context { flags, ..read }));
            }
        }
    }

    #[test]
    fn ids_differ_and_are_not_zero() {
        let ids: std::collections::HashSet<u64> = (0..10_000).map(|_| random()).collect();
        assert_eq!(ids.len(), 10_000);
        assert!(!ids.contains(&0));
    }
}

//! A request as the picker sees it before its body: method, path, headers, what the gateway said.
//!
//! Lives here: [`Head`], [`Headers`], and what is left to tell of a request without a pick ([`Arrival`], [`Ended`]).
//! Never here: Envoy types (see `extproc`), decisions.
//! Invariant: header names are lower case; order and duplicates are kept.

use crate::decide::ask::Subset;
use crate::pick::Refusal;
use bytes::Bytes;
use std::sync::Arc;
use std::time::Instant;

/// Request headers: lower-case names, in order, duplicates kept.
#[derive(Clone, Debug, Default)]
pub struct Headers(Vec<(Box<str>, Bytes)>);

impl Headers {
    /// Adds a header; the name is lower-cased.
    pub fn push(&mut self, name: &str, value: impl Into<Bytes>) {
        self.0
            .push((name.to_ascii_lowercase().into_boxed_str(), value.into()));
    }

    /// The first value of `name` (lower case) that is valid UTF-8.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0
            .iter()
            .filter(|(key, _)| &**key == name)
            .find_map(|(_, value)| std::str::from_utf8(value).ok())
    }

    /// All values of `name` (lower case) that are valid UTF-8.
    pub fn get_all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.0
            .iter()
            .filter(move |(key, _)| &**key == name)
            .filter_map(|(_, value)| std::str::from_utf8(value).ok())
    }

    /// Whether `name` (lower case) occurs, whatever its value.
    #[must_use]
    pub fn contains(&self, name: &str) -> bool {
        self.0.iter().any(|(key, _)| &**key == name)
    }

    /// Number of headers.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Everything known of a request before its body.
#[derive(Clone, Debug, Default)]
pub struct Head {
    /// `:method`, upper case.
    pub method: String,
    /// `:path`, query string included.
    pub path: String,
    /// The other headers.
    pub headers: Headers,
    /// The endpoints that the gateway allows.
    pub subset: Subset,
    /// W3C `traceparent`: the gateway's own (gRPC metadata) when it traces, else the client's header.
    pub trace_parent: Option<Arc<str>>,
    /// W3C `tracestate` from the same place.
    pub trace_state: Option<Arc<str>>,
    /// Whether the gateway traces itself, so that it writes `traceparent` to the pod.
    pub gateway_traces: bool,
}

/// When a request came, and the trace that it belongs to: enough to write its span should it end before its pick.
#[derive(Clone, Debug)]
pub struct Arrival {
    /// When its headers came.
    pub at: Instant,
    /// As in [`Head`].
    pub trace_parent: Option<Arc<str>>,
    /// As in [`Head`].
    pub trace_state: Option<Arc<str>>,
}

impl Arrival {
    /// Of a request whose headers come now.
    #[must_use]
    pub fn now(head: &Head) -> Arrival {
        Arrival {
            at: Instant::now(),
            trace_parent: head.trace_parent.clone(),
            trace_state: head.trace_state.clone(),
        }
    }
}

/// How a request ended before its pick.
#[derive(Clone, Copy, Debug)]
pub enum Ended<'a> {
    /// The client got this.
    Refused(&'a Refusal),
    /// The client or the gateway gave up.
    Aborted,
}

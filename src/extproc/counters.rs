//! What happened on the gateway's side, counted.
//!
//! Lives here: [`Counters`].
//! Never here: how they are shown (see `admin`), anything about decisions (see `telemetry`).
//! Invariant: labels come from the code, never from a client.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// A number that only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `n`.
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    /// The number so far.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Everything counted on the gateway's side.
#[derive(Debug, Default)]
pub struct Counters {
    /// Streams opened.
    pub streams: Counter,
    /// Streams ended.
    pub ended: Counter,
    /// Streams that ended between a plan and the end of the response.
    pub aborted: Counter,
    /// Streams ended by us when the time to drain was over.
    pub cut: Counter,
    /// Requests refused because of the gateway's body mode.
    pub unsupported_processing_mode: Counter,
    /// Requests with a body that the gateway does not send (mode `NONE`).
    pub body_not_sent: Counter,
    /// Requests whose body is encoded in a way that is not read here.
    pub unreadable_encoding: Counter,
    /// Streams of gateways in `observability_mode`, which take no answer.
    pub only_shown: Counter,
    /// Messages that changed nothing, such as a body after its end.
    pub ignored_messages: Counter,
    /// Bytes of request bodies.
    pub request_bytes: Counter,
    /// Bytes of response bodies.
    pub response_bytes: Counter,
    /// Responses that the gateway does not show, whose load is released after a fixed time.
    pub leases: Counter,
    refusals: Mutex<BTreeMap<(&'static str, u16), u64>>,
}

impl Counters {
    /// Streams open now.
    #[must_use]
    pub fn open_streams(&self) -> u64 {
        let ended = self.ended.get();
        self.streams.get().saturating_sub(ended)
    }

    /// Counts a refusal.
    pub fn refused(&self, code: &'static str, status: u16) {
        *self.refusals.lock().entry((code, status)).or_default() += 1;
    }

    /// Refusals so far, by code and status.
    #[must_use]
    pub fn refusals(&self) -> Vec<(&'static str, u16, u64)> {
        self.refusals
            .lock()
            .iter()
            .map(|((code, status), count)| (*code, *status, *count))
            .collect()
    }
}

//! What the gRPC side can be told.
//!
//! Lives here: [`Settings`], [`Limits`].
//! Never here: files, YAML, policies.
//! Invariant: every wait and every buffer has a limit; there is no value that means "for ever".

use crate::extproc::conformance::Conformance;
use crate::extproc::counters::Counters;
use crate::extproc::tls::TlsMaterial;
use crate::extproc::wire::MetadataKeys;
use std::sync::Arc;
use std::time::Duration;

/// How a server is to run.
#[derive(Clone, Debug)]
pub struct Settings {
    /// What is bounded, and by how much.
    pub limits: Limits,
    /// How the port is secured.
    pub tls: TlsMaterial,
    /// Where the gateway's dynamic metadata holds what.
    pub metadata: MetadataKeys,
    /// Whether conformance tests may steer.
    pub conformance: Conformance,
    /// Where things are counted.
    pub counters: Arc<Counters>,
}

/// What is bounded, and by how much.
///
/// Memory for request bodies is at most `held_requests` × `body` bytes, decoded copies and gRPC
/// framing apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Longest request body, in bytes, as sent and after decoding.
    pub body: usize,
    /// Requests whose headers or body are held at once. A request counts from its headers until
    /// everything of it went back to the gateway; further ones get 503 at once. A response that
    /// streams does not count.
    pub held_requests: usize,
    /// Longest pause within a request body; then 408.
    pub body_stall: Duration,
    /// Longest time for a whole request body; then 408.
    pub body_total: Duration,
    /// Longest wait for the first piece of body from a gateway that did not announce its body
    /// mode; then 500, because it probably waits for us.
    pub unannounced: Duration,
    /// Longest time for a pick; then 504.
    pub decision: Duration,
    /// How long load stays booked when the gateway does not show responses.
    pub lease: Duration,
    /// How long streams may go on after a shutdown began.
    pub drain: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            body: 32 << 20,
            held_requests: 1_024,
            body_stall: Duration::from_secs(30),
            body_total: Duration::from_secs(300),
            unannounced: Duration::from_secs(1),
            decision: Duration::from_secs(10),
            lease: Duration::from_secs(30),
            drain: Duration::from_secs(30),
        }
    }
}

//! What an operator sees of a decision: span, metrics, journal.
//!
//! Lives here: everything that turns a [`crate::decide::Decision`] into something readable.
//! Never here: choices. Telemetry that fails never touches a request.
//! Invariant: no prompt text and no unbounded client text in any output; the words are those of
//! [`crate::decide::reason`].

pub mod explanation;
pub mod fields;
pub mod journal;
pub mod metrics;
pub mod record;
pub mod shadow;
pub mod throttle;
pub mod trace;

//! Through a real Envoy: the program's own commands as child processes, on loopback ports.
//!
//! Lives here: a deployment per test (`stack`), pods that record what reaches them (`recorder`), a
//! collector of spans (`collector`), and the tests, by what they are about.
//! Never here: anything that can be shown without Envoy (see `tests/it` and the unit tests).
//! Invariant: every test ends what it started, and waits for conditions, never for time.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests fail the test, as the tests do"
)]

mod bodies;
mod collector;
mod conformance;
mod demo;
mod faults;
mod headers;
mod limits;
mod recorder;
mod routing;
mod stack;
mod traces;

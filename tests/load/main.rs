//! What must hold under load, in a release build: `tests/run load`.
//!
//! Each test has the machine to itself (`--test-threads=1`) and prints its figures.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests fail the test, as the tests do"
)]

#[allow(dead_code, reason = "the tests of the page alone use the rest of it")]
#[path = "../browser/fleet.rs"]
mod fleet;
mod page;
mod picker;
#[path = "../browser/scenario.rs"]
mod scenario;

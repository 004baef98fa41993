//! Black-box tests of the library, in one binary.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "fixtures and models fail the test that uses them"
)]

/// Table tests of the kernel: the bypass rule, the gate, pins, sessions, roles.
mod decide;
/// Fixtures of the kernel's tests: pods, asks, policies.
mod decide_fixture;
/// The cases of `tests/golden/decide`.
mod decide_golden;
/// The kernel and the ledger together.
mod decide_ledger;
/// The ledger against its definition.
mod decide_ledger_model;
/// What must hold for every snapshot.
mod decide_properties;

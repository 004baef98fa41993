//! Black-box and repository tests, one binary.

mod architecture;
mod extproc_grpc;
//! Black-box tests of the library, in one binary.

/// Table tests of the kernel: the bypass rule, the gate, pins, sessions, roles.
mod decide;
/// Fixtures of the kernel's tests: pods, asks, policies.
mod decide_fixture;
/// The cases of `tests/golden/decide`.
mod decide_golden;
/// The kernel and the ledger together.
mod decide_ledger;
/// What must hold for every snapshot.
mod decide_properties;
mod prompt_golden;
//! Black-box tests of the library.
mod config;
mod fleet;

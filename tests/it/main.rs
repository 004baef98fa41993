//! Black-box and repository tests, one binary.

mod prompt_engine;
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "fixtures and models fail the test that uses them"
)]

/// The shape of the source: layers, purity, file sizes.
mod architecture;
/// Files in, valid types or every fault out.
mod config;
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
/// The simulated engine as a router sees it.
mod engine;
/// The gRPC service, driven by a scripted gateway.
mod extproc_grpc;
/// Pods listed, probed, gone.
mod config_watch;
mod fleet;
/// Chat templates and their renders.
mod prompt_golden;
//! Black-box tests: the library as its users see it.

mod kv_captures;
mod kv_feed;
mod kv_support;

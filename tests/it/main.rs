//! Black-box and repository tests, one binary.

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
/// A scripted gateway.
mod extproc_gateway;
/// The gRPC service, driven by a scripted gateway.
mod extproc_grpc;
/// The gRPC service with the real picker behind it.
mod extproc_picker;
/// Pods listed, probed, gone.
mod fleet;
/// Chat templates and their renders.
mod prompt_golden;
/// Recorded KV events of every engine.
mod kv_captures;
/// KV events over the wire, from a scripted engine.
mod kv_feed;
/// What the KV tests share.
mod kv_support;

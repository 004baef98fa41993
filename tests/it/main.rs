//! Black-box and repository tests, one binary; each module says at its head what it proves.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "fixtures and models fail the test that uses them"
)]

mod admin;
mod architecture;
mod cli_check;
mod config;
mod config_conditions;
mod config_kubernetes;
mod config_reload;
mod config_watch;
mod crd;
mod decide;
mod decide_fixture;
mod decide_golden;
mod decide_ledger;
mod decide_ledger_model;
mod decide_prerequisites;
mod decide_properties;
mod docs;
mod engine;
mod explain;
mod extproc_gateway;
mod extproc_grpc;
mod extproc_picker;
mod fleet;
mod kubernetes;
mod kv_captures;
mod kv_feed;
mod kv_support;
mod metrics;
mod policy_from;
mod prompt_difference;
mod prompt_golden;
mod shadow;
mod telemetry;
mod telemetry_export;
mod telemetry_log;
mod telemetry_refusals;
mod telemetry_support;

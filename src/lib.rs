//! sidestep: an Envoy endpoint picker for disaggregated LLM serving.
//!
//! For every request it finds the prompt's KV blocks in an index of what each engine pod holds, decides
//! whether remote prefill pays, and pins the request to its pods by rewriting headers.
//!
//! # The map
//!
//! Modules in reading order, with what each may use. `tests/it/architecture.rs` enforces the table.
//!
//! | layer | module | what it is | may use |
//! | --- | --- | --- | --- |
//! | 0 | [`units`], [`names`], [`blocks`], [`revision`] | quantities, identities, content keys, change | each other, downwards |
//! | 1 | [`decide`] | the kernel: snapshot in, decision out | layer 0 |
//! | 1 | [`prompt`] | bytes to tokens and block keys | layer 0 |
//! | 1 | [`kv`] | which pod holds which block | layer 0, values of [`decide`] |
//! | 1 | [`fleet`] | which pods exist | layer 0, values of [`decide`] |
//! | 1 | [`load`] | what was promised to them | layer 0, [`decide`] |
//! | 2 | [`observe`] | roster, overlaps, reports and loads become one snapshot | layer 1 |
//! | 2 | [`route`] | a decision becomes header edits | [`decide`] |
//! | 2 | [`config`] | files become valid types | [`decide`], [`fleet`] |
//! | 2 | [`telemetry`] | a decision becomes span, metrics, record | [`decide`] |
//! | 3 | [`pick`] | a request becomes a plan and a booking | layers 1 and 2 |
//! | 4 | [`extproc`] | Envoy's protocol | [`pick`], [`route`] |
//! | 4 | [`admin`] | the admin port | [`pick`], [`telemetry`], [`config`] |
//! | 4 | [`engine`] | the simulated engine pod | [`prompt`], [`kv`] |
//! | 5 | [`app`] | everything put together | all but [`cli`], [`engine`] |
//! | 5 | [`cli`] | the command line | [`app`], [`engine`], [`config`] |

pub mod admin;
pub mod app;
pub mod blocks;
pub mod cli;
pub mod config;
pub mod decide;
pub mod engine;
pub mod extproc;
pub mod fleet;
pub mod kv;
pub mod load;
pub mod names;
pub mod observe;
pub mod pick;
pub mod prompt;
pub mod revision;
pub mod route;
pub mod telemetry;
pub mod units;

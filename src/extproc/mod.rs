//! The gateway's side: Envoy's external-processing protocol.
//!
//! Lives here: the session of one request ([`session`]), the bytes it holds ([`body`]), Envoy's
//! types ([`wire`]), the gRPC service around it ([`server`]).
//! Never here: choices; what comes back from the picker is carried out, not judged.
//! Invariant: no message of the gateway stays without an answer or a deadline, and a gRPC stream
//! is never ended with OK before its request is answered, unless the gateway takes no answer.
//!
//! Body modes, by what the gateway announces in its first message:
//!
//! | request body mode | what happens to a request with a body |
//! | --- | --- |
//! | `FULL_DUPLEX_STREAMED` | headers and body are held, then both go back, the body in chunks |
//! | `BUFFERED` | headers go on at once, the plan is applied in the reply to the body |
//! | `NONE` | a pod is chosen without the prompt (counted as `body_not_sent`) |
//! | `STREAMED`, `BUFFERED_PARTIAL`, `GRPC` | refused with 500 `unsupported_processing_mode` |
//! | not announced | as `FULL_DUPLEX_STREAMED`; refused with the same 500 when no body message comes within [`Limits::unannounced`], because the gateway then waits for us |
//!
//! Requests that bring no body (`GET`, `HEAD`, `OPTIONS`, upgrades, `content-length: 0`) are
//! answered at their headers in every mode.
//!
//! `send_body_without_waiting_for_header_response` changes nothing here: a full-duplex gateway sends the body unasked
//! whatever it says, a buffering one waits, and it means nothing beside the modes that are refused.
//!
//! A gateway in `observability_mode` takes no answer. Its streams are ended at their first message, without a pick, a
//! booking or an answer (counted as `only_shown`, with a warning), because its requests go on without us.

pub mod body;
pub mod conformance;
pub mod counters;
pub mod exchange;
pub mod health;
pub mod message;
mod picker;
pub mod server;
pub mod session;
pub mod settings;
pub mod tls;
pub mod wire;

pub use server::{ServerError, serve};
pub use settings::{Limits, Settings};

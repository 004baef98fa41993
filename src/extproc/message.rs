//! What goes in and out of a session, without Envoy's types.
//!
//! Lives here: [`Incoming`], [`Outgoing`], [`Modes`].
//! Never here: how they look on the wire (see `wire`), what follows from them (see `session`).
//! Invariant: every message that the gateway can send has a variant, [`Incoming::Other`] included.

use crate::names::Endpoint;
use crate::pick::{Head, Refusal};
use crate::route::{DecisionId, Plan};
use bytes::Bytes;

/// How a gateway sends bodies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BodyMode {
    /// Not at all.
    None,
    /// Chunk by chunk, each waiting for its answer; headers go on before.
    Streamed,
    /// Once, complete.
    Buffered,
    /// Once, as much as fits a buffer.
    BufferedPartial,
    /// Chunk by chunk, without waiting for answers.
    FullDuplex,
    /// Per gRPC message, or a mode that is newer than this program.
    Unsupported,
    /// The gateway did not say.
    Unannounced,
}

impl BodyMode {
    /// Envoy's name for it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            BodyMode::None => "NONE",
            BodyMode::Streamed => "STREAMED",
            BodyMode::Buffered => "BUFFERED",
            BodyMode::BufferedPartial => "BUFFERED_PARTIAL",
            BodyMode::FullDuplex => "FULL_DUPLEX_STREAMED",
            BodyMode::Unsupported => "a mode unknown here",
            BodyMode::Unannounced => "an unannounced mode",
        }
    }

    /// Whether body messages are answered with the bytes themselves.
    #[must_use]
    pub fn returns_bytes(self) -> bool {
        matches!(self, BodyMode::FullDuplex | BodyMode::Unannounced)
    }
}

/// The body modes of a stream, as announced in its first message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Modes {
    /// Of request bodies.
    pub request: BodyMode,
    /// Of response bodies.
    pub response: BodyMode,
}

impl Modes {
    /// What is assumed of a gateway that announces nothing.
    pub const UNANNOUNCED: Modes = Modes {
        request: BodyMode::Unannounced,
        response: BodyMode::Unannounced,
    };
}

/// A message of the gateway.
#[derive(Clone, Debug)]
pub enum Incoming {
    /// The request's headers.
    RequestHeaders {
        /// What they say.
        head: Box<Head>,
        /// Nothing follows.
        end: bool,
    },
    /// A piece of the request's body.
    RequestBody {
        /// Its bytes.
        bytes: Bytes,
        /// Nothing follows.
        end: bool,
    },
    /// The request's trailers; they end the body.
    RequestTrailers,
    /// The response's headers.
    ResponseHeaders {
        /// `:status`, if it is a number.
        status: Option<u16>,
        /// The pod that the gateway reached.
        served: Option<Endpoint>,
        /// Nothing follows.
        end: bool,
    },
    /// A piece of the response's body.
    ResponseBody {
        /// Its bytes.
        bytes: Bytes,
        /// Nothing follows.
        end: bool,
    },
    /// The response's trailers; they end the body.
    ResponseTrailers,
    /// Any message of a gateway that only shows what passes, and takes no answer.
    Shown,
    /// A message that asks for nothing.
    Other,
}

/// An answer to the gateway.
#[derive(Clone, Debug, PartialEq)]
pub enum Outgoing {
    /// To the request's headers: go on, edited as planned, or as they are.
    RequestHeaders(Option<Box<Plan>>),
    /// To the request's body.
    RequestBody(BodyReply),
    /// To the request's trailers: go on.
    RequestTrailers,
    /// To the response's headers: go on, and tell the client this.
    ResponseHeaders {
        /// The decision's id.
        decision: Option<DecisionId>,
        /// The pod that served, for a conformance test.
        echo: Option<Endpoint>,
    },
    /// To the response's body.
    ResponseBody(BodyReply),
    /// To the response's trailers: go on.
    ResponseTrailers,
    /// An answer to the client, instead of a pod's.
    Immediate(Refusal),
}

/// An answer to a piece of a body.
#[derive(Clone, Debug, PartialEq)]
pub enum BodyReply {
    /// Go on with the body as it is; the request headers are edited as planned, if there is a plan.
    Continue(Option<Box<Plan>>),
    /// Go on with these bytes.
    Bytes {
        /// At most [`CHUNK`](crate::extproc::body::CHUNK) of them.
        bytes: Bytes,
        /// Nothing follows.
        end: bool,
    },
}

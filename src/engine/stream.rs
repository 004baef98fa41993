//! Answers as HTTP bodies.
//!
//! Lives here: [`Sse`] (tokens as server-sent events) and [`Payload`] (any body).
//! Never here: what a chunk says (`reply`), heads (`http`).
//! Invariant: chunks are written in the order tokens come; dropping the body cancels what is left.

use super::reply::{Heard, Speech, StreamUsage};
use bytes::Bytes;
use hyper::body::Frame;
use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll};

const DONE: Bytes = Bytes::from_static(b"data: [DONE]\n\n");

/// The streaming body.
pub(super) struct Sse {
    speech: Speech,
    usage: StreamUsage,
    ready: VecDeque<Bytes>,
    ended: bool,
}

impl Sse {
    /// Streams `speech`.
    pub(super) fn new(speech: Speech, usage: StreamUsage) -> Sse {
        Sse {
            speech,
            usage,
            ready: VecDeque::new(),
            ended: false,
        }
    }

    /// Makes chunks of the next token, if there is one.
    fn advance(&mut self, context: &mut Context<'_>) {
        match self.speech.poll_next(context) {
            Poll::Pending => {}
            Poll::Ready(Heard::Piece(piece)) => {
                self.ready.extend(self.speech.opening_chunk(&piece));
                self.ready.push_back(self.speech.piece_chunk(&piece));
            }
            Poll::Ready(Heard::End) => {
                if self.usage == StreamUsage::Report {
                    self.ready.push_back(self.speech.usage_chunk());
                }
                self.ready.push_back(DONE);
                self.ended = true;
            }
            // The engine is shutting down; the stream breaks off without [DONE].
            Poll::Ready(Heard::Stopped) => self.ended = true,
        }
    }

    /// The next piece of the body.
    pub(super) fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Frame<Bytes>>> {
        if self.ready.is_empty() && !self.ended {
            self.advance(context);
        }
        match self.ready.pop_front() {
            Some(chunk) => Poll::Ready(Some(Frame::data(chunk))),
            None if self.ended => Poll::Ready(None),
            None => Poll::Pending,
        }
    }
}

/// The body of any answer.
pub(super) enum Payload {
    /// Known as a whole; sent once.
    Whole(Option<Bytes>),
    /// Server-sent events.
    Stream(Box<Sse>),
    /// Another engine's answer, passed through.
    Relay(hyper::body::Incoming),
}

impl hyper::body::Body for Payload {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        match self.get_mut() {
            Payload::Whole(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Payload::Stream(sse) => sse.poll(context).map(|frame| frame.map(Ok)),
            Payload::Relay(incoming) => Pin::new(incoming).poll_frame(context),
        }
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        match self {
            Payload::Whole(bytes) => {
                hyper::body::SizeHint::with_exact(bytes.as_ref().map_or(0, Bytes::len) as u64)
            }
            Payload::Stream(_) => hyper::body::SizeHint::default(),
            Payload::Relay(incoming) => hyper::body::Body::size_hint(incoming),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Payload::Whole(bytes) => bytes.is_none(),
            Payload::Stream(_) => false,
            Payload::Relay(incoming) => hyper::body::Body::is_end_stream(incoming),
        }
    }
}

//! The request's half of a session: held until its pod is chosen, then passed on.
//!
//! Lives here: what each request message does, and which requests bring no body.
//! Never here: what happens after the pick (see the parent's `picked`).
//! Invariant: a request asks for one pick, and what is held until then is bounded.

use super::{
    Action, Actions, Answers, Close, End, Event, Picking, Request, Session, Trailers, ignored,
    request_chunk, send_chunks,
};
use crate::extproc::body::Body;
use crate::extproc::message::{BodyMode, BodyReply, Outgoing};
use crate::pick::{Head, Refusal};
use bytes::Bytes;
use smallvec::smallvec;

impl Session {
    pub(super) fn request_headers(&mut self, head: Box<Head>, end: bool) -> Actions {
        if !matches!(self.request, Request::Fresh) {
            return ignored();
        }
        let mode = self.modes().request;
        if end || brings_no_body(&head) {
            let end = if end { End::Headers } else { End::NotYet };
            return self.pick_at_headers(head, end);
        }
        match mode {
            BodyMode::None => {
                let mut actions = self.pick_at_headers(head, End::NotYet);
                actions.push(Action::Count(Event::BodyNotSent));
                actions
            }
            BodyMode::Streamed | BodyMode::BufferedPartial | BodyMode::Unsupported => {
                self.unsupported()
            }
            BodyMode::Buffered | BodyMode::FullDuplex | BodyMode::Unannounced => {
                self.collect(head, mode)
            }
        }
    }

    fn pick_at_headers(&mut self, head: Box<Head>, end: End) -> Actions {
        self.request = Request::Picking(Picking {
            answers: Answers::Headers,
            body: Body::new(self.body_limit, None),
            replies: 0,
            end,
        });
        smallvec![Action::Pick { head, body: None }]
    }

    fn collect(&mut self, head: Box<Head>, mode: BodyMode) -> Actions {
        let expected = head
            .headers
            .get("content-length")
            .and_then(|value| value.trim().parse::<usize>().ok());
        if expected.is_some_and(|expected| self.body_limit < expected) {
            return self.message_too_long();
        }
        let body = Body::new(self.body_limit, expected);
        self.request = Request::Collecting { head, body };
        match mode {
            BodyMode::Buffered => smallvec![Action::Send(Outgoing::RequestHeaders(None))],
            _ => Actions::new(),
        }
    }

    pub(super) fn request_body(&mut self, bytes: Bytes, end: bool) -> Actions {
        let mode = self.modes().request;
        match &mut self.request {
            Request::Fresh => self.unsupported(),
            Request::Collecting { body, .. } => match body.push(bytes) {
                Err(too_long) => self.refuse(too_long.into()),
                // A buffering gateway sends the body once; without `end`, trailers follow.
                Ok(()) if end || mode == BodyMode::Buffered => self.pick_with_body(End::Body),
                Ok(()) => Actions::new(),
            },
            Request::Picking(picking) if picking.end == End::NotYet => {
                if end {
                    picking.end = End::Body;
                }
                if !mode.returns_bytes() {
                    picking.replies = picking.replies.saturating_add(1);
                    return Actions::new();
                }
                match picking.body.push(bytes) {
                    Err(too_long) => self.refuse(too_long.into()),
                    Ok(()) => Actions::new(),
                }
            }
            Request::Passing => {
                if end {
                    self.request = Request::Answered;
                }
                let mut actions = Actions::new();
                if mode.returns_bytes() {
                    send_chunks(&mut actions, bytes, end, request_chunk);
                } else {
                    actions.push(Action::Send(Outgoing::RequestBody(BodyReply::Continue(
                        None,
                    ))));
                }
                actions
            }
            Request::Picking(_) | Request::Answered | Request::Refused => ignored(),
        }
    }

    pub(super) fn request_trailers(&mut self) -> Actions {
        if self.request_trailers != Trailers::None {
            return ignored();
        }
        match &mut self.request {
            Request::Fresh => self.unsupported(),
            Request::Collecting { .. } => {
                if self.modes().request == BodyMode::Buffered {
                    // The headers went on already, and no reply to trailers can edit them.
                    return self.refuse(Refusal::new(
                        400,
                        "empty_body",
                        "request body: expected a body, found trailers only",
                    ));
                }
                self.request_trailers = Trailers::Owed;
                self.pick_with_body(End::Trailers)
            }
            Request::Picking(picking) => {
                if picking.end == End::NotYet {
                    picking.end = End::Trailers;
                }
                self.request_trailers = Trailers::Owed;
                Actions::new()
            }
            Request::Passing | Request::Answered => {
                self.request = Request::Answered;
                self.request_trailers = Trailers::Answered;
                smallvec![Action::Send(Outgoing::RequestTrailers)]
            }
            Request::Refused => ignored(),
        }
    }

    fn pick_with_body(&mut self, end: End) -> Actions {
        let Request::Collecting { head, body } =
            std::mem::replace(&mut self.request, Request::Answered)
        else {
            return Actions::new();
        };
        let bytes = body.into_bytes();
        let mut held = Body::new(self.body_limit, None);
        let answers = match self.modes().request {
            BodyMode::Buffered => Answers::Body,
            _ => {
                // Cannot fail: the same bytes fitted before.
                let _ = held.push(bytes.clone());
                Answers::Headers
            }
        };
        self.request = Request::Picking(Picking {
            answers,
            body: held,
            replies: 0,
            end,
        });
        let body = (!bytes.is_empty()).then_some(bytes);
        smallvec![Action::Pick { head, body }]
    }

    /// Nothing is chosen, because nothing of it would reach the request, and nothing is booked,
    /// because it may run on any pod. The end of the stream tells the gateway that no more
    /// messages are needed.
    pub(super) fn shown(&mut self) -> Actions {
        if !matches!(self.request, Request::Fresh) {
            return ignored();
        }
        self.request = Request::Answered;
        smallvec![Action::Count(Event::OnlyShown), Action::Close(Close::Ok)]
    }

    pub(super) fn unsupported(&mut self) -> Actions {
        let found = match self.request {
            Request::Fresh if self.modes().request.returns_bytes() => "no request headers",
            _ => self.modes().request.as_str(),
        };
        let mut actions = self.refuse(Refusal::new(
            500,
            "unsupported_processing_mode",
            format!(
                "gateway configuration: expected request headers to be sent, and request_body_mode \
                 FULL_DUPLEX_STREAMED or BUFFERED, found {found}"
            ),
        ));
        actions.push(Action::Count(Event::UnsupportedMode));
        actions
    }
}

/// Whether no body belongs to a request with this head, whatever the gateway says: its pod is
/// chosen at once, because waiting for a body would be waiting for ever.
fn brings_no_body(head: &Head) -> bool {
    let length_zero = head
        .headers
        .get("content-length")
        .is_some_and(|length| length.trim() == "0");
    length_zero
        || head.headers.contains("upgrade")
        || matches!(head.method.as_str(), "GET" | "HEAD" | "OPTIONS" | "CONNECT")
}

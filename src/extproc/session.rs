//! One request between gateway and picker, as a state machine without I/O.
//!
//! Lives here: which message gets which answer, in which order, and what is held meanwhile.
//! Never here: clocks, sockets, Envoy's types, choices.
//! Invariant: at most one pick per session; after an immediate answer nothing else is sent; the
//! bytes sent back join to the bytes received.

use crate::extproc::body::{self, Body};
use crate::extproc::conformance::Conformance;
use crate::extproc::message::{BodyMode, BodyReply, Incoming, Modes, Outgoing};
use crate::names::Endpoint;
use crate::pick::{Head, Refusal};
use crate::route::{DecisionId, Plan};
use bytes::Bytes;
use smallvec::{SmallVec, smallvec};

/// What the caller does after a message, in order.
pub type Actions = SmallVec<[Action; 4]>;

/// One thing to do.
#[derive(Clone, Debug)]
pub enum Action {
    /// Send this to the gateway.
    Send(Outgoing),
    /// Choose a pod, then call [`Session::picked`].
    Pick {
        /// The request's head.
        head: Box<Head>,
        /// Its body, as received; `None` when no body will come.
        body: Option<Bytes>,
    },
    /// Tell the request's flight.
    Flight(Flown),
    /// Count this.
    Count(Event),
    /// End the stream, after everything was sent.
    Close(Close),
}

/// How a stream is ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Close {
    /// With OK: the gateway has its answer.
    Ok,
    /// With an error, so that the gateway does not take what it has for everything.
    Error(&'static str),
}

/// What a flight is told of the response.
#[derive(Clone, Debug, PartialEq)]
pub enum Flown {
    /// Its headers came.
    Headers {
        /// `:status`.
        status: Option<u16>,
        /// The pod that the gateway reached.
        served: Option<Endpoint>,
    },
    /// The first bytes came: prefill is over.
    FirstBytes,
    /// Bytes came.
    Bytes(Bytes),
    /// It is complete.
    Finish,
}

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The body mode is not one that this program can work with.
    UnsupportedMode,
    /// A request has a body that the gateway does not send.
    BodyNotSent,
    /// The gateway takes no answer: its request goes where it goes.
    OnlyShown,
    /// A message changed nothing.
    Ignored,
}

/// What the session waits for: the caller sets the deadline, and calls [`Session::expired`] when
/// this value has not changed by then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waiting {
    /// Nothing that needs a deadline.
    Nothing,
    /// A first piece of body, from a gateway that did not announce whether it waits for us.
    Unannounced,
    /// More of the body.
    Body {
        /// Bytes received so far.
        received: usize,
    },
    /// The pick.
    Decision,
}

/// How a stream's end is to be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// There is nothing left to release.
    Settled,
    /// The client, the gateway or the pod gave up.
    Aborted,
    /// The gateway does not show responses: the end says nothing about the request.
    Unseen,
}

/// The session of one request.
#[derive(Debug)]
pub struct Session {
    body_limit: usize,
    modes: Option<Modes>,
    request: Request,
    response: Response,
    /// The decision that the request went out with.
    decision: Option<DecisionId>,
    request_trailers: Trailers,
    response_trailers: Trailers,
    conformance: Conformance,
}

/// Where the request is.
#[derive(Debug)]
enum Request {
    /// Nothing came yet.
    Fresh,
    /// The body is being collected.
    Collecting { head: Box<Head>, body: Body },
    /// A pod is being chosen.
    Picking(Picking),
    /// Headers are answered; the body still flows.
    Passing,
    /// Everything is answered.
    Answered,
    /// The client got our answer.
    Refused,
}

/// What waits for the pick.
#[derive(Debug)]
struct Picking {
    /// The message whose answer carries the plan.
    answers: Answers,
    /// Body to send back with it.
    body: Body,
    /// Body messages to answer with an empty reply after it.
    replies: usize,
    end: End,
}

/// The message whose answer carries a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answers {
    Headers,
    Body,
}

/// How the request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    NotYet,
    /// With its headers: there is no body.
    Headers,
    /// With a body message.
    Body,
    /// With trailers: no body message says that it is the last.
    Trailers,
}

/// Whether trailers were seen and answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trailers {
    None,
    Owed,
    Answered,
}

/// Where the response is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Response {
    Pending,
    /// Headers came.
    Headers,
    /// Bytes came.
    Bytes,
    /// It is complete.
    Ended,
}

impl Session {
    /// A session that holds at most `body_limit` bytes of body.
    #[must_use]
    pub fn new(body_limit: usize) -> Session {
        Session {
            body_limit,
            modes: None,
            request: Request::Fresh,
            response: Response::Pending,
            decision: None,
            request_trailers: Trailers::None,
            response_trailers: Trailers::None,
            conformance: Conformance::Disabled,
        }
    }

    /// The same session, which tells conformance tests which pod served if that is `Enabled`.
    #[must_use]
    pub fn conformance(mut self, conformance: Conformance) -> Session {
        self.conformance = conformance;
        self
    }

    /// What the gateway's first message announced; later calls change nothing.
    pub fn announce(&mut self, modes: Option<Modes>) {
        self.modes
            .get_or_insert(modes.unwrap_or(Modes::UNANNOUNCED));
    }

    fn modes(&self) -> Modes {
        self.modes.unwrap_or(Modes::UNANNOUNCED)
    }

    /// A message came.
    pub fn on(&mut self, incoming: Incoming) -> Actions {
        if matches!(self.request, Request::Refused) {
            return smallvec![Action::Count(Event::Ignored)];
        }
        match incoming {
            Incoming::RequestHeaders { head, end } => self.request_headers(head, end),
            Incoming::RequestBody { bytes, end } => self.request_body(bytes, end),
            Incoming::RequestTrailers => self.request_trailers(),
            Incoming::ResponseHeaders {
                status,
                served,
                end,
            } => self.response_headers(status, served, end),
            Incoming::ResponseBody { bytes, end } => self.response_body(bytes, end),
            Incoming::ResponseTrailers => self.response_trailers(),
            Incoming::Shown => self.shown(),
            Incoming::Other => Actions::new(),
        }
    }

    /// The pick is done.
    pub fn picked(&mut self, outcome: Result<Plan, Refusal>) -> Actions {
        let picking = match std::mem::replace(&mut self.request, Request::Answered) {
            Request::Picking(picking) => picking,
            other => {
                // A pick that outlived the wait for it; the caller drops it when that ends.
                self.request = other;
                return Actions::new();
            }
        };
        let plan = match outcome {
            Ok(plan) => Box::new(plan),
            Err(refusal) => return self.refuse(refusal),
        };
        self.decision = Some(plan.decision_id);
        let mut actions = Actions::new();
        match picking.answers {
            Answers::Headers => {
                actions.push(Action::Send(Outgoing::RequestHeaders(Some(plan))));
                let last = picking.end == End::Body;
                if self.modes().request.returns_bytes() {
                    send_chunks(&mut actions, picking.body.into_bytes(), last, request_chunk);
                }
            }
            Answers::Body => actions.push(Action::Send(Outgoing::RequestBody(
                BodyReply::Continue(Some(plan)),
            ))),
        }
        for _ in 0..picking.replies {
            actions.push(Action::Send(Outgoing::RequestBody(BodyReply::Continue(
                None,
            ))));
        }
        if self.request_trailers == Trailers::Owed {
            self.request_trailers = Trailers::Answered;
            actions.push(Action::Send(Outgoing::RequestTrailers));
        }
        if picking.end == End::NotYet {
            self.request = Request::Passing;
        }
        actions
    }

    /// What must happen in time.
    #[must_use]
    pub fn waiting(&self) -> Waiting {
        match &self.request {
            Request::Collecting { body, .. }
                if body.is_empty() && self.modes().request == BodyMode::Unannounced =>
            {
                Waiting::Unannounced
            }
            Request::Collecting { body, .. } => Waiting::Body {
                received: body.len(),
            },
            Request::Picking(_) => Waiting::Decision,
            Request::Fresh | Request::Passing | Request::Answered | Request::Refused => {
                Waiting::Nothing
            }
        }
    }

    /// What [`Session::waiting`] said did not happen in time.
    pub fn expired(&mut self) -> Actions {
        match self.waiting() {
            Waiting::Nothing => Actions::new(),
            Waiting::Unannounced => self.unsupported(),
            Waiting::Body { .. } => self.refuse(Refusal::new(
                408,
                "body_timeout",
                "request body: expected to go on, found no more of it in time",
            )),
            Waiting::Decision => self.refuse(Refusal::new(
                504,
                "decision_timeout",
                "no pod could be chosen in time",
            )),
        }
    }

    /// Answers the client instead of a pod; when the request went out already, ends the stream
    /// with an error.
    pub fn refuse(&mut self, refusal: Refusal) -> Actions {
        match self.request {
            Request::Refused => Actions::new(),
            _ if self.decision.is_some() => {
                smallvec![Action::Close(Close::Error(refusal.code))]
            }
            _ => {
                self.request = Request::Refused;
                smallvec![
                    Action::Send(Outgoing::Immediate(refusal)),
                    Action::Close(Close::Ok)
                ]
            }
        }
    }

    /// A message was longer than any that is accepted.
    pub fn message_too_long(&mut self) -> Actions {
        let limit = self.body_limit;
        self.refuse(Refusal::new(
            413,
            "body_too_large",
            format!("request body: expected at most {limit} bytes, found more"),
        ))
    }

    /// Whether nothing came yet.
    #[must_use]
    pub fn is_fresh(&self) -> bool {
        matches!(self.request, Request::Fresh)
    }

    /// Whether a pick is awaited.
    #[must_use]
    pub fn is_picking(&self) -> bool {
        matches!(self.request, Request::Picking(_))
    }

    /// Whether bytes of the request are, or may yet be, held.
    #[must_use]
    pub fn holds_request(&self) -> bool {
        matches!(
            self.request,
            Request::Collecting { .. } | Request::Picking(_)
        )
    }

    /// Whether the client got, or will get, what was asked for: an end of the stream is then
    /// nobody's fault.
    #[must_use]
    pub fn is_answered(&self) -> bool {
        matches!(
            self.request,
            Request::Answered | Request::Passing | Request::Refused
        )
    }

    /// How to take the stream's end, now.
    #[must_use]
    pub fn ending(&self) -> Ending {
        match (&self.request, self.response) {
            (Request::Answered | Request::Passing, Response::Ended)
            | (Request::Refused | Request::Fresh, _) => Ending::Settled,
            (Request::Answered | Request::Passing, Response::Pending | Response::Headers)
                if matches!(
                    self.modes().response,
                    BodyMode::None | BodyMode::Unannounced
                ) =>
            {
                Ending::Unseen
            }
            _ => Ending::Aborted,
        }
    }
}

fn ignored() -> Actions {
    smallvec![Action::Count(Event::Ignored)]
}

fn request_chunk(bytes: Bytes, end: bool) -> Outgoing {
    Outgoing::RequestBody(BodyReply::Bytes { bytes, end })
}

fn response_chunk(bytes: Bytes, end: bool) -> Outgoing {
    Outgoing::ResponseBody(BodyReply::Bytes { bytes, end })
}

/// Sends `bytes` back in pieces; with `end`, the last piece says so, and there is one even for no
/// bytes.
fn send_chunks(
    actions: &mut Actions,
    bytes: Bytes,
    end: bool,
    message: fn(Bytes, bool) -> Outgoing,
) {
    let mut pieces = body::chunks(bytes).peekable();
    if pieces.peek().is_none() && end {
        actions.push(Action::Send(message(Bytes::new(), true)));
    }
    while let Some(piece) = pieces.next() {
        let last = end && pieces.peek().is_none();
        actions.push(Action::Send(message(piece, last)));
    }
}

mod request;
mod response;
#[cfg(test)]
mod tests;

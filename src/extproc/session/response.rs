//! The response's half of a session: everything passes unchanged, and is watched.
//!
//! Lives here: the answers to response messages, and what the request's flight is told of them.
//! Never here: anything that holds a response back.
//! Invariant: each message is answered at once, in the way of the announced body mode.

use super::{Action, Actions, Flown, Outgoing, Response, Session, Trailers, ignored};
use crate::extproc::conformance::Conformance;
use crate::extproc::message::BodyReply;
use crate::names::Endpoint;
use bytes::Bytes;

impl Session {
    pub(super) fn response_headers(
        &mut self,
        status: Option<u16>,
        served: Option<Endpoint>,
        end: bool,
    ) -> Actions {
        if self.response != Response::Pending {
            return ignored();
        }
        self.response = Response::Headers;
        let mut actions = Actions::new();
        self.tell(&mut actions, Flown::Headers { status, served });
        if end {
            self.end_response(&mut actions);
        }
        actions.push(Action::Send(Outgoing::ResponseHeaders {
            decision: self.decision,
            echo: match self.conformance {
                Conformance::Disabled => None,
                Conformance::Enabled => served,
            },
        }));
        actions
    }

    pub(super) fn response_body(&mut self, bytes: Bytes, end: bool) -> Actions {
        if self.response == Response::Ended {
            return ignored();
        }
        let mut actions = Actions::new();
        if !bytes.is_empty() {
            if self.response != Response::Bytes {
                self.response = Response::Bytes;
                self.tell(&mut actions, Flown::FirstBytes);
            }
            self.tell(&mut actions, Flown::Bytes(bytes.clone()));
        }
        if end {
            self.end_response(&mut actions);
        }
        if !self.modes().response.returns_bytes() {
            let reply = BodyReply::Continue(None);
            actions.push(Action::Send(Outgoing::ResponseBody(reply)));
        } else if bytes.is_empty() {
            let reply = BodyReply::Bytes { bytes, end };
            actions.push(Action::Send(Outgoing::ResponseBody(reply)));
        } else {
            super::send_chunks(&mut actions, bytes, end, super::response_chunk);
        }
        actions
    }

    pub(super) fn response_trailers(&mut self) -> Actions {
        if self.response_trailers != Trailers::None {
            return ignored();
        }
        self.response_trailers = Trailers::Answered;
        let mut actions = Actions::new();
        self.end_response(&mut actions);
        actions.push(Action::Send(Outgoing::ResponseTrailers));
        actions
    }

    fn end_response(&mut self, actions: &mut Actions) {
        if self.response != Response::Ended {
            self.response = Response::Ended;
            self.tell(actions, Flown::Finish);
        }
    }

    /// Only a request that went out with a plan has a flight to tell.
    fn tell(&self, actions: &mut Actions, flown: Flown) {
        if self.decision.is_some() {
            actions.push(Action::Flight(flown));
        }
    }
}

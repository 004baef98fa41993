//! The live stream of decisions: server-sent events.
//!
//! Lives here: one task per client that reads the journal and writes events.
//! Never here: anything that a decision waits for; filters (clients have them).
//! Invariant: a client costs one task and a channel of [`QUEUE`] events; one that does not read is
//! dropped, and at most [`CLIENTS`] are served.
//!
//! Events: `decisions` (`{"missed": n, "records": […]}`, at most every [`EVERY`]), `outcomes` (what
//! became of decisions sent before), and comments that keep the connection alive.

use crate::admin::Body;
use crate::pick::Picker;
use crate::telemetry::record::{Outcome, Record};
use bytes::Bytes;
use http_body_util::{Either, StreamBody};
use hyper::body::Frame;
use hyper::{Response, header};
use serde::Serialize;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio_stream::wrappers::ReceiverStream;

/// Most clients at once.
pub(super) const CLIENTS: usize = 16;
/// Events that wait for a client to read them.
const QUEUE: usize = 16;
/// Time between two looks at the journal.
const EVERY: Duration = Duration::from_millis(100);
/// Looks without news after which a comment is sent, so that a connection that is gone is noticed.
const QUIET: u32 = 100;
/// Decisions in one event: more than that in [`EVERY`] are counted, not shown.
const MOST: usize = 1000;
/// Decisions whose outcome is awaited.
const AWAITED: usize = 1024;

/// The body of a live stream.
pub(super) type Feed = StreamBody<ReceiverStream<Result<Frame<Bytes>, Infallible>>>;

#[derive(Serialize)]
struct Decisions<'a> {
    missed: u64,
    records: Vec<crate::telemetry::record::Brief<'a>>,
}

#[derive(Serialize)]
struct Outcomes<'a> {
    id: &'a str,
    sequence: u64,
    #[serde(flatten)]
    outcome: Outcome,
}

/// Starts a live stream; it ends when the client is gone or too slow, or the picker is.
pub(super) fn answer(picker: &Arc<Picker>, permit: OwnedSemaphorePermit) -> Response<Body> {
    let (send, receive) = mpsc::channel(QUEUE);
    let follower = Follower {
        picker: Arc::downgrade(picker),
        send,
        position: 0,
        awaited: VecDeque::new(),
        _permit: permit,
    };
    tokio::spawn(follower.run());
    let body = StreamBody::new(ReceiverStream::new(receive));
    let mut response = Response::new(Either::Right(body));
    let headers = response.headers_mut();
    let value = header::HeaderValue::from_static;
    headers.insert(header::CONTENT_TYPE, value("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, value("no-store"));
    // A proxy that gathers the answer first would make it anything but live.
    headers.insert("x-accel-buffering", value("no"));
    response
}

struct Follower {
    picker: Weak<Picker>,
    send: mpsc::Sender<Result<Frame<Bytes>, Infallible>>,
    position: u64,
    /// Decisions sent without their end, and what was said of it last.
    awaited: VecDeque<(Arc<Record>, bool)>,
    _permit: OwnedSemaphorePermit,
}

/// The client is gone, or does not read.
struct Gone;

impl Follower {
    async fn run(mut self) {
        let mut ticks = tokio::time::interval(EVERY);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut quiet = 0;
        loop {
            tokio::select! {
                () = self.send.closed() => return,
                _ = ticks.tick() => {}
            }
            let Some(picker) = self.picker.upgrade() else {
                return;
            };
            let told = match self.look(&picker) {
                Ok(told) => told,
                Err(Gone) => return,
            };
            quiet = if told { 0 } else { quiet + 1 };
            if quiet == QUIET {
                quiet = 0;
                if self.write(Bytes::from_static(b": quiet\n\n")).is_err() {
                    return;
                }
            }
        }
    }

    /// Sends what is new; whether there was anything.
    fn look(&mut self, picker: &Picker) -> Result<bool, Gone> {
        let first = self.position == 0;
        let batch = picker.journal().follow(self.position, MOST);
        self.position = batch.next;
        let mut told = false;
        let settled = self.settled();
        if !settled.is_empty() {
            told = true;
            let lines: Vec<Outcomes<'_>> = settled
                .iter()
                .map(|record| Outcomes {
                    id: &record.id,
                    sequence: record.sequence,
                    outcome: record.outcome(),
                })
                .collect();
            self.event("outcomes", &lines)?;
        }
        if !batch.records.is_empty() || first {
            told = true;
            let event = Decisions {
                missed: if first { 0 } else { batch.missed },
                records: batch.records.iter().map(|record| record.brief()).collect(),
            };
            self.event("decisions", &event)?;
        }
        for record in batch.records {
            let outcome = record.outcome();
            if outcome.end.is_none() {
                if self.awaited.len() == AWAITED {
                    self.awaited.pop_front();
                }
                self.awaited.push_back((record, outcome.ttft_ms.is_some()));
            }
        }
        Ok(told)
    }

    /// Decisions sent before whose answer has begun or ended since.
    fn settled(&mut self) -> Vec<Arc<Record>> {
        let mut settled = Vec::new();
        self.awaited.retain_mut(|(record, begun)| {
            let outcome = record.outcome();
            if outcome.end.is_some() || (outcome.ttft_ms.is_some() && !*begun) {
                *begun = true;
                settled.push(Arc::clone(record));
            }
            outcome.end.is_none()
        });
        settled
    }

    fn event(&self, name: &str, data: &impl Serialize) -> Result<(), Gone> {
        // Our own types always serialise; an event that did not would be left out.
        let Ok(data) = serde_json::to_string(data) else {
            return Ok(());
        };
        self.write(Bytes::from(format!("event: {name}\ndata: {data}\n\n")))
    }

    fn write(&self, bytes: Bytes) -> Result<(), Gone> {
        self.send.try_send(Ok(Frame::data(bytes))).map_err(|_| Gone)
    }
}

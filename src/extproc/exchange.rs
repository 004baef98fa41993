//! One gRPC stream: the session, driven by messages, the pick and deadlines.
//!
//! Lives here: `Exchange`, everything around a [`Session`] that needs a clock or waits.
//! Never here: Envoy's types, which answer a message gets.
//! Invariant: an exchange owns all that its request holds (bytes, permit, pick, flight), so that
//! dropping it, at whatever point, releases everything.

use crate::extproc::body::{self, Encoding};
use crate::extproc::conformance::{self, Conformance};
use crate::extproc::counters::Counters;
use crate::extproc::message::{Incoming, Modes, Outgoing};
use crate::extproc::session::{Action, Actions, Close, Ending, Event, Flown, Session, Waiting};
use crate::extproc::settings::Limits;
use crate::names::Endpoint;
use crate::pick::{Arrival, Ended, Head, Refusal};
use crate::route::Plan;
use bytes::Bytes;
use futures_util::{Stream, StreamExt};
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;
use tonic::Status;

/// So long after an exchange has nothing left to send, the answer to the request is surely on its way.
const OUT: Duration = Duration::from_millis(1);
/// Most leases at once; beyond it, load of unseen responses is released when their stream ends.
const LEASES: usize = 65_536;

/// Chooses pods: the picker, or a test's stand-in for it.
pub trait PickPods: Send + Sync + 'static {
    /// What follows a request after its pick; dropping it releases what the pick booked.
    type Flight: Follow;

    /// Chooses pods for a request.
    fn pick(
        &self,
        head: Head,
        body: Option<Bytes>,
    ) -> impl Future<Output = Result<(Plan, Self::Flight), Refusal>> + Send;

    /// A request ended before its pick, or while it waited for it; it is told nowhere else.
    fn ended_early(&self, arrival: &Arrival, how: Ended<'_>);

    /// Whether picks can succeed.
    fn ready(&self) -> bool;
}

/// Follows a request after its pick.
pub trait Follow: Send + 'static {
    /// Whether something is left to do that nobody waits for.
    fn unsettled(&self) -> bool {
        false
    }
    /// Does it: the answer to the request is out.
    fn settle(&mut self) {}
    /// The response's headers came.
    fn response_headers(&mut self, status: Option<u16>, served: Option<Endpoint>);
    /// The first bytes of the response came.
    fn first_bytes(&mut self);
    /// Bytes of the response came.
    fn response_bytes(&mut self, chunk: &[u8]);
    /// The response is complete.
    fn finish(self);
}

/// What all exchanges of a server share.
#[derive(Debug)]
pub(crate) struct Shared<P> {
    pub(crate) picker: Arc<P>,
    pub(crate) limits: Limits,
    pub(crate) counters: Arc<Counters>,
    pub(crate) conformance: Conformance,
    /// One permit per request that is held.
    held: Arc<Semaphore>,
    leases: Arc<Semaphore>,
    /// Fires when the time to drain is over.
    pub(crate) cut: CancellationToken,
    /// Knows the open exchanges.
    pub(crate) open: TaskTracker,
}

impl<P> Shared<P> {
    pub(crate) fn new(picker: Arc<P>, limits: Limits, counters: Arc<Counters>) -> Shared<P> {
        let permits = limits.held_requests.min(Semaphore::MAX_PERMITS);
        Shared {
            picker,
            limits,
            counters,
            conformance: Conformance::Disabled,
            held: Arc::new(Semaphore::new(permits)),
            leases: Arc::new(Semaphore::new(LEASES)),
            cut: CancellationToken::new(),
            open: TaskTracker::new(),
        }
    }
}

/// Why no further message comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Broken {
    /// A message was longer than any that is accepted.
    TooLong,
    /// The stream was reset, or carried something that is no message. The usual end of a request
    /// that went well: gateways reset the stream when they are done with it.
    Reset,
}

/// A message as `wire` read it.
pub(crate) type Received = Result<(Option<Modes>, Incoming), Broken>;

type PickFuture<F> = Pin<Box<dyn Future<Output = Result<(Plan, F), Refusal>> + Send>>;

/// One stream of messages, and the request it is about.
pub(crate) struct Exchange<S, P: PickPods> {
    inbound: S,
    session: Session,
    shared: Arc<Shared<P>>,
    /// Answers that were not sent yet.
    queue: VecDeque<Outgoing>,
    pick: Option<PickFuture<P::Flight>>,
    flight: Option<P::Flight>,
    permit: Option<OwnedSemaphorePermit>,
    deadline: Option<Pin<Box<Sleep>>>,
    /// What `deadline` is for.
    armed: Waiting,
    body_began: Option<Instant>,
    /// When what nobody waits for is done, if there is any.
    settles: Option<Instant>,
    close: Option<Close>,
    /// The request, until its pick or its end was told.
    untold: Option<Arrival>,
    _open: TaskTrackerToken,
}

/// What an exchange waited for.
enum Happened<F> {
    Received(Received),
    Ended,
    Picked(Result<(Plan, F), Refusal>),
    Expired,
    Cut,
    /// The answer to the request is out.
    Out,
}

impl<S, P> Exchange<S, P>
where
    S: Stream<Item = Received> + Unpin + Send + 'static,
    P: PickPods,
{
    /// The answers to the messages of `inbound`, on a stream that came at `arrival`.
    pub(crate) fn answers(
        inbound: S,
        shared: Arc<Shared<P>>,
        arrival: Arrival,
    ) -> impl Stream<Item = Result<Outgoing, Status>> + Send + 'static {
        shared.counters.streams.add(1);
        let exchange = Exchange {
            inbound,
            session: Session::new(shared.limits.body).conformance(shared.conformance),
            queue: VecDeque::new(),
            pick: None,
            flight: None,
            permit: None,
            deadline: None,
            armed: Waiting::Nothing,
            body_began: None,
            settles: None,
            close: None,
            untold: Some(arrival),
            _open: shared.open.token(),
            shared,
        };
        // In a box, because `unfold` moves it for every answer.
        futures_util::stream::unfold(Box::new(exchange), Exchange::next)
    }

    async fn next(mut self: Box<Self>) -> Option<(Result<Outgoing, Status>, Box<Self>)> {
        loop {
            if let Some(outgoing) = self.queue.pop_front() {
                if self.queue.is_empty() && !self.session.holds_request() {
                    self.permit = None;
                }
                return Some((Ok(outgoing), self));
            }
            match self.close {
                Some(Close::Ok) => return None,
                Some(Close::Error(code)) => {
                    self.close = Some(Close::Ok);
                    return Some((Err(Status::unavailable(code)), self));
                }
                None => {}
            }
            self.arm();
            let actions = match self.happens().await {
                Happened::Received(Ok((modes, incoming))) => self.received(modes, incoming),
                Happened::Received(Err(Broken::TooLong)) => self.session.message_too_long(),
                Happened::Received(Err(Broken::Reset)) => self.ended(Ending::Aborted),
                Happened::Ended if self.session.is_answered() => self.ended(Ending::Settled),
                Happened::Ended => self.ended(Ending::Aborted),
                Happened::Picked(outcome) => self.picked(outcome),
                Happened::Expired => self.session.expired(),
                Happened::Cut => self.cut(),
                Happened::Out => {
                    if let Some(flight) = &mut self.flight {
                        flight.settle();
                    }
                    continue;
                }
            };
            self.perform(actions);
        }
    }

    async fn happens(&mut self) -> Happened<P::Flight> {
        let Exchange {
            inbound,
            shared,
            pick,
            deadline,
            flight,
            settles,
            ..
        } = self;
        let unsettled = flight.as_ref().is_some_and(Follow::unsettled);
        let settles = unsettled.then(|| *settles.get_or_insert_with(|| Instant::now() + OUT));
        // A gateway that never stops sending must not keep either moment from being seen.
        if let Some(deadline) = deadline
            && deadline.deadline() <= Instant::now()
        {
            return Happened::Expired;
        }
        if settles.is_some_and(|settles| settles <= Instant::now()) {
            return Happened::Out;
        }
        // In the order of how often it happens; the last one takes a lock that all streams share,
        // so it is only looked at when there is nothing to do.
        tokio::select! {
            biased;
            picked = async { match pick {
                Some(pick) => pick.await,
                None => std::future::pending().await,
            } } => Happened::Picked(picked),
            received = inbound.next() => received.map_or(Happened::Ended, Happened::Received),
            () = async { match deadline {
                Some(deadline) => deadline.await,
                None => std::future::pending().await,
            } } => Happened::Expired,
            () = async { match settles {
                Some(settles) => tokio::time::sleep_until(settles).await,
                None => std::future::pending().await,
            } } => Happened::Out,
            () = shared.cut.cancelled() => Happened::Cut,
        }
    }

    /// Sets the deadline for what the session waits for now.
    fn arm(&mut self) {
        let waiting = self.session.waiting();
        if waiting == self.armed {
            return;
        }
        self.armed = waiting;
        let limits = &self.shared.limits;
        let now = Instant::now();
        let at = match waiting {
            Waiting::Nothing => None,
            Waiting::Unannounced => {
                self.body_began = Some(now);
                Some(now + limits.unannounced.min(limits.body_stall))
            }
            Waiting::Body { .. } => {
                let began = *self.body_began.get_or_insert(now);
                Some((now + limits.body_stall).min(began + limits.body_total))
            }
            Waiting::Decision => Some(now + limits.decision),
        };
        match (at, &mut self.deadline) {
            (Some(at), Some(deadline)) => deadline.as_mut().reset(at),
            (Some(at), none) => *none = Some(Box::pin(tokio::time::sleep_until(at))),
            (None, deadline) => *deadline = None,
        }
    }

    fn received(&mut self, modes: Option<Modes>, incoming: Incoming) -> Actions {
        self.session.announce(modes);
        let counters = &self.shared.counters;
        match &incoming {
            // Before anything of the request is held.
            Incoming::RequestHeaders { head, .. } if self.session.is_fresh() => {
                self.untold = Some(Arrival::now(head));
                match Arc::clone(&self.shared.held).try_acquire_owned() {
                    Ok(permit) => self.permit = Some(permit),
                    Err(_) => return self.session.refuse(overloaded()),
                }
            }
            Incoming::RequestBody { bytes, .. } => counters.request_bytes.add(bytes.len() as u64),
            Incoming::ResponseBody { bytes, .. } => counters.response_bytes.add(bytes.len() as u64),
            _ => {}
        }
        self.session.on(incoming)
    }

    fn picked(&mut self, outcome: Result<(Plan, P::Flight), Refusal>) -> Actions {
        self.pick = None;
        // The picker writes down what it decides.
        self.untold = None;
        match outcome {
            Ok((plan, flight)) => {
                self.flight = Some(flight);
                self.session.picked(Ok(plan))
            }
            Err(refusal) => self.session.picked(Err(refusal)),
        }
    }

    /// No further message comes. A stream whose request is not answered ends with an error: an
    /// end with OK would let a gateway go on without a pod.
    fn ended(&mut self, how: Ending) -> Actions {
        let close = match (how, self.session.ending()) {
            (Ending::Aborted, Ending::Aborted) => Close::Error("stream_ended_early"),
            _ => Close::Ok,
        };
        smallvec::smallvec![Action::Close(close)]
    }

    fn cut(&mut self) -> Actions {
        self.shared.counters.cut.add(1);
        let refusal = Refusal::new(503, "shutting_down", "the endpoint picker is shutting down")
            .retry_after(Duration::from_secs(1));
        self.session.refuse(refusal)
    }

    fn perform(&mut self, actions: Actions) {
        for action in actions {
            match action {
                Action::Send(outgoing) => {
                    if let Outgoing::Immediate(refusal) = &outgoing {
                        self.shared.counters.refused(refusal.code, refusal.status);
                        if let Some(arrival) = self.untold.take() {
                            let picker = &self.shared.picker;
                            picker.ended_early(&arrival, Ended::Refused(refusal));
                        }
                    }
                    self.queue.push_back(outgoing);
                }
                Action::Pick { head, body } => self.pick = Some(self.start_pick(*head, body)),
                Action::Flight(flown) => self.fly(flown),
                Action::Count(event) => self.count(event),
                Action::Close(close) => self.close = Some(close),
            }
        }
        if !self.session.is_picking() {
            self.pick = None;
        }
        if self.queue.is_empty() && !self.session.holds_request() {
            self.permit = None;
        }
    }

    fn start_pick(&self, mut head: Head, body: Option<Bytes>) -> PickFuture<P::Flight> {
        if self.shared.conformance == Conformance::Enabled {
            conformance::narrow(&mut head);
        }
        let picker = Arc::clone(&self.shared.picker);
        let limit = self.shared.limits.body;
        let encoding = Encoding::of(&head.headers);
        let Some(body) = body else {
            return Box::pin(async move { picker.pick(head, None).await });
        };
        match encoding {
            Encoding::Identity => Box::pin(async move { picker.pick(head, Some(body)).await }),
            // The pod may well read it; that we cannot is no reason to refuse it.
            Encoding::Unreadable => {
                self.shared.counters.unreadable_encoding.add(1);
                Box::pin(async move { picker.pick(head, None).await })
            }
            Encoding::Gzip | Encoding::Deflate => {
                let arrival = self.untold.clone();
                Box::pin(async move {
                    let decoding =
                        tokio::task::spawn_blocking(move || body::decode(&body, encoding, limit));
                    let decoded = decoding.await.unwrap_or_else(|_| {
                        Err(Refusal::new(500, "internal", "decoding was interrupted"))
                    });
                    if let (Err(refusal), Some(arrival)) = (&decoded, &arrival) {
                        picker.ended_early(arrival, Ended::Refused(refusal));
                    }
                    picker.pick(head, Some(decoded?)).await
                })
            }
        }
    }

    fn fly(&mut self, flown: Flown) {
        let Some(flight) = &mut self.flight else {
            return;
        };
        match flown {
            Flown::Headers { status, served } => flight.response_headers(status, served),
            Flown::FirstBytes => flight.first_bytes(),
            Flown::Bytes(bytes) => flight.response_bytes(&bytes),
            Flown::Finish => {
                if let Some(flight) = self.flight.take() {
                    flight.finish();
                }
            }
        }
    }

    fn count(&self, event: Event) {
        let counters = &self.shared.counters;
        match event {
            Event::Ignored => counters.ignored_messages.add(1),
            Event::BodyNotSent => counters.body_not_sent.add(1),
            Event::OnlyShown => {
                counters.only_shown.add(1);
                tracing::warn!(
                    "a gateway shows requests and takes no answers, so no pod is chosen for them; \
                     set observability_mode of its ext_proc filter to false"
                );
            }
            Event::UnsupportedMode => {
                if counters.unsupported_processing_mode.get() == 0 {
                    tracing::warn!(
                        "the gateway's request_body_mode cannot be served: expected \
                         FULL_DUPLEX_STREAMED or BUFFERED; further such requests are counted only"
                    );
                }
                counters.unsupported_processing_mode.add(1);
            }
        }
    }
}

impl<S, P: PickPods> Drop for Exchange<S, P> {
    fn drop(&mut self) {
        if self.session.holds_request()
            && let Some(arrival) = self.untold.take()
        {
            self.shared.picker.ended_early(&arrival, Ended::Aborted);
        }
        let counters = &self.shared.counters;
        counters.ended.add(1);
        let Some(mut flight) = self.flight.take() else {
            return;
        };
        if self.session.ending() != Ending::Unseen {
            counters.aborted.add(1);
            return;
        }
        // The response goes on where we do not see it: its load stays booked for a while.
        let permit = Arc::clone(&self.shared.leases).try_acquire_owned();
        if let (Ok(permit), Ok(runtime)) = (permit, tokio::runtime::Handle::try_current()) {
            counters.leases.add(1);
            let lease = self.shared.limits.lease;
            runtime.spawn(async move {
                // Load stays, what the decision was made from does not.
                if flight.unsettled() {
                    flight.settle();
                }
                tokio::time::sleep(lease).await;
                flight.finish();
                drop(permit);
            });
        }
    }
}

fn overloaded() -> Refusal {
    Refusal::new(
        503,
        "too_many_requests_held",
        "the endpoint picker holds as many requests as it may",
    )
    .retry_after(Duration::from_secs(1))
}

#[cfg(test)]
mod tests;

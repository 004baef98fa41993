//! Runs the scheduler in real time: the only task that advances it, and the handles others use.
//!
//! Lives here: [`Driver`] (the loop), [`Handle`] (submit, look, reset) and [`Ticket`] (one
//! sequence's tokens; dropping it cancels the sequence).
//! Never here: scheduling rules (`scheduler`), HTTP, wire forms.
//! Invariant: what a pass changed in the cache is published before its tokens are delivered, as in
//! vLLM; so a router hears of a block before the client can use it.

use super::events::Publisher;
use super::scheduler::{
    Job, Limits, Load, Next, Output, Pass, QueueFull, Scheduler, SequenceId, Totals,
};
use parking_lot::Mutex;
use rustc_hash::FxBuildHasher;
use std::collections::HashMap;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;

struct State {
    scheduler: Scheduler,
    /// Where each live sequence's tokens go. A sequence has at most `max_tokens` of them, so a slow
    /// reader costs bounded memory.
    readers: HashMap<SequenceId, mpsc::UnboundedSender<Output>, FxBuildHasher>,
}

struct Shared {
    state: Mutex<State>,
    wake: Notify,
    began: Instant,
}

/// Access to a running scheduler.
#[derive(Clone)]
pub(super) struct Handle {
    shared: Arc<Shared>,
}

/// The loop that runs a scheduler.
pub(super) struct Driver {
    shared: Arc<Shared>,
    publisher: Publisher,
}

/// One sequence: its tokens as they come. Dropped, the sequence is cancelled and its blocks freed.
pub(super) struct Ticket {
    id: SequenceId,
    outputs: mpsc::UnboundedReceiver<Output>,
    shared: Arc<Shared>,
}

impl Driver {
    /// A driver for an empty engine of these sizes, and a handle to it.
    pub(super) fn new(limits: Limits, publisher: Publisher) -> (Driver, Handle) {
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                scheduler: Scheduler::new(limits),
                readers: HashMap::default(),
            }),
            wake: Notify::new(),
            began: Instant::now(),
        });
        let handle = Handle {
            shared: shared.clone(),
        };
        (Driver { shared, publisher }, handle)
    }

    /// Runs for ever; dropped to stop.
    pub(super) async fn run(mut self) {
        // When the last pass was due to end. The next one begins there rather than when the timer
        // woke us, so that timer granularity does not add up.
        let mut due: Option<Instant> = None;
        loop {
            let (next, changes) = {
                let mut state = self.shared.state.lock();
                let next = state.scheduler.start(self.shared.began.elapsed());
                // vLLM steps while it waits for a transfer, and reports; it does not when idle.
                let changes = match next {
                    Next::WaitUntil(_) => state.scheduler.changes(),
                    Next::Run(_) | Next::Idle => Vec::new(),
                };
                (next, changes)
            };
            self.publisher.publish(changes).await;
            match next {
                Next::Run(pass) => {
                    let end = due.unwrap_or_else(Instant::now) + pass.duration;
                    self.pass(pass, end).await;
                    due = Some(end.max(Instant::now() - SLACK));
                }
                Next::WaitUntil(at) => {
                    due = None;
                    tokio::select! {
                        () = tokio::time::sleep_until(self.shared.began + at) => {}
                        () = self.shared.wake.notified() => {}
                    }
                }
                Next::Idle => {
                    due = None;
                    self.shared.wake.notified().await;
                }
            }
        }
    }

    async fn pass(&mut self, pass: Pass, end: Instant) {
        if pass.duration.is_zero() || end <= Instant::now() {
            // Let connections be served between passes that take no time.
            tokio::task::yield_now().await;
        } else {
            tokio::time::sleep_until(end).await;
        }
        let report = {
            let mut state = self.shared.state.lock();
            state.scheduler.complete(self.shared.began.elapsed())
        };
        self.publisher.publish(report.changes).await;
        let mut state = self.shared.state.lock();
        for output in report.outputs {
            let id = output.sequence;
            let finished = output.finish.is_some();
            if let Some(reader) = state.readers.get(&id) {
                // A reader that is gone cancels its sequence when it is dropped.
                let _ = reader.send(output);
            }
            if finished {
                state.readers.remove(&id);
            }
        }
    }
}

/// How far a pass may begin before the present, to make up for a timer that fired late.
const SLACK: Duration = Duration::from_millis(5);

impl Handle {
    /// Queues `jobs`, all or none.
    pub(super) fn submit(&self, jobs: Vec<Job>) -> Result<Vec<Ticket>, QueueFull> {
        let tickets = {
            let mut guard = self.shared.state.lock();
            let state = &mut *guard;
            let ids = state.scheduler.submit(jobs)?;
            let tickets = ids.into_iter().map(|id| {
                let (sender, outputs) = mpsc::unbounded_channel();
                state.readers.insert(id, sender);
                Ticket {
                    id,
                    outputs,
                    shared: self.shared.clone(),
                }
            });
            tickets.collect()
        };
        self.shared.wake.notify_one();
        Ok(tickets)
    }

    /// Whether blocks are kept under `id`.
    pub(super) fn keeps(&self, id: SequenceId) -> bool {
        self.shared.state.lock().scheduler.keeps(id)
    }

    /// Frees the blocks kept under `id`; `false` when there are none.
    pub(super) fn release(&self, id: SequenceId) -> bool {
        let released = self.shared.state.lock().scheduler.release(id);
        self.shared.wake.notify_one();
        released
    }

    /// Drops the cached content; `false` while blocks are in use.
    pub(super) fn reset(&self) -> bool {
        self.shared.state.lock().scheduler.reset()
    }

    /// How busy the engine is, and its counters.
    pub(super) fn look(&self) -> (Load, Totals) {
        let state = self.shared.state.lock();
        (state.scheduler.load(), state.scheduler.totals())
    }
}

impl Ticket {
    /// Names the sequence.
    pub(super) fn id(&self) -> SequenceId {
        self.id
    }

    /// The next token; `None` after the last one, or when the engine stopped.
    pub(super) async fn next(&mut self) -> Option<Output> {
        self.outputs.recv().await
    }

    /// The next token, for a body that is polled.
    pub(super) fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Output>> {
        self.outputs.poll_recv(context)
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        if state.readers.remove(&self.id).is_some() {
            state.scheduler.cancel(self.id);
            drop(state);
            self.shared.wake.notify_one();
        }
    }
}

#[cfg(test)]
mod tests;

//! A request after its decision: what must be released, timed and written down.
//!
//! Lives here: [`Flight`], owned by the stream that carries the request.
//! Never here: Envoy types, choices.
//! Invariant: the booking is released and the span ended exactly once, whatever happens to the
//! stream; a dropped flight is one that was aborted.

use crate::fleet::Roster;
use crate::load::Booking;
use crate::names::Endpoint;
use crate::pick::beside::Beside;
use crate::pick::usage::{Said, Tail};
use crate::telemetry::metrics::Metrics;
use crate::telemetry::record::{Record, Usage};
use crate::telemetry::trace::PickSpan;
use std::sync::Arc;
use std::time::Instant;

/// A request on its way.
#[derive(Debug)]
pub struct Flight {
    pub(super) booking: Booking,
    pub(super) span: PickSpan,
    pub(super) record: Arc<Record>,
    pub(super) metrics: Metrics,
    pub(super) roster: Arc<Roster>,
    pub(super) began: Instant,
    pub(super) destination: Endpoint,
    pub(super) addressee: Addressee,
    pub(super) route: &'static str,
    /// Cached tokens predicted, for routes where the engine's own figure means the same.
    pub(super) predicted: Option<u64>,
    /// Prompt tokens, where they were counted exactly.
    pub(super) counted: Option<u64>,
    /// What the shadow is asked about, until it is.
    pub(super) beside: Option<Box<Beside>>,
    /// Status of the answer.
    pub(super) status: Option<u16>,
    pub(super) progress: Progress,
    pub(super) tail: Tail,
}

/// The pod that the gateway sends the request to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Addressee {
    /// The one that decodes, which may prefill too.
    Decode,
    /// The one that prefills and hands on.
    Prefill,
}

/// How far the answer has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// Nothing yet.
    Waiting,
    /// The first bytes came.
    Answering,
    /// The answer ended.
    Completed,
}

impl Flight {
    /// Whether something is left to do that nobody waits for (see [`Flight::settle`]).
    #[must_use]
    pub fn unsettled(&self) -> bool {
        self.beside.is_some()
    }

    /// Does what can wait until the request is on its way: asks the shadow. Until then what the
    /// decision was made from is kept.
    pub fn settle(&mut self) {
        let beside = self.beside.take();
        if let Some(facts) = beside.and_then(|beside| beside.facts()) {
            self.metrics.shadow(facts.taken, facts.words);
            self.span.beside(&facts);
            self.record.beside(&facts);
        }
    }

    /// Notes the head of the answer: its status, and the pod that the gateway says it came from.
    pub fn response_headers(&mut self, status: Option<u16>, served: Option<Endpoint>) {
        if let Some(status) = status {
            self.status = Some(status);
            self.span.status(status);
            self.record.update(|outcome| outcome.status = Some(status));
        }
        let Some(served) = served.filter(|served| *served != self.destination) else {
            return;
        };
        self.metrics.served_elsewhere();
        match self.roster.view().at(served) {
            Some(pod) => match self.addressee {
                Addressee::Decode => self.booking.served_by(pod.id),
                Addressee::Prefill => self.booking.prefilled_by(pod.id),
            },
            None => tracing::warn!(
                picked = %self.destination, %served,
                "the gateway reached an endpoint that is not among the pods; check its load balancer's fallback"
            ),
        }
    }

    /// Notes the first bytes of the answer: prefill is over.
    pub fn first_bytes(&mut self) {
        if self.progress != Progress::Waiting {
            return;
        }
        self.progress = Progress::Answering;
        self.booking.prefill_done();
        let ttft = self.began.elapsed();
        self.span.first_bytes(ttft);
        // An error comes fast, and a list of models is no generation: neither says how long a prompt
        // takes.
        let served = self.status.is_none_or(|status| status < 400);
        if served && self.record.operation.is_some() {
            self.metrics
                .first_bytes(self.route, ttft, self.span.trace_id());
        }
        self.record
            .update(|outcome| outcome.ttft_ms = Some(ttft.as_secs_f64() * 1e3));
    }

    /// Looks at bytes of the answer as they pass.
    pub fn response_bytes(&mut self, chunk: &[u8]) {
        if !chunk.is_empty() {
            self.first_bytes();
            self.tail.push(chunk);
        }
    }

    /// The answer ended as it should.
    pub fn finish(mut self) {
        self.progress = Progress::Completed;
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.settle();
        let usage = match self.tail.read() {
            Said::Usage(usage) => usage,
            Said::Nothing => Usage::default(),
            Said::Unreadable => {
                self.metrics.usage_unreadable();
                Usage::default()
            }
        };
        let end = match self.progress {
            Progress::Completed => "completed",
            Progress::Waiting | Progress::Answering => "aborted",
        };
        if let Some(predicted) = self.predicted {
            self.metrics.cached(predicted, &usage);
        }
        if let Some(ours) = self.counted {
            self.metrics.counted(ours, &usage);
            if let Some(theirs) = usage.prompt_tokens.filter(|theirs| *theirs != ours) {
                tracing::warn!(
                    pod = %self.destination, ours, theirs,
                    "the engine counted a prompt differently, so its cached blocks cannot be found; \
                     check that tokenizer and chat template are the engine's"
                );
            }
        }
        self.span.ended(end, &usage);
        self.metrics.ended(end, self.status);
        self.record.update(|outcome| {
            outcome.end = Some(end);
            outcome.usage = usage;
        });
    }
}

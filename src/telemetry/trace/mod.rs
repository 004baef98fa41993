//! Spans: one per request with one per stage below it, joined to the gateway's trace, exported by OTLP.
//!
//! Lives here: [`Tracing`], [`PickSpan`]; below, the bytes, the queue and the exporter.
//! Never here: waiting. Export trouble drops spans and counts them; it never holds a request.
//! Invariant: a span that is not sampled costs no attribute; one whose end nobody told is not exported, because
//! whoever ended the request tells it in another.
//!
//! Spans are written as OTLP's own bytes while the request goes on, rather than built as objects by
//! OpenTelemetry's SDK and converted later: with some seventy attributes per request, building, moving and
//! converting them is most of what tracing costs (`benches/tracing.rs` measures what is left).

mod attributes;
mod context;
mod export;
mod queue;
pub mod settings;
mod turns;
mod wire;

pub use context::{Context, SpanId, TraceId};
pub use queue::ExportStats;

use crate::decide::Decision;
use crate::telemetry::fields;
use crate::telemetry::record::{Facts, Usage};
use crate::telemetry::shadow::ShadowFacts;
use crate::telemetry::trace::queue::{Entry, Queue};
use crate::telemetry::trace::settings::{Parent, QueueSettings, Sampling, TraceSettings};
use crate::telemetry::trace::turns::Turns;
use crate::telemetry::trace::wire::{Identity, Kind, SpanBytes, Value};
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// The exporter could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// A setting cannot be used.
    #[error(transparent)]
    Setting(#[from] settings::SettingError),
    /// The system's certificates cannot be read.
    #[error("certificates of this system, to check the receiver of spans: {0}")]
    Certificates(#[from] std::io::Error),
}

/// The tracer of the process, or none.
#[derive(Clone, Debug)]
pub enum Tracing {
    /// Spans are not made.
    Off,
    /// Spans are made and exported.
    On(Arc<Tracer>),
}

/// Makes spans.
#[derive(Debug)]
pub struct Tracer {
    sampling: Sampling,
    queue: Arc<Queue>,
    turns: Turns,
    exporter: Exporter,
}

/// What takes spans from the queue.
#[derive(Debug)]
enum Exporter {
    /// Whoever calls [`Tracing::drain`].
    Nobody,
    /// A task.
    Task {
        stop: watch::Sender<bool>,
        handle: Mutex<Option<JoinHandle<()>>>,
    },
}

impl Tracing {
    /// Sets up the exporter. Must be called inside a tokio runtime. Does not wait for the receiver.
    ///
    /// # Errors
    /// When the receiver is reached by TLS and the certificates of this system cannot be read.
    pub fn start(settings: &TraceSettings) -> Result<Tracing, TraceError> {
        let sender = export::Sender::new(settings)?;
        let queue = Arc::new(Queue::new(settings.queue));
        let (stop, stopped) = watch::channel(false);
        let task = tokio::spawn(export::run(Arc::clone(&queue), sender, stopped));
        Ok(Tracing::On(Arc::new(Tracer {
            sampling: settings.sampling,
            queue,
            turns: Turns::new(),
            exporter: Exporter::Task {
                stop,
                handle: Mutex::new(Some(task)),
            },
        })))
    }

    /// Spans are kept until [`Tracing::drain`] is called.
    #[must_use]
    pub fn in_memory(sampling: Sampling, queue: QueueSettings) -> Tracing {
        Tracing::On(Arc::new(Tracer {
            sampling,
            queue: Arc::new(Queue::new(queue)),
            turns: Turns::new(),
            exporter: Exporter::Nobody,
        }))
    }

    /// The spans that wait, as an `ExportTraceServiceRequest` without a resource.
    #[must_use]
    pub fn drain(&self) -> Vec<u8> {
        let mut requests = Vec::new();
        if let Tracing::On(tracer) = self {
            while let Some(batch) = tracer.queue.take() {
                tracer.queue.exported(batch.spans);
                // Messages of protobuf that follow each other are one message.
                requests.extend_from_slice(&batch.request(&[], 0));
            }
        }
        requests
    }

    /// What became of spans so far; nothing when none are made.
    #[must_use]
    pub fn stats(&self) -> Option<ExportStats> {
        match self {
            Tracing::Off => None,
            Tracing::On(tracer) => Some(tracer.queue.stats()),
        }
    }

    /// Sends what is queued and stops, within five seconds.
    pub async fn shutdown(&self) {
        let Tracing::On(tracer) = self else {
            return;
        };
        let Exporter::Task { stop, handle } = &tracer.exporter else {
            return;
        };
        let _ = stop.send(true);
        let task = handle.lock().take();
        if let Some(task) = task
            && let Err(error) = task.await
        {
            tracing::warn!(%error, "the last spans could not be sent");
        }
    }

    /// Opens the span of a request that arrived at `began`.
    #[must_use]
    pub fn open(&self, parent: Option<&str>, state: Option<&str>, began: Instant) -> PickSpan {
        let Tracing::On(tracer) = self else {
            return PickSpan(State::Off);
        };
        let parent = parent.and_then(|text| Context::parse(text, state));
        let trace = parent
            .as_ref()
            .map_or_else(TraceId::random, |parent| parent.trace);
        let sampled = tracer.sampled(parent.as_ref(), trace);
        let parent_span = parent.as_ref().map(|parent| parent.span);
        let context = Context {
            trace,
            span: SpanId::random(),
            flags: u8::from(sampled),
            state: parent.and_then(|parent| parent.state),
        };
        if !sampled {
            return PickSpan(State::Passing(context));
        }
        let start = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, nanos)
            .saturating_sub(nanos(began.elapsed()));
        let span = SpanBytes::begin(Identity {
            context: &context,
            parent: parent_span,
            name: fields::SPAN_PICK,
            kind: Kind::Server,
            start,
        });
        PickSpan(State::Recording(Box::new(Recording {
            tracer: Arc::clone(tracer),
            context,
            span: Some(span),
            children: Vec::new(),
            spans: 1,
            began,
            start,
            status: None,
            told: false,
        })))
    }
}

impl Tracer {
    fn sampled(&self, parent: Option<&Context>, trace: TraceId) -> bool {
        match (parent, self.sampling.parent) {
            (Some(parent), Parent::Decides) => parent.sampled(),
            _ => (trace.sampled_part() as f64) < self.sampling.ratio * (1u64 << 63) as f64,
        }
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// The span of one request; ends when dropped, and is exported if it was told how the request ended.
#[derive(Debug)]
pub struct PickSpan(State);

#[derive(Debug)]
enum State {
    /// There is no tracer.
    Off,
    /// The trace goes on and is not recorded.
    Passing(Context),
    /// The trace is recorded.
    Recording(Box<Recording>),
}

#[derive(Debug)]
struct Recording {
    tracer: Arc<Tracer>,
    context: Context,
    /// Taken when it ends.
    span: Option<SpanBytes>,
    /// Finished spans below this one.
    children: Vec<u8>,
    spans: usize,
    began: Instant,
    /// The same moment, in nanoseconds since 1970.
    start: u64,
    status: Option<u16>,
    /// Whether it was said how the request ended.
    told: bool,
}

impl PickSpan {
    /// A span that says nothing.
    #[must_use]
    pub fn off() -> PickSpan {
        PickSpan(State::Off)
    }

    /// The trace id, when the trace is recorded.
    #[must_use]
    pub fn trace_id(&self) -> Option<TraceId> {
        match &self.0 {
            State::Recording(recording) => Some(recording.context.trace),
            State::Off | State::Passing(_) => None,
        }
    }

    /// A `traceparent` for whoever is called next, whether or not the trace is recorded.
    #[must_use]
    pub fn traceparent(&self) -> Option<String> {
        match &self.0 {
            State::Off => None,
            State::Passing(context) => Some(context.traceparent()),
            State::Recording(recording) => Some(recording.context.traceparent()),
        }
    }

    fn recording(&mut self) -> Option<(&mut Recording, SpanBytes)> {
        match &mut self.0 {
            State::Recording(recording) => {
                let span = recording.span.take()?;
                Some((recording, span))
            }
            State::Off | State::Passing(_) => None,
        }
    }

    /// Writes into the span, if it is recorded.
    fn write(&mut self, write: impl FnOnce(&mut Recording, &mut SpanBytes)) {
        if let Some((recording, mut span)) = self.recording() {
            write(recording, &mut span);
            recording.span = Some(span);
        }
    }

    /// Links to the turn before in `session`, and remembers this one.
    pub fn turn_of(&mut self, session: &str) {
        self.write(|recording, span| {
            let own = &recording.context;
            if let Some(before) = recording.tracer.turns.replace(session, own) {
                span.link(&before);
            }
        });
    }

    /// Writes the decision, and a span per stage.
    pub fn decided(&mut self, decision: &Decision, facts: &Facts) {
        self.write(|recording, span| {
            attributes::decision(span, decision, facts);
            let times = &facts.times;
            let parsed = times.waited + times.parse;
            let observed = times.understood + times.observe;
            let stages = [
                (fields::SPAN_PARSE, times.waited, times.parse),
                (fields::SPAN_ENCODE, parsed, times.encode),
                (fields::SPAN_OBSERVE, times.understood, times.observe),
                (fields::SPAN_DECIDE, observed, times.decide),
                (fields::SPAN_BOOK, observed + times.decide, times.book),
            ];
            // A request without a prompt is neither parsed nor encoded.
            let skipped = if facts.operation.is_some() { 0 } else { 2 };
            for (name, after, took) in stages.into_iter().skip(skipped) {
                recording.child(name, after, took);
            }
        });
    }

    /// Writes what the policy in the shadow would have done.
    pub fn beside(&mut self, shadow: &ShadowFacts) {
        self.write(|_, span| attributes::shadow(span, shadow));
    }

    /// Writes a refusal and marks the span as failed.
    pub fn refused(&mut self, status: u16, code: &'static str) {
        self.write(|recording, span| {
            recording.status = Some(status);
            recording.told = true;
            span.text(fields::ROUTE, "refused");
            span.text(fields::BECAUSE, code);
            span.text(fields::ERROR, code);
            span.text(fields::END, "refused");
            if 500 <= status {
                span.failed(code);
            }
        });
    }

    /// Notes the first response bytes.
    pub fn first_bytes(&mut self, ttft: Duration) {
        self.write(|recording, span| {
            span.event(fields::EVENT_FIRST_BYTES, recording.now(), &[]);
            span.float(fields::TIME_TO_FIRST_CHUNK, ttft.as_secs_f64());
        });
    }

    /// Notes the status of the answer.
    pub fn status(&mut self, status: u16) {
        self.write(|recording, _| recording.status = Some(status));
    }

    /// Notes how the request ended and what the engine said it used.
    pub fn ended(&mut self, end: &'static str, usage: &Usage) {
        self.write(|recording, span| {
            recording.told = true;
            let mut said: SmallVec<[(&str, Value<'_>); 4]> = SmallVec::new();
            said.push((fields::END, Value::Text(end)));
            for (key, value) in [
                (fields::INPUT_TOKENS, usage.prompt_tokens),
                (fields::OUTPUT_TOKENS, usage.completion_tokens),
                (fields::CACHE_READ_TOKENS, usage.cached_tokens),
            ] {
                said.extend(value.map(|value| (key, Value::Int(value))));
            }
            for (key, value) in &said {
                span.put(key, *value);
            }
            span.event(fields::EVENT_END, recording.now(), &said);
            if let Some(500..) = recording.status {
                span.text(fields::ERROR, "server_error");
                span.failed("the pod or the gateway answered with an error");
            }
        });
    }
}

impl Recording {
    /// Now, in nanoseconds since 1970 by the clock that began with the span.
    fn now(&self) -> u64 {
        self.start.saturating_add(nanos(self.began.elapsed()))
    }

    fn child(&mut self, name: &str, after: Duration, took: Duration) {
        let context = Context {
            span: SpanId::random(),
            state: None,
            ..self.context.clone()
        };
        let start = self.start.saturating_add(nanos(after));
        let identity = Identity {
            context: &context,
            parent: Some(self.context.span),
            name,
            kind: Kind::Internal,
            start,
        };
        if self.children.capacity() == 0 {
            self.children.reserve(640);
        }
        wire::child(
            &mut self.children,
            identity,
            start.saturating_add(nanos(took)),
        );
        self.spans += 1;
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        if let Some(mut span) = self.span.take()
            && self.told
        {
            if let Some(status) = self.status {
                span.int(fields::STATUS, u64::from(status));
            }
            self.tracer.queue.push(Entry {
                own: span.end(self.now()),
                children: std::mem::take(&mut self.children),
                spans: self.spans,
            });
        }
    }
}

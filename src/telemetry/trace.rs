//! Spans: one per request, joined to the gateway's trace, exported by OTLP.
//!
//! Lives here: all OpenTelemetry types of the program.
//! Never here: waiting. Export trouble drops spans and counts them; it never holds a request.
//! Invariant: a span that is not sampled costs no attribute.

use crate::decide::Decision;
use crate::telemetry::explanation::flip_sentence;
use crate::telemetry::fields;
use crate::telemetry::record::{Facts, Usage};
use opentelemetry::propagation::{Extractor, TextMapPropagator};
use opentelemetry::trace::{
    Span as _, SpanContext, SpanKind, Status, TraceContextExt, Tracer as _, TracerProvider as _,
};
use opentelemetry::{Context, KeyValue};
use opentelemetry_otlp::{SpanExporter, WithExportConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{Sampler, SdkTracer, SdkTracerProvider, Span};
use std::time::{Duration, SystemTime};

/// Where spans go.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceSettings {
    /// OTLP gRPC endpoint, e.g. `http://127.0.0.1:4317`.
    pub endpoint: String,
    /// `service.name` of the resource.
    pub service_name: String,
    /// Share of requests traced when the gateway does not say, 0..=1.
    pub sample_ratio: f64,
    /// Further resource attributes.
    pub resource: Vec<(String, String)>,
}

/// The exporter could not be set up.
#[derive(Debug, thiserror::Error)]
#[error(
    "telemetry.otlpEndpoint: expected the URL of an OTLP gRPC receiver, found {endpoint:?}: {cause}"
)]
pub struct TraceError {
    endpoint: String,
    cause: String,
}

/// The tracer of the process, or none.
#[derive(Clone, Debug)]
pub enum Tracing {
    /// Spans are not made.
    Off,
    /// Spans are made and exported.
    On {
        /// Makes spans.
        tracer: SdkTracer,
        /// Owns the export queue.
        provider: SdkTracerProvider,
    },
}

impl Tracing {
    /// Sets up the exporter. Must be called inside a tokio runtime. Does not wait for the receiver.
    ///
    /// # Errors
    /// When the endpoint is not a URL.
    pub fn start(settings: &TraceSettings) -> Result<Tracing, TraceError> {
        let exporter = SpanExporter::builder()
            .with_tonic()
            .with_endpoint(settings.endpoint.clone())
            .with_timeout(Duration::from_secs(5))
            .build()
            .map_err(|error| TraceError {
                endpoint: settings.endpoint.clone(),
                cause: error.to_string(),
            })?;
        let resource = Resource::builder()
            .with_service_name(settings.service_name.clone())
            .with_attributes(
                settings
                    .resource
                    .iter()
                    .map(|(key, value)| KeyValue::new(key.clone(), value.clone())),
            )
            .build();
        let provider = SdkTracerProvider::builder()
            .with_batch_exporter(exporter)
            .with_resource(resource)
            .with_sampler(Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(
                settings.sample_ratio,
            ))))
            .build();
        Ok(Tracing::with_provider(provider))
    }

    /// Uses a provider made elsewhere (tests give one with an in-memory exporter).
    #[must_use]
    pub fn with_provider(provider: SdkTracerProvider) -> Tracing {
        Tracing::On {
            tracer: provider.tracer("sidestep"),
            provider,
        }
    }

    /// Sends what is queued and stops. Blocks up to the exporter's timeout.
    pub fn shutdown(&self) {
        if let Tracing::On { provider, .. } = self
            && let Err(error) = provider.shutdown()
        {
            tracing::warn!(%error, "spans that were still queued could not be exported");
        }
    }

    /// Opens the span of one request.
    #[must_use]
    pub fn open(&self, parent: Option<&str>, state: Option<&str>) -> PickSpan {
        let Tracing::On { tracer, .. } = self else {
            return PickSpan(None);
        };
        let parent = parent.map_or_else(Context::new, |traceparent| {
            let carrier = Carrier {
                traceparent,
                tracestate: state,
            };
            TraceContextPropagator::new().extract_with_context(&Context::new(), &carrier)
        });
        let builder = tracer
            .span_builder("pick")
            .with_kind(SpanKind::Server)
            .with_start_time(SystemTime::now());
        let remote = parent.span().span_context().clone();
        PickSpan(Some(Open {
            span: tracer.build_with_context(builder, &parent),
            parent: remote,
        }))
    }
}

struct Carrier<'a> {
    traceparent: &'a str,
    tracestate: Option<&'a str>,
}

impl Extractor for Carrier<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        match key {
            "traceparent" => Some(self.traceparent),
            "tracestate" => self.tracestate,
            _ => None,
        }
    }

    fn keys(&self) -> Vec<&str> {
        vec!["traceparent", "tracestate"]
    }
}

#[derive(Debug)]
struct Open {
    span: Span,
    parent: SpanContext,
}

/// The span of one request; ends when dropped.
#[derive(Debug)]
pub struct PickSpan(Option<Open>);

impl PickSpan {
    /// The trace id as 32 hex digits, if there is a span.
    #[must_use]
    pub fn trace_id(&self) -> Option<String> {
        self.0
            .as_ref()
            .map(|open| open.span.span_context().trace_id().to_string())
    }

    /// The `traceparent` that makes this span the parent of what the pod does.
    #[must_use]
    pub fn traceparent(&self) -> Option<String> {
        self.0.as_ref().map(|open| {
            let own = open.span.span_context();
            format!(
                "00-{}-{}-{:02x}",
                own.trace_id(),
                own.span_id(),
                own.trace_flags().to_u8()
            )
        })
    }

    /// Whether the span joined a trace that somebody else began.
    #[must_use]
    pub fn joined(&self) -> bool {
        self.0.as_ref().is_some_and(|open| open.parent.is_valid())
    }

    fn recording(&mut self) -> Option<&mut Span> {
        self.0
            .as_mut()
            .map(|open| &mut open.span)
            .filter(|span| span.is_recording())
    }

    /// Writes the decision.
    pub fn decided(&mut self, decision: &Decision, facts: &Facts) {
        if let Some(span) = self.recording() {
            span.set_attributes(decision_attributes(decision, facts));
        }
    }

    /// Writes a refusal and marks the span as failed.
    pub fn refused(&mut self, status: u16, code: &'static str) {
        if let Some(span) = self.recording() {
            span.set_attribute(KeyValue::new(fields::STATUS, i64::from(status)));
            span.set_attribute(KeyValue::new(fields::ERROR, code));
            span.set_attribute(KeyValue::new(fields::END, "refused"));
            span.set_status(Status::error(code));
        }
    }

    /// Notes the first response bytes.
    pub fn first_bytes(&mut self, ttft: Duration) {
        if let Some(span) = self.recording() {
            span.add_event(fields::EVENT_FIRST_BYTES, Vec::new());
            span.set_attribute(KeyValue::new(fields::TTFT_MS, millis(ttft)));
        }
    }

    /// Notes the status of the answer.
    pub fn status(&mut self, status: u16) {
        if let Some(span) = self.recording() {
            span.set_attribute(KeyValue::new(fields::STATUS, i64::from(status)));
            if 500 <= status {
                span.set_status(Status::error("server_error"));
            }
        }
    }

    /// Notes how the request ended and what the engine said it used.
    pub fn ended(&mut self, end: &'static str, usage: &Usage) {
        if let Some(span) = self.recording() {
            span.set_attribute(KeyValue::new(fields::END, end));
            for (key, value) in [
                (fields::INPUT_TOKENS, usage.prompt_tokens),
                (fields::OUTPUT_TOKENS, usage.completion_tokens),
                (fields::CACHE_READ_TOKENS, usage.cached_tokens),
            ] {
                if let Some(value) = value {
                    span.set_attribute(KeyValue::new(key, int(value)));
                }
            }
        }
    }
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

fn int(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

fn decision_attributes(decision: &Decision, facts: &Facts) -> Vec<KeyValue> {
    let route = &decision.route;
    let destination = route.decode().candidate.endpoint;
    let mut attributes = Vec::with_capacity(48);
    let mut put = |key: &'static str, value: opentelemetry::Value| {
        attributes.push(KeyValue::new(key, value));
    };
    put(fields::DECISION_ID, facts.decision_id.clone().into());
    put(fields::ROUTE, route.as_str().into());
    put(fields::BECAUSE, decision.because.as_str().into());
    put(fields::BYPASS, decision.because.is_bypass().into());
    put(fields::POLICY, facts.policy.to_string().into());
    put(fields::GENERATION, int(facts.generation).into());
    put(fields::RULE, int(decision.rule as u64).into());
    put(
        fields::SERVER_ADDRESS,
        destination.0.ip().to_string().into(),
    );
    put(fields::SERVER_PORT, i64::from(destination.0.port()).into());
    put(fields::DECODE_ENDPOINT, destination.to_string().into());
    put(fields::DECODE_POD, facts.decode_pod.to_string().into());
    put(fields::PROMPT_TOKENS, int(decision.prompt_tokens.0).into());
    put(fields::COUNTED, facts.counted.into());
    put(fields::CANDIDATES, int(facts.candidates as u64).into());
    put(fields::SESSION, facts.session.as_str().into());
    put(fields::STREAM, facts.stream.into());
    put(
        fields::TIME_PARSE,
        int(facts.times.parse.as_micros() as u64).into(),
    );
    put(
        fields::TIME_ENCODE,
        int(facts.times.encode.as_micros() as u64).into(),
    );
    put(
        fields::TIME_DECIDE,
        int(facts.times.decide.as_micros() as u64).into(),
    );
    if let Some(operation) = facts.operation {
        put(fields::OPERATION, operation.into());
    }
    if let Some(model) = &facts.model {
        put(fields::MODEL, model.to_string().into());
    }
    if let Some(trouble) = facts.encode_trouble {
        put(fields::ENCODE_TROUBLE, trouble.into());
    }
    if let (Some(prefill), Some(name)) = (route.prefill(), &facts.prefill_pod) {
        put(
            fields::PREFILL_ENDPOINT,
            prefill.candidate.endpoint.to_string().into(),
        );
        put(fields::PREFILL_POD, name.to_string().into());
    }
    if let Some(local) = &decision.considered.local {
        put(fields::CACHED_TOKENS, int(local.cached_tokens.0).into());
        put(fields::NET_NEW_TOKENS, int(local.net_new_tokens.0).into());
        put(
            fields::LOCAL_POD,
            local.candidate.endpoint.to_string().into(),
        );
        put(fields::LOCAL_COST, local.cost.total.into());
        put(
            fields::LOCAL_DEVICE,
            i64::from(local.candidate.cached.device.0).into(),
        );
        put(
            fields::LOCAL_HOST,
            i64::from(local.candidate.cached.host.0).into(),
        );
        put(
            fields::LOCAL_DISK,
            i64::from(local.candidate.cached.disk.0).into(),
        );
        put(
            fields::LOCAL_KV_SOURCE,
            local.candidate.kv_source.as_str().into(),
        );
        put(
            fields::LOCAL_PREFILL_TOKENS,
            int(local.candidate.load.prefill_tokens.0).into(),
        );
        put(
            fields::LOCAL_DECODE_BLOCKS,
            i64::from(local.candidate.load.decode_blocks.0).into(),
        );
    }
    if let Some(prefill) = &decision.considered.prefill {
        put(
            fields::REMOTE_PREFILL,
            prefill.candidate.endpoint.to_string().into(),
        );
        put(fields::REMOTE_PREFILL_COST, prefill.cost.total.into());
        put(
            fields::REMOTE_PREFILL_CACHED,
            int(prefill.cached_tokens.0).into(),
        );
        put(
            fields::REMOTE_PREFILL_TOKENS,
            int(prefill.candidate.load.prefill_tokens.0).into(),
        );
    }
    if let Some(decode) = &decision.considered.decode {
        put(
            fields::REMOTE_DECODE,
            decode.candidate.endpoint.to_string().into(),
        );
        put(fields::REMOTE_DECODE_COST, decode.cost.total.into());
        put(
            fields::REMOTE_DECODE_BLOCKS,
            i64::from(decode.candidate.load.decode_blocks.0).into(),
        );
    }
    if !decision.checks.is_empty() {
        let lines: Vec<opentelemetry::StringValue> = decision
            .checks
            .iter()
            .map(|check| crate::telemetry::record::check_line(check).into())
            .collect();
        put(fields::CHECKS, opentelemetry::Value::Array(lines.into()));
    }
    if let Some(flip) = &facts.flip {
        put(fields::FLIP, flip_sentence(flip).into());
    }
    if let Some(shadow) = &facts.shadow {
        put(fields::SHADOW_POLICY, shadow.policy.to_string().into());
        put(fields::SHADOW_ROUTE, shadow.words.route.into());
        put(fields::SHADOW_BECAUSE, shadow.words.because.into());
        put(fields::SHADOW_BYPASS, shadow.words.bypass.into());
        put(fields::SHADOW_AGREES, shadow.agrees.into());
    }
    attributes
}

//! Counters and histograms of the process, in OpenMetrics text.
//!
//! Lives here: every metric that is counted as it happens. Metrics that describe state (pods, feeds,
//! index) are read at scrape time through collectors that `app` registers.
//! Never here: unbounded labels. A model is a label only when it is a configured one.
//! Invariant: the number of series is bounded by the configuration and the reason words.

use crate::decide::reason::Because;
use crate::telemetry::record::Usage;
use crate::telemetry::shadow::Words;
use crate::telemetry::trace::TraceId;
use parking_lot::Mutex;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::exemplar::HistogramWithExemplars;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

/// Label value for models that are not configured.
pub const OTHER_MODEL: &str = "other";

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct DecisionLabels {
    model: Arc<str>,
    route: &'static str,
    because: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct StageLabel {
    stage: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct RouteLabel {
    route: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct EndLabels {
    end: &'static str,
    status: &'static str,
}

/// What an exemplar carries: the trace of one observation. Written out only when it is read.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Exemplar {
    trace_id: TraceText,
}

#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
struct TraceText(TraceId);

impl EncodeLabelValue for TraceText {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), std::fmt::Error> {
        write!(encoder, "{}", self.0)
    }
}

type Timed = HistogramWithExemplars<Exemplar>;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct KindLabel {
    kind: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ShadowLabels {
    route: &'static str,
    shadow_route: &'static str,
    because: &'static str,
    shadow_because: &'static str,
}

/// The metrics of the process. Clones share their values.
#[derive(Clone, Debug)]
pub struct Metrics {
    registry: Arc<Mutex<Registry>>,
    decisions: Family<DecisionLabels, Counter>,
    /// Decisions by reason, in the order of [`Because::ALL`], to be read back.
    reasons: Arc<[AtomicU64]>,
    in_flight: Gauge,
    stages: Family<StageLabel, Histogram, fn() -> Histogram>,
    decision: Timed,
    ttft: Family<RouteLabel, Timed, fn() -> Timed>,
    ends: Family<EndLabels, Counter>,
    cached_predicted: Counter,
    cached_reported: Counter,
    usage_unreadable: Counter,
    counts_checked: Counter,
    counts_wrong: Counter,
    bypassed: Counter,
    encode_trouble: Family<KindLabel, Counter>,
    served_elsewhere: Counter,
    reload_failures: Counter,
    generation: Gauge,
    shadow_decisions: Family<ShadowLabels, Counter>,
    shadow_would_bypass: Counter,
    shadow_unresolved: Gauge,
}

fn stage_histogram() -> Histogram {
    Histogram::new([
        5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 5e-2, 0.25, 1.0,
    ])
}

fn decision_histogram() -> Timed {
    let buckets = [
        1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 0.1, 1.0,
    ];
    Timed::new(buckets.into_iter())
}

fn ttft_histogram() -> Timed {
    let buckets = [
        0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
    ];
    Timed::new(buckets.into_iter())
}

/// A status as a label: its class.
fn class(status: Option<u16>) -> &'static str {
    match status {
        Some(100..200) => "1xx",
        Some(200..300) => "2xx",
        Some(300..400) => "3xx",
        Some(400..500) => "4xx",
        Some(500..600) => "5xx",
        Some(_) => "other",
        None => "none",
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Metrics::new()
    }
}

impl Metrics {
    /// All metrics at zero.
    #[must_use]
    pub fn new() -> Metrics {
        let metrics = Metrics {
            registry: Arc::new(Mutex::new(Registry::with_prefix("sidestep"))),
            decisions: Family::default(),
            reasons: Because::ALL.iter().map(|_| AtomicU64::new(0)).collect(),
            in_flight: Gauge::default(),
            stages: Family::new_with_constructor(stage_histogram as fn() -> Histogram),
            decision: decision_histogram(),
            ttft: Family::new_with_constructor(ttft_histogram as fn() -> Timed),
            ends: Family::default(),
            cached_predicted: Counter::default(),
            cached_reported: Counter::default(),
            usage_unreadable: Counter::default(),
            counts_checked: Counter::default(),
            counts_wrong: Counter::default(),
            bypassed: Counter::default(),
            encode_trouble: Family::default(),
            served_elsewhere: Counter::default(),
            reload_failures: Counter::default(),
            generation: Gauge::default(),
            shadow_decisions: Family::default(),
            shadow_would_bypass: Counter::default(),
            shadow_unresolved: Gauge::default(),
        };
        metrics.register();
        metrics
    }

    fn register(&self) {
        let mut registry = self.registry.lock();
        let r = &mut *registry;
        r.register(
            "build",
            "What runs here",
            Info::new(vec![("version", env!("CARGO_PKG_VERSION"))]),
        );
        r.register(
            "bypasses",
            "Decisions that skipped remote prefill by policy although a prefill pod was there",
            self.bypassed.clone(),
        );
        r.register(
            "decision_seconds",
            "Time from the whole body to the decision",
            self.decision.clone(),
        );
        r.register(
            "decisions",
            "Decisions by model, route and reason",
            self.decisions.clone(),
        );
        r.register(
            "requests_in_flight",
            "Requests with a booking",
            self.in_flight.clone(),
        );
        r.register(
            "stage_seconds",
            "Time per stage of a decision",
            self.stages.clone(),
        );
        r.register(
            "time_to_first_bytes_seconds",
            "Time from the whole request to the first response bytes, by route",
            self.ttft.clone(),
        );
        r.register(
            "requests_ended",
            "Requests that had a decision, by how they ended and the class of the answer's status",
            self.ends.clone(),
        );
        r.register(
            "cached_tokens_predicted",
            "Cached prompt tokens the index predicted for local requests whose engine reported usage",
            self.cached_predicted.clone(),
        );
        r.register(
            "cached_tokens_reported",
            "Cached prompt tokens that engines reported for the same requests",
            self.cached_reported.clone(),
        );
        r.register(
            "usage_unreadable",
            "Answers whose usage was present but not readable",
            self.usage_unreadable.clone(),
        );
        r.register(
            "prompt_counts_checked",
            "Prompts counted exactly whose engine reported its own count",
            self.counts_checked.clone(),
        );
        r.register(
            "prompt_counts_wrong",
            "Of these, prompts that the engine counted differently: tokenizer or template are not the engine's",
            self.counts_wrong.clone(),
        );
        r.register(
            "encode_trouble",
            "Prompts that could not be tokenised exactly, by cause",
            self.encode_trouble.clone(),
        );
        r.register(
            "served_elsewhere",
            "Answers that came from another pod than the one picked",
            self.served_elsewhere.clone(),
        );
        r.register(
            "config_reload_failures",
            "Reloads of a file that were refused because of faults",
            self.reload_failures.clone(),
        );
        r.register(
            "config_generation",
            "Version of the policy in force",
            self.generation.clone(),
        );
        r.register(
            "shadow_decisions",
            "Decisions by what was done and what the policy in the shadow would have done",
            self.shadow_decisions.clone(),
        );
        r.register(
            "shadow_would_bypass",
            "Requests that did not skip remote prefill and would have under the policy in the shadow",
            self.shadow_would_bypass.clone(),
        );
        r.register(
            "shadow_unresolved",
            "1 while the policy in force names a shadow that cannot be had",
            self.shadow_unresolved.clone(),
        );
    }

    /// Adds metrics that are read at scrape time.
    pub fn register_collector(&self, collector: Box<dyn Collector>) {
        self.registry.lock().register_collector(collector);
    }

    /// All metrics in OpenMetrics text.
    #[must_use]
    pub fn encode(&self) -> String {
        let mut text = String::new();
        // Writing to a String cannot fail; a collector that fails leaves the text cut, which the
        // missing `# EOF` shows to the scraper.
        if prometheus_client::encoding::text::encode(&mut text, &self.registry.lock()).is_err() {
            tracing::warn!("a metrics collector failed; the metrics text is incomplete");
        }
        text
    }

    /// Counts a decision.
    pub fn decided(
        &self,
        model: &Arc<str>,
        route: &'static str,
        because: &'static str,
        bypass: bool,
    ) {
        if bypass {
            self.bypassed.inc();
        }
        self.decisions
            .get_or_create(&DecisionLabels {
                model: model.clone(),
                route,
                because,
            })
            .inc();
        self.in_flight.inc();
    }

    /// Counts a decision by its reason alone.
    pub fn reason(&self, because: Because) {
        let place = Because::ALL.iter().position(|one| *one == because);
        if let Some(count) = place.and_then(|place| self.reasons.get(place)) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Decisions so far, by reason.
    #[must_use]
    pub fn reasons(&self) -> Vec<(Because, u64)> {
        let counts = self
            .reasons
            .iter()
            .map(|count| count.load(Ordering::Relaxed));
        Because::ALL.iter().copied().zip(counts).collect()
    }

    /// Counts what was done beside what the shadow would have done.
    pub fn shadow(&self, taken: Words, would: Words) {
        self.shadow_decisions
            .get_or_create(&ShadowLabels {
                route: taken.route,
                shadow_route: would.route,
                because: taken.because,
                shadow_because: would.because,
            })
            .inc();
        if would.bypass && !taken.bypass {
            self.shadow_would_bypass.inc();
        }
    }

    /// Sets whether the shadow that is asked for cannot be had.
    pub fn shadow_unresolved(&self, unresolved: bool) {
        self.shadow_unresolved.set(i64::from(unresolved));
    }

    /// Notes how long a stage took.
    pub fn stage(&self, stage: &'static str, took: Duration) {
        self.stages
            .get_or_create(&StageLabel { stage })
            .observe(took.as_secs_f64());
    }

    /// Notes how long the whole decision took, and the trace it belongs to.
    pub fn decision(&self, took: Duration, trace: Option<TraceId>) {
        observe(&self.decision, took, trace);
    }

    /// Notes the time to the first response bytes, and the trace it belongs to.
    pub fn first_bytes(&self, route: &'static str, took: Duration, trace: Option<TraceId>) {
        observe(&self.ttft.get_or_create(&RouteLabel { route }), took, trace);
    }

    /// Counts the end of a request that had a decision.
    pub fn ended(&self, end: &'static str, status: Option<u16>) {
        let status = class(status);
        self.ends.get_or_create(&EndLabels { end, status }).inc();
        self.in_flight.dec();
    }

    /// Sets our count of a prompt beside the engine's.
    pub fn counted(&self, ours: u64, usage: &Usage) {
        if let Some(theirs) = usage.prompt_tokens {
            self.counts_checked.inc();
            if ours != theirs {
                self.counts_wrong.inc();
            }
        }
    }

    /// Sets the prediction beside what the engine said, for a local request.
    pub fn cached(&self, predicted: u64, usage: &Usage) {
        if let Some(reported) = usage.cached_tokens {
            self.cached_predicted.inc_by(predicted);
            self.cached_reported.inc_by(reported);
        }
    }

    /// Counts an answer whose usage could not be read.
    pub fn usage_unreadable(&self) {
        self.usage_unreadable.inc();
    }

    /// Counts a prompt that could not be tokenised exactly.
    pub fn encode_trouble(&self, kind: &'static str) {
        self.encode_trouble.get_or_create(&KindLabel { kind }).inc();
    }

    /// Counts an answer from another pod than the one picked.
    pub fn served_elsewhere(&self) {
        self.served_elsewhere.inc();
    }

    /// Counts a refused reload.
    pub fn reload_failed(&self) {
        self.reload_failures.inc();
    }

    /// Sets the version of the policy in force.
    pub fn generation(&self, generation: u64) {
        self.generation
            .set(i64::try_from(generation).unwrap_or(i64::MAX));
    }
}

fn observe(histogram: &Timed, took: Duration, trace: Option<TraceId>) {
    let exemplar = trace.map(|trace| Exemplar {
        trace_id: TraceText(trace),
    });
    let now = exemplar.as_ref().map(|_| SystemTime::now());
    histogram.observe(took.as_secs_f64(), exemplar, now);
}

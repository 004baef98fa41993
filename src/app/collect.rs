//! Metrics that describe state: read at scrape time, never kept twice.
//!
//! Lives here: pods, feeds, index size and the gateway's side as Prometheus metrics.
//! Never here: anything counted as it happens (see `telemetry::metrics`).
//! Invariant: one series per configured pod and metric; a pod that is gone is gone from the next scrape.

use crate::decide::snapshot::Role;
use crate::extproc::counters::Counters;
use crate::kv::feed::FeedStats;
use crate::pick::{Picker, PodStatus};
use crate::telemetry::trace::ExportStats;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use std::fmt::Error;
use std::sync::{Arc, Weak};

/// Reads the state of a picker.
#[derive(Debug)]
pub(super) struct State {
    pub(super) picker: Weak<Picker>,
    pub(super) counters: Arc<Counters>,
}

/// The label for a pod's name. Not `pod`: Prometheus gives that name to the picker's own pod.
const ENGINE: &str = "engine";

/// A gauge per pod: name, help, reading.
type PodGauge = (&'static str, &'static str, fn(&PodStatus) -> Option<f64>);

const POD_GAUGES: &[PodGauge] = &[
    ("pod_ready", "1 while the pod can take requests", |pod| {
        Some(f64::from(u8::from(pod.availability == "ready")))
    }),
    (
        "pod_booked_requests",
        "Requests promised to the pod and not yet over",
        |pod| Some(f64::from(pod.requests)),
    ),
    (
        "pod_booked_prefill_tokens",
        "Prompt tokens promised to the pod and not yet prefilled",
        |pod| Some(pod.prefill_tokens as f64),
    ),
    (
        "pod_booked_decode_blocks",
        "KV blocks of the requests promised to the pod",
        |pod| Some(f64::from(pod.decode_blocks)),
    ),
    (
        "pod_engine_waiting",
        "Requests that the engine says are waiting",
        |pod| pod.waiting.map(f64::from),
    ),
    (
        "pod_engine_running",
        "Requests that the engine says are running",
        |pod| pod.running.map(f64::from),
    ),
    (
        "pod_engine_kv_usage_ratio",
        "Share of its KV cache that the engine says is in use",
        |pod| pod.kv_usage,
    ),
    (
        "pod_kv_source_connected",
        "1 while the pod's KV events arrive without a gap; absent when none are configured",
        |pod| (pod.kv_source != "absent").then(|| f64::from(u8::from(pod.kv_source == "live"))),
    ),
    (
        "pod_kv_blocks",
        "Blocks that the index knows on the pod",
        |pod| Some(pod.kv_blocks as f64),
    ),
    (
        "pod_kv_last_event_age_seconds",
        "Time since the pod's last KV event",
        |pod| pod.kv_last_event_age_s,
    ),
];

/// A counter per feed: name, help, reading.
type FeedCounter = (&'static str, &'static str, fn(&FeedStats) -> u64);

const FEED_COUNTERS: &[FeedCounter] = &[
    ("kv_batches", "KV event batches read", |feed| feed.batches),
    ("kv_events", "KV events applied", |feed| feed.events),
    (
        "kv_events_skipped",
        "KV events of a kind, medium or group that is not indexed",
        |feed| feed.skipped,
    ),
    (
        "kv_batches_malformed",
        "KV event batches that could not be read",
        |feed| feed.malformed,
    ),
    ("kv_gaps", "Gaps in a pod's sequence of batches", |feed| {
        feed.gaps
    }),
    (
        "kv_source_resets",
        "Times a pod's blocks were dropped because it restarted or a gap stayed open",
        |feed| feed.resets,
    ),
    ("kv_replays", "Replays asked of a pod", |feed| feed.replays),
    (
        "kv_reconnects",
        "Times a pod's event stream was connected again",
        |feed| feed.reconnects,
    ),
];

impl Collector for State {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), Error> {
        let Some(picker) = self.picker.upgrade() else {
            return Ok(());
        };
        let pods = picker.pods();
        for (name, help, read) in POD_GAUGES {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for pod in &pods {
                if let Some(value) = read(pod) {
                    let labels = [(ENGINE, &*pod.name), ("role", pod.role.as_str())];
                    ConstGauge::new(value).encode(family.encode_family(&labels)?)?;
                }
            }
        }
        let help = "1 for each thing that the policy in force needs of a pod and does not get";
        let mut family = encoder.encode_descriptor(
            "policy_prerequisite_missing",
            help,
            None,
            MetricType::Gauge,
        )?;
        for pod in pods.iter().filter(|pod| pod.availability == "ready") {
            for what in &pod.missing {
                let labels = [("pod", &*pod.name), ("what", what.as_str())];
                ConstGauge::new(1.0).encode(family.encode_family(&labels)?)?;
            }
        }
        let view = picker.observer().roster.view();
        let feeds: Vec<_> = view
            .pods
            .iter()
            .filter_map(|pod| Some((pod, picker.observer().sources.feed(pod.id)?.stats())))
            .collect();
        for (name, help, read) in FEED_COUNTERS {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for (pod, stats) in &feeds {
                let labels = [(ENGINE, &*pod.spec.name)];
                ConstCounter::new(read(stats)).encode(family.encode_family(&labels)?)?;
            }
        }
        let blocks = ConstGauge::new(picker.observer().index.len() as f64);
        let help = "Blocks that the index knows, each counted once per pod that holds it";
        blocks.encode(encoder.encode_descriptor(
            "index_blocks",
            help,
            None,
            MetricType::Gauge,
        )?)?;
        let ready = ConstGauge::new(f64::from(u8::from(picker.ready())));
        ready.encode(encoder.encode_descriptor(
            "ready",
            "1 while a decode pod is ready, so that requests can be answered",
            None,
            MetricType::Gauge,
        )?)?;
        pods_by_state(&pods, &mut encoder)?;
        if let Some(stats) = picker.tracing().stats() {
            spans(&stats, &mut encoder)?;
        }
        self.gateway(&mut encoder)
    }
}

/// Pods by role and availability, and by the state of their KV events: every combination, so that a
/// state nobody is in reads 0 rather than nothing.
fn pods_by_state(pods: &[PodStatus], encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
    let help = "Pods by role and availability";
    let mut family = encoder.encode_descriptor("pods", help, None, MetricType::Gauge)?;
    for role in [Role::Prefill, Role::Decode, Role::Both] {
        for state in ["ready", "not_ready", "draining", "unreachable"] {
            let fits = |pod: &&PodStatus| pod.role == role && pod.availability == state;
            let count = pods.iter().filter(fits).count();
            let labels = [("role", role.as_str()), ("state", state)];
            ConstGauge::new(count as f64).encode(family.encode_family(&labels)?)?;
        }
    }
    let help = "Pods by the state of their KV events";
    let mut family = encoder.encode_descriptor("kv_sources", help, None, MetricType::Gauge)?;
    for state in ["live", "syncing", "lost", "absent"] {
        let count = pods.iter().filter(|pod| pod.kv_source == state).count();
        ConstGauge::new(count as f64).encode(family.encode_family(&[("state", state)])?)?;
    }
    Ok(())
}

fn spans(stats: &ExportStats, encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
    let help = "Spans that the receiver took";
    let exported = ConstCounter::new(stats.exported);
    exported.encode(encoder.encode_descriptor(
        "spans_exported",
        help,
        None,
        MetricType::Counter,
    )?)?;
    let help = "Spans that were dropped, by cause";
    let mut family = encoder.encode_descriptor("spans_dropped", help, None, MetricType::Counter)?;
    for (cause, count) in [
        ("queue_full", stats.dropped_queue_full),
        ("export_failed", stats.dropped_export_failed),
    ] {
        ConstCounter::new(count).encode(family.encode_family(&[("cause", cause)])?)?;
    }
    Ok(())
}

impl State {
    fn gateway(&self, encoder: &mut DescriptorEncoder) -> Result<(), Error> {
        let c = &self.counters;
        let open = ConstGauge::new(c.open_streams() as f64);
        open.encode(encoder.encode_descriptor(
            "streams_open",
            "External-processing streams open",
            None,
            MetricType::Gauge,
        )?)?;
        for (name, help, value) in [
            (
                "streams",
                "External-processing streams opened",
                c.streams.get(),
            ),
            (
                "streams_aborted",
                "Streams that ended between a plan and the end of the answer",
                c.aborted.get(),
            ),
            (
                "streams_cut",
                "Streams cut when the drain time was over",
                c.cut.get(),
            ),
            (
                "unsupported_processing_mode",
                "Requests refused because of the gateway's body mode",
                c.unsupported_processing_mode.get(),
            ),
            (
                "body_not_sent",
                "Requests with a body that the gateway does not send",
                c.body_not_sent.get(),
            ),
            (
                "only_shown",
                "Requests of gateways in observability_mode, for which no pod is chosen",
                c.only_shown.get(),
            ),
            (
                "unreadable_encoding",
                "Requests whose content encoding is not read here",
                c.unreadable_encoding.get(),
            ),
            (
                "ignored_messages",
                "Messages that changed nothing, such as a body after its end",
                c.ignored_messages.get(),
            ),
            (
                "request_bytes",
                "Bytes of request bodies",
                c.request_bytes.get(),
            ),
            (
                "response_bytes",
                "Bytes of response bodies",
                c.response_bytes.get(),
            ),
            (
                "log_warnings_held_back",
                "Warnings not written because the same one was written within a minute",
                crate::telemetry::throttle::held_back(),
            ),
            (
                "leases",
                "Requests whose answer the gateway does not show, released after a fixed time",
                c.leases.get(),
            ),
        ] {
            ConstCounter::new(value).encode(encoder.encode_descriptor(
                name,
                help,
                None,
                MetricType::Counter,
            )?)?;
        }
        self.refusals(encoder)
    }

    /// Requests that were answered here, whatever the cause.
    fn refusals(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
        let help = "Requests answered without a pod, by cause and status";
        let name = "refusals";
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (code, status, count) in self.counters.refusals() {
            let status = status.to_string();
            let labels = [("code", code), ("status", status.as_str())];
            ConstCounter::new(count).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

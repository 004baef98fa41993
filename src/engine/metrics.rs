//! `/metrics` under vLLM's names, in the Prometheus text format.
//!
//! Lives here: [`render`].
//! Never here: what the numbers mean (`scheduler`), HTTP.
//! Invariant: every family has one HELP, one TYPE and series with distinct labels.

use super::config::EngineConfig;
use super::scheduler::{Load, Totals};
use std::fmt::Write;

/// The page.
pub(super) fn render(config: &EngineConfig, load: Load, totals: Totals) -> String {
    let mut page = Page {
        text: String::with_capacity(4_096),
        labels: format!(
            "engine=\"0\",model_name=\"{}\"",
            escape(config.model.as_str())
        ),
    };
    gauges(&mut page, config, load);
    counters(&mut page, totals);
    page.text
}

fn gauges(page: &mut Page, config: &EngineConfig, load: Load) {
    page.gauge(
        "vllm:num_requests_running",
        "Number of requests in model execution batches.",
        load.running as f64,
    );
    page.gauge(
        "vllm:num_requests_waiting",
        "Number of requests waiting to be processed.",
        load.waiting as f64,
    );
    page.gauge(
        "vllm:kv_cache_usage_perc",
        "KV-cache usage. 1 means 100 percent usage.",
        load.used as f64 / load.total.max(1) as f64,
    );
    let sizes = format!(
        "block_size=\"{}\",enable_prefix_caching=\"True\",num_gpu_blocks=\"{}\"",
        config.block_size, config.blocks
    );
    page.family(
        "vllm:cache_config_info",
        "gauge",
        "Information of the LLMEngine CacheConfig",
    );
    page.series("vllm:cache_config_info", &sizes, 1.0);
}

fn counters(page: &mut Page, totals: Totals) {
    let prompt = totals.prompt;
    let all = prompt.cached.0 + prompt.external.0 + prompt.computed.0;
    for (name, help, value) in [
        (
            "vllm:prefix_cache_queries_total",
            "Prefix cache queries, in terms of number of queried tokens.",
            totals.prefix_queries,
        ),
        (
            "vllm:prefix_cache_hits_total",
            "Prefix cache hits, in terms of number of cached tokens.",
            totals.prefix_hits,
        ),
        (
            "vllm:external_prefix_cache_queries_total",
            "External prefix cache queries from KV connector cross-instance cache sharing, in tokens.",
            totals.external_queries,
        ),
        (
            "vllm:external_prefix_cache_hits_total",
            "External prefix cache hits from KV connector cross-instance cache sharing, in tokens.",
            totals.external_hits,
        ),
        (
            "vllm:prompt_tokens_total",
            "Number of prefill tokens processed.",
            all,
        ),
        (
            "vllm:generation_tokens_total",
            "Number of generation tokens processed.",
            totals.generated,
        ),
        (
            "vllm:num_preemptions_total",
            "Cumulative number of preemption from the engine.",
            totals.preemptions,
        ),
        (
            "vllm:nixl_num_kv_expired_reqs_total",
            "Number of requests whose KV expired before it was fetched.",
            totals.expired,
        ),
    ] {
        page.family(name, "counter", help);
        page.series(name, "", value as f64);
    }
    page.labelled(
        "vllm:prompt_tokens_by_source_total",
        "Number of prompt tokens by source.",
        "source",
        &[
            ("local_compute", prompt.computed.0),
            ("local_cache_hit", prompt.cached.0),
            ("external_kv_transfer", prompt.external.0),
        ],
    );
    page.labelled(
        "vllm:request_success_total",
        "Count of successfully processed requests.",
        "finished_reason",
        &[
            ("stop", totals.stopped),
            ("length", totals.length),
            ("abort", totals.aborted),
        ],
    );
}

struct Page {
    text: String,
    labels: String,
}

impl Page {
    fn gauge(&mut self, name: &str, help: &str, value: f64) {
        self.family(name, "gauge", help);
        self.series(name, "", value);
    }

    fn labelled(&mut self, name: &str, help: &str, label: &str, values: &[(&str, u64)]) {
        self.family(name, "counter", help);
        for (word, value) in values {
            self.series(name, &format!("{label}=\"{word}\""), *value as f64);
        }
    }

    fn family(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn series(&mut self, name: &str, extra: &str, value: f64) {
        let comma = if extra.is_empty() { "" } else { "," };
        let _ = writeln!(
            self.text,
            "{name}{{{}{comma}{extra}}} {value:?}",
            self.labels
        );
    }
}

fn escape(text: &str) -> String {
    text.replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}

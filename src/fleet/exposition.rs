//! What an engine says of itself in Prometheus text.
//!
//! Lives here: the few samples that decisions use, as vLLM, SGLang and TensorRT-LLM name them.
//! Never here: I/O, histograms, anything else an engine exposes.
//! Invariant: any text gives a [`Reported`]; what is missing or makes no sense is `None`. Nothing is
//! kept of the text.
//!
//! Format: Prometheus text exposition 0.0.4, of which OpenMetrics text differs only in lines that are
//! skipped here.

use crate::decide::prerequisite::PrefixCaching;
use crate::fleet::status::Reported;
use crate::units::{BlockSize, Blocks, Ratio};

/// What a sample of interest says.
#[derive(Clone, Copy)]
enum Says {
    /// Requests waiting to be scheduled.
    Waiting,
    /// Requests running.
    Running,
    /// Share of the KV cache in use.
    KvUsage,
    /// Tokens per block and number of blocks, in these labels.
    CacheConfig(&'static str, &'static str),
    /// Tokens per block.
    BlockSize,
    /// Tokens in all blocks.
    CacheTokens,
}

/// The samples of interest. Engines rename some between versions, so several may say the same; of
/// those, an engine has one.
const SAMPLES: [(&str, Says); 15] = [
    ("vllm:num_requests_waiting", Says::Waiting),
    ("vllm:num_requests_running", Says::Running),
    ("vllm:kv_cache_usage_perc", Says::KvUsage),
    ("vllm:gpu_cache_usage_perc", Says::KvUsage),
    (
        "vllm:cache_config_info",
        Says::CacheConfig("block_size", "num_gpu_blocks"),
    ),
    ("sglang:num_queue_reqs", Says::Waiting),
    ("sglang:num_running_reqs", Says::Running),
    ("sglang:token_usage", Says::KvUsage),
    (
        "sglang:cache_config_info",
        Says::CacheConfig("page_size", "num_pages"),
    ),
    ("sglang:page_size", Says::BlockSize),
    ("sglang:max_total_num_tokens", Says::CacheTokens),
    ("trtllm_num_requests_waiting", Says::Waiting),
    ("trtllm_num_requests_running", Says::Running),
    ("trtllm_kv_cache_utilization", Says::KvUsage),
    ("trtllm_kv_cache_tokens_per_block", Says::BlockSize),
];

/// The label of vLLM's cache config that says whether prefixes are kept: `True`, `False` or `None`.
const PREFIX_CACHING: &str = "enable_prefix_caching";

/// Reads the samples that decisions use out of `text`.
///
/// An endpoint in front of several engines (data-parallel ranks, each with a label of its own) is
/// reported as one: counts and blocks are summed, the usage is their mean. Of tensor- and
/// pipeline-parallel ranks, which say the same, only the first counts.
#[must_use]
pub fn read(text: &str) -> Reported {
    let mut sums = Sums::default();
    for line in text.lines() {
        if let Some(sample) = Sample::parse(line)
            && sample.is_first_rank()
        {
            sums.add(&sample);
        }
    }
    sums.finish()
}

/// One line of interest.
struct Sample<'a> {
    says: Says,
    labels: &'a str,
    value: f64,
}

impl<'a> Sample<'a> {
    fn parse(line: &'a str) -> Option<Sample<'a>> {
        let line = line.trim_start();
        let end = line.find(|c: char| c == '{' || c.is_ascii_whitespace())?;
        let (name, rest) = line.split_at(end);
        let (_, says) = SAMPLES.iter().find(|(known, _)| *known == name)?;
        let rest = rest.trim_start();
        let (labels, rest) = match rest.strip_prefix('{') {
            Some(inside) => inside.split_at(labels_end(inside)?),
            None => ("", rest),
        };
        let value = rest
            .trim_start_matches('}')
            .split_ascii_whitespace()
            .next()?;
        Some(Sample {
            says: *says,
            labels,
            value: value.parse().ok()?,
        })
    }

    /// Whether no label says that another rank says the same.
    fn is_first_rank(&self) -> bool {
        ["tp_rank", "pp_rank"]
            .iter()
            .all(|rank| self.label(rank).is_none_or(|value| value == "0"))
    }

    /// The text of a label, without undoing escapes: numbers have none.
    fn label(&self, wanted: &str) -> Option<&'a str> {
        let mut rest = self.labels;
        while let Some((name, after)) = rest.split_once('=') {
            let inside = after.trim_start().strip_prefix('"')?;
            let end = quote_end(inside)?;
            if name.trim_matches(|c: char| c == ',' || c.is_ascii_whitespace()) == wanted {
                return Some(&inside[..end]);
            }
            rest = &inside[end + 1..];
        }
        None
    }

    fn number(&self, label: &str) -> Option<f64> {
        self.label(label)?.parse().ok()
    }
}

/// Where the labels end, that is the brace outside of quotes.
fn labels_end(text: &str) -> Option<usize> {
    let mut at = 0;
    loop {
        let step = text[at..].find(['"', '}'])?;
        at += step;
        if text[at..].starts_with('}') {
            return Some(at);
        }
        at += 1 + quote_end(&text[at + 1..])? + 1;
    }
}

/// Where the quoted text that starts at 0 ends, that is the first quote that is not escaped.
fn quote_end(text: &str) -> Option<usize> {
    let mut escaped = false;
    text.bytes().position(|byte| {
        let ends = byte == b'"' && !escaped;
        escaped = byte == b'\\' && !escaped;
        ends
    })
}

#[derive(Default)]
struct Sums {
    waiting: Sum,
    running: Sum,
    kv_usage: Sum,
    kv_blocks: Sum,
    cache_tokens: Sum,
    block_size: Option<BlockSize>,
    prefix_caching: PrefixCaching,
}

/// A sum of numbers that are finite and at least 0.
#[derive(Clone, Copy, Default)]
struct Sum {
    total: f64,
    count: u32,
}

impl Sum {
    fn add(&mut self, value: f64) {
        if value.is_finite() && 0.0 <= value {
            self.total += value;
            self.count = self.count.saturating_add(1);
        }
    }

    fn total(self) -> Option<f64> {
        (self.count != 0).then_some(self.total)
    }

    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // Saturates, and is not negative.
    fn whole(self) -> Option<u32> {
        self.total().map(|total| total as u32)
    }
}

impl Sums {
    fn add(&mut self, sample: &Sample<'_>) {
        match sample.says {
            Says::Waiting => self.waiting.add(sample.value),
            Says::Running => self.running.add(sample.value),
            Says::KvUsage => self.kv_usage.add(sample.value),
            Says::CacheTokens => self.cache_tokens.add(sample.value),
            Says::BlockSize => self.block_size = block_size(sample.value),
            Says::CacheConfig(size, blocks) => {
                if let Some(size) = sample.number(size) {
                    self.block_size = block_size(size);
                }
                if let Some(blocks) = sample.number(blocks) {
                    self.kv_blocks.add(blocks);
                }
                match sample.label(PREFIX_CACHING) {
                    Some("True") => self.prefix_caching = PrefixCaching::On,
                    Some("False") => self.prefix_caching = PrefixCaching::Off,
                    _ => {}
                }
            }
        }
    }

    fn finish(self) -> Reported {
        let from_tokens = || {
            let size = self.block_size?;
            let tokens = self.cache_tokens.whole()?;
            Some(tokens / size.get())
        };
        let kv_usage = self.kv_usage.total().map(|total| {
            // A percentage by name, a share by value; rounding may leave it a little above 1.
            (total / f64::from(self.kv_usage.count)).min(1.0)
        });
        Reported {
            waiting: self.waiting.whole(),
            running: self.running.whole(),
            kv_usage: kv_usage.and_then(Ratio::new),
            kv_blocks: self
                .kv_blocks
                .whole()
                .or_else(from_tokens)
                .filter(|blocks| *blocks != 0)
                .map(Blocks),
            block_size: self.block_size,
            prefix_caching: self.prefix_caching,
        }
    }
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // Saturates; NaN and negatives give 0.
fn block_size(value: f64) -> Option<BlockSize> {
    BlockSize::new(value as u32)
}

#[cfg(test)]
mod tests;

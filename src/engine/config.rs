//! What one simulated engine is.
//!
//! Lives here: [`EngineConfig`] and the checks a real engine makes when it starts.
//! Never here: files, flags (`cli`).
//! Invariant: a checked configuration can serve its longest request: one sequence of
//! `max_model_len` tokens fits the cache, as vLLM demands at start.

use super::answer::Vocabulary;
use super::scheduler::Limits;
use super::timing::{Link, Pace};
use super::words;
use crate::names::ModelName;
use crate::prompt::Encoder;
use crate::units::{BlockSize, Blocks, Ratio, Tokens};
use std::sync::Arc;
use std::time::Duration;

/// Most blocks a simulated cache may have; each takes about 24 bytes here.
const MAX_BLOCKS: u32 = 1 << 24;
/// Prompt tokens that may wait in the queue: 64 MiB of them.
const WAITING_TOKENS: usize = 1 << 24;

/// What an engine is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Computes prompts for decode engines (vLLM's `kv_producer`).
    Prefill,
    /// Fetches prompts and decodes (vLLM's `kv_consumer`).
    Decode,
    /// Either (vLLM's `kv_both`).
    Both,
}

impl Role {
    /// The word used in flags and messages.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Role::Prefill => "prefill",
            Role::Decode => "decode",
            Role::Both => "both",
        }
    }
}

/// Whether an engine can prefill for itself when no prefill engine is named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LocalPrefill {
    /// As unmodified vLLM.
    Able,
    /// Requests that need it are refused with 400 (SGLang's and TensorRT-LLM's decode mode).
    Unable,
}

/// Everything about one engine except its addresses.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// What it is for.
    pub role: Role,
    /// Whether a decode engine can prefill for itself.
    pub local_prefill: LocalPrefill,
    /// The name it serves its model under; its adapters are those of that model's profile.
    pub model: ModelName,
    /// Tokenizer and chat template of that model (others may be in it). Shared between the engines
    /// of a process.
    pub encoder: Arc<Encoder>,
    /// Tokens per KV block.
    pub block_size: BlockSize,
    /// KV blocks.
    pub blocks: Blocks,
    /// Longest prompt plus answer.
    pub max_model_len: Tokens,
    /// Tokens one scheduler pass may compute.
    pub batch_tokens: Tokens,
    /// Sequences that may run at once.
    pub sequences: u32,
    /// Sequences that may wait; beyond, requests get 503.
    pub waiting: u32,
    /// The KV transfer link.
    pub link: Link,
    /// How fast modelled time runs; 0 does not wait at all.
    pub pace: Pace,
    /// Words after which an answer ends by itself.
    pub answer_tokens: u32,
    /// How long a prefill engine keeps blocks that no decode engine fetches (vLLM's
    /// `kv_lease_duration`). Not scaled by `pace`.
    pub lease: Duration,
    /// How long another engine may take to answer.
    pub peer_timeout: Duration,
    /// First frame of event messages.
    pub topic: String,
    /// Event batches kept for replay (vLLM's `buffer_steps`).
    pub replay_batches: usize,
    /// How many requests `/sim/requests` remembers; 0 turns it off.
    pub record_requests: usize,
    /// Largest request body.
    pub max_body_bytes: usize,
}

impl EngineConfig {
    /// vLLM's defaults for an engine of this role that serves `model`, which `encoder` knows, in
    /// blocks of `block_size` (vLLM's own default is 16 tokens).
    #[must_use]
    pub fn new(
        role: Role,
        model: ModelName,
        encoder: Arc<Encoder>,
        block_size: BlockSize,
    ) -> EngineConfig {
        EngineConfig {
            role,
            local_prefill: LocalPrefill::Able,
            model,
            encoder,
            block_size,
            blocks: Blocks(16_384),
            max_model_len: Tokens(131_072),
            batch_tokens: Tokens(8_192),
            sequences: 256,
            waiting: 4_096,
            link: Link::default(),
            pace: Pace(Ratio::ONE),
            answer_tokens: 128,
            lease: Duration::from_secs(30),
            peer_timeout: Duration::from_secs(120),
            topic: String::new(),
            replay_batches: 10_000,
            record_requests: 0,
            max_body_bytes: 32 << 20,
        }
    }

    /// The scheduler's part, checked.
    pub(super) fn limits(&self) -> Result<Limits, ConfigError> {
        let positive = |what: &'static str, value: u64| match value {
            0 => Err(ConfigError::Zero { what }),
            _ => Ok(value),
        };
        positive("max_model_len", self.max_model_len.0)?;
        positive("batch_tokens", self.batch_tokens.0)?;
        positive("sequences", u64::from(self.sequences))?;
        positive("answer_tokens", u64::from(self.answer_tokens))?;
        if MAX_BLOCKS < self.blocks.0 {
            return Err(ConfigError::TooManyBlocks {
                found: self.blocks.0,
            });
        }
        let capacity = self.block_size.tokens(self.blocks);
        if capacity < self.max_model_len {
            return Err(ConfigError::CacheTooSmall {
                capacity,
                needed: self.max_model_len,
            });
        }
        Ok(Limits {
            block_size: self.block_size,
            blocks: self.blocks.0,
            batch_tokens: usize::try_from(self.batch_tokens.0).unwrap_or(usize::MAX),
            sequences: self.sequences as usize,
            waiting: self.waiting as usize,
            waiting_tokens: WAITING_TOKENS,
            lease: self.lease,
            link: self.link,
            pace: self.pace,
        })
    }
}

impl EngineConfig {
    /// The words its model can say.
    pub(super) fn vocabulary(&self) -> Result<Vocabulary, super::EngineError> {
        let resolved = self.encoder.profiles().resolve(&self.model);
        let profile = resolved
            .filter(|resolved| resolved.adapter.is_none())
            .ok_or(ConfigError::NoTokenizer)?
            .profile;
        let tokenizer = profile.tokenizer().ok_or(ConfigError::NoTokenizer)?;
        Ok(words::vocabulary(tokenizer)?)
    }
}

/// Why an engine cannot be what it is asked to be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// A size that must be positive.
    #[error("{what}: expected at least 1, found 0")]
    Zero {
        /// Which.
        what: &'static str,
    },
    /// Nothing to tokenize with.
    #[error("model: expected one with a tokenizer, found none")]
    NoTokenizer,
    /// More blocks than the simulation supports.
    #[error("blocks: expected at most {MAX_BLOCKS}, found {found}")]
    TooManyBlocks {
        /// How many were asked for.
        found: u32,
    },
    /// The longest request would not fit.
    #[error("cache: expected room for max_model_len = {needed} tokens, found {capacity}")]
    CacheTooSmall {
        /// Tokens the cache holds.
        capacity: Tokens,
        /// Tokens of the longest request.
        needed: Tokens,
    },
}

//! One message of KV events, as vLLM, SGLang and the TensorRT-LLM publisher of Dynamo send them.
//!
//! Lives here: the decoded form ([`Batch`], [`Event`]); [`Batch::decode`] reads every release whose
//! messages are among the captures in `tests/data/captures`.
//! Never here: sockets (see `feed`), what the events mean for a pod (see `index`).
//! Invariant: decoding never panics, allocates no more than a small multiple of the payload, and
//! keeps the good events of a batch when one event among them is unreadable.

mod decode;
mod msgpack;
#[cfg(test)]
mod tests;

use std::sync::Arc;

/// Largest payload that is decoded, in bytes; longer ones are malformed.
///
/// A store of a million tokens is 3 to 5 MB.
pub const MAX_PAYLOAD: usize = 16 * 1024 * 1024;
/// Most token ids in one event; an event with more is skipped as malformed.
pub const MAX_TOKENS: usize = 1_000_000;

/// The engine's own name for a block: opaque, used for parent links and removals only.
///
/// The 64-bit pattern of the wire's integer (signed or not), or the last eight bytes, big-endian,
/// of a byte string; both forms of one hash are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EngineHash(pub u64);

/// One payload.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Batch {
    /// When the engine made it, in seconds since the Unix epoch by its clock.
    pub ts: f64,
    /// Data-parallel rank of the sender; 0 when the message names none.
    pub rank: u32,
    /// In the order of the wire, which matters.
    pub events: Vec<Event>,
    /// What was left out.
    pub skipped: Skipped,
}

/// Events of a batch that were left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Skipped {
    /// Well-formed, with a tag this version does not know.
    pub unknown: u32,
    /// With a field missing or of the wrong type.
    pub malformed: u32,
}

/// One event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Blocks that are now held.
    Stored(Box<Stored>),
    /// Blocks of which one copy is gone.
    Removed(Removed),
    /// Everything this rank held is gone.
    Cleared,
}

/// `BlockStored`: consecutive blocks of one prompt.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Stored {
    /// One per block, in prompt order.
    pub hashes: Vec<EngineHash>,
    /// The block before the first; `None` at the start of a prompt.
    pub parent: Option<EngineHash>,
    /// The tokens of the blocks, one after another; empty when the sender only moves known blocks.
    ///
    /// From SGLang's pairs (`[t0,t1], [t1,t2], …`) the `pairs + 1` tokens they spell.
    pub tokens: Vec<u32>,
    /// Whether the tokens came as pairs, so that there is one more than blocks × size.
    pub tokens_as: TokenForm,
    /// Tokens per block; 0 when the sender only moves known blocks.
    pub block_size: u32,
    /// The storage it is about.
    pub medium: Medium,
    /// Whether that storage belongs to the pod.
    pub locality: Locality,
    /// KV-cache group of a hybrid model.
    pub group: Option<u32>,
    /// Attention of that group.
    pub attention: Attention,
    /// The adapter the blocks were computed with.
    pub adapter: Adapter,
    /// SGLang's separate field; vLLM's salt is among `extra`.
    pub salt: Option<Arc<str>>,
    /// What else the engine mixed into each block: empty, or one list per block.
    pub extra: Vec<Vec<Extra>>,
}

/// How the token ids were written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum TokenForm {
    /// One integer per token.
    #[default]
    Single,
    /// SGLang with a draft model: overlapping pairs.
    Pairs,
}

/// `BlockRemoved`.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Removed {
    /// The blocks.
    pub hashes: Vec<EngineHash>,
    /// The storage they left.
    pub medium: Medium,
    /// Whether that storage belongs to the pod.
    pub locality: Locality,
    /// KV-cache group of a hybrid model.
    pub group: Option<u32>,
}

/// Where blocks are kept. Absent, nil and empty mean the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Medium {
    /// `GPU`.
    #[default]
    Device,
    /// `CPU`, `CPU_PINNED`.
    Host,
    /// `DISK`, `STORAGE`, `FS`, `OBJ`, `EXTERNAL`.
    Disk,
    /// A word this version does not know.
    Unknown,
}

/// Whose storage it is. Absent means the pod's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Locality {
    /// The pod's.
    #[default]
    Local,
    /// Shared between pods, so it says nothing about this one.
    Remote,
}

/// `kv_cache_spec_kind`, as far as it matters here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Attention {
    /// The sender does not say (older releases, SGLang).
    #[default]
    Unstated,
    /// `full_attention`, `mla_attention`, `sink_full_attention`: a block depends on all before it
    /// and stays until evicted.
    Full,
    /// Sliding window, chunked, mamba, cross, encoder: blocks come and go out of order.
    Partial,
}

/// The adapter (LoRA) of stored blocks.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum Adapter {
    /// The base model.
    #[default]
    None,
    /// By name.
    Named(Arc<str>),
    /// Releases that send a number only; the number differs from pod to pod.
    NumberOnly,
}

/// One item of a block's `extra_keys`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Extra {
    /// An adapter name, a cache salt, or (older vLLM) a multimodal identifier.
    Text(Arc<str>),
    /// A multimodal item and its offset relative to the block.
    Item {
        /// Its identifier.
        id: Arc<str>,
        /// Offset in tokens; negative when it began in an earlier block.
        offset: i64,
    },
    /// A digest (prompt embeddings).
    Bytes(Vec<u8>),
    /// Anything else, as it stood on the wire.
    Other(Vec<u8>),
}

/// Why a payload is not a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// The bytes do not have the shape of a batch.
    #[error("kv event batch: expected {expected} at byte {at}, found {found:#04x}")]
    Unexpected {
        /// What should have stood there.
        expected: &'static str,
        /// Where, from the start of the payload.
        at: usize,
        /// The byte that stood there.
        found: u8,
    },
    /// The bytes end too early.
    #[error("kv event batch: expected {expected} at byte {at}, found the end")]
    Truncated {
        /// What should have stood there.
        expected: &'static str,
        /// Where, from the start of the payload.
        at: usize,
    },
    /// The payload is longer than [`MAX_PAYLOAD`].
    #[error("kv event batch: expected at most {MAX_PAYLOAD} bytes, found {0}")]
    TooLong(usize),
}

impl Batch {
    /// Decodes one payload.
    ///
    /// # Errors
    /// When the payload is not an array of a time, an array of events and, optionally, a rank, or
    /// when an unreadable event leaves no way to find the next one.
    pub fn decode(payload: &[u8]) -> Result<Batch, Malformed> {
        decode::batch(payload)
    }
}

impl Stored {
    /// Whether the event names blocks without their tokens, to say that they moved.
    #[must_use]
    pub fn is_placeholder(&self) -> bool {
        self.tokens.is_empty()
    }
}

//! What goes into the scheduler and what comes out, besides jobs.
//!
//! Lives here: sizes, passes, reports, counters.
//! Never here: behaviour.
//! Invariant: plain values.

use super::{Finish, PromptSource, SequenceId};
use crate::engine::cache::{BlockId, Change};
use crate::engine::timing::{Link, Pace};
use crate::units::{BlockSize, Tokens};
use std::time::Duration;

/// Sizes of one scheduler.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Tokens per block.
    pub block_size: BlockSize,
    /// Blocks in the cache.
    pub blocks: u32,
    /// Tokens one pass may compute.
    pub batch_tokens: usize,
    /// Sequences that may run at once.
    pub sequences: usize,
    /// Sequences that may wait.
    pub waiting: usize,
    /// Prompt tokens that may wait, so that memory stays bounded when every prompt is long.
    pub waiting_tokens: usize,
    /// How long blocks are kept for a decode engine that does not fetch them.
    pub lease: Duration,
    /// The link over which blocks come in.
    pub link: Link,
    /// How fast modelled time runs.
    pub pace: Pace,
}

/// A pass that is being computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pass {
    /// How long it takes.
    pub duration: Duration,
    /// New prompt tokens in it.
    pub prefill: Tokens,
    /// Sequences that decode in it.
    pub decodes: usize,
}

/// What the driver is to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Let the pass take its time, then call [`Scheduler::complete`](super::Scheduler::complete).
    Run(Pass),
    /// Nothing to compute before this instant (a transfer ends, a lease expires) or a new job.
    WaitUntil(Duration),
    /// Nothing to do until a new job comes.
    Idle,
}

/// One token for one sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// Whose.
    pub sequence: SequenceId,
    /// Where the prompt's KV came from; with the first token only.
    pub first: Option<PromptSource>,
    /// Whether it is the last one, and why.
    pub finish: Option<Finish>,
    /// Blocks kept for the decode engine, with the last token of a [`Keep::ForDecode`](super::sequence::Keep::ForDecode) job.
    pub kept: Vec<BlockId>,
}

/// What a pass produced.
#[derive(Debug, Default)]
pub struct Report {
    /// One token per sequence that got one.
    pub outputs: Vec<Output>,
    /// What changed in the cache since the last report, in order.
    pub changes: Vec<Change>,
}

/// Counters since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Prompt tokens looked up in the cache.
    pub prefix_queries: u64,
    /// Prompt tokens found there.
    pub prefix_hits: u64,
    /// Prompt tokens looked for on another engine.
    pub external_queries: u64,
    /// Prompt tokens fetched from another engine.
    pub external_hits: u64,
    /// Prompt tokens by source, of sequences that got their first token.
    pub prompt: PromptSource,
    /// Generated tokens.
    pub generated: u64,
    /// Sequences sent back to be computed again.
    pub preemptions: u64,
    /// Sequences that ended by themselves.
    pub stopped: u64,
    /// Sequences that reached their limit.
    pub length: u64,
    /// Sequences whose client went away.
    pub aborted: u64,
    /// Leases that ran out.
    pub expired: u64,
}

/// How busy the scheduler is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Load {
    /// Sequences being computed.
    pub running: usize,
    /// Sequences waiting, for a seat or for a transfer.
    pub waiting: usize,
    /// Blocks in use.
    pub used: usize,
    /// Blocks there are.
    pub total: usize,
}

/// The queue of waiting sequences is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("waiting queue: expected room for {wanted} more, found {waiting} waiting")]
pub struct QueueFull {
    /// Sequences that were to be added.
    pub wanted: usize,
    /// Sequences that wait already.
    pub waiting: usize,
}

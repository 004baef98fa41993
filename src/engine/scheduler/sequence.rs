//! One sequence on its way through the scheduler.
//!
//! Lives here: [`Job`] (what is asked) and `Sequence` (how far it is).
//! Never here: other sequences, queues.
//! Invariant: `announced <= computed + scheduled`, in full blocks; a sequence holds blocks for every
//! token it has computed.

use crate::engine::answer::{Answer, Generated};
use crate::engine::cache::{BlockHash, BlockId, Pool, Space};
use crate::units::{BlockSize, Tokens};
use std::sync::Arc;

/// Names a sequence of one engine; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(pub u64);

/// Where the KV of the prompt comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// Computed here, as far as it is not cached here.
    Compute,
    /// Fetched from a prefill engine, as far as it is not cached here.
    Pull,
}

/// What becomes of the blocks at the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// They may be evicted.
    Evictable,
    /// They wait for a decode engine to fetch them.
    ForDecode,
}

/// What is asked of the engine.
#[derive(Clone, Debug)]
pub struct Job {
    /// The prompt; at least one token.
    pub prompt: Vec<u32>,
    /// Adapter and salt.
    pub space: Arc<Space>,
    /// What will be said.
    pub answer: Answer,
    /// Tokens to generate at most; at least one.
    pub max_tokens: u32,
    /// Where the prompt's KV comes from.
    pub start: Start,
    /// What becomes of it.
    pub keep: Keep,
}

/// Where the KV of a prompt came from, in tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PromptSource {
    /// Found in this engine's cache.
    pub cached: Tokens,
    /// Fetched from another engine.
    pub external: Tokens,
    /// Computed here.
    pub computed: Tokens,
}

impl PromptSource {
    /// Adds `other`, source by source.
    pub fn add(&mut self, other: PromptSource) {
        self.cached = self.cached.saturating_add(other.cached);
        self.external = self.external.saturating_add(other.external);
        self.computed = self.computed.saturating_add(other.computed);
    }
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// It said all it had to say.
    Stop,
    /// It reached its limit.
    Length,
}

impl Finish {
    /// The word of OpenAI's `finish_reason`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Finish::Stop => "stop",
            Finish::Length => "length",
        }
    }
}

/// A token that a pass produced.
pub(super) struct NewToken {
    pub(super) first: Option<PromptSource>,
    pub(super) finish: Option<Finish>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Prefill,
    Pull,
    Decode,
}

pub(super) struct Sequence {
    pub(super) id: SequenceId,
    pub(super) keep: Keep,
    answer: Answer,
    space: Arc<Space>,
    max_tokens: u32,
    size: usize,
    /// Tokens of the prompt.
    pub(super) prompt: usize,
    /// Whether its prompt is still to be fetched.
    pull: bool,
    /// Prompt and what was generated so far.
    tokens: Vec<u32>,
    /// One hash per full block of `tokens`.
    pub(super) hashes: Vec<BlockHash>,
    pub(super) blocks: Vec<BlockId>,
    /// Tokens whose KV is here.
    pub(super) computed: usize,
    /// Tokens given to it in the pass that is being computed.
    pub(super) scheduled: usize,
    /// Leading blocks that are content of the cache.
    announced: usize,
    phase: Phase,
    pub(super) source: PromptSource,
    /// Whether its cache lookup has been counted.
    pub(super) counted: bool,
}

impl Sequence {
    pub(super) fn new(id: SequenceId, job: Job, size: BlockSize) -> Sequence {
        let mut sequence = Sequence {
            id,
            keep: job.keep,
            answer: job.answer,
            space: job.space,
            max_tokens: job.max_tokens,
            size: size.get() as usize,
            prompt: job.prompt.len(),
            pull: job.start == Start::Pull,
            tokens: job.prompt,
            hashes: Vec::new(),
            blocks: Vec::new(),
            computed: 0,
            scheduled: 0,
            announced: 0,
            phase: Phase::Prefill,
            source: PromptSource::default(),
            counted: false,
        };
        sequence.hash();
        sequence
    }

    fn hash(&mut self) {
        while (self.hashes.len() + 1) * self.size <= self.tokens.len() {
            let from = self.hashes.len() * self.size;
            let block = &self.tokens[from..from + self.size];
            let hash = self.space.hash(self.hashes.last().copied(), block);
            self.hashes.push(hash);
        }
    }

    fn generated(&self) -> u32 {
        u32::try_from(self.tokens.len() - self.prompt).unwrap_or(u32::MAX)
    }

    /// The blocks a lookup may reuse: at least one token is always left to compute, because the
    /// next token needs the last one's hidden state.
    pub(super) fn reusable(&self) -> &[BlockHash] {
        let full = self.tokens.len().saturating_sub(1) / self.size;
        &self.hashes[..full.min(self.hashes.len())]
    }

    /// Tokens there are.
    pub(super) fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Blocks needed beyond `hits` reused ones to begin with `budget` tokens.
    pub(super) fn wanted_blocks(&self, hits: usize, budget: usize) -> usize {
        let have = hits * self.size;
        let end = if self.pull {
            self.tokens.len()
        } else {
            self.tokens.len().min(have + budget)
        };
        end.div_ceil(self.size).saturating_sub(hits)
    }

    /// Takes its first `blocks`, the first `hits` of them reused.
    pub(super) fn seated(&mut self, blocks: Vec<BlockId>, hits: usize) {
        self.blocks = blocks;
        self.announced = hits;
        self.computed = hits * self.size;
        let rest = Tokens((self.tokens.len() - self.computed) as u64);
        if self.pull {
            self.phase = Phase::Pull;
        }
        if !self.counted {
            let (external, computed) = match self.pull {
                true => (rest, Tokens::ZERO),
                false => (Tokens::ZERO, rest),
            };
            self.source = PromptSource {
                cached: Tokens(self.computed as u64),
                external,
                computed,
            };
        }
    }

    /// Whether it waits for a transfer.
    pub(super) fn pulls(&self) -> bool {
        self.phase == Phase::Pull
    }

    /// Whether its next token is a decode.
    pub(super) fn decodes(&self) -> bool {
        self.phase == Phase::Decode
    }

    /// The transfer has ended.
    pub(super) fn landed(&mut self) {
        self.computed = self.tokens.len() - 1;
        self.pull = false;
        self.phase = Phase::Decode;
    }

    /// Gives up its blocks and begins again.
    pub(super) fn restart(&mut self) {
        self.blocks.clear();
        self.computed = 0;
        self.scheduled = 0;
        self.announced = 0;
        self.phase = Phase::Prefill;
    }

    /// Tokens that are there but not computed.
    pub(super) fn missing(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// Gets `tokens` more tokens computed in this pass; `false`, and nothing changed, when the pool
    /// has no block for them.
    pub(super) fn reserve(&mut self, tokens: usize, pool: &mut Pool) -> bool {
        let end = self.computed + tokens;
        let more = end.div_ceil(self.size).saturating_sub(self.blocks.len());
        if 0 < more {
            match pool.take(&[], more) {
                Some(blocks) => self.blocks.extend(blocks),
                None => return false,
            }
        }
        self.scheduled = tokens;
        self.announce(end, pool);
        true
    }

    /// Makes the full blocks up to token `end` content of the cache. vLLM does so when it schedules
    /// them, so that a second sequence of the same pass can already share them.
    pub(super) fn announce(&mut self, end: usize, pool: &mut Pool) {
        let full = (end / self.size).min(self.hashes.len());
        if full <= self.announced {
            return;
        }
        let parent = self
            .announced
            .checked_sub(1)
            .and_then(|last| self.hashes.get(last).copied());
        let pairs: Vec<(BlockId, BlockHash)> = self.blocks[self.announced..full]
            .iter()
            .copied()
            .zip(self.hashes[self.announced..full].iter().copied())
            .collect();
        let tokens = &self.tokens[self.announced * self.size..full * self.size];
        pool.store(parent, &pairs, tokens, &self.space);
        self.announced = full;
    }

    /// The pass is over: what was scheduled is computed, and if that was all, a token comes out.
    pub(super) fn finish_pass(&mut self) -> Option<NewToken> {
        let scheduled = std::mem::take(&mut self.scheduled);
        self.computed += scheduled;
        if scheduled == 0 || self.computed < self.tokens.len() {
            return None;
        }
        let index = self.generated();
        let token = self.answer.token(index);
        let finish = match token {
            Generated::End(_) => Some(Finish::Stop),
            Generated::Word(_) if self.max_tokens <= index + 1 => Some(Finish::Length),
            Generated::Word(_) => None,
        };
        let id = token.id();
        self.tokens.push(id);
        self.hash();
        self.phase = Phase::Decode;
        Some(NewToken {
            first: (index == 0).then_some(self.source),
            finish,
        })
    }
}

//! What long prompts begin with, remembered, so that the next turn of a conversation costs its tail.
//!
//! Lives here: [`Growing`], the chain of a prompt that is still being added to, and [`Memo`], which
//! keeps such chains by the text they stand for.
//! Never here: prompt text or whole token lists (hashes, keys and less than one block of tokens are
//! enough), tokenizing.
//! Invariant: memory stays below the limit it was made with, give or take one entry.

use crate::blocks::{BlockChain, BlockKey, KeySpace};
use crate::units::BlockSize;
use parking_lot::Mutex;
use rustc_hash::FxBuildHasher;
use smallvec::SmallVec;
use std::collections::HashMap;
use std::sync::Arc;
use xxhash_rust::xxh3::Xxh3;

/// Shortest text worth remembering. Below it, tokenizing costs less than the memo would save.
pub(super) const MIN_BYTES: usize = 8 * 1024;

/// Least distance between two remembered places of one text.
const STRIDE: usize = 1024;

/// Memory of an entry besides its keys and tokens: map slot, counters, allocations.
const ENTRY_BYTES: usize = 192;

/// The chains of the tokens so far, in each key space asked for.
#[derive(Clone, Debug)]
pub(super) struct Growing {
    /// Tokens so far.
    pub(super) tokens: u64,
    chains: SmallVec<[Chain; 1]>,
}

#[derive(Clone, Debug)]
struct Chain {
    root: BlockKey,
    size: BlockSize,
    keys: Vec<BlockKey>,
    /// Tokens after the last full block.
    tail: Vec<u32>,
}

impl Growing {
    /// No tokens yet.
    pub(super) fn new(spaces: &[KeySpace]) -> Growing {
        let chains = spaces.iter().map(|space| Chain {
            root: space.root(),
            size: space.block_size,
            keys: Vec::new(),
            tail: Vec::new(),
        });
        Growing {
            tokens: 0,
            chains: chains.collect(),
        }
    }

    /// Adds `ids` at the end.
    pub(super) fn push(&mut self, ids: &[u32]) {
        self.tokens += ids.len() as u64;
        for chain in &mut self.chains {
            chain.push(ids);
        }
    }

    /// The chains of the full blocks.
    pub(super) fn finish(self) -> SmallVec<[BlockChain; 1]> {
        let chains = self.chains.into_iter().map(|chain| BlockChain {
            size: chain.size,
            keys: chain.keys.into(),
        });
        chains.collect()
    }

    /// Whether these are the chains of exactly `spaces`.
    fn serves(&self, spaces: &[KeySpace]) -> bool {
        let roots = self.chains.iter().map(|chain| chain.root);
        roots.eq(spaces.iter().map(KeySpace::root))
    }

    fn bytes(&self) -> usize {
        let chains = self.chains.iter();
        let held = chains.map(|chain| chain.keys.len() * 16 + chain.tail.len() * 4 + 80);
        ENTRY_BYTES + held.sum::<usize>()
    }
}

impl Chain {
    fn push(&mut self, mut ids: &[u32]) {
        let size = self.size.get() as usize;
        if !self.tail.is_empty() {
            let (first, rest) = ids.split_at(ids.len().min(size - self.tail.len()));
            self.tail.extend_from_slice(first);
            ids = rest;
            if self.tail.len() < size {
                return;
            }
            let block = std::mem::take(&mut self.tail);
            self.add(&block);
        }
        let blocks = ids.chunks_exact(size);
        self.tail.extend_from_slice(blocks.remainder());
        self.keys.reserve(blocks.len());
        for block in blocks {
            self.add(block);
        }
    }

    fn add(&mut self, block: &[u32]) {
        let parent = self.keys.last().copied().unwrap_or(self.root);
        self.keys.push(parent.child(block, &[]));
    }
}

/// A place in a text up to which chains can be remembered, and the hash of all before it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mark {
    /// Bytes before the place.
    pub(super) at: usize,
    key: u128,
}

/// Picks the marks of `text` from its `cuts` (ascending). `context` is whatever else decides the
/// tokens. Which cuts are picked depends only on what is before them, so that a text and its
/// continuation agree.
pub(super) fn marks(
    text: &str,
    cuts: impl Iterator<Item = usize>,
    context: (u32, bool),
) -> Vec<Mark> {
    let mut hash = Xxh3::new();
    hash.update(&context.0.to_le_bytes());
    hash.update(&[u8::from(context.1)]);
    let mut marks = Vec::with_capacity(text.len() / STRIDE);
    let mut last = 0;
    for at in cuts {
        if last + STRIDE <= at {
            hash.update(&text.as_bytes()[last..at]);
            marks.push(Mark {
                at,
                key: hash.digest128(),
            });
            last = at;
        }
    }
    marks
}

/// Remembered prefixes, bounded by bytes.
///
/// Two generations instead of a list in order of use: entries go into the young one; when it is half
/// the limit, it becomes the old one and what was old and unused is dropped. A hit in the old one
/// makes an entry young again.
#[derive(Debug)]
pub(super) struct Memo {
    limit: usize,
    generations: Mutex<Generations>,
}

#[derive(Debug, Default)]
struct Generations {
    young: HashMap<u128, Arc<Growing>, FxBuildHasher>,
    young_bytes: usize,
    old: HashMap<u128, Arc<Growing>, FxBuildHasher>,
}

impl Memo {
    /// A memo of at most `limit` bytes.
    pub(super) fn new(limit: usize) -> Memo {
        Memo {
            limit,
            generations: Mutex::default(),
        }
    }

    /// Whether texts of `bytes` are worth remembering.
    pub(super) fn wants(&self, bytes: usize) -> bool {
        self.limit != 0 && MIN_BYTES <= bytes
    }

    /// The chains of the longest remembered prefix.
    pub(super) fn longest(
        &self,
        marks: &[Mark],
        spaces: &[KeySpace],
    ) -> Option<(Mark, Arc<Growing>)> {
        let mut generations = self.generations.lock();
        marks.iter().rev().find_map(|mark| {
            let found = generations.young.get(&mark.key).cloned();
            let found = found.or_else(|| {
                let found = generations.old.remove(&mark.key)?;
                generations.insert(self.limit / 2, mark.key, Arc::clone(&found));
                Some(found)
            })?;
            found.serves(spaces).then_some((*mark, found))
        })
    }

    /// Remembers the chains of the text before `mark`.
    pub(super) fn remember(&self, mark: Mark, chains: Growing) {
        let mut generations = self.generations.lock();
        generations.insert(self.limit / 2, mark.key, Arc::new(chains));
    }

    /// Bytes held, for tests.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        let generations = self.generations.lock();
        let all = generations.young.values().chain(generations.old.values());
        all.map(|entry| entry.bytes()).sum()
    }
}

impl Generations {
    fn insert(&mut self, limit: usize, key: u128, entry: Arc<Growing>) {
        let bytes = entry.bytes();
        if limit < bytes {
            return;
        }
        if limit < self.young_bytes + bytes {
            self.old = std::mem::take(&mut self.young);
            self.young_bytes = 0;
        }
        self.young_bytes += bytes;
        if let Some(before) = self.young.insert(key, entry) {
            self.young_bytes -= before.bytes();
        }
    }
}

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
/// chains: the model, whether special tokens are added, the key spaces. Which cuts are picked depends only on what is before them, so that a text and its
/// continuation agree.
pub(super) fn marks(
    text: &str,
    cuts: impl Iterator<Item = usize>,
    context: (u32, bool, &[KeySpace]),
) -> Vec<Mark> {
    let (model, special, spaces) = context;
    let mut hash = Xxh3::new();
    hash.update(&model.to_le_bytes());
    hash.update(&[u8::from(special)]);
    for space in spaces {
        hash.update(&space.root().0.to_le_bytes());
    }
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

/// What a memo holds and how often it helped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoStats {
    /// Bytes held.
    pub bytes: usize,
    /// Long prompts that began with something remembered.
    pub hits: u64,
    /// Long prompts that did not.
    pub misses: u64,
}

#[derive(Debug, Default)]
struct Generations {
    young: Generation,
    old: Generation,
    hits: u64,
    misses: u64,
}

#[derive(Debug, Default)]
struct Generation {
    entries: HashMap<u128, Arc<Growing>, FxBuildHasher>,
    bytes: usize,
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
    pub(super) fn longest(&self, marks: &[Mark]) -> Option<(Mark, Arc<Growing>)> {
        let mut generations = self.generations.lock();
        let found = marks.iter().rev().find_map(|mark| {
            let found = generations.get(self.limit / 2, mark.key)?;
            Some((*mark, found))
        });
        match found {
            Some(_) => generations.hits += 1,
            None => generations.misses += 1,
        }
        found
    }

    /// Remembers the chains of the text before `mark`.
    pub(super) fn remember(&self, mark: Mark, chains: Growing) {
        let chains = Arc::new(chains);
        (self.generations.lock()).insert(self.limit / 2, mark.key, chains);
    }

    /// What is held and how often it helped.
    pub(super) fn stats(&self) -> MemoStats {
        let generations = self.generations.lock();
        MemoStats {
            bytes: generations.young.bytes + generations.old.bytes,
            hits: generations.hits,
            misses: generations.misses,
        }
    }
}

impl Generations {
    fn get(&mut self, limit: usize, key: u128) -> Option<Arc<Growing>> {
        if let Some(found) = self.young.entries.get(&key) {
            return Some(Arc::clone(found));
        }
        let found = self.old.entries.remove(&key)?;
        self.old.bytes -= found.bytes();
        self.insert(limit, key, Arc::clone(&found));
        Some(found)
    }

    fn insert(&mut self, limit: usize, key: u128, entry: Arc<Growing>) {
        let bytes = entry.bytes();
        if limit < bytes {
            return;
        }
        if limit < self.young.bytes + bytes {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.bytes += bytes;
        if let Some(before) = self.young.entries.insert(key, entry) {
            self.young.bytes -= before.bytes();
        }
    }
}

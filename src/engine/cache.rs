//! The KV cache of one simulated engine: a fixed pool of blocks, shared by prefix.
//!
//! Lives here: [`Pool`]: which block holds which hash, who uses it, which is evicted next, and the
//! [`Change`]s a router hears about.
//! Never here: tokens of a sequence (`scheduler`), time, wire formats (`events`).
//! Invariant: a block is either used (`0 < users`) or in the eviction list, never both; every hash
//! in the index was announced by a `Stored` and not yet withdrawn.
//!
//! As in vLLM's v1 block pool: a freed block keeps its content until it is evicted, the tail of a
//! sequence is evicted before its head, and two blocks computed at the same time with the same
//! content both exist, are both announced and are both withdrawn.

use crate::names::{ModelName, Tenant};
use rustc_hash::FxBuildHasher;
use smallvec::SmallVec;
use std::collections::HashMap;
use std::sync::Arc;

/// The engine's own, opaque name for the content of a block and all blocks before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHash(pub u64);

/// What, besides tokens, separates cached content.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Space {
    /// The adapter (LoRA) a sequence runs through.
    pub adapter: Option<ModelName>,
    /// The tenant's salt; part of the first block only, as in vLLM.
    pub salt: Option<Tenant>,
}

impl Space {
    /// The hash of the block after `parent` (`None`: the first block) that holds `tokens`.
    #[must_use]
    pub fn hash(&self, parent: Option<BlockHash>, tokens: &[u32]) -> BlockHash {
        let mut bytes = SmallVec::<[u8; 512]>::new();
        match parent {
            Some(parent) => bytes.extend_from_slice(&parent.0.to_le_bytes()),
            None => {
                bytes.push(0);
                let salt = self.salt.as_ref().map_or("", Tenant::as_str);
                bytes.extend_from_slice(&(salt.len() as u64).to_le_bytes());
                bytes.extend_from_slice(salt.as_bytes());
            }
        }
        if let Some(adapter) = &self.adapter {
            bytes.extend_from_slice(adapter.as_str().as_bytes());
        }
        for token in tokens {
            bytes.extend_from_slice(&token.to_le_bytes());
        }
        BlockHash(xxhash_rust::xxh3::xxh3_64(&bytes))
    }
}

/// Something that happened to the cached content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Full blocks became reusable, in prefix order.
    Stored {
        /// The block before the first one; `None` at the start of a prompt.
        parent: Option<BlockHash>,
        /// One hash per block.
        hashes: Vec<BlockHash>,
        /// The tokens of all these blocks.
        tokens: Vec<u32>,
        /// The adapter and salt they were computed under.
        space: Arc<Space>,
    },
    /// A block was evicted.
    Removed(BlockHash),
    /// Everything was dropped.
    Cleared,
}

/// Index of a block in the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockId(u32);

impl BlockId {
    /// The number an engine would print.
    #[must_use]
    pub fn number(self) -> u32 {
        self.0
    }
}

const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Block {
    hash: Option<BlockHash>,
    users: u32,
    before: u32,
    after: u32,
}

/// The blocks of one engine.
#[derive(Debug)]
pub struct Pool {
    blocks: Vec<Block>,
    index: HashMap<BlockHash, SmallVec<[u32; 1]>, FxBuildHasher>,
    /// The next block to be evicted.
    oldest: u32,
    newest: u32,
    free: usize,
    changes: Vec<Change>,
}

impl Pool {
    /// A pool of `count` empty blocks.
    #[must_use]
    pub fn new(count: u32) -> Pool {
        let mut pool = Pool {
            blocks: vec![
                Block {
                    hash: None,
                    users: 0,
                    before: NONE,
                    after: NONE,
                };
                count as usize
            ],
            index: HashMap::default(),
            oldest: NONE,
            newest: NONE,
            free: 0,
            changes: Vec::new(),
        };
        for id in 0..count {
            pool.push_newest(id);
        }
        pool
    }

    /// Blocks in the pool.
    #[must_use]
    pub fn total(&self) -> usize {
        self.blocks.len()
    }

    /// Blocks in use by sequences; cached but unused ones do not count.
    #[must_use]
    pub fn used(&self) -> usize {
        self.blocks.len() - self.free
    }

    /// How many of the leading `hashes` are held.
    #[must_use]
    pub fn held(&self, hashes: &[BlockHash]) -> usize {
        hashes
            .iter()
            .take_while(|hash| self.index.contains_key(hash))
            .count()
    }

    /// Takes the blocks of `hits` (all held) and `fresh` empty ones after them, evicting the
    /// oldest; `None`, and nothing changed, when the pool has too few.
    pub fn take(&mut self, hits: &[BlockHash], fresh: usize) -> Option<Vec<BlockId>> {
        let found: Vec<u32> = hits
            .iter()
            .map_while(|hash| self.index.get(hash)?.first().copied())
            .collect();
        let idle = found
            .iter()
            .filter(|id| self.block(**id).users == 0)
            .count();
        if self.free < idle + fresh {
            return None;
        }
        let mut taken = Vec::with_capacity(found.len() + fresh);
        for id in found {
            if self.block(id).users == 0 {
                self.unlink(id);
            }
            self.block_mut(id).users += 1;
            taken.push(BlockId(id));
        }
        for _ in 0..fresh {
            let id = self.oldest;
            self.evict(id);
            self.unlink(id);
            self.block_mut(id).users = 1;
            taken.push(BlockId(id));
        }
        Some(taken)
    }

    /// Registers the content of `blocks`, which follow `parent` and hold `tokens`.
    pub fn store(
        &mut self,
        parent: Option<BlockHash>,
        blocks: &[(BlockId, BlockHash)],
        tokens: &[u32],
        space: &Arc<Space>,
    ) {
        if blocks.is_empty() {
            return;
        }
        for (id, hash) in blocks {
            self.block_mut(id.0).hash = Some(*hash);
            self.index.entry(*hash).or_default().push(id.0);
        }
        self.changes.push(Change::Stored {
            parent,
            hashes: blocks.iter().map(|(_, hash)| *hash).collect(),
            tokens: tokens.to_vec(),
            space: space.clone(),
        });
    }

    /// Gives blocks back. Their content stays until evicted, the last block first.
    pub fn give_back(&mut self, blocks: &[BlockId]) {
        for id in blocks.iter().rev() {
            let block = self.block_mut(id.0);
            block.users = block.users.saturating_sub(1);
            if block.users == 0 {
                self.push_newest(id.0);
            }
        }
    }

    /// Drops all content; refused (`false`) while any block is in use, as vLLM does.
    pub fn clear(&mut self) -> bool {
        if 0 < self.used() {
            return false;
        }
        for block in &mut self.blocks {
            block.hash = None;
        }
        self.index.clear();
        self.changes.push(Change::Cleared);
        true
    }

    /// What changed since the last call, in order.
    pub fn drain(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.changes)
    }

    /// How many blocks hold each content, for tests.
    #[cfg(test)]
    pub(super) fn copies(&self) -> HashMap<BlockHash, usize> {
        let counts = self.index.iter().map(|(hash, ids)| (*hash, ids.len()));
        counts.collect()
    }

    fn evict(&mut self, id: u32) {
        let Some(hash) = self.block_mut(id).hash.take() else {
            return;
        };
        if let Some(copies) = self.index.get_mut(&hash) {
            copies.retain(|copy| *copy != id);
            if copies.is_empty() {
                self.index.remove(&hash);
            }
        }
        self.changes.push(Change::Removed(hash));
    }

    fn push_newest(&mut self, id: u32) {
        let last = self.newest;
        let block = self.block_mut(id);
        block.before = last;
        block.after = NONE;
        match last {
            NONE => self.oldest = id,
            last => self.block_mut(last).after = id,
        }
        self.newest = id;
        self.free += 1;
    }

    fn unlink(&mut self, id: u32) {
        let Block { before, after, .. } = *self.block(id);
        match before {
            NONE => self.oldest = after,
            before => self.block_mut(before).after = after,
        }
        match after {
            NONE => self.newest = before,
            after => self.block_mut(after).before = before,
        }
        self.free -= 1;
    }

    fn block(&self, id: u32) -> &Block {
        &self.blocks[id as usize]
    }

    fn block_mut(&mut self, id: u32) -> &mut Block {
        &mut self.blocks[id as usize]
    }
}

#[cfg(test)]
mod tests;

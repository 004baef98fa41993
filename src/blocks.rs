//! Content keys of KV blocks: the one hash that the request side and the event side share.
//!
//! Lives here: [`BlockKey`], [`KeySpace`] and [`BlockChain`].
//! Never here: engine hashes (opaque to us, see `kv`), tokenizers (see `prompt`).
//! Invariant: equal keys mean equal key space and equal tokens from the start of the prompt to the
//! end of that block. Keys are 128 bits wide, so a collision is not a practical concern, and would
//! only mis-route.

use crate::names::{ModelName, Tenant};
use crate::units::{BlockSize, Blocks, Tokens};
use std::sync::Arc;
use xxhash_rust::xxh3::Xxh3;

/// Content key of one block: a hash of everything from the start of the prompt to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockKey(pub u128);

/// What must agree, besides the tokens, before two requests may share cached blocks.
///
/// The base model is not part of it: a pod serves one base model, and only pods that serve the
/// request's model are looked at.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct KeySpace {
    /// Tokens per block.
    pub block_size: BlockSize,
    /// The adapter (LoRA) by name, if the request runs through one.
    pub adapter: Option<ModelName>,
    /// The tenant whose salt separates its cache, if any.
    pub tenant: Option<Tenant>,
}

impl KeySpace {
    /// The key that stands before the first block.
    #[must_use]
    pub fn root(&self) -> BlockKey {
        let mut hash = Xxh3::new();
        hash.update(&self.block_size.get().to_le_bytes());
        for part in [
            self.adapter.as_ref().map(ModelName::as_str),
            self.tenant.as_ref().map(Tenant::as_str),
        ] {
            // A length before each part, and u64::MAX for an absent one, keep (a, none) and (none, a) apart.
            let len = part.map_or(u64::MAX, |text| text.len() as u64);
            hash.update(&len.to_le_bytes());
            hash.update(part.unwrap_or_default().as_bytes());
        }
        BlockKey(hash.digest128())
    }
}

impl BlockKey {
    /// The key of the block that follows this one and holds `tokens`.
    ///
    /// `extra` is whatever else the engine mixes into that block (multimodal identifiers, prompt
    /// embeddings), in a canonical byte form; empty for plain text.
    #[must_use]
    pub fn child(self, tokens: &[u32], extra: &[u8]) -> BlockKey {
        // The usual block sizes have their own copy of the code, in which every length is a
        // constant: several times as fast, and hashing is most of the work on a long prompt.
        let hash = match (tokens.len(), extra) {
            (16, []) => hash_exactly::<80>(self, tokens),
            (32, []) => hash_exactly::<144>(self, tokens),
            (64, []) => hash_exactly::<272>(self, tokens),
            (count, _) => {
                let mut bytes = vec![0; 16 + 4 * count];
                write_block(self, tokens, &mut bytes);
                bytes.extend_from_slice(extra);
                xxhash_rust::xxh3::xxh3_128(&bytes)
            }
        };
        BlockKey(hash)
    }
}

/// Hashes a block of `(BYTES - 16) / 4` tokens.
fn hash_exactly<const BYTES: usize>(parent: BlockKey, tokens: &[u32]) -> u128 {
    let mut bytes = [0; BYTES];
    write_block(parent, tokens, &mut bytes);
    xxhash_rust::xxh3::xxh3_128(&bytes)
}

/// The parent's key, then the tokens, all little-endian.
fn write_block(BlockKey(parent): BlockKey, tokens: &[u32], out: &mut [u8]) {
    let (head, tail) = out.split_at_mut(16);
    head.copy_from_slice(&parent.to_le_bytes());
    for (bytes, token) in tail.chunks_exact_mut(4).zip(tokens) {
        bytes.copy_from_slice(&token.to_le_bytes());
    }
}

/// The keys of a prompt's full blocks, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockChain {
    /// Tokens per block.
    pub size: BlockSize,
    /// One key per full block.
    pub keys: Arc<[BlockKey]>,
}

impl BlockChain {
    /// Cuts `tokens` into full blocks of `space.block_size` and chains their keys.
    #[must_use]
    pub fn new(space: &KeySpace, tokens: &[u32]) -> BlockChain {
        let mut parent = space.root();
        let keys = tokens
            .chunks_exact(space.block_size.get() as usize)
            .map(|block| {
                parent = parent.child(block, &[]);
                parent
            })
            .collect();
        BlockChain {
            size: space.block_size,
            keys,
        }
    }

    /// Number of full blocks.
    #[must_use]
    pub fn len(&self) -> Blocks {
        Blocks(u32::try_from(self.keys.len()).unwrap_or(u32::MAX))
    }

    /// Whether the prompt is shorter than one block.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Tokens in the full blocks.
    #[must_use]
    pub fn tokens(&self) -> Tokens {
        self.size.tokens(self.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition, written plainly.
    fn plain(parent: BlockKey, tokens: &[u32], extra: &[u8]) -> BlockKey {
        let mut bytes = parent.0.to_le_bytes().to_vec();
        bytes.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
        bytes.extend_from_slice(extra);
        BlockKey(xxhash_rust::xxh3::xxh3_128(&bytes))
    }

    #[test]
    fn every_block_size_is_hashed_by_the_same_definition() {
        let tokens: Vec<u32> = (1..300).map(|n| n * 7_654_321).collect();
        let parent = BlockKey(3);
        for size in [1, 8, 15, 16, 17, 32, 64, 128, 256] {
            for extra in [&b""[..], b"image"] {
                let block = &tokens[..size];
                assert_eq!(parent.child(block, extra), plain(parent, block, extra));
            }
        }
    }
}

//! From the tokens of a store event to content keys.
//!
//! Lives here: which of an event's fields enter which key (adapter and salt the key space, the rest
//! of `extra_keys` the block).
//! Never here: where the blocks are.
//! Invariant: two blocks get one key only if tokens, adapter, salt and every other extra item
//! agree from the start of the prompt; an item that is not understood still separates.

use crate::blocks::{BlockKey, KeySpace};
use crate::kv::event::{Adapter, Extra, Stored};
use crate::names::{ModelName, Tenant};
use crate::units::BlockSize;
use std::sync::Arc;

/// The keys of the first `blocks` blocks of `event`, which follow `parent` or start a prompt.
///
/// Of tokens that came as pairs each block takes its first tokens, without the one that its last
/// pair looks ahead to; so a prompt that differs just there, or ends there, is credited with one
/// block more than the engine will find.
pub(super) fn chain(
    event: &Stored,
    parent: Option<BlockKey>,
    size: BlockSize,
    blocks: usize,
) -> Vec<BlockKey> {
    let adapter = match &event.adapter {
        Adapter::Named(name) => Some(name),
        Adapter::None | Adapter::NumberOnly => None,
    };
    let salt = match parent {
        None => salt(event, adapter),
        Some(_) => None,
    };
    let mut key = parent.unwrap_or_else(|| {
        KeySpace {
            block_size: size,
            adapter: adapter.map(|name| ModelName(Arc::clone(name))),
            tenant: salt.as_ref().map(|(text, _)| Tenant(Arc::clone(text))),
        }
        .root()
    });
    // The salt is one of the first block's items; where it was a field of its own, none.
    let salt_item = salt.and_then(|(_, item)| item);
    let mut bytes = Vec::new();
    event
        .tokens
        .chunks_exact(size.get() as usize)
        .take(blocks)
        .enumerate()
        .map(|(block, tokens)| {
            bytes.clear();
            if let Some(items) = event.extra.get(block) {
                let spared = salt_item.filter(|_| block == 0);
                write_items(items, adapter, spared, &mut bytes);
            }
            key = key.child(tokens, &bytes);
            key
        })
        .collect()
}

/// The salt of a prompt's first block, and which item of the block it is, if it is one.
///
/// vLLM writes the adapter's name first and the salt after any multimodal identifiers, all as bare
/// text (up to 0.18 the identifiers too). An identifier read as a salt costs a miss, never a
/// false match, because no request carries it as its tenant.
fn salt(event: &Stored, adapter: Option<&Arc<str>>) -> Option<(Arc<str>, Option<usize>)> {
    if let Some(salt) = &event.salt {
        return Some((Arc::clone(salt), None));
    }
    let items = event.extra.first()?;
    let name = adapter_item(items, adapter);
    let found = items.iter().enumerate().rev().find_map(|(at, item)| {
        let Extra::Text(text) = item else { return None };
        (Some(at) != name && !text.is_empty()).then_some((at, text))
    });
    found.map(|(at, text)| (Arc::clone(text), Some(at)))
}

/// Which item only repeats the adapter's name.
fn adapter_item(items: &[Extra], adapter: Option<&Arc<str>>) -> Option<usize> {
    let name = adapter?;
    items
        .iter()
        .position(|item| matches!(item, Extra::Text(text) if text == name))
}

/// Every item that is neither the adapter nor the salt, each with its kind and length.
fn write_items(
    items: &[Extra],
    adapter: Option<&Arc<str>>,
    salt_item: Option<usize>,
    out: &mut Vec<u8>,
) {
    let name = adapter_item(items, adapter);
    for (at, item) in items.iter().enumerate() {
        if Some(at) == name || Some(at) == salt_item {
            continue;
        }
        match item {
            Extra::Text(text) => write_item(0, text.as_bytes(), out),
            Extra::Item { id, offset } => {
                write_item(1, id.as_bytes(), out);
                out.extend_from_slice(&offset.to_le_bytes());
            }
            Extra::Bytes(bytes) => write_item(2, bytes, out),
            Extra::Other(bytes) => write_item(3, bytes, out),
        }
    }
}

fn write_item(kind: u8, bytes: &[u8], out: &mut Vec<u8>) {
    out.push(kind);
    out.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
    out.extend_from_slice(bytes);
}

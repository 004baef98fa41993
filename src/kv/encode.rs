//! The inverse of `event`: batches in the map form that vLLM sends since 0.25.1.
//!
//! Lives here: [`batch`], for the simulated engine and for tests.
//! Never here: sockets, sequence numbers.
//! Invariant: `Batch::decode(&batch(..))` gives the same events back (hashes as integers).

use super::event::{
    Adapter, Attention, EngineHash, Event, Extra, Locality, Medium, Removed, Stored, TokenForm,
};

/// The payload for `events`: `[ts, [event, …], rank]`.
///
/// `ts` is in seconds since the Unix epoch.
#[must_use]
pub fn batch(ts: f64, events: &[Event], rank: u32) -> Vec<u8> {
    let mut out = Writer(Vec::with_capacity(64 + 128 * events.len()));
    out.array(3);
    out.float(ts);
    out.array(events.len());
    for event in events {
        match event {
            Event::Stored(stored) => out.stored(stored),
            Event::Removed(removed) => out.removed(removed),
            Event::Cleared => {
                out.map(1);
                out.text("type");
                out.text("AllBlocksCleared");
            }
        }
    }
    out.uint(u64::from(rank));
    out.0
}

struct Writer(Vec<u8>);

impl Writer {
    fn stored(&mut self, event: &Stored) {
        let optional = usize::from(event.group.is_some())
            + usize::from(event.attention != Attention::Unstated)
            + usize::from(event.locality != Locality::Local)
            + usize::from(event.salt.is_some());
        self.map(9 + optional);
        self.text("type");
        self.text("BlockStored");
        self.hashes(&event.hashes);
        self.text("parent_block_hash");
        match event.parent {
            Some(EngineHash(hash)) => self.uint(hash),
            None => self.nil(),
        }
        self.tokens(event);
        self.text("block_size");
        self.uint(u64::from(event.block_size));
        self.text("lora_id");
        match event.adapter {
            Adapter::None => self.nil(),
            Adapter::Named(_) | Adapter::NumberOnly => self.uint(1),
        }
        self.medium(event.medium);
        self.text("lora_name");
        match &event.adapter {
            Adapter::Named(name) => self.text(name),
            Adapter::None | Adapter::NumberOnly => self.nil(),
        }
        self.extra(&event.extra);
        self.group(event.group);
        match event.attention {
            Attention::Unstated => {}
            Attention::Full => self.pair("kv_cache_spec_kind", "full_attention"),
            Attention::Partial => self.pair("kv_cache_spec_kind", "sliding_window"),
        }
        self.locality(event.locality);
        if let Some(salt) = &event.salt {
            self.pair("cache_salt", salt);
        }
    }

    fn removed(&mut self, event: &Removed) {
        let optional =
            usize::from(event.group.is_some()) + usize::from(event.locality != Locality::Local);
        self.map(3 + optional);
        self.text("type");
        self.text("BlockRemoved");
        self.hashes(&event.hashes);
        self.medium(event.medium);
        self.group(event.group);
        self.locality(event.locality);
    }

    fn hashes(&mut self, hashes: &[EngineHash]) {
        self.text("block_hashes");
        self.array(hashes.len());
        for hash in hashes {
            self.uint(hash.0);
        }
    }

    fn tokens(&mut self, event: &Stored) {
        self.text("token_ids");
        match event.tokens_as {
            TokenForm::Single => {
                self.array(event.tokens.len());
                for token in &event.tokens {
                    self.uint(u64::from(*token));
                }
            }
            TokenForm::Pairs => {
                self.array(event.tokens.len().saturating_sub(1));
                for pair in event.tokens.windows(2) {
                    self.array(2);
                    for token in pair {
                        self.uint(u64::from(*token));
                    }
                }
            }
        }
    }

    fn extra(&mut self, extra: &[Vec<Extra>]) {
        self.text("extra_keys");
        if extra.is_empty() {
            return self.nil();
        }
        self.array(extra.len());
        for items in extra {
            if items.is_empty() {
                self.nil();
                continue;
            }
            self.array(items.len());
            for item in items {
                match item {
                    Extra::Text(text) => self.text(text),
                    Extra::Item { id, offset } => {
                        self.array(2);
                        self.text(id);
                        self.int(*offset);
                    }
                    Extra::Bytes(bytes) => self.bytes(bytes),
                    Extra::Other(raw) => self.0.extend_from_slice(raw),
                }
            }
        }
    }

    fn medium(&mut self, medium: Medium) {
        self.pair(
            "medium",
            match medium {
                Medium::Device => "GPU",
                Medium::Host => "CPU",
                Medium::Disk => "STORAGE",
                Medium::Unknown => "UNKNOWN",
            },
        );
    }

    fn group(&mut self, group: Option<u32>) {
        if let Some(group) = group {
            self.text("group_idx");
            self.uint(u64::from(group));
        }
    }

    fn locality(&mut self, locality: Locality) {
        if locality == Locality::Remote {
            self.pair("locality", "REMOTE");
        }
    }

    fn pair(&mut self, key: &str, value: &str) {
        self.text(key);
        self.text(value);
    }

    fn nil(&mut self) {
        self.0.push(0xc0);
    }

    fn float(&mut self, value: f64) {
        self.0.push(0xcb);
        self.0.extend_from_slice(&value.to_be_bytes());
    }

    fn uint(&mut self, value: u64) {
        if let Ok(small) = u8::try_from(value) {
            if 0x80 <= small {
                self.0.push(0xcc);
            }
            self.0.push(small);
        } else if let Ok(short) = u16::try_from(value) {
            self.0.push(0xcd);
            self.0.extend_from_slice(&short.to_be_bytes());
        } else if let Ok(long) = u32::try_from(value) {
            self.0.push(0xce);
            self.0.extend_from_slice(&long.to_be_bytes());
        } else {
            self.0.push(0xcf);
            self.0.extend_from_slice(&value.to_be_bytes());
        }
    }

    fn int(&mut self, value: i64) {
        if let Ok(unsigned) = u64::try_from(value) {
            self.uint(unsigned);
        } else {
            self.0.push(0xd3);
            self.0.extend_from_slice(&value.to_be_bytes());
        }
    }

    fn array(&mut self, len: usize) {
        self.header(len, 0x90, 16, [0xdc, 0xdd]);
    }

    fn map(&mut self, len: usize) {
        self.header(len, 0x80, 16, [0xde, 0xdf]);
    }

    fn text(&mut self, text: &str) {
        let len = text.len();
        match u8::try_from(len) {
            Ok(short) if 32 <= short => self.0.extend_from_slice(&[0xd9, short]),
            _ => self.header(len, 0xa0, 32, [0xda, 0xdb]),
        }
        self.0.extend_from_slice(text.as_bytes());
    }

    fn bytes(&mut self, bytes: &[u8]) {
        if let Ok(short) = u8::try_from(bytes.len()) {
            self.0.extend_from_slice(&[0xc4, short]);
        } else {
            self.header(bytes.len(), 0, 0, [0xc5, 0xc6]);
        }
        self.0.extend_from_slice(bytes);
    }

    /// A length: in the low bits of `fix` below `fix_limit`, else after one of the `wide` markers.
    fn header(&mut self, len: usize, fix: u8, fix_limit: usize, wide: [u8; 2]) {
        if let (true, Ok(short)) = (len < fix_limit, u8::try_from(len)) {
            self.0.push(fix | short);
        } else if let Ok(short) = u16::try_from(len) {
            self.0.push(wide[0]);
            self.0.extend_from_slice(&short.to_be_bytes());
        } else {
            self.0.push(wide[1]);
            let long = u32::try_from(len).unwrap_or(u32::MAX);
            self.0.extend_from_slice(&long.to_be_bytes());
        }
    }
}

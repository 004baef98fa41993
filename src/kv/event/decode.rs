//! From MessagePack to [`Batch`]: both event shapes, all releases.
//!
//! Lives here: which field stands where. Releases up to vLLM 0.23 and SGLang 0.5.18 write an event
//! as an array with the tag first, later ones as a map with the key `type`; fields were only ever
//! added at the end, so one table per shape reads them all.
//! Never here: what an event does to a pod.
//! Invariant: an event is either fully understood or left out; unknown keys and trailing fields do
//! not matter.

use super::msgpack::Reader;
use super::{
    Adapter, Attention, Batch, EngineHash, Event, Extra, Locality, MAX_PAYLOAD, MAX_TOKENS,
    Malformed, Medium, Removed, Stored, TokenForm,
};
use std::sync::Arc;

type Read<T> = Result<T, Malformed>;

pub(super) fn batch(payload: &[u8]) -> Read<Batch> {
    if MAX_PAYLOAD < payload.len() {
        return Err(Malformed::TooLong(payload.len()));
    }
    let mut reader = Reader::new(payload);
    let fields = reader.array("an array of time, events and rank")?;
    if fields < 2 {
        return Err(reader.unexpected("a time and events"));
    }
    let mut batch = Batch {
        ts: reader.float("a time")?,
        ..Batch::default()
    };
    for _ in 0..reader.array("an array of events")? {
        let start = reader;
        match event(&mut reader) {
            Ok(Some(event)) => batch.events.push(event),
            Ok(None) => batch.skipped.unknown += 1,
            Err(_) => {
                reader = start;
                reader.skip()?;
                batch.skipped.malformed += 1;
            }
        }
    }
    if 2 < fields && !reader.nil() {
        batch.rank = reader.u32("a rank")?;
    }
    for _ in 3..fields {
        reader.skip()?;
    }
    if reader.is_at_end() {
        Ok(batch)
    } else {
        Err(reader.unexpected("the end"))
    }
}

/// `None` for a tag that this version does not know.
fn event(reader: &mut Reader<'_>) -> Read<Option<Event>> {
    if reader.is_map() {
        map_event(reader)
    } else {
        array_event(reader)
    }
}

fn array_event(reader: &mut Reader<'_>) -> Read<Option<Event>> {
    let fields = reader.array("an event")?;
    if fields == 0 {
        return Err(reader.unexpected("a tag"));
    }
    let tag = Tag::of(reader.text("a tag")?);
    let mut draft = Draft::default();
    for position in 1..fields {
        match tag.field_at(position) {
            Some(field) => draft.read(field, reader)?,
            None => reader.skip()?,
        }
    }
    draft.finish(tag, reader)
}

fn map_event(reader: &mut Reader<'_>) -> Read<Option<Event>> {
    let pairs = reader.map("an event")?;
    let mut tag = None;
    let mut draft = Draft::default();
    for _ in 0..pairs {
        // A key that is not text is nothing we know.
        if !reader.is_text() {
            reader.skip()?;
            reader.skip()?;
            continue;
        }
        match reader.text("a key")? {
            "type" => tag = Some(Tag::of(reader.text("a tag")?)),
            key => match Field::named(key) {
                Some(field) => draft.read(field, reader)?,
                None => reader.skip()?,
            },
        }
    }
    draft.finish(tag.ok_or_else(|| reader.unexpected("a tag"))?, reader)
}

#[derive(Clone, Copy)]
enum Tag {
    Stored,
    Removed,
    Cleared,
    Unknown,
}

impl Tag {
    fn of(text: &str) -> Tag {
        match text {
            // SGLang 0.5.18 names the class with the trailing metadata map.
            "BlockStored" | "BlockStoredWithMetadata" => Tag::Stored,
            "BlockRemoved" => Tag::Removed,
            "AllBlocksCleared" => Tag::Cleared,
            _ => Tag::Unknown,
        }
    }

    fn field_at(self, position: usize) -> Option<Field> {
        const STORED: [Field; 10] = [
            Field::Hashes,
            Field::Parent,
            Field::Tokens,
            Field::BlockSize,
            Field::LoraId,
            Field::Medium,
            Field::LoraNameOrMetadata,
            Field::Extra,
            Field::Group,
            Field::Kind,
        ];
        const REMOVED: [Field; 3] = [Field::Hashes, Field::Medium, Field::Group];
        match self {
            Tag::Stored => STORED.get(position - 1).copied(),
            Tag::Removed => REMOVED.get(position - 1).copied(),
            Tag::Cleared | Tag::Unknown => None,
        }
    }
}

#[derive(Clone, Copy)]
enum Field {
    Hashes,
    Parent,
    Tokens,
    BlockSize,
    LoraId,
    Medium,
    /// vLLM puts the adapter's name at this position, SGLang a map.
    LoraNameOrMetadata,
    Extra,
    Group,
    Kind,
    Locality,
    Salt,
}

impl Field {
    fn named(key: &str) -> Option<Field> {
        Some(match key {
            "block_hashes" => Field::Hashes,
            "parent_block_hash" => Field::Parent,
            "token_ids" => Field::Tokens,
            "block_size" => Field::BlockSize,
            "lora_id" => Field::LoraId,
            "medium" => Field::Medium,
            "lora_name" | "metadata" => Field::LoraNameOrMetadata,
            "extra_keys" => Field::Extra,
            "group_idx" => Field::Group,
            "kv_cache_spec_kind" => Field::Kind,
            "locality" => Field::Locality,
            "cache_salt" => Field::Salt,
            _ => return None,
        })
    }
}

/// The fields read so far.
#[derive(Default)]
struct Draft {
    stored: Stored,
    has_hashes: bool,
    has_tokens: bool,
    has_lora_id: bool,
}

impl Draft {
    fn read(&mut self, field: Field, reader: &mut Reader<'_>) -> Read<()> {
        let event = &mut self.stored;
        match field {
            Field::Hashes => {
                event.hashes = hashes(reader)?;
                self.has_hashes = true;
            }
            Field::Parent => {
                event.parent = optional(reader, hash)?;
            }
            Field::Tokens => {
                (event.tokens, event.tokens_as) = tokens(reader)?;
                self.has_tokens = true;
            }
            Field::BlockSize => {
                event.block_size = optional(reader, |r| r.u32("a block size"))?.unwrap_or(0);
            }
            Field::LoraId => {
                self.has_lora_id = !reader.nil();
                if self.has_lora_id {
                    reader.skip()?;
                }
            }
            Field::Medium => event.medium = medium(reader)?,
            Field::LoraNameOrMetadata if reader.is_map() => event.salt = metadata(reader)?,
            Field::LoraNameOrMetadata => {
                event.adapter = match filled(reader, "an adapter name")? {
                    Some(name) => Adapter::Named(name),
                    None => Adapter::None,
                };
            }
            Field::Extra => event.extra = optional(reader, extra)?.unwrap_or_default(),
            Field::Group => event.group = optional(reader, |r| r.u32("a group"))?,
            Field::Kind => event.attention = attention(reader)?,
            Field::Locality => event.locality = locality(reader)?,
            Field::Salt => event.salt = filled(reader, "a salt")?,
        }
        Ok(())
    }

    fn finish(mut self, tag: Tag, reader: &Reader<'_>) -> Read<Option<Event>> {
        let needs = |present: bool, what: &'static str| {
            if present {
                Ok(())
            } else {
                Err(reader.unexpected(what))
            }
        };
        if self.has_lora_id && self.stored.adapter == Adapter::None {
            self.stored.adapter = Adapter::NumberOnly;
        }
        Ok(Some(match tag {
            Tag::Stored => {
                needs(self.has_hashes && self.has_tokens, "hashes and tokens")?;
                Event::Stored(Box::new(self.stored))
            }
            Tag::Removed => {
                needs(self.has_hashes, "hashes")?;
                Event::Removed(Removed {
                    hashes: self.stored.hashes,
                    medium: self.stored.medium,
                    locality: self.stored.locality,
                    group: self.stored.group,
                })
            }
            Tag::Cleared => Event::Cleared,
            Tag::Unknown => return Ok(None),
        }))
    }
}

fn optional<'a, T>(
    reader: &mut Reader<'a>,
    read: impl FnOnce(&mut Reader<'a>) -> Read<T>,
) -> Read<Option<T>> {
    if reader.nil() {
        Ok(None)
    } else {
        read(reader).map(Some)
    }
}

/// Text; nil and empty count as absent.
fn filled(reader: &mut Reader<'_>, what: &'static str) -> Read<Option<Arc<str>>> {
    let text = optional(reader, |r| r.text(what))?;
    Ok(text.filter(|text| !text.is_empty()).map(Arc::from))
}

fn hash(reader: &mut Reader<'_>) -> Read<EngineHash> {
    if reader.is_bytes() {
        let bytes = reader.bytes("a block hash")?;
        let tail = &bytes[bytes.len().saturating_sub(8)..];
        let value = tail
            .iter()
            .fold(0, |value, byte| (value << 8) | u64::from(*byte));
        return Ok(EngineHash(value));
    }
    reader.bits("a block hash").map(EngineHash)
}

fn hashes(reader: &mut Reader<'_>) -> Read<Vec<EngineHash>> {
    let len = reader.array("block hashes")?;
    if MAX_TOKENS < len {
        return Err(reader.unexpected("at most a million block hashes"));
    }
    (0..len).map(|_| hash(reader)).collect()
}

fn tokens(reader: &mut Reader<'_>) -> Read<(Vec<u32>, TokenForm)> {
    const WHAT: &str = "a token id";
    let len = reader.array("token ids")?;
    if MAX_TOKENS < len {
        return Err(reader.unexpected("at most a million token ids"));
    }
    let mut tokens = Vec::with_capacity(len + 1);
    if !reader.is_array() || len == 0 {
        for _ in 0..len {
            tokens.push(reader.u32(WHAT)?);
        }
        return Ok((tokens, TokenForm::Single));
    }
    for _ in 0..len {
        if reader.array(WHAT)? != 2 {
            return Err(reader.unexpected("a pair of token ids"));
        }
        let first = reader.u32(WHAT)?;
        let second = reader.u32(WHAT)?;
        match tokens.last() {
            None => tokens.push(first),
            Some(last) if *last == first => {}
            Some(_) => return Err(reader.unexpected("overlapping pairs of token ids")),
        }
        tokens.push(second);
    }
    Ok((tokens, TokenForm::Pairs))
}

fn medium(reader: &mut Reader<'_>) -> Read<Medium> {
    let word = optional(reader, |r| r.text("a medium"))?.unwrap_or_default();
    Ok(match word {
        "" | "GPU" => Medium::Device,
        "CPU" | "CPU_PINNED" => Medium::Host,
        "DISK" | "STORAGE" | "FS" | "OBJ" | "EXTERNAL" => Medium::Disk,
        _ => Medium::Unknown,
    })
}

fn locality(reader: &mut Reader<'_>) -> Read<Locality> {
    let word = optional(reader, |r| r.text("a locality"))?.unwrap_or_default();
    Ok(match word {
        "REMOTE" => Locality::Remote,
        _ => Locality::Local,
    })
}

fn attention(reader: &mut Reader<'_>) -> Read<Attention> {
    let word = optional(reader, |r| r.text("an attention kind"))?.unwrap_or_default();
    Ok(match word {
        "" => Attention::Unstated,
        "full_attention" | "mla_attention" | "sink_full_attention" => Attention::Full,
        _ => Attention::Partial,
    })
}

/// SGLang 0.5.18: `{"cache_salt": …}`, of which only that key matters.
fn metadata(reader: &mut Reader<'_>) -> Read<Option<Arc<str>>> {
    let mut salt = None;
    for _ in 0..reader.map("metadata")? {
        if reader.is_text() && reader.text("a key")? == "cache_salt" {
            salt = filled(reader, "a salt")?;
        } else {
            reader.skip()?;
        }
    }
    Ok(salt)
}

fn extra(reader: &mut Reader<'_>) -> Read<Vec<Vec<Extra>>> {
    let len = reader.array("extra keys")?;
    (0..len)
        .map(|_| {
            reader.spend("fewer extra keys")?;
            let items = optional(reader, |r| {
                let len = r.array("extra keys of a block")?;
                (0..len).map(|_| extra_item(r)).collect::<Read<Vec<_>>>()
            })?;
            Ok(items.unwrap_or_default())
        })
        .collect()
}

fn extra_item(reader: &mut Reader<'_>) -> Read<Extra> {
    reader.spend("fewer extra keys")?;
    if reader.is_text() {
        return Ok(Extra::Text(Arc::from(reader.text("an extra key")?)));
    }
    if reader.is_bytes() {
        return Ok(Extra::Bytes(reader.bytes("an extra key")?.to_vec()));
    }
    let start = *reader;
    if let Some(item) = multimodal(reader) {
        return Ok(item);
    }
    *reader = start;
    reader.skip()?;
    Ok(Extra::Other(reader.since(start).to_vec()))
}

fn multimodal(reader: &mut Reader<'_>) -> Option<Extra> {
    if reader.array("an item").ok()? != 2 {
        return None;
    }
    Some(Extra::Item {
        id: Arc::from(reader.text("an identifier").ok()?),
        offset: reader.int("an offset").ok()?,
    })
}

//! `POST /v1/completions`: the shapes of `prompt`.
//!
//! Lives here: a string, a list of strings, token ids, lists of token ids, and nothing else.
//! Never here: tokenizing.
//! Invariant: a list is one of the four shapes as a whole; a mixed list is a fault.

use super::Input;
use super::error::{BodyError, JsonType};
use super::fields::{Field, Fields};
use serde::de::{Deserialize, DeserializeSeed, Deserializer, IgnoredAny, SeqAccess, Visitor};
use serde::de::{Error, MapAccess};
use std::fmt;

const EXPECTED: &str =
    "a string, a list of strings, a list of token ids (0 to 4294967295) or a list of such lists";

pub(super) fn input(fields: &mut Fields, body: &[u8]) -> Result<Input, BodyError> {
    let embeddings = fields.prompt_embeds.found().is_some();
    if embeddings && !matches!(fields.prompt, Field::Found(_)) {
        return Ok(Input::Embeddings);
    }
    Ok(match fields.prompt.require(body, "prompt", EXPECTED)? {
        _ if embeddings => Input::Embeddings,
        PromptShape::Texts(texts) => Input::Text(texts),
        PromptShape::Ids(ids) => Input::TokenIds(vec![ids]),
        PromptShape::IdLists(lists) => Input::TokenIds(lists),
    })
}

/// A well-formed `prompt`.
pub(super) enum PromptShape {
    /// One string, or a list of them (perhaps empty).
    Texts(Vec<String>),
    /// One prompt of token ids.
    Ids(Vec<u32>),
    /// Several prompts of token ids.
    IdLists(Vec<Vec<u32>>),
}

/// Reads `prompt` without failing on its type.
pub(super) struct PromptSeed;

impl<'de> DeserializeSeed<'de> for PromptSeed {
    type Value = Field<PromptShape>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        Ok(match Item::deserialize(deserializer)? {
            Item::Text(text) => Field::Found(PromptShape::Texts(vec![text])),
            Item::List(shape) => Field::Found(shape),
            Item::Id(_) => Field::Wrong(JsonType::Number),
            Item::Other(found) => Field::Wrong(found),
        })
    }
}

/// A value as it may occur at the top of `prompt` or one level down.
enum Item {
    Text(String),
    Id(u32),
    List(PromptShape),
    /// Anything else; of a faulty list, the type of the first faulty element.
    Other(JsonType),
}

impl Item {
    fn json_type(&self) -> JsonType {
        match self {
            Item::Text(_) => JsonType::String,
            Item::Id(_) => JsonType::Number,
            Item::List(_) => JsonType::Array,
            Item::Other(found) => *found,
        }
    }
}

impl<'de> Deserialize<'de> for Item {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Item, D::Error> {
        deserializer.deserialize_any(ItemVisitor)
    }
}

struct ItemVisitor;

impl<'de> Visitor<'de> for ItemVisitor {
    type Value = Item;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a prompt")
    }

    fn visit_unit<E>(self) -> Result<Item, E> {
        Ok(Item::Other(JsonType::Null))
    }

    fn visit_bool<E>(self, _: bool) -> Result<Item, E> {
        Ok(Item::Other(JsonType::Bool))
    }

    fn visit_i64<E>(self, _: i64) -> Result<Item, E> {
        // Only negative numbers come this way.
        Ok(Item::Other(JsonType::Number))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Item, E> {
        Ok(u32::try_from(value).map_or(Item::Other(JsonType::Number), Item::Id))
    }

    fn visit_f64<E>(self, _: f64) -> Result<Item, E> {
        Ok(Item::Other(JsonType::Number))
    }

    fn visit_str<E>(self, text: &str) -> Result<Item, E> {
        Ok(Item::Text(text.to_owned()))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Item, A::Error> {
        while entries.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Item::Other(JsonType::Object))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Item, A::Error> {
        let shape = match items.next_element::<Item>()? {
            None => Ok(PromptShape::Texts(Vec::new())),
            Some(Item::Text(first)) => rest(&mut items, first, |item| match item {
                Item::Text(text) => Ok(text),
                other => Err(other.json_type()),
            })?
            .map(PromptShape::Texts),
            Some(Item::Id(first)) => rest(&mut items, first, |item| match item {
                Item::Id(id) => Ok(id),
                other => Err(other.json_type()),
            })?
            .map(PromptShape::Ids),
            Some(Item::List(first)) => match ids(first) {
                Ok(first) => rest(&mut items, first, |item| match item {
                    Item::List(shape) => ids(shape),
                    other => Err(other.json_type()),
                })?
                .map(PromptShape::IdLists),
                Err(found) => Err(found),
            },
            Some(Item::Other(found)) => Err(found),
        };
        // A fault leaves the rest of the list unread, and the reader insists on its end.
        while items.next_element::<IgnoredAny>()?.is_some() {}
        Ok(shape.map_or_else(Item::Other, Item::List))
    }
}

/// `first` and the remaining elements of a list, each as `pick` wants it; stops at the first fault.
fn rest<'de, A, T, E>(
    items: &mut A,
    first: T,
    pick: impl Fn(Item) -> Result<T, JsonType>,
) -> Result<Result<Vec<T>, JsonType>, E>
where
    A: SeqAccess<'de, Error = E>,
    E: Error,
{
    let mut all = vec![first];
    while let Some(item) = items.next_element::<Item>()? {
        match pick(item) {
            Ok(value) => all.push(value),
            Err(found) => return Ok(Err(found)),
        }
    }
    Ok(Ok(all))
}

/// A nested list, which may hold token ids only.
fn ids(shape: PromptShape) -> Result<Vec<u32>, JsonType> {
    match shape {
        PromptShape::Ids(ids) => Ok(ids),
        PromptShape::Texts(texts) if texts.is_empty() => Ok(Vec::new()),
        PromptShape::Texts(_) => Err(JsonType::String),
        PromptShape::IdLists(_) => Err(JsonType::Array),
    }
}

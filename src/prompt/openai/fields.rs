//! One pass over a body's top level, keeping the fields routing needs.
//!
//! Lives here: [`Fields`] and the search for a faulty field's place.
//! Never here: what a field means.
//! Invariant: a later value of a key replaces an earlier one, whatever the types of both; a faulty
//! value that is replaced is no fault.

use super::completions::{PromptSeed, PromptShape};
use super::error::{BodyError, JsonType};
use super::json::{Budget, ValueSeed};
use super::scalar::{Scalar, ScalarSeed};
use super::{Api, MAX_VALUES};
use minijinja::Value;
use minijinja::value::ValueKind;
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::fmt;

/// The last value of one key.
pub(super) enum Field<T> {
    /// The key is absent.
    Missing,
    /// A value of the right shape.
    Found(T),
    /// A value of another type.
    Wrong(JsonType),
}

impl<T> Field<T> {
    /// The value, taken; for fields whose faults are the engine's to judge.
    pub(super) fn found(&mut self) -> Option<T> {
        match std::mem::replace(self, Field::Missing) {
            Field::Found(value) => Some(value),
            Field::Missing | Field::Wrong(_) => None,
        }
    }

    /// The value, taken, or why there is none.
    pub(super) fn require(
        &mut self,
        body: &[u8],
        param: &'static str,
        expected: &'static str,
    ) -> Result<T, BodyError> {
        match std::mem::replace(self, Field::Missing) {
            Field::Found(value) => Ok(value),
            Field::Missing => Err(BodyError::Missing { param, expected }),
            Field::Wrong(found) => Err(BodyError::Wrong {
                param,
                expected,
                found,
                offset: offset_of(body, param),
            }),
        }
    }
}

macro_rules! fields {
    ($($name:ident: $type:ty),* $(,)?) => {
        /// The fields of one body.
        pub(super) struct Fields {
            $(pub(super) $name: Field<$type>,)*
            /// Whether the conversation exceeded [`MAX_VALUES`].
            pub(super) too_complex: bool,
        }

        impl Fields {
            fn empty() -> Fields {
                Fields { $($name: Field::Missing,)* too_complex: false }
            }
        }
    };
}

fields! {
    model: String,
    messages: Vec<Value>,
    prompt: PromptShape,
    prompt_embeds: (),
    stream: bool,
    session_id: String,
    prompt_cache_key: String,
    cache_salt: String,
    priority: i64,
    n: i64,
    best_of: i64,
    max_tokens: i64,
    max_completion_tokens: i64,
    add_special_tokens: bool,
    truncate_prompt_tokens: i64,
    truncation_side: String,
    add_generation_prompt: bool,
    continue_final_message: bool,
    chat_template: String,
    chat_template_kwargs: Value,
    tools: Value,
    tool_choice: String,
    documents: Value,
    reasoning_effort: String,
}

impl Fields {
    /// Reads `body`, which must be one JSON object and nothing else.
    pub(super) fn read(api: Api, body: &[u8]) -> Result<Fields, BodyError> {
        let budget = Budget::new(MAX_VALUES);
        let mut reader = serde_json::Deserializer::from_slice(body);
        let top = Top {
            api,
            budget: &budget,
        };
        let outcome = reader
            .deserialize_any(top)
            .and_then(|outcome| reader.end().map(|()| outcome))
            .map_err(|error| BodyError::syntax(body, &error))?;
        let mut fields = outcome.map_err(|found| BodyError::NotAnObject { found })?;
        fields.too_complex = budget.exhausted();
        Ok(fields)
    }
}

/// Reads the top level; `Err` carries the type of a body that is no object.
struct Top<'b> {
    api: Api,
    budget: &'b Budget,
}

impl<'de> Visitor<'de> for Top<'_> {
    type Value = Result<Fields, JsonType>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Self::Value, A::Error> {
        let mut fields = Fields::empty();
        while let Some(key) = entries.next_key_seed(Key)? {
            self.entry(&key, &mut entries, &mut fields)?;
        }
        Ok(Ok(fields))
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(Err(JsonType::Null))
    }

    fn visit_bool<E>(self, _: bool) -> Result<Self::Value, E> {
        Ok(Err(JsonType::Bool))
    }

    fn visit_i64<E>(self, _: i64) -> Result<Self::Value, E> {
        Ok(Err(JsonType::Number))
    }

    fn visit_u64<E>(self, _: u64) -> Result<Self::Value, E> {
        Ok(Err(JsonType::Number))
    }

    fn visit_f64<E>(self, _: f64) -> Result<Self::Value, E> {
        Ok(Err(JsonType::Number))
    }

    fn visit_str<E>(self, _: &str) -> Result<Self::Value, E> {
        Ok(Err(JsonType::String))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
        while items.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Err(JsonType::Array))
    }
}

impl Top<'_> {
    fn entry<'de, A: MapAccess<'de>>(
        &self,
        key: &str,
        entries: &mut A,
        fields: &mut Fields,
    ) -> Result<(), A::Error> {
        let chat = self.api == Api::ChatCompletions;
        match key {
            "model" => fields.model = scalar(entries)?.string(),
            "stream" => fields.stream = scalar(entries)?.bool(),
            "session_id" => fields.session_id = scalar(entries)?.string(),
            "prompt_cache_key" => fields.prompt_cache_key = scalar(entries)?.string(),
            "cache_salt" => fields.cache_salt = scalar(entries)?.string(),
            "priority" => fields.priority = scalar(entries)?.integer(),
            "n" => fields.n = scalar(entries)?.integer(),
            "best_of" if !chat => fields.best_of = scalar(entries)?.integer(),
            "max_tokens" => fields.max_tokens = scalar(entries)?.integer(),
            "max_completion_tokens" => fields.max_completion_tokens = scalar(entries)?.integer(),
            "add_special_tokens" => fields.add_special_tokens = scalar(entries)?.bool(),
            "truncate_prompt_tokens" => fields.truncate_prompt_tokens = scalar(entries)?.integer(),
            "truncation_side" => fields.truncation_side = scalar(entries)?.string(),
            "prompt" if !chat => fields.prompt = entries.next_value_seed(PromptSeed)?,
            "prompt_embeds" if !chat => {
                fields.prompt_embeds = match scalar(entries)? {
                    Scalar::Null => Field::Missing,
                    _ => Field::Found(()),
                }
            }
            "messages" if chat => fields.messages = messages(self.value(entries)?),
            "tools" if chat => fields.tools = present(self.value(entries)?),
            "documents" if chat => fields.documents = present(self.value(entries)?),
            "chat_template_kwargs" if chat => {
                fields.chat_template_kwargs = present(self.value(entries)?);
            }
            "tool_choice" if chat => fields.tool_choice = scalar(entries)?.string(),
            "chat_template" if chat => fields.chat_template = scalar(entries)?.string(),
            "reasoning_effort" if chat => fields.reasoning_effort = scalar(entries)?.string(),
            "add_generation_prompt" if chat => {
                fields.add_generation_prompt = scalar(entries)?.bool();
            }
            "continue_final_message" if chat => {
                fields.continue_final_message = scalar(entries)?.bool();
            }
            _ => drop(entries.next_value::<IgnoredAny>()?),
        }
        Ok(())
    }

    fn value<'de, A: MapAccess<'de>>(&self, entries: &mut A) -> Result<Value, A::Error> {
        entries.next_value_seed(ValueSeed(self.budget))
    }
}

/// `null` is the same as an absent field.
fn present(value: Value) -> Field<Value> {
    if value.is_none() {
        Field::Missing
    } else {
        Field::Found(value)
    }
}

/// A list of objects.
fn messages(value: Value) -> Field<Vec<Value>> {
    if value.kind() != ValueKind::Seq {
        return Field::Wrong(json_type(value.kind()));
    }
    let Ok(items) = value.try_iter() else {
        return Field::Wrong(JsonType::Array);
    };
    let items: Vec<Value> = items.collect();
    match items.iter().find(|item| item.kind() != ValueKind::Map) {
        Some(item) => Field::Wrong(json_type(item.kind())),
        None => Field::Found(items),
    }
}

fn json_type(kind: ValueKind) -> JsonType {
    match kind {
        ValueKind::Bool => JsonType::Bool,
        ValueKind::Number => JsonType::Number,
        ValueKind::String => JsonType::String,
        ValueKind::Seq => JsonType::Array,
        ValueKind::Map => JsonType::Object,
        _ => JsonType::Null,
    }
}

fn scalar<'de, A: MapAccess<'de>>(entries: &mut A) -> Result<Scalar, A::Error> {
    entries.next_value_seed(ScalarSeed)
}

/// A top-level key, escapes undone.
struct Key;

impl<'de> DeserializeSeed<'de> for Key {
    type Value = Cow<'de, str>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Cow<'de, str>, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for Key {
    type Value = Cow<'de, str>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_borrowed_str<E>(self, key: &'de str) -> Result<Cow<'de, str>, E> {
        Ok(Cow::Borrowed(key))
    }

    fn visit_str<E>(self, key: &str) -> Result<Cow<'de, str>, E> {
        Ok(Cow::Owned(key.to_owned()))
    }
}

/// Where the last value of the top-level key `param` begins. Reads the body again: errors are rare,
/// and the good path should not pay for places it does not need.
fn offset_of(body: &[u8], param: &str) -> usize {
    struct Finder<'a> {
        start: usize,
        param: &'a str,
    }

    impl<'de> Visitor<'de> for Finder<'_> {
        type Value = usize;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<usize, A::Error> {
            let mut offset = 0;
            while let Some(key) = entries.next_key_seed(Key)? {
                let value = entries.next_value::<&'de RawValue>()?;
                if key == self.param {
                    offset = (value.get().as_ptr() as usize).saturating_sub(self.start);
                }
            }
            Ok(offset)
        }
    }

    let start = body.as_ptr() as usize;
    serde_json::Deserializer::from_slice(body)
        .deserialize_map(Finder { start, param })
        .unwrap_or(0)
}

//! JSON text to template values, keeping what a chat template can see: key order, integers, floats.
//!
//! Lives here: the one reader of conversations, tools and template arguments.
//! Never here: what the values mean.
//! Invariant: reads at most the values its budget allows and reads over the rest, so that memory
//! stays proportional to the body. Repeated keys: the last value, at the first one's place, as in
//! Python.

use minijinja::Value;
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::cell::Cell;
use std::fmt;

/// How many more JSON values may be kept.
pub(super) struct Budget {
    left: Cell<usize>,
}

impl Budget {
    pub(super) fn new(values: usize) -> Budget {
        Budget {
            left: Cell::new(values),
        }
    }

    /// Whether some value was dropped.
    pub(super) fn exhausted(&self) -> bool {
        self.left.get() == 0
    }

    fn take(&self) -> bool {
        let left = self.left.get();
        self.left.set(left.saturating_sub(1));
        left != 0
    }
}

/// Reads one value of any type.
#[derive(Clone, Copy)]
pub(super) struct ValueSeed<'b>(pub(super) &'b Budget);

impl<'de> DeserializeSeed<'de> for ValueSeed<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        if self.0.take() {
            deserializer.deserialize_any(self)
        } else {
            deserializer.deserialize_ignored_any(IgnoredAny)?;
            Ok(Value::from(()))
        }
    }
}

impl<'de> Visitor<'de> for ValueSeed<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::from(()))
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_str<E>(self, text: &str) -> Result<Value, E> {
        Ok(Value::from(text))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = items.next_element_seed(self)? {
            // Past the budget every element is a placeholder, and not worth keeping.
            if !self.0.exhausted() {
                values.push(value);
            }
        }
        Ok(Value::from(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut pairs = Vec::new();
        while let Some(key) = entries.next_key_seed(KeySeed)? {
            let value = entries.next_value_seed(self)?;
            if !self.0.exhausted() {
                pairs.push((key, value));
            }
        }
        Ok(pairs.into_iter().collect())
    }
}

/// Reads a key straight into a template value, without a `String` in between.
struct KeySeed;

impl<'de> DeserializeSeed<'de> for KeySeed {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for KeySeed {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E>(self, key: &str) -> Result<Value, E> {
        Ok(Value::from(key))
    }
}

/// `text` as a value, or `None` when it is not one JSON value.
pub(crate) fn value_from_str(text: &str) -> Option<Value> {
    let budget = Budget::new(super::MAX_VALUES);
    let mut reader = serde_json::Deserializer::from_str(text);
    let value = ValueSeed(&budget).deserialize(&mut reader).ok()?;
    reader.end().ok()?;
    (!budget.exhausted()).then_some(value)
}

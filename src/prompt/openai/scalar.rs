//! One value of any type, of which a string, a boolean or an integer is kept.
//!
//! Lives here: the tolerant reader of the fields whose faults are the engine's to judge.
//! Never here: which field it is.
//! Invariant: reading never fails because of a value's type.

use super::error::JsonType;
use super::fields::Field;
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::fmt;

/// A value of which only scalars are kept.
pub(super) enum Scalar {
    Null,
    Bool(bool),
    Integer(i64),
    Fraction,
    String(String),
    Array,
    Object,
}

impl Scalar {
    pub(super) fn string(self) -> Field<String> {
        match self {
            Scalar::String(text) => Field::Found(text),
            other => Field::Wrong(other.json_type()),
        }
    }

    pub(super) fn bool(self) -> Field<bool> {
        match self {
            Scalar::Bool(value) => Field::Found(value),
            other => Field::Wrong(other.json_type()),
        }
    }

    pub(super) fn integer(self) -> Field<i64> {
        match self {
            Scalar::Integer(value) => Field::Found(value),
            other => Field::Wrong(other.json_type()),
        }
    }

    fn json_type(&self) -> JsonType {
        match self {
            Scalar::Null => JsonType::Null,
            Scalar::Bool(_) => JsonType::Bool,
            Scalar::Integer(_) | Scalar::Fraction => JsonType::Number,
            Scalar::String(_) => JsonType::String,
            Scalar::Array => JsonType::Array,
            Scalar::Object => JsonType::Object,
        }
    }
}

/// Reads a [`Scalar`], and over whatever is none.
pub(super) struct ScalarSeed;

impl<'de> DeserializeSeed<'de> for ScalarSeed {
    type Value = Scalar;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Scalar, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for ScalarSeed {
    type Value = Scalar;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any JSON value")
    }

    fn visit_unit<E>(self) -> Result<Scalar, E> {
        Ok(Scalar::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Scalar, E> {
        Ok(Scalar::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Scalar, E> {
        Ok(Scalar::Integer(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Scalar, E> {
        Ok(Scalar::Integer(i64::try_from(value).unwrap_or(i64::MAX)))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Scalar, E> {
        // Engines take 100.0 for 100; the cast saturates.
        Ok(if value.fract() == 0.0 {
            Scalar::Integer(value as i64)
        } else {
            Scalar::Fraction
        })
    }

    fn visit_str<E>(self, text: &str) -> Result<Scalar, E> {
        Ok(Scalar::String(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Scalar, A::Error> {
        while items.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Scalar::Array)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Scalar, A::Error> {
        while entries.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Scalar::Object)
    }
}

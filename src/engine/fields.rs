//! A request body as a list of fields, so that one can be read and another replaced while the rest
//! stays byte for byte as the client wrote it.
//!
//! Lives here: [`Fields`] and typed access to single fields.
//! Never here: which fields mean what (`request`, `handoff`).
//! Invariant: of a repeated key the last one counts, as in the engines' JSON reader.

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;
use std::fmt;

/// The top-level fields of a JSON object, in order.
pub(super) struct Fields<'a>(Vec<(String, &'a RawValue)>);

/// A field that does not hold what it should.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: expected {expected}, found {found}")]
pub(super) struct Wrong {
    pub(super) field: &'static str,
    expected: &'static str,
    found: &'static str,
}

impl<'a> Fields<'a> {
    /// Reads `body`; `None` when it is not a JSON object.
    pub(super) fn read(body: &'a [u8]) -> Option<Fields<'a>> {
        // Engines written in Python accept a byte-order mark.
        let body = body.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(body);
        serde_json::from_slice(body).ok()
    }

    /// Whether the field is there, whatever it holds.
    pub(super) fn has(&self, field: &str) -> bool {
        self.0.iter().any(|(key, _)| key == field)
    }

    fn value(&self, field: &str) -> Option<Value> {
        let (_, raw) = self.0.iter().rev().find(|(key, _)| key == field)?;
        match serde_json::from_str(raw.get()) {
            Ok(Value::Null) | Err(_) => None,
            Ok(value) => Some(value),
        }
    }

    /// An object; absent and null are `None`.
    pub(super) fn object(
        &self,
        field: &'static str,
    ) -> Result<Option<serde_json::Map<String, Value>>, Wrong> {
        match self.value(field) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(map)),
            Some(other) => Err(wrong(field, "an object", &other)),
        }
    }

    /// A boolean; absent and null are `None`.
    pub(super) fn flag(&self, field: &'static str) -> Result<Option<bool>, Wrong> {
        match self.value(field) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(flag)),
            Some(other) => Err(wrong(field, "a boolean", &other)),
        }
    }

    /// A whole number of at least `least`; absent and null are `None`.
    pub(super) fn count(&self, field: &'static str, least: Least) -> Result<Option<u32>, Wrong> {
        let Some(value) = self.value(field) else {
            return Ok(None);
        };
        let number = value.as_u64().map(|n| u32::try_from(n).unwrap_or(u32::MAX));
        match number.filter(|n| least.value() <= *n) {
            Some(number) => Ok(Some(number)),
            None => Err(wrong(field, least.as_str(), &value)),
        }
    }

    /// A number from `from` to `to`; absent and null are fine.
    pub(super) fn check_number(
        &self,
        field: &'static str,
        expected: &'static str,
        range: std::ops::RangeInclusive<f64>,
    ) -> Result<(), Wrong> {
        match self.value(field) {
            None => Ok(()),
            Some(value) => match value.as_f64() {
                Some(number) if range.contains(&number) => Ok(()),
                _ => Err(wrong(field, expected, &value)),
            },
        }
    }

    /// The object again, without `removed` and with `added` at its end.
    pub(super) fn rewrite(&self, removed: &[&str], added: &[(&str, Value)]) -> Vec<u8> {
        let mut out = String::from("{");
        let mut comma = "";
        let mut push = |key: &str, value: &str| {
            out.push_str(comma);
            out.push_str(&Value::from(key).to_string());
            out.push(':');
            out.push_str(value);
            comma = ",";
        };
        for (key, raw) in &self.0 {
            let replaced = added.iter().any(|(name, _)| name == key);
            if !replaced && !removed.contains(&key.as_str()) {
                push(key, raw.get());
            }
        }
        for (key, value) in added {
            push(key, &value.to_string());
        }
        out.push('}');
        out.into_bytes()
    }
}

/// The smallest number a field may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Least {
    Zero,
    One,
}

impl Least {
    fn value(self) -> u32 {
        match self {
            Least::Zero => 0,
            Least::One => 1,
        }
    }

    fn as_str(self) -> &'static str {
        match self {
            Least::Zero => "a whole number of at least 0",
            Least::One => "a whole number of at least 1",
        }
    }
}

fn wrong(field: &'static str, expected: &'static str, found: &Value) -> Wrong {
    let found = match found {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "another number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    };
    Wrong {
        field,
        expected,
        found,
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Fields<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = Vec<(String, &'de RawValue)>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut fields = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    fields.push(entry);
                }
                Ok(fields)
            }
        }
        deserializer.deserialize_map(Reader).map(Fields)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(body: &str) -> Fields<'_> {
        Fields::read(body.as_bytes()).expect("an object")
    }

    #[test]
    fn the_last_of_a_repeated_key_counts_and_null_is_absent() {
        let fields = fields(r#"{"n":1,"n":2,"stream":null}"#);
        assert_eq!(fields.count("n", Least::One), Ok(Some(2)));
        assert_eq!(fields.flag("stream"), Ok(None));
        assert_eq!(fields.flag("absent"), Ok(None));
    }

    #[test]
    fn a_wrong_type_is_named_without_its_value() {
        let fields = fields(r#"{"n":"secret","max_tokens":0,"stream":1}"#);
        let error = fields.count("n", Least::One).expect_err("a string");
        assert_eq!(
            error.to_string(),
            "n: expected a whole number of at least 1, found a string"
        );
        assert!(fields.count("max_tokens", Least::One).is_err());
        assert!(fields.count("max_tokens", Least::Zero).is_ok());
        assert!(fields.flag("stream").is_err());
    }

    #[test]
    fn rewriting_leaves_other_fields_byte_for_byte() {
        let fields = fields(r#"{"a": [1.0, 1e3,"\u00e9"], "stream":true, "stream_options":{}}"#);
        let body = fields.rewrite(&["stream_options"], &[("stream", Value::Bool(false))]);
        assert_eq!(
            String::from_utf8(body).expect("text"),
            r#"{"a":[1.0, 1e3,"\u00e9"],"stream":false}"#
        );
    }

    #[test]
    fn what_is_not_an_object_is_not_read() {
        assert!(Fields::read(b"[1]").is_none());
        assert!(Fields::read(b"{").is_none());
    }
}

//! Values spelt the way Python spells them: `json.dumps`, `str` and `repr`.
//!
//! Lives here: the `tojson` and `string` filters, the output formatter, the tests that differ.
//! Never here: HTML escapes (chat templates are rendered without them).
//! Invariant: the spelling is CPython's: `", "` and `": "` separators, key order kept, floats as
//! `repr(float)` gives them (`1e-07`, `1e+16`, `1.0`).

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Error, ErrorKind, Output, State, Value};
use minijinja_contrib::pycompat;
use std::fmt::{self, Write};

/// Writes `value` as `str(value)`, except that an undefined value writes nothing (Jinja's rule).
pub(super) fn write_str(out: &mut Output, value: &Value) -> Result<(), Error> {
    match value.as_str() {
        Some(text) => out.write_str(text).map_err(Error::from),
        None => str_into(out, value).map_err(Error::from),
    }
}

/// The filter `string`.
pub(super) fn string(value: &Value) -> Result<String, Error> {
    let mut out = String::new();
    str_into(&mut out, value)?;
    Ok(out)
}

fn str_into(out: &mut impl Write, value: &Value) -> fmt::Result {
    match (value.as_str(), value.kind()) {
        (Some(text), _) => out.write_str(text),
        (None, ValueKind::Undefined) => Ok(()),
        (None, _) => repr_into(out, value),
    }
}

fn repr_into(out: &mut impl Write, value: &Value) -> fmt::Result {
    match value.kind() {
        ValueKind::String => repr_text(out, value.as_str().unwrap_or_default()),
        ValueKind::Number if !value.is_integer() => {
            let number = f64::try_from(value.clone()).unwrap_or(f64::NAN);
            out.write_str(&float(number, ["nan", "inf", "-inf"]))
        }
        // A slice is an iterator here, and a list in Python.
        ValueKind::Seq | ValueKind::Iterable => {
            out.write_char('[')?;
            for (index, item) in value.try_iter().into_iter().flatten().enumerate() {
                out.write_str(if index == 0 { "" } else { ", " })?;
                repr_into(out, &item)?;
            }
            out.write_char(']')
        }
        ValueKind::Map => {
            out.write_char('{')?;
            for (index, key) in value.try_iter().into_iter().flatten().enumerate() {
                out.write_str(if index == 0 { "" } else { ", " })?;
                repr_into(out, &key)?;
                out.write_str(": ")?;
                repr_into(out, &value.get_item(&key).unwrap_or_default())?;
            }
            out.write_char('}')
        }
        ValueKind::Undefined => out.write_str("Undefined"),
        // None, True, False and integers are spelt as in Python already.
        _ => write!(out, "{value}"),
    }
}

/// `repr(str)`: single quotes unless the text has some and no double quotes.
fn repr_text(out: &mut impl Write, text: &str) -> fmt::Result {
    let quote = if text.contains('\'') && !text.contains('"') {
        '"'
    } else {
        '\''
    };
    out.write_char(quote)?;
    for c in text.chars() {
        match c {
            '\\' => out.write_str("\\\\")?,
            '\n' => out.write_str("\\n")?,
            '\r' => out.write_str("\\r")?,
            '\t' => out.write_str("\\t")?,
            c if c == quote => write!(out, "\\{c}")?,
            c if (c as u32) < 0x100 && (c.is_control() || c == '\u{a0}' || c == '\u{ad}') => {
                write!(out, "\\x{:02x}", c as u32)?;
            }
            c => out.write_char(c)?,
        }
    }
    out.write_char(quote)
}

/// `repr(float)`; `special` spells not-a-number and the infinities.
fn float(number: f64, special: [&str; 3]) -> String {
    if number.is_nan() {
        return special[0].to_owned();
    }
    if number.is_infinite() {
        return special[if 0.0 < number { 1 } else { 2 }].to_owned();
    }
    // The shortest digits that read back as the same number, as Python's: `d.ddde±x`.
    let scientific = format!("{number:e}");
    let Some((digits, exponent)) = scientific.split_once('e') else {
        return scientific;
    };
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = format!("{number}");
        if plain.contains('.') {
            plain
        } else {
            plain + ".0"
        }
    } else {
        let sign = if exponent < 0 { '-' } else { '+' };
        format!("{digits}e{sign}{:02}", exponent.unsigned_abs())
    }
}

/// Python's methods of strings, lists and dictionaries.
pub(super) fn method(
    state: &State,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    match (value.as_str(), name, args) {
        // `pycompat` counts bytes, Python characters.
        (Some(text), "find" | "rfind", [part, rest @ ..]) if rest.len() < 2 => {
            let start = rest.first().map_or(Some(0), Value::as_i64);
            match (part.as_str(), start.and_then(|at| usize::try_from(at).ok())) {
                (Some(part), Some(start)) => Ok(Value::from(find(text, part, start, name))),
                _ => pycompat::unknown_method_callback(state, value, name, args),
            }
        }
        // Of no characters, none is a digit.
        (Some(""), "isdigit" | "isalpha" | "isalnum" | "isnumeric" | "isspace", []) => {
            Ok(Value::from(false))
        }
        _ => pycompat::unknown_method_callback(state, value, name, args),
    }
}

/// `text.find(part, start)` or `text.rfind(part, start)`, in characters; -1 if it is not there.
fn find(text: &str, part: &str, start: usize, name: &str) -> i64 {
    let skipped = match text.char_indices().nth(start) {
        Some((at, _)) => at,
        None if text.chars().count() == start => text.len(),
        None => return -1,
    };
    let found = match name {
        "find" => text[skipped..].find(part),
        _ => text[skipped..].rfind(part),
    };
    found.map_or(-1, |at| {
        i64::try_from(text[..skipped + at].chars().count()).unwrap_or(i64::MAX)
    })
}

/// Jinja's `sequence` test asks for a length and an index operator, which Python's strings and
/// dictionaries have as well.
pub(super) fn is_sequence(value: &Value) -> bool {
    matches!(
        value.kind(),
        ValueKind::Seq | ValueKind::String | ValueKind::Map
    )
}

/// Jinja's `iterable` test asks for an iterator, which `None` has not.
pub(super) fn is_iterable(value: &Value) -> bool {
    !matches!(
        value.kind(),
        ValueKind::None | ValueKind::Bool | ValueKind::Number
    )
}

/// Python's booleans are numbers.
pub(super) fn is_number(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Number | ValueKind::Bool)
}

/// The filter `tojson`: `json.dumps(value, ensure_ascii=False, …)` with the keyword arguments
/// `ensure_ascii`, `indent`, `separators` and `sort_keys`, in that order where positional.
pub(super) fn tojson(value: &Value, args: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    let argument = |position: usize, name: &str| -> Result<Option<Value>, Error> {
        match args.get(position) {
            Some(value) => Ok(Some(value.clone())),
            None => named.get::<Option<Value>>(name),
        }
    };
    let mut style = Style {
        ascii: argument(0, "ensure_ascii")?.is_some_and(|flag| flag.is_true()),
        indent: argument(1, "indent")?.and_then(|indent| indentation(&indent)),
        item: ", ".to_owned(),
        key: ": ".to_owned(),
        sorted: false,
    };
    if style.indent.is_some() {
        style.item = ",".to_owned();
    }
    if let Some(pair) = argument(2, "separators")?.filter(|pair| !pair.is_none()) {
        let part = |index| -> Result<String, Error> {
            let part = pair.get_item_by_index(index)?;
            part.as_str()
                .map(str::to_owned)
                .ok_or_else(|| unserializable("separators"))
        };
        (style.item, style.key) = (part(0)?, part(1)?);
    }
    style.sorted = argument(3, "sort_keys")?.is_some_and(|flag| flag.is_true());
    named.assert_all_used()?;
    let mut out = String::new();
    style.write(&mut out, value, 0)?;
    Ok(Value::from(out))
}

/// `indent=`: a number of spaces or the indentation itself; `None` for one line.
fn indentation(indent: &Value) -> Option<String> {
    match indent.as_str() {
        Some(text) => Some(text.to_owned()),
        None if indent.kind() == ValueKind::Number => {
            let spaces = indent.as_i64().unwrap_or(0).clamp(0, 64);
            Some(" ".repeat(usize::try_from(spaces).unwrap_or(0)))
        }
        None => None,
    }
}

fn unserializable(what: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, what)
}

/// How `json.dumps` was asked to write.
struct Style {
    ascii: bool,
    indent: Option<String>,
    item: String,
    key: String,
    sorted: bool,
}

impl Style {
    fn write(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&number(value)),
            ValueKind::String => self.text(out, value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                out.push('[');
                self.items(out, depth, &items, |out, item| {
                    self.write(out, item, depth + 1)
                })?;
                out.push(']');
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sorted {
                    keys.sort();
                }
                out.push('{');
                self.items(out, depth, &keys, |out, key| {
                    self.text(out, &key_text(key)?);
                    out.push_str(&self.key);
                    self.write(out, &value.get_item(key)?, depth + 1)
                })?;
                out.push('}');
            }
            _ => return Err(unserializable("not a JSON value")),
        }
        Ok(())
    }

    /// What is between the brackets.
    fn items(
        &self,
        out: &mut String,
        depth: usize,
        items: &[Value],
        mut write: impl FnMut(&mut String, &Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        for (index, item) in items.iter().enumerate() {
            if index != 0 {
                out.push_str(&self.item);
            }
            self.newline(out, depth + 1);
            write(out, item)?;
        }
        if !items.is_empty() {
            self.newline(out, depth);
        }
        Ok(())
    }

    fn newline(&self, out: &mut String, depth: usize) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            for _ in 0..depth {
                out.push_str(indent);
            }
        }
    }

    fn text(&self, out: &mut String, text: &str) {
        out.push('"');
        let mut plain = 0;
        for (at, c) in text.char_indices() {
            let short = match c {
                '"' => "\\\"",
                '\\' => "\\\\",
                '\n' => "\\n",
                '\r' => "\\r",
                '\t' => "\\t",
                '\u{8}' => "\\b",
                '\u{c}' => "\\f",
                c if c < ' ' || (self.ascii && '~' < c) => "",
                _ => continue,
            };
            out.push_str(&text[plain..at]);
            plain = at + c.len_utf8();
            if short.is_empty() {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    // Writing to a string cannot fail.
                    let _ = write!(out, "\\u{unit:04x}");
                }
            } else {
                out.push_str(short);
            }
        }
        out.push_str(&text[plain..]);
        out.push('"');
    }
}

fn number(value: &Value) -> String {
    if value.is_integer() {
        value.to_string()
    } else {
        let number = f64::try_from(value.clone()).unwrap_or(f64::NAN);
        float(number, ["NaN", "Infinity", "-Infinity"])
    }
}

/// A key of a Python dictionary as a JSON key.
fn key_text(key: &Value) -> Result<String, Error> {
    match key.kind() {
        ValueKind::String => Ok(key.as_str().unwrap_or_default().to_owned()),
        ValueKind::Number => Ok(number(key)),
        ValueKind::Bool => Ok(if key.is_true() { "true" } else { "false" }.to_owned()),
        ValueKind::None => Ok("null".to_owned()),
        _ => Err(unserializable("not a JSON key")),
    }
}

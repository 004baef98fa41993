//! Stage one: a document takes the shape of a file of ours.
//!
//! Lives here: [`Shape`], [`Field`], and the `mirror!` macro that writes the mirror of a section.
//! Never here: ranges, defaults, what depends on another key (see `parse`).
//! Invariant: reading goes on after a fault, so that all of them are reported together. That is why
//! this is not a derived `Deserialize`, which stops at the first one.

use crate::config::diagnostic::{Report, Wrong};
use crate::config::keys::Nulls;
use crate::config::node::{Entry, Node, NodeId, Value, quoted};
use std::collections::HashSet;

/// A value that can be read out of a node.
pub(crate) trait Shape: Sized {
    /// Whether whatever stands there is of no interest.
    const SKIPPED: bool = false;

    /// Reads `node`; what does not fit is reported, and then nothing is returned.
    fn read(node: &Node, report: &mut Report) -> Option<Self>;
}

/// A value and where it stood.
#[derive(Clone, Debug)]
pub(crate) struct Spot<T> {
    pub(crate) at: NodeId,
    pub(crate) value: T,
}

/// What a key of a section holds.
#[derive(Clone, Debug)]
pub(crate) enum Field<T> {
    /// The key is not there.
    Absent,
    /// It is there, and what is wrong with it has been reported.
    Faulty,
    /// It is there and has the right shape.
    Given(Spot<T>),
}

impl<T> Field<T> {
    /// What is there, if it has the right shape.
    pub(crate) fn given(&self) -> Option<&Spot<T>> {
        match self {
            Field::Given(spot) => Some(spot),
            Field::Absent | Field::Faulty => None,
        }
    }
}

/// A single value. That it is not of the type `T` is not a fault yet: only the second stage knows what
/// to call what was expected.
#[derive(Clone, Debug)]
pub(crate) struct Leaf<T> {
    pub(crate) value: Option<T>,
    /// What stands there, for people.
    pub(crate) found: String,
    /// What to do about it, for people; often nothing.
    hint: &'static str,
}

impl<T> Leaf<T> {
    /// That this is not what was `expected`.
    pub(crate) fn wrong(&self, expected: impl Into<String>) -> Wrong {
        Wrong::new(expected, self.found.clone()).hinting(self.hint)
    }

    /// What `parse` makes of the value, or that it is not what was `expected`.
    pub(crate) fn parse<'a, U>(
        &'a self,
        expected: impl Into<String>,
        parse: impl FnOnce(&'a T) -> Option<U>,
    ) -> Result<U, Wrong> {
        let value = self.value.as_ref().and_then(parse);
        value.ok_or_else(|| self.wrong(expected))
    }
}

/// Text.
pub(crate) type Text = Leaf<String>;
/// A whole number.
pub(crate) type Whole = Leaf<i128>;
/// Any number.
pub(crate) type Number = Leaf<f64>;
/// True or false.
pub(crate) type Flag = Leaf<bool>;

/// A size: a number of bytes, or text such as `16Mi`.
#[derive(Clone, Debug)]
pub(crate) enum Size {
    Bytes(i128),
    Text(String),
}

/// Either a word or a section.
#[derive(Clone, Debug)]
pub(crate) enum WordOr<T> {
    Word(Text),
    Section(T),
}

/// Keys with text values, such as labels; in the order of the file.
#[derive(Clone, Debug)]
pub(crate) struct TextMap(pub(crate) Vec<(Text, Spot<Text>)>);

/// Whatever stands there is skipped.
#[derive(Clone, Debug)]
pub(crate) struct Skipped;

fn mismatch<T>(node: &Node, report: &mut Report, expected: &str) -> Option<T> {
    report.fault(node.id, Wrong::new(expected, node.to_string()));
    None
}

fn leaf<T>(node: &Node, value: Option<T>, hint: &'static str) -> Leaf<T> {
    Leaf {
        hint: if value.is_none() { hint } else { "" },
        value,
        found: node.to_string(),
    }
}

/// The hint for a number that was written as text.
fn unquote(node: &Node) -> &'static str {
    match &node.value {
        Value::Text(text) if text.trim().parse::<f64>().is_ok() => "write it without quotes",
        _ => "",
    }
}

impl Shape for Flag {
    fn read(node: &Node, _: &mut Report) -> Option<Self> {
        let value = match node.value {
            Value::Bool(value) => Some(value),
            _ => None,
        };
        Some(leaf(node, value, ""))
    }
}

impl Shape for Whole {
    fn read(node: &Node, _: &mut Report) -> Option<Self> {
        let value = match node.value {
            Value::Whole(value) => Some(value),
            _ => None,
        };
        Some(leaf(node, value, unquote(node)))
    }
}

impl Shape for Number {
    fn read(node: &Node, _: &mut Report) -> Option<Self> {
        let value = match node.value {
            #[allow(clippy::cast_precision_loss)] // Far above every range that a number is held to.
            Value::Whole(value) => Some(value as f64),
            Value::Float(value) => Some(value),
            _ => None,
        };
        let mut leaf = leaf(node, value, unquote(node));
        if let Some(value) = value.filter(|value| value.is_finite()) {
            // As an API server's rules show it: without an exponent.
            leaf.found = value.to_string();
        }
        Some(leaf)
    }
}

impl Shape for Text {
    fn read(node: &Node, _: &mut Report) -> Option<Self> {
        let (value, hint) = match &node.value {
            Value::Text(text) => (Some(text.to_string()), ""),
            Value::Whole(_) | Value::Float(_) => {
                (None, "text that looks like a number is written in quotes")
            }
            _ => (None, ""),
        };
        Some(leaf(node, value, hint))
    }
}

impl Shape for Leaf<Size> {
    fn read(node: &Node, _: &mut Report) -> Option<Self> {
        let value = match &node.value {
            Value::Whole(value) => Some(Size::Bytes(*value)),
            Value::Text(text) => Some(Size::Text(text.to_string())),
            _ => None,
        };
        Some(leaf(node, value, ""))
    }
}

impl Shape for Skipped {
    const SKIPPED: bool = true;

    fn read(_: &Node, _: &mut Report) -> Option<Self> {
        Some(Skipped)
    }
}

impl<T: Shape> Shape for WordOr<T> {
    fn read(node: &Node, report: &mut Report) -> Option<Self> {
        match &node.value {
            Value::Map(_) => T::read(node, report).map(WordOr::Section),
            _ => Text::read(node, report).map(WordOr::Word),
        }
    }
}

impl<T: Shape> Shape for Vec<Spot<T>> {
    fn read(node: &Node, report: &mut Report) -> Option<Self> {
        let Value::List(items) = &node.value else {
            return mismatch(node, report, "a list");
        };
        Some(
            items
                .iter()
                .filter_map(|item| T::read(item, report).map(|value| Spot { at: item.id, value }))
                .collect(),
        )
    }
}

impl Shape for TextMap {
    fn read(node: &Node, report: &mut Report) -> Option<Self> {
        let Value::Map(entries) = &node.value else {
            return mismatch(node, report, "a mapping");
        };
        report_duplicates(entries, report);
        let mut texts = Vec::with_capacity(entries.len());
        for entry in entries {
            let key = Leaf {
                value: Some(entry.key.to_string()),
                found: format!("the key {}", quoted(&entry.key)),
                hint: "",
            };
            if let Some(value) = Text::read(&entry.node, report) {
                let at = entry.node.id;
                texts.push((key, Spot { at, value }));
            }
        }
        Some(TextMap(texts))
    }
}

/// The entries of the section `node`, after a report of keys that are unknown or written twice.
pub(crate) fn section<'a>(
    node: &'a Node,
    keys: &'static [&'static str],
    report: &mut Report,
) -> Option<&'a [Entry]> {
    let Value::Map(entries) = &node.value else {
        return mismatch(
            node,
            report,
            &format!(
                "a mapping with the {} {}",
                plural("key", keys),
                keys.join(", ")
            ),
        );
    };
    report_duplicates(entries, report);
    for entry in entries {
        if !keys.contains(&&*entry.key) {
            let expected = match keys {
                [key] => format!("the key {key}"),
                _ => format!("one of the keys {}", keys.join(", ")),
            };
            let found = format!("the unknown key {}", quoted(&entry.key));
            let wrong = match nearest(&entry.key, keys) {
                Some(near) => Wrong::new("a known key", found).hinting(format!("is {near} meant?")),
                None => Wrong::new(expected, found),
            };
            report.fault(entry.id, wrong);
        }
    }
    Some(entries)
}

fn plural(noun: &str, of: &[&str]) -> String {
    let ending = if of.len() == 1 { "" } else { "s" };
    format!("{noun}{ending}")
}

fn report_duplicates(entries: &[Entry], report: &mut Report) {
    let mut seen = HashSet::new();
    for entry in entries {
        if !seen.insert(&*entry.key) {
            let found = format!("{} a second time", quoted(&entry.key));
            report.fault(entry.id, Wrong::new("each key once", found));
        }
    }
}

/// Reads the value under `key`.
pub(crate) fn field<T: Shape>(
    entries: &[Entry],
    (key, nulls): (&str, Nulls),
    report: &mut Report,
) -> Field<T> {
    let Some(entry) = entries.iter().find(|entry| &*entry.key == key) else {
        return Field::Absent;
    };
    let at = entry.node.id;
    if nulls == Nulls::AreAbsent && matches!(entry.node.value, Value::Null) {
        if !T::SKIPPED {
            report.warn(at, "has no effect: a null is the same as no key");
        }
        return Field::Absent;
    }
    match T::read(&entry.node, report) {
        Some(value) => Field::Given(Spot { at, value }),
        None => Field::Faulty,
    }
}

/// The known word that `word` was probably meant to be: the start of one, or at most a quarter of it
/// mistyped (a third, of a long one).
pub(crate) fn nearest<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    const LONGEST: usize = 64;
    if LONGEST < word.len() {
        return None;
    }
    let plain = |text: &str| -> Vec<char> {
        text.chars()
            .filter(|c| c.is_alphanumeric())
            .flat_map(char::to_lowercase)
            .collect()
    };
    let typed = plain(word);
    known
        .iter()
        .map(|&candidate| {
            let meant = plain(candidate);
            let near = distance(&typed, &meant);
            let part = if meant.len() < 12 { 4 } else { 3 };
            let start =
                3 <= typed.len() && (meant.starts_with(&typed) || typed.starts_with(&meant));
            (start || near * part <= meant.len(), near, candidate)
        })
        .filter(|(close, ..)| *close)
        .min_by_key(|(_, near, _)| *near)
        .map(|(.., candidate)| candidate)
}

/// Levenshtein distance.
fn distance(a: &[char], b: &[char]) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut diagonal = i;
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

/// Writes the mirror of sections: a struct with a [`Field`] per key, its [`Shape`], and its description.
///
/// After the type of a key may stand what else is known of it, a [`Note`](crate::config::keys::Note) in
/// brackets; after the name of a section, the function that gives the rules between its keys.
macro_rules! mirror {
    (@note) => { $crate::config::keys::Note::NONE };
    (@note $note:expr) => { $note };
    (@rules) => { Vec::new() };
    (@rules $rules:expr) => { $rules() };
    ($(
        $(#[doc = $doc:literal])*
        $(#[allow($lint:ident)])?
        struct $name:ident $([$rules:expr])? {
            $($(#[doc = $field_doc:literal])* $key:literal => $field:ident: $type:ty $([$note:expr])?,)+
        }
    )+) => {$(
        $(#[doc = $doc])*
        $(#[allow($lint)])?
        #[derive(Clone, Debug)]
        pub(crate) struct $name {
            /// The section itself.
            #[allow(dead_code)] // Read only where one of its keys is required.
            pub(crate) at: $crate::config::node::NodeId,
            $($(#[doc = $field_doc])* pub(crate) $field: $crate::config::shape::Field<$type>,)+
        }

        impl $crate::config::shape::Shape for $name {
            fn read(
                node: &$crate::config::node::Node,
                report: &mut $crate::config::diagnostic::Report,
            ) -> Option<Self> {
                let entries = $crate::config::shape::section(node, &[$($key),+], report)?;
                Some($name {
                    at: node.id,
                    $($field: {
                        let note = mirror!(@note $($note)?);
                        $crate::config::shape::field(entries, ($key, note.nulls), report)
                    },)+
                })
            }
        }

        impl $crate::config::keys::Described for $name {
            fn kind() -> $crate::config::keys::Kind {
                $crate::config::keys::Kind::Section($crate::config::keys::Section {
                    doc: concat!($($doc,)*).trim_ascii(),
                    keys: vec![$($crate::config::keys::Key {
                        name: $key,
                        doc: concat!($($field_doc,)*).trim_ascii(),
                        note: mirror!(@note $($note)?),
                        kind: <$type as $crate::config::keys::Described>::kind(),
                    },)+],
                    rules: mirror!(@rules $($rules)?),
                })
            }
        }
    )+};
}
pub(crate) use mirror;

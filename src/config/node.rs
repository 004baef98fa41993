//! A YAML text as a tree that still knows where everything stood.
//!
//! Lives here: [`Node`], and finding the line and column of one.
//! Never here: which keys or values are right (see `shape`).
//! Invariant: nodes and keys are numbered in reading order, so the same text always gives the same
//! numbers. Duplicate keys are kept, because they are to be reported.
//!
//! The YAML crate gives places only in errors. [`locate`] therefore reads the text again and raises an
//! error on purpose at the node it looks for. That costs one more reading per fault shown, and nothing
//! while the file is right.

use serde::de::{DeserializeSeed, EnumAccess, Error, MapAccess, SeqAccess, VariantAccess, Visitor};
use std::cell::Cell;
use std::fmt;

/// Most values and keys in one file: enough for thousands of pods, and a bound on what aliases
/// (`&a`, `*a`) can blow up to.
pub(crate) const MAX_NODES: u32 = 250_000;

/// Most brackets open at once. The YAML parser takes time in the square of that number; our files need
/// a handful.
const MAX_DEPTH: usize = 256;

/// The number of a node or key in its document, in reading order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct NodeId(pub(crate) u32);

/// One value.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) id: NodeId,
    pub(crate) value: Value,
}

/// What a node holds.
#[derive(Debug)]
pub(crate) enum Value {
    Null,
    Bool(bool),
    Whole(i128),
    Float(f64),
    Text(Box<str>),
    List(Vec<Node>),
    Map(Vec<Entry>),
    /// A value under a tag such as `!Name`, of which no file of ours has one.
    Tagged(Box<str>),
}

/// One key with its value.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) id: NodeId,
    pub(crate) key: Box<str>,
    pub(crate) node: Node,
}

/// A fault of the YAML itself.
#[derive(Debug)]
pub(crate) struct SyntaxFault {
    pub(crate) problem: String,
    /// Line and column from 1, where known.
    pub(crate) place: Option<(usize, usize)>,
}

/// Reads `text` as one YAML document.
pub(crate) fn read(text: &str) -> Result<Node, SyntaxFault> {
    if let Some(place) = too_deep(text) {
        return Err(SyntaxFault {
            problem: format!("more than {MAX_DEPTH} open brackets"),
            place: Some(place),
        });
    }
    let count = Count::default();
    let document = serde_yaml::Deserializer::from_str(text);
    NodeSeed(&count)
        .deserialize(document)
        .map_err(|error| SyntaxFault {
            problem: without_places(&error.to_string()),
            place: place(&error),
        })
}

/// The place of the first bracket too many. Quotes and comments are not looked at: brackets in them
/// come in pairs too, or at least not by the hundred.
fn too_deep(text: &str) -> Option<(usize, usize)> {
    let mut depth: usize = 0;
    let (mut line, mut line_start) = (1, 0);
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            b'[' | b'{' => depth += 1,
            b']' | b'}' => depth = depth.saturating_sub(1),
            b'\n' => (line, line_start) = (line + 1, at + 1),
            _ => {}
        }
        if MAX_DEPTH < depth {
            let column = text
                .get(line_start..at)
                .map_or(0, |text| text.chars().count());
            return Some((line, column + 1));
        }
    }
    None
}

/// Line and column (from 1) of the node or key `id` in `text`.
pub(crate) fn locate(text: &str, id: NodeId) -> Option<(usize, usize)> {
    let count = Count {
        next: Cell::new(0),
        stop: Some(id.0),
    };
    let document = serde_yaml::Deserializer::from_str(text);
    NodeSeed(&count)
        .deserialize(document)
        .err()
        .and_then(|error| place(&error))
}

/// The path of the node or key `id` under `root`, such as `spec.rules[0].bypass`.
pub(crate) fn path(root: &Node, id: NodeId) -> Option<String> {
    fn walk(node: &Node, id: NodeId, path: &mut String) -> bool {
        if node.id == id {
            return true;
        }
        let length = path.len();
        match &node.value {
            Value::List(items) => {
                // Ids grow in reading order, so the last child that does not start after `id` holds it.
                let next = items.partition_point(|item| item.id <= id);
                let Some((index, item)) =
                    next.checked_sub(1).and_then(|i| Some((i, items.get(i)?)))
                else {
                    return false;
                };
                path.push_str(&format!("[{index}]"));
                if walk(item, id, path) {
                    return true;
                }
            }
            Value::Map(entries) => {
                let next = entries.partition_point(|entry| entry.id <= id);
                let Some(entry) = next.checked_sub(1).and_then(|i| entries.get(i)) else {
                    return false;
                };
                if !path.is_empty() {
                    path.push('.');
                }
                path.push_str(&clip(&entry.key));
                if entry.id == id || walk(&entry.node, id, path) {
                    return true;
                }
            }
            _ => {}
        }
        path.truncate(length);
        false
    }
    let mut path = String::new();
    walk(root, id, &mut path).then_some(path)
}

impl Node {
    /// The value under `key`, if this is a mapping that has it.
    pub(crate) fn get(&self, key: &str) -> Option<&Node> {
        match &self.value {
            Value::Map(entries) => entries
                .iter()
                .find(|entry| &*entry.key == key)
                .map(|entry| &entry.node),
            _ => None,
        }
    }
}

/// What stands there, for people: `the text "2k"`, `NaN`, `a list`.
impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.value {
            Value::Null => f.write_str("null"),
            Value::Bool(value) => value.fmt(f),
            Value::Whole(value) => value.fmt(f),
            Value::Float(value) if value.is_nan() => f.write_str("NaN"),
            Value::Float(value) if value.is_infinite() && *value < 0.0 => f.write_str("-infinity"),
            Value::Float(value) if value.is_infinite() => f.write_str("infinity"),
            Value::Float(value) => write!(f, "{value:?}"),
            Value::Text(text) => write!(f, "the text {}", quoted(text)),
            Value::List(_) => f.write_str("a list"),
            Value::Map(_) => f.write_str("a mapping"),
            Value::Tagged(tag) => write!(f, "a value under the tag {}", quoted(tag)),
        }
    }
}

/// `text` in quotes, printable and of bounded length.
pub(crate) fn quoted(text: &str) -> String {
    format!("\"{}\"", clip(text))
}

fn clip(text: &str) -> String {
    const LONGEST: usize = 60;
    let mut clipped: String = text.chars().take(LONGEST).collect();
    if clipped.len() < text.len() {
        clipped.push('…');
    }
    if clipped.chars().any(char::is_control) {
        clipped = clipped.escape_debug().to_string();
    }
    clipped
}

fn place(error: &serde_yaml::Error) -> Option<(usize, usize)> {
    error
        .location()
        .map(|location| (location.line(), location.column()))
}

/// The parser's message without the places in it, which are reported apart.
fn without_places(message: &str) -> String {
    let mut rest = message;
    let mut kept = String::new();
    while let Some(at) = rest.find(" at line ") {
        let (before, after) = rest.split_at(at);
        kept.push_str(before);
        let numbers = after.trim_start_matches(" at line ");
        let numbers = numbers.trim_start_matches(|c: char| c.is_ascii_digit());
        let numbers = numbers.strip_prefix(" column ").unwrap_or(numbers);
        rest = numbers.trim_start_matches(|c: char| c.is_ascii_digit());
    }
    kept.push_str(rest);
    clip_long(&kept)
}

fn clip_long(text: &str) -> String {
    let printable: String = text
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .take(200)
        .collect();
    printable.trim().to_owned()
}

#[derive(Default)]
struct Count {
    next: Cell<u32>,
    /// The number at which to raise an error.
    stop: Option<u32>,
}

impl Count {
    fn next<E: Error>(&self) -> Result<NodeId, E> {
        let id = self.next.get();
        if self.stop == Some(id) {
            return Err(E::custom("found"));
        }
        if MAX_NODES <= id {
            return Err(E::custom(format_args!(
                "more than {MAX_NODES} values and keys"
            )));
        }
        self.next.set(id + 1);
        Ok(NodeId(id))
    }

    fn leaf<E: Error>(&self, value: Value) -> Result<Node, E> {
        let id = self.next()?;
        Ok(Node { id, value })
    }
}

struct NodeSeed<'a>(&'a Count);

impl<'de> DeserializeSeed<'de> for NodeSeed<'_> {
    type Value = Node;

    fn deserialize<D: serde::Deserializer<'de>>(self, input: D) -> Result<Node, D::Error> {
        input.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for NodeSeed<'_> {
    type Value = Node;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a YAML value")
    }

    fn visit_unit<E: Error>(self) -> Result<Node, E> {
        self.0.leaf(Value::Null)
    }

    fn visit_none<E: Error>(self) -> Result<Node, E> {
        self.0.leaf(Value::Null)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Node, E> {
        self.0.leaf(Value::Bool(value))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Node, E> {
        self.0.leaf(Value::Whole(i128::from(value)))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Node, E> {
        self.0.leaf(Value::Whole(i128::from(value)))
    }

    fn visit_i128<E: Error>(self, value: i128) -> Result<Node, E> {
        self.0.leaf(Value::Whole(value))
    }

    fn visit_u128<E: Error>(self, value: u128) -> Result<Node, E> {
        self.0
            .leaf(Value::Whole(i128::try_from(value).unwrap_or(i128::MAX)))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Node, E> {
        self.0.leaf(Value::Float(value))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Node, E> {
        self.0.leaf(Value::Text(value.into()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut input: A) -> Result<Node, A::Error> {
        let id = self.0.next()?;
        let mut items = Vec::new();
        while let Some(item) = input.next_element_seed(NodeSeed(self.0))? {
            items.push(item);
        }
        Ok(Node {
            id,
            value: Value::List(items),
        })
    }

    fn visit_map<A: MapAccess<'de>>(self, mut input: A) -> Result<Node, A::Error> {
        let id = self.0.next()?;
        let mut entries = Vec::new();
        while let Some(key) = input.next_key_seed(NodeSeed(self.0))? {
            let node = input.next_value_seed(NodeSeed(self.0))?;
            entries.push(Entry {
                id: key.id,
                key: key_text(&key).into(),
                node,
            });
        }
        Ok(Node {
            id,
            value: Value::Map(entries),
        })
    }

    fn visit_enum<A: EnumAccess<'de>>(self, input: A) -> Result<Node, A::Error> {
        let id = self.0.next()?;
        let (tag, value) = input.variant_seed(TagSeed)?;
        // Read, so that the parser stays in step, and dropped: no file of ours has tags.
        value.newtype_variant_seed(NodeSeed(self.0))?;
        Ok(Node {
            id,
            value: Value::Tagged(tag),
        })
    }
}

fn key_text(key: &Node) -> String {
    match &key.value {
        Value::Text(text) => text.to_string(),
        _ => key.to_string(),
    }
}

struct TagSeed;

impl<'de> DeserializeSeed<'de> for TagSeed {
    type Value = Box<str>;

    fn deserialize<D: serde::Deserializer<'de>>(self, input: D) -> Result<Box<str>, D::Error> {
        input.deserialize_identifier(self)
    }
}

impl Visitor<'_> for TagSeed {
    type Value = Box<str>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a tag")
    }

    fn visit_str<E: Error>(self, tag: &str) -> Result<Box<str>, E> {
        Ok(tag.into())
    }
}

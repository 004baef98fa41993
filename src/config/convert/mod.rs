//! The settings of other routers as policies of ours.
//!
//! Lives here: [`Converted`], what both translations share.
//! Never here: opening files and reading the environment (see `cli`).
//! Invariant: the policy that comes out is valid; whatever of the input it does not say is in the notes.

mod dynamo;
mod llm_d;

pub use dynamo::{Settings, from_dynamo};
pub use llm_d::from_llm_d;

use crate::config::Diagnostics;
use crate::config::diagnostic::{Report, Text, Wrong};
use crate::config::node::{self, Entry, Node, SyntaxFault, Value};
use std::fmt;
use std::path::Path;
use std::sync::Arc;

/// A policy made of the settings of another router.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Converted {
    /// The policy, in YAML.
    pub yaml: String,
    /// What the policy does not say, or says differently.
    pub notes: Vec<Note>,
}

/// Something to know about a translated policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// What sort of thing.
    pub sort: Sort,
    /// For people.
    pub text: String,
}

/// Sorts of notes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sort {
    /// The setting has an equivalent that works differently in some cases.
    Differs,
    /// The setting has no equivalent.
    NoEquivalent,
    /// A value that was not given, or not as it should be.
    Assumed,
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sort = match self.sort {
            Sort::Differs => "differs",
            Sort::NoEquivalent => "no equivalent",
            Sort::Assumed => "assumed",
        };
        write!(f, "{sort}: {}", self.text)
    }
}

/// Notes while they are gathered.
#[derive(Debug, Default)]
struct Notes(Vec<Note>);

impl Notes {
    fn differs(&mut self, text: impl Into<String>) {
        self.add(Sort::Differs, text.into());
    }

    fn no_equivalent(&mut self, text: impl Into<String>) {
        self.add(Sort::NoEquivalent, text.into());
    }

    fn assumed(&mut self, text: impl Into<String>) {
        self.add(Sort::Assumed, text.into());
    }

    fn add(&mut self, sort: Sort, text: String) {
        let note = Note { sort, text };
        if !self.0.contains(&note) {
            self.0.push(note);
        }
    }
}

/// A bypass as it is written: its type and the other keys, in order.
struct Written {
    kind: &'static str,
    keys: Vec<(&'static str, String)>,
}

impl Written {
    fn of(kind: &'static str) -> Written {
        Written {
            kind,
            keys: Vec::new(),
        }
    }

    fn with(mut self, key: &'static str, value: impl fmt::Display) -> Written {
        self.keys.push((key, value.to_string()));
        self
    }
}

/// A policy with one rule for all requests, and further lines of its spec.
fn policy(name: &str, bypass: &Written, on_no_prefill: &str, more: &str) -> String {
    let mut yaml = format!(
        "apiVersion: sidestep.dev/v1alpha1\nkind: DisaggregationPolicy\nmetadata:\n  name: {name}\n\
         spec:\n  rules:\n  - bypass:\n      type: {}\n",
        bypass.kind
    );
    for (key, value) in &bypass.keys {
        yaml.push_str(&format!("      {key}: {value}\n"));
    }
    yaml.push_str(&format!("    onNoPrefill: {on_no_prefill}\n{more}"));
    yaml
}

/// A foreign document, and where its faults go.
struct Foreign {
    text: Text,
    root: Node,
    report: Report,
}

impl Foreign {
    fn read(source: &str, origin: &Path) -> Result<Foreign, Diagnostics> {
        let text = Text {
            file: Arc::from(origin),
            text: Arc::from(source),
        };
        let root = node::read(source).map_err(|SyntaxFault { problem, .. }| {
            let message = format!("expected well-formed YAML or JSON, found an error: {problem}");
            Diagnostics::of_file(Arc::from(origin), message)
        })?;
        Ok(Foreign {
            text,
            root,
            report: Report::default(),
        })
    }

    fn finish(self) -> Result<(), Diagnostics> {
        self.report.finish(&self.text, &self.root).map(drop)
    }
}

/// The entries of a mapping; of anything else, none.
fn entries(node: &Node) -> &[Entry] {
    match &node.value {
        Value::Map(entries) => entries,
        _ => &[],
    }
}

/// The items of a list; of anything else, none.
fn items(node: Option<&Node>) -> &[Node] {
    match node.map(|node| &node.value) {
        Some(Value::List(items)) => items,
        _ => &[],
    }
}

fn text(node: Option<&Node>) -> Option<&str> {
    match node.map(|node| &node.value) {
        Some(Value::Text(text)) => Some(text),
        _ => None,
    }
}

/// The whole number of at least 0 that `node` is, or `default` when it is not there.
fn tokens(node: Option<&Node>, default: i128, report: &mut Report) -> i128 {
    let Some(node) = node else { return default };
    match node.value {
        Value::Whole(value) if 0 <= value => value,
        _ => {
            let wrong = Wrong::new("a whole number of at least 0", node.to_string());
            report.fault(node.id, wrong);
            default
        }
    }
}

//! What is wrong with a file, where, and what was expected.
//!
//! Lives here: [`Finding`], [`Diagnostics`], and the [`Report`] that collects them for one document.
//! Never here: what is right (see `shape`, `parse`).
//! Invariant: one finding is one line of printable text of bounded length, and a report holds a
//! bounded number of them.

use crate::config::node::{self, Node, NodeId};
use std::fmt;
use std::path::Path;
use std::sync::Arc;

/// Most faults shown of one document; the others are counted.
const MOST_SHOWN: usize = 50;

/// Most bytes read again in search of places, since each place costs a reading of the whole text. Of a
/// file of a megabyte with many faults, the later ones are therefore shown without line and column.
const MOST_READ_AGAIN: usize = 4 << 20;

/// One thing that is wrong or, as a warning, probably not meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Path in the document, such as `spec.rules[0].bypass.type`; `file` for the whole of it.
    pub path: String,
    /// What was expected and what was found; of a warning, what to know.
    pub message: String,
    /// What to do about it; often empty.
    pub hint: String,
    /// The file, or what the text came from.
    pub file: Arc<Path>,
    /// Where in it.
    pub position: Position,
}

/// A place in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Position {
    /// Line and column, both from 1; columns count characters.
    At {
        /// Line.
        line: usize,
        /// Column.
        column: usize,
    },
    /// The file as a whole, or a place that was not looked for.
    WholeFile,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path, self.message)?;
        if !self.hint.is_empty() {
            write!(f, "; {}", self.hint)?;
        }
        write!(f, " ({}", self.file.display())?;
        if let Position::At { line, column } = self.position {
            write!(f, ", line {line}, column {column}")?;
        }
        f.write_str(")")
    }
}

/// All that is wrong with one or several files: at least one fault.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Diagnostics {
    /// The faults, file by file, in the order of each file.
    pub faults: Vec<Finding>,
    /// How many more there are.
    pub left_out: usize,
}

impl Diagnostics {
    /// One fault that concerns a whole file.
    pub(crate) fn of_file(file: Arc<Path>, message: String) -> Diagnostics {
        Diagnostics {
            faults: vec![Finding {
                path: "file".to_owned(),
                message,
                hint: String::new(),
                file,
                position: Position::WholeFile,
            }],
            left_out: 0,
        }
    }

    /// These faults and then those of `other`.
    pub(crate) fn and(mut self, other: Diagnostics) -> Diagnostics {
        self.faults.extend(other.faults);
        self.left_out += other.left_out;
        self
    }
}

impl fmt::Display for Diagnostics {
    /// One line per fault.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, fault) in self.faults.iter().enumerate() {
            if index != 0 {
                f.write_str("\n")?;
            }
            fault.fmt(f)?;
        }
        if self.left_out != 0 {
            write!(f, "\nand {} more", self.left_out)?;
        }
        Ok(())
    }
}

impl std::error::Error for Diagnostics {}

/// What a value should have been, and what it is instead.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Wrong {
    pub(crate) expected: String,
    pub(crate) found: String,
    /// What to do about it; often empty.
    pub(crate) hint: String,
}

impl Wrong {
    pub(crate) fn new(expected: impl Into<String>, found: impl Into<String>) -> Wrong {
        Wrong {
            expected: expected.into(),
            found: found.into(),
            hint: String::new(),
        }
    }

    /// This, with what to do about it.
    pub(crate) fn hinting(mut self, hint: impl Into<String>) -> Wrong {
        self.hint = hint.into();
        self
    }
}

/// The text of one document and where it came from.
#[derive(Clone, Debug)]
pub(crate) struct Text {
    pub(crate) file: Arc<Path>,
    pub(crate) text: Arc<str>,
}

/// Collects what is wrong with one document while it is read.
#[derive(Debug, Default)]
pub(crate) struct Report {
    faults: Vec<Noted>,
    warnings: Vec<Noted>,
    left_out: usize,
}

/// A finding before its path and place are worked out.
#[derive(Debug)]
struct Noted {
    /// The node or key it is about, or the mapping that lacks `missing`.
    at: NodeId,
    missing: Option<&'static str>,
    message: String,
    hint: String,
}

impl Report {
    /// The value (or key) `at` is wrong.
    pub(crate) fn fault(&mut self, at: NodeId, wrong: Wrong) {
        let Wrong {
            expected,
            found,
            hint,
        } = wrong;
        self.note(Noted {
            at,
            missing: None,
            message: format!("expected {expected}, found {found}"),
            hint,
        });
    }

    /// The mapping `at` lacks `key`.
    pub(crate) fn missing(&mut self, at: NodeId, key: &'static str, expected: &str) {
        self.note(Noted {
            at,
            missing: Some(key),
            message: format!("expected {expected}, found nothing"),
            hint: String::new(),
        });
    }

    /// The value (or key) `at` is allowed and probably not meant.
    pub(crate) fn warn(&mut self, at: NodeId, message: impl Into<String>) {
        if self.warnings.len() < MOST_SHOWN {
            self.warnings.push(Noted {
                at,
                missing: None,
                message: message.into(),
                hint: String::new(),
            });
        }
    }

    fn note(&mut self, noted: Noted) {
        if self.faults.len() < MOST_SHOWN {
            self.faults.push(noted);
        } else {
            self.left_out += 1;
        }
    }

    /// The warnings if there was no fault, else the faults.
    pub(crate) fn finish(self, text: &Text, root: &Node) -> Result<Vec<Finding>, Diagnostics> {
        if self.faults.is_empty() {
            return Ok(placed(self.warnings, text, root));
        }
        Err(Diagnostics {
            faults: placed(self.faults, text, root),
            left_out: self.left_out,
        })
    }
}

fn placed(mut noted: Vec<Noted>, text: &Text, root: &Node) -> Vec<Finding> {
    noted.sort_by_key(|noted| noted.at);
    let affordable = MOST_READ_AGAIN / text.text.len().max(1);
    let position = |index: usize, at: NodeId| {
        let sought = (index < affordable.max(1)).then(|| node::locate(&text.text, at));
        match sought.flatten() {
            Some((line, column)) => Position::At { line, column },
            None => Position::WholeFile,
        }
    };
    noted
        .into_iter()
        .enumerate()
        .map(|(index, noted)| Finding {
            path: full_path(root, &noted),
            position: position(index, noted.at),
            message: noted.message,
            hint: noted.hint,
            file: Arc::clone(&text.file),
        })
        .collect()
}

fn full_path(root: &Node, noted: &Noted) -> String {
    let path = node::path(root, noted.at).unwrap_or_default();
    match (path.is_empty(), noted.missing) {
        (true, None) => "file".to_owned(),
        (true, Some(key)) => key.to_owned(),
        (false, None) => path,
        (false, Some(key)) => format!("{path}.{key}"),
    }
}

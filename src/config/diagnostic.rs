//! What is wrong with a file, where, and what was expected.
//!
//! Lives here: [`Fault`], [`Diagnostics`].
//! Never here: what is right.
//! Invariant: one fault is one line of printable text of bounded length.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// One thing that is wrong (or, as a warning, probably not meant).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Path in the document, such as `spec.rules[0].bypass.type`; `file` for the whole of it.
    pub path: String,
    /// What was expected and what was found, or what to know.
    pub message: String,
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
    /// The file as a whole.
    WholeFile,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: {} ({}",
            self.path,
            self.message,
            self.file.display()
        )?;
        if let Position::At { line, column } = self.position {
            write!(f, ", line {line}, column {column}")?;
        }
        f.write_str(")")
    }
}

/// All that is wrong with one or several files: at least one fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnostics {
    /// The faults, file by file, in the order of each file.
    pub faults: Vec<Fault>,
    /// How many more there are.
    pub left_out: usize,
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

#[allow(dead_code)]
pub(crate) type Origin = PathBuf;

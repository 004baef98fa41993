//! Stage two: what a file says becomes valid types.
//!
//! Lives here: defaults, ranges, and what one key demands of another; one file per kind of document,
//! and [`values`] for single values.
//! Never here: the shape of a file (see `shape`, `raw`), I/O.
//! Invariant: parsing goes on after a fault with a stand-in, which never leaves: a document with a
//! fault gives no value.

mod bypass;
mod kubernetes;
pub(crate) mod pods;
pub(crate) mod policy;
mod policy_lint;
pub(crate) mod process;
pub(crate) mod values;

use crate::config::diagnostic::{Report, Wrong};
use crate::config::node::NodeId;
use crate::config::rules;
use crate::config::shape::{Field, Spot, Text};
use std::path::{Path, PathBuf};

/// The API version of every file of ours.
pub(crate) const API_VERSION: &str = "sidestep.dev/v1alpha1";

/// What a document is read with: where faults go, and what its relative paths are relative to.
#[derive(Debug)]
pub(crate) struct Reading<'a> {
    pub(crate) report: &'a mut Report,
    /// The folder of the file.
    pub(crate) folder: &'a Path,
    /// Files that the document names, to be looked for.
    pub(crate) named: Vec<(NodeId, PathBuf)>,
}

impl Reading<'_> {
    /// The value of `field`, or `default` when the key is absent (or faulty, which is reported).
    fn or<R, T>(
        &mut self,
        field: &Field<R>,
        default: T,
        convert: impl FnOnce(&R) -> Result<T, Wrong>,
    ) -> T {
        self.optional(field, convert).unwrap_or(default)
    }

    /// The value of `field`, if the key is there and right.
    fn optional<R, T>(
        &mut self,
        field: &Field<R>,
        convert: impl FnOnce(&R) -> Result<T, Wrong>,
    ) -> Option<T> {
        field.given().and_then(|spot| self.convert(spot, convert))
    }

    /// The value of `field`; that the `section` lacks its `key` is reported.
    fn required<R, T>(
        &mut self,
        field: &Field<R>,
        (section, key): (NodeId, &'static str),
        expected: &str,
        convert: impl FnOnce(&R) -> Result<T, Wrong>,
    ) -> Option<T> {
        if let Field::Absent = field {
            self.report.missing(section, key, expected);
        }
        self.optional(field, convert)
    }

    /// The right ones among the items of `field`, which may be absent.
    fn each<R, T>(
        &mut self,
        field: &Field<Vec<Spot<R>>>,
        convert: impl Fn(&R) -> Result<T, Wrong>,
    ) -> Vec<T> {
        let Some(list) = field.given() else {
            return Vec::new();
        };
        list.value
            .iter()
            .filter_map(|spot| self.convert(spot, &convert))
            .collect()
    }

    /// Reports that the list in `field` is longer than `most`.
    fn at_most<R>(&mut self, field: &Field<Vec<Spot<R>>>, most: usize) {
        if let Some(list) = field.given().filter(|list| most < list.value.len()) {
            let wrong = Wrong::new(rules::at_most(most), list.value.len().to_string());
            self.report.fault(list.at, wrong);
        }
    }

    fn convert<R, T>(
        &mut self,
        spot: &Spot<R>,
        convert: impl FnOnce(&R) -> Result<T, Wrong>,
    ) -> Option<T> {
        match convert(&spot.value) {
            Ok(value) => Some(value),
            Err(wrong) => {
                self.report.fault(spot.at, wrong);
                None
            }
        }
    }

    /// The path in `field`, made independent of this document, and noted to be looked for.
    fn file(&mut self, field: &Field<Text>) -> Option<PathBuf> {
        let path = self.optional(field, values::path)?;
        let path = self.folder.join(path);
        if let Some(spot) = field.given() {
            self.named.push((spot.at, path.clone()));
        }
        Some(path)
    }

    /// Warns that `field`, if given, has no effect.
    fn no_effect<R>(&mut self, field: &Field<R>, why: &str) {
        if let Some(spot) = field.given() {
            self.report.warn(spot.at, format!("has no effect: {why}"));
        }
    }

    /// Demands the API version, and the kind `name`.
    fn version(&mut self, api_version: &Field<Text>, kind: &Field<Text>, root: NodeId, name: &str) {
        let word = |leaf: &Text, word| values::word(leaf, &[(word, ())]);
        self.required(api_version, (root, "apiVersion"), API_VERSION, |leaf| {
            word(leaf, API_VERSION)
        });
        self.required(kind, (root, "kind"), name, |leaf| word(leaf, name));
    }
}

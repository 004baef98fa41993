//! What is known of the keys of our files: the description that the CRD and the docs are made of.
//!
//! Lives here: [`Section`], [`Key`], [`Note`].
//! Never here: reading files (see `shape`), the form of a CRD (see `crd`).
//! Invariant: a description comes from the same table as the mirror that a file is read into.

use crate::config::rules::{CelRule, Must};
use crate::config::shape::{Flag, Leaf, Number, Size, Skipped, Spot, Text, TextMap, Whole, WordOr};

/// A mapping with known keys.
#[derive(Debug)]
pub(crate) struct Section {
    pub(crate) doc: &'static str,
    pub(crate) keys: Vec<Key>,
    /// The rules between its keys.
    pub(crate) rules: Vec<CelRule>,
}

/// One key of a section.
#[derive(Debug)]
pub(crate) struct Key {
    pub(crate) name: &'static str,
    pub(crate) doc: &'static str,
    pub(crate) note: Note,
    pub(crate) kind: Kind,
}

/// What stands under a key.
#[derive(Debug)]
pub(crate) enum Kind {
    Text,
    Whole,
    Number,
    List(Box<Kind>),
    Section(Section),
    /// Something that no object of a cluster has, or that is not ours.
    Other,
}

/// What has a description.
pub(crate) trait Described {
    /// Its description.
    fn kind() -> Kind;
}

macro_rules! described {
    ($($type:ty => $kind:ident,)+) => {$(
        impl Described for $type {
            fn kind() -> Kind {
                Kind::$kind
            }
        }
    )+};
}

described! {
    Text => Text,
    Whole => Whole,
    Number => Number,
    Flag => Other,
    Leaf<Size> => Other,
    TextMap => Other,
    Skipped => Other,
}

impl<T: Described> Described for Vec<Spot<T>> {
    fn kind() -> Kind {
        Kind::List(Box::new(T::kind()))
    }
}

impl<T> Described for WordOr<T> {
    fn kind() -> Kind {
        Kind::Other
    }
}

/// What is known of a key beside its type.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Note {
    /// What its value must be.
    pub(crate) must: Option<Must>,
    pub(crate) presence: Presence,
    /// Whether a null is as good as no key at all.
    pub(crate) nulls: Nulls,
}

/// What it means that a key is absent.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Presence {
    /// Nothing, or what its description says.
    Optional,
    /// A fault: this, or else what the value must be, was expected.
    Required(Option<&'static str>),
    /// This value, in JSON, which an API server writes into the object.
    Written(&'static str),
    /// This value. It is not written into objects, since it has a meaning only for some values of other
    /// keys.
    Assumed(&'static str),
}

/// What a null means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Nulls {
    /// A value like any other, and not a right one.
    AreValues,
    /// The same as no key, as in objects of a cluster, from which an API server drops them before it
    /// looks at anything.
    AreAbsent,
}

impl Note {
    /// A key that no CRD has.
    pub(crate) const NONE: Note = Note {
        must: None,
        presence: Presence::Optional,
        nulls: Nulls::AreValues,
    };

    pub(crate) const fn required(self) -> Note {
        self.with(Presence::Required(None))
    }

    pub(crate) const fn required_as(self, expected: &'static str) -> Note {
        self.with(Presence::Required(Some(expected)))
    }

    pub(crate) const fn written(self, json: &'static str) -> Note {
        self.with(Presence::Written(json))
    }

    pub(crate) const fn assumed(self, value: &'static str) -> Note {
        self.with(Presence::Assumed(value))
    }

    const fn with(self, presence: Presence) -> Note {
        Note { presence, ..self }
    }

    /// What is expected where the key is missing, if it must not be.
    pub(crate) fn wanted(&self) -> Option<String> {
        match (self.presence, &self.must) {
            (Presence::Required(Some(expected)), _) => Some(expected.to_owned()),
            (Presence::Required(None), Some(must)) => Some(must.expected()),
            _ => None,
        }
    }
}

/// A key of an object in a cluster.
pub(crate) const fn key() -> Note {
    Note {
        nulls: Nulls::AreAbsent,
        ..Note::NONE
    }
}

/// A key of an object in a cluster, with what its value must be.
pub(crate) const fn must(must: Must) -> Note {
    Note {
        must: Some(must),
        ..key()
    }
}

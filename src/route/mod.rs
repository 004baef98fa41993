//! A decision as the engines and the gateway understand it: header edits and one destination.
//!
//! Lives here: the handoff dialects, [`Plan`], the table of names ([`names`]).
//! Never here: Envoy types (see `extproc`), choices; a plan says what was decided, no more.
//! Invariant: each name in [`names::CLIENT_MAY_NOT_SEND`] is in every plan exactly once, set or
//! removed; header and metadata of the destination are written from the one [`Plan::destination`].

pub mod id;
pub mod names;

pub use id::{DecisionId, DecisionIds};

use crate::decide::{Decision, Route};
use crate::names::Endpoint;
use names::{BYPASS, CLIENT_MAY_NOT_SEND, DECISION, DECODER, DESTINATION, PREFILLER};

/// How engines are told who prefills and who decodes.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "camelCase")]
pub enum Dialect {
    /// The decode pod gets the request and is told who prefills (llm-d's sidecar contract).
    #[default]
    DecodeFirst,
    /// The prefill pod gets the request and is told who decodes.
    PrefillFirst,
}

impl Dialect {
    /// The word used in YAML, spans and output.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Dialect::DecodeFirst => "decodeFirst",
            Dialect::PrefillFirst => "prefillFirst",
        }
    }
}

/// What to do to a request so that the decision comes true.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Where the gateway sends the request; not among `edits`, see [`Plan::header_edits`].
    pub destination: Endpoint,
    /// Edits of the request headers other than the destination.
    pub edits: Vec<HeaderEdit>,
    /// The id of the decision, for the client too.
    pub decision_id: DecisionId,
}

impl Plan {
    /// All edits of the request headers, the destination first.
    pub fn header_edits(&self) -> impl Iterator<Item = HeaderEdit> + '_ {
        std::iter::once(HeaderEdit::Set(DESTINATION, self.destination.to_string()))
            .chain(self.edits.iter().cloned())
    }

    /// The value that the plan gives `name`, if it sets it.
    #[must_use]
    pub fn value_of(&self, name: &str) -> Option<String> {
        self.header_edits().find_map(|edit| match edit {
            HeaderEdit::Set(set, value) if set == name => Some(value),
            _ => None,
        })
    }
}

/// One edit of the request headers; names are lower case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HeaderEdit {
    /// The header has this one value, whatever it was before.
    Set(&'static str, String),
    /// The header is gone.
    Remove(&'static str),
}

impl HeaderEdit {
    /// The header's name.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            HeaderEdit::Set(name, _) | HeaderEdit::Remove(name) => name,
        }
    }
}

/// The plan for `decision` in `dialect`.
#[must_use]
pub fn plan(dialect: Dialect, decision: &Decision, id: DecisionId) -> Plan {
    let (destination, handoff) = match (&decision.route, dialect) {
        (Route::Local { decode }, _) => (decode, None),
        (Route::Remote { prefill, decode }, Dialect::DecodeFirst) => {
            (decode, Some((PREFILLER, prefill)))
        }
        (Route::Remote { prefill, decode }, Dialect::PrefillFirst) => {
            (prefill, Some((DECODER, decode)))
        }
    };
    let bypass = decision
        .because
        .is_bypass()
        .then(|| decision.because.as_str());
    let value = |name: &'static str| match name {
        DECISION => Some(id.to_string()),
        BYPASS => bypass.map(str::to_owned),
        _ => handoff
            .filter(|(header, _)| *header == name)
            .map(|(_, pod)| pod.candidate.endpoint.to_string()),
    };
    Plan {
        destination: destination.candidate.endpoint,
        edits: CLIENT_MAY_NOT_SEND
            .iter()
            .filter(|name| **name != DESTINATION)
            .map(|name| match value(name) {
                Some(value) => HeaderEdit::Set(name, value),
                None => HeaderEdit::Remove(name),
            })
            .collect(),
        decision_id: id,
    }
}

#[cfg(test)]
mod tests;

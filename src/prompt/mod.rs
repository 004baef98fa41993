//! Request bytes to a [`Prompt`]: how many tokens the engine will see, and the keys of its blocks.
//!
//! Lives here: reading OpenAI bodies ([`openai`]), rendering chat templates the way engines do
//! ([`template`]), tokenizing ([`tokenizer`]), and the memo that makes growing conversations cheap
//! ([`encode`]).
//! Never here: I/O (callers pass bytes), what a pod holds (`kv`), any routing choice (`decide`).
//! Invariant: nothing that leaves this module, errors included, carries prompt text. A prompt that
//! cannot be counted exactly is estimated and says so; it never fails a request.

pub mod builtin;
pub mod encode;
mod memo;
pub mod openai;
pub mod profile;
pub mod template;
#[cfg(test)]
mod tests;
pub mod tokenizer;

use crate::blocks::BlockChain;
use crate::units::Tokens;
use smallvec::SmallVec;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

pub use encode::Encoder;
pub use memo::MemoStats;
pub use openai::{BodyError, ChatInput, Input, Request, parse};
pub use profile::{Profile, ProfileError, ProfileFiles, Profiles, Resolved};

/// The request kinds whose prompts are understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Api {
    /// `POST …/chat/completions`.
    ChatCompletions,
    /// `POST …/completions`.
    Completions,
}

impl Api {
    /// The kind that `path` addresses, or `None` for any other path.
    ///
    /// The query string and one trailing slash are ignored, and only the end of the path counts, so
    /// that a gateway's own prefix does no harm.
    #[must_use]
    pub fn from_path(path: &str) -> Option<Api> {
        let path = path.split(['?', '#']).next().unwrap_or_default();
        let path = path.strip_suffix('/').unwrap_or(path);
        if path.ends_with("/chat/completions") {
            Some(Api::ChatCompletions)
        } else if path.ends_with("/completions") {
            Some(Api::Completions)
        } else {
            None
        }
    }
}

/// What routing needs to know of a request's prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// Prompt length; of a batch, the sum over its prompts.
    pub tokens: Tokens,
    /// Whether `tokens` is what the engine will count.
    pub counted: Counted,
    /// One chain per requested block size, in the order asked; of a batch, the first prompt's.
    /// Empty when `counted` is an estimate.
    pub chains: SmallVec<[BlockChain; 1]>,
    /// What went wrong when an exact count was expected and could not be had.
    pub trouble: Option<EncodeTrouble>,
}

/// Where a prompt's length comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Counted {
    /// The model's own tokenizer and template.
    Exact,
    /// A quarter of the prompt's UTF-8 bytes, rounded up.
    EstimatedFromBytes,
}

/// Why a prompt was estimated although its model has a tokenizer. Never carries prompt text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EncodeTrouble {
    /// No profile has this model or adapter name.
    UnknownModel,
    /// A chat request, and the profile has no chat template.
    NoTemplate,
    /// The chat template refused the conversation.
    Template,
    /// The tokenizer failed.
    Tokenizer,
    /// Images, audio, video or prompt embeddings: only the engine knows their tokens.
    Multimodal,
    /// The conversation has more JSON values than [`openai::MAX_VALUES`].
    TooComplex,
}

impl EncodeTrouble {
    /// Every kind, for metrics that want all series from the start.
    pub const ALL: [EncodeTrouble; 6] = [
        EncodeTrouble::UnknownModel,
        EncodeTrouble::NoTemplate,
        EncodeTrouble::Template,
        EncodeTrouble::Tokenizer,
        EncodeTrouble::Multimodal,
        EncodeTrouble::TooComplex,
    ];

    /// The word used in spans and metric labels.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            EncodeTrouble::UnknownModel => "unknown_model",
            EncodeTrouble::NoTemplate => "no_template",
            EncodeTrouble::Template => "template_failed",
            EncodeTrouble::Tokenizer => "tokenizer_failed",
            EncodeTrouble::Multimodal => "multimodal",
            EncodeTrouble::TooComplex => "too_complex",
        }
    }
}

impl fmt::Display for EncodeTrouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// `work`, or `None` if it panicked.
///
/// For calls into the tokenizer and the template engine: whatever a client sends, a fault of theirs
/// costs one exact count, not the process. (minijinja 2.24 panics on `[][::-1]`, which a template
/// may well write, and the tokenizer is a release candidate.) Neither leaves state behind that a
/// panic could have broken: a template renders from values into a new string, and the tokenizer's
/// scratch space is cleared before each use.
fn guarded<T>(work: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(work)).ok()
}

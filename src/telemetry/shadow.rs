//! A shadow's opinion beside the decision that was taken.
//!
//! Lives here: [`ShadowFacts`], what span, record and metrics say of an opinion.
//! Never here: how an opinion is found (see `decide::shadow`).
//! Invariant: nothing here changes a decision.

use crate::decide::shadow::Opinion;
use crate::decide::{Decision, NoRoute, Policy};
use std::sync::Arc;

/// A route in two words: where, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Words {
    /// `local`, `remote` or `refused`.
    pub route: &'static str,
    /// The reason.
    pub because: &'static str,
    /// Whether it is a bypass.
    pub bypass: bool,
}

impl Words {
    /// The words for a refusal.
    #[must_use]
    pub fn refused(cause: NoRoute) -> Words {
        Words {
            route: "refused",
            because: cause.as_str(),
            bypass: false,
        }
    }

    /// The words for a decision, or why there was none.
    #[must_use]
    pub fn of(result: Result<&Decision, NoRoute>) -> Words {
        match result {
            Ok(decision) => Words {
                route: decision.route.as_str(),
                because: decision.because.as_str(),
                bypass: decision.because.is_bypass(),
            },
            Err(cause) => Words::refused(cause),
        }
    }
}

/// What a shadow policy would have done with a request, beside what was done.
#[derive(Clone, Debug)]
pub struct ShadowFacts {
    /// The shadow policy.
    pub policy: Arc<str>,
    /// Its version.
    pub generation: u64,
    /// Its opinion.
    pub opinion: Opinion,
    /// The opinion in words.
    pub words: Words,
    /// What was done, in words.
    pub taken: Words,
    /// Whether route and pods are the same; reasons may differ.
    pub agrees: bool,
}

impl ShadowFacts {
    /// The `opinion` of `policy` beside what was decided.
    #[must_use]
    pub fn new(
        policy: &Policy,
        opinion: Opinion,
        result: Result<&Decision, NoRoute>,
    ) -> ShadowFacts {
        let words = match &opinion.verdict {
            Ok(course) => Words {
                route: course.because.route(),
                because: course.because.as_str(),
                bypass: course.because.is_bypass(),
            },
            Err(cause) => Words::refused(*cause),
        };
        let agrees = match (&opinion.verdict, result) {
            (Ok(course), Ok(decision)) => {
                let prefill = decision.route.prefill();
                course.decode == decision.route.decode().candidate.endpoint
                    && course.prefill == prefill.map(|pick| pick.candidate.endpoint)
            }
            (Err(_), Err(_)) => true,
            _ => false,
        };
        ShadowFacts {
            policy: Arc::clone(&policy.name),
            generation: policy.generation,
            opinion,
            words,
            taken: Words::of(result),
            agrees,
        }
    }
}

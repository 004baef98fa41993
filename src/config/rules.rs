//! What a value of a policy must be: said once, for the check, its message, the CRD and the docs.
//!
//! Lives here: [`Must`], the words, the ranges, and the rules between keys.
//! Never here: which key is held to which rule (see `raw`), what a value means (`decide`).
//! Invariant: a rule and its CEL form accept the same values and say the same of the others.
//!
//! CEL is the language in which an API server checks objects of our kind
//! (<https://kubernetes.io/docs/reference/using-api/cel/>). Ranges and words are CEL here, not keywords of
//! the schema, because only CEL says of a wrong value what we say of it.

use crate::config::{Handoff, parse::values};
use crate::decide::policy::{ClientPins, OnNoPrefill, TierCredit};
use crate::decide::snapshot::CapacitySource;

/// The most rules of a policy.
pub(crate) const MOST_RULES: usize = 64;
/// The most names in one list of a rule's match.
pub(crate) const MOST_NAMES: usize = 32;
/// The most items of `trustCapacity`.
pub(crate) const MOST_SOURCES: usize = 8;

/// What one value must be, apart from its type.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Must {
    /// One of these words.
    Words(&'static [&'static str]),
    /// A number from 0 to this.
    Number(f64),
    /// A whole number from the first to the second.
    Whole(i64, i64),
    /// Text of a certain form.
    Form(&'static Form),
    /// A list of at most so many sections.
    Most(usize),
    /// A list of at most so many items, each of which must be this.
    Each(usize, &'static Must),
    /// A list of at most so many items, at least one, each of which must be this.
    SomeOf(usize, &'static Must),
}

/// A form of text.
#[derive(Debug)]
pub(crate) struct Form {
    /// For people.
    pub(crate) expected: &'static str,
    /// Whether a text has it.
    pub(crate) holds: fn(&str) -> bool,
    /// The same in CEL, of `self`.
    cel: &'static str,
}

/// Words and what they mean.
#[derive(Debug)]
pub(crate) struct Words<T: 'static> {
    /// The words and their meanings.
    pub(crate) meanings: &'static [(&'static str, T)],
}

macro_rules! words {
    ($($(#[$doc:meta])* $name:ident, $must:ident: $type:ty { $($word:literal => $meaning:expr,)+ })+) => {$(
        $(#[$doc])*
        pub(crate) const $name: Words<$type> = Words { meanings: &[$(($word, $meaning),)+] };
        $(#[$doc])*
        pub(crate) const $must: Must = Must::Words(&[$($word),+]);
    )+};
}

/// The five bypass types, by what they look at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BypassType {
    Never,
    Always,
    IslBounding,
    PrefillLoad,
    IslOrLoad,
}

impl BypassType {
    pub(crate) fn word(self) -> &'static str {
        let mut words = BYPASS_TYPES.meanings.iter();
        words
            .find(|(_, kind)| *kind == self)
            .map_or("", |(word, _)| word)
    }

    /// Whether it looks at net-new tokens.
    pub(crate) fn bounds_isl(self) -> bool {
        matches!(self, BypassType::IslBounding | BypassType::IslOrLoad)
    }

    /// Whether it looks at the prefill pod's load.
    pub(crate) fn reads_load(self) -> bool {
        matches!(self, BypassType::PrefillLoad | BypassType::IslOrLoad)
    }
}

/// How strongly a session binds to its pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AffinityMode {
    None,
    Soft,
    Hard,
}

words! {
    /// Types of a bypass.
    BYPASS_TYPES, A_BYPASS_TYPE: BypassType {
        "Never" => BypassType::Never,
        "Always" => BypassType::Always,
        "IslBounding" => BypassType::IslBounding,
        "PrefillLoad" => BypassType::PrefillLoad,
        "IslOrLoad" => BypassType::IslOrLoad,
    }
    /// How slower tiers count.
    TIER_CREDITS, A_TIER_CREDIT: TierCredit {
        "Full" => TierCredit::Full,
        "Weighted" => TierCredit::Weighted,
    }
    /// Sources of a capacity.
    CAPACITY_SOURCES, A_CAPACITY_SOURCE: CapacitySource {
        "Reported" => CapacitySource::Reported,
        "Configured" => CapacitySource::Configured,
        "Assumed" => CapacitySource::Assumed,
    }
    /// What to do without a prefill pod.
    ON_NO_PREFILL, ON_NO_PREFILL_WORD: OnNoPrefill {
        "Local" => OnNoPrefill::Local,
        "Fail" => OnNoPrefill::Fail,
    }
    /// Modes of session affinity. `None` and not `Off`: readers of YAML 1.1, kubectl among them, take a
    /// bare `Off` for false.
    AFFINITY_MODES, AN_AFFINITY_MODE: AffinityMode {
        "None" => AffinityMode::None,
        "Soft" => AffinityMode::Soft,
        "Hard" => AffinityMode::Hard,
    }
    /// Dialects of the handoff.
    DIALECTS, A_DIALECT: Handoff {
        "decodeFirst" => Handoff::DecodeFirst,
        "prefillFirst" => Handoff::PrefillFirst,
    }
    /// What becomes of pins in requests.
    CLIENT_PINS, CLIENT_PINS_WORD: ClientPins {
        "Ignore" => ClientPins::Ignore,
        "Honor" => ClientPins::Honor,
    }
}

/// A number of tokens.
pub(crate) const TOKENS: Must = Must::Whole(0, values::MOST_TOKENS);
/// A share of something.
pub(crate) const SHARE: Must = Must::Number(1.0);
/// A factor or weight.
pub(crate) const FACTOR: Must = Must::Number(values::LARGEST_FACTOR);
/// A priority.
pub(crate) const PRIORITY: Must = Must::Whole(i32::MIN as i64, i32::MAX as i64);
/// Patterns of model names.
pub(crate) const MODEL_PATTERNS: Must = Must::Each(MOST_NAMES, &Must::Form(&values::MODEL_PATTERN));
/// Names of policy classes.
pub(crate) const CLASSES: Must = Must::Each(MOST_NAMES, &Must::Form(&values::NAME));
/// The rules of a policy.
pub(crate) const RULES: Must = Must::Most(MOST_RULES);
/// Sources that a gate trusts.
pub(crate) const TRUST: Must = Must::SomeOf(MOST_SOURCES, &A_CAPACITY_SOURCE);

impl Form {
    pub(crate) const fn new(
        expected: &'static str,
        holds: fn(&str) -> bool,
        cel: &'static str,
    ) -> Form {
        Form {
            expected,
            holds,
            cel,
        }
    }
}

/// One rule in CEL: what must hold of `self`, and what is said when it does not.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct CelRule {
    /// Must hold.
    pub(crate) holds: String,
    /// Said when it does not, if `says` cannot be worked out.
    pub(crate) message: String,
    /// A CEL expression for what is said when it does not.
    pub(crate) says: Option<String>,
    /// The key of `self` that it is about; nothing for `self` as a whole.
    pub(crate) key: Option<&'static str>,
}

impl CelRule {
    /// A rule about `self` that ends with what was found: text with `%s` in it, which stands for `what`, a
    /// CEL expression.
    fn found(holds: String, expected: &str, (found, what): (&str, &str)) -> CelRule {
        let expected = format!("expected {expected}");
        // Format, and not +: the server takes the text of a number for one of any length, and the sum of
        // two texts for too costly then.
        let template = literal(&format!("{expected}, found {found}"));
        CelRule {
            holds,
            says: Some(format!("{template}.format([{what}])")),
            message: expected,
            key: None,
        }
    }

    /// That `self` must have `key`.
    pub(crate) fn required(key: &'static str, expected: &str) -> CelRule {
        CelRule {
            holds: format!("has(self.{key})"),
            message: format!("expected {expected}, found nothing"),
            says: None,
            key: Some(key),
        }
    }
}

/// `text` as a CEL literal.
fn literal(text: &str) -> String {
    format!("'{}'", text.replace('\\', "\\\\").replace('\'', "\\'"))
}

/// A text for people, as `node` shows it.
const FOUND_TEXT: (&str, &str) = (
    "the text \"%s\"",
    "60 < size(self) ? self.substring(0, 60) + '…' : self",
);
/// A number for people, as `node` shows it.
const FOUND_NUMBER: (&str, &str) = ("%s", "self");

impl Must {
    /// For people, in a sentence that begins with "expected".
    pub(crate) fn expected(&self) -> String {
        match self {
            Must::Words(words) => either(words),
            Must::Number(most) => format!("a number from 0 to {most}"),
            Must::Whole(least, most) => format!("a whole number from {least} to {most}"),
            Must::Form(form) => form.expected.to_owned(),
            Must::Most(most) | Must::Each(most, _) | Must::SomeOf(most, _) => at_most(*most),
        }
    }

    /// What an API server is to check of `self`.
    pub(crate) fn cel(&self) -> Vec<CelRule> {
        let expected = self.expected();
        let rule = match self {
            Must::Words(words) => {
                let words: Vec<String> = words.iter().map(|word| literal(word)).collect();
                let holds = format!("self in [{}]", words.join(", "));
                CelRule::found(holds, &expected, FOUND_TEXT)
            }
            Must::Number(most) => {
                let holds = format!("0.0 <= self && self <= {most:?}");
                CelRule::found(holds, &expected, FOUND_NUMBER)
            }
            Must::Whole(least, most) => {
                let holds = format!("{least} <= self && self <= {most}");
                CelRule::found(holds, &expected, FOUND_NUMBER)
            }
            Must::Form(form) => CelRule::found(form.cel.to_owned(), &expected, FOUND_TEXT),
            Must::Most(most) | Must::Each(most, _) => return vec![most_items(*most)],
            Must::SomeOf(most, of) => return vec![most_items(*most), some_of(of)],
        };
        vec![rule]
    }
}

/// That a list has at most so many items.
fn most_items(most: usize) -> CelRule {
    let holds = format!("size(self) <= {most}");
    CelRule::found(holds, &at_most(most), ("%s", "size(self)"))
}

/// What is expected of a list that is too long.
pub(crate) fn at_most(most: usize) -> String {
    format!("at most {most} items")
}

/// What is expected of a list that is empty.
pub(crate) fn at_least_one(of: &Must) -> String {
    match of {
        Must::Words(words) => format!("at least one of {}", joined(words, "and")),
        _ => "at least one item".to_owned(),
    }
}

fn some_of(of: &Must) -> CelRule {
    CelRule {
        holds: "size(self) != 0".to_owned(),
        message: format!("expected {}, found an empty list", at_least_one(of)),
        says: None,
        key: None,
    }
}

/// `a, b or c`.
pub(crate) fn either(words: &[&str]) -> String {
    joined(words, "or")
}

fn joined(words: &[&str], last_by: &str) -> String {
    match words {
        [most @ .., last] if !most.is_empty() => format!("{} {last_by} {last}", most.join(", ")),
        one => one.concat(),
    }
}

/// What a bypass that looks at load is told when it has no threshold for it.
pub(crate) fn needs_busy_threshold(kind: &str) -> String {
    format!("a number of at least 0, which the type {kind} needs")
}

/// The rules between the keys of a bypass.
pub(crate) fn of_bypass() -> Vec<CelRule> {
    let loads: Vec<&str> = BYPASS_TYPES
        .meanings
        .iter()
        .filter(|(_, kind)| kind.reads_load())
        .map(|(word, _)| *word)
        .collect();
    let quoted: Vec<String> = loads.iter().map(|word| literal(word)).collect();
    let says = literal(&format!(
        "expected {}, found nothing",
        needs_busy_threshold("#")
    ));
    vec![CelRule {
        holds: format!(
            "!has(self.type) || !(self.type in [{}]) || has(self.prefillBusyThreshold)",
            quoted.join(", ")
        ),
        message: format!(
            "expected {}, found nothing",
            needs_busy_threshold(&either(&loads))
        ),
        says: Some(says.replace('#', "' + self.type + '")),
        key: Some("prefillBusyThreshold"),
    }]
}

/// What a shadow must name.
pub(crate) const NAME_OR_FILE: &str = "either a name or a file";

/// The rules between the keys of a shadow.
pub(crate) fn of_shadow() -> Vec<CelRule> {
    let found = ("%s", "has(self.name) ? 'both' : 'neither'");
    vec![CelRule::found(
        "has(self.name) != has(self.file)".to_owned(),
        NAME_OR_FILE,
        found,
    )]
}

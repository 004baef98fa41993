//! Dynamo's settings of conditional disaggregation: its JSON config, its flags, its environment.
//!
//! Lives here: reading the three forms, and what they mean as a policy.
//! Never here: the process's environment (the caller passes it).
//! Invariant: a setting that Dynamo refuses is refused; one that it silently ignores is noted.
//!
//! Source: the options of `dynamo.frontend` and `KvRouterConfig` in dynamo-kv-router 1.6.1.

use crate::config::Diagnostics;
use crate::config::convert::{Converted, Foreign, Notes, Written, policy};
use crate::config::diagnostic::{Report, Wrong};
use crate::config::node::{Node, Value, quoted};
use crate::config::parse::values::{LARGEST_FACTOR, MOST_TOKENS};
use std::path::Path;
use std::sync::Arc;

const ENABLE: &str = "--router-conditional-disagg";
const CONFIG: &str = "--router-conditional-disagg-config";
const QUEUE: &str = "--router-queue-threshold";
const ENV: &str = "DYN_ROUTER_CONDITIONAL_DISAGG";
const ENV_QUEUE: &str = "DYN_ROUTER_QUEUE_THRESHOLD";
const KEYS: [&str; 5] = [
    "policy",
    "eff_isl_threshold",
    "eff_isl_ratio_threshold",
    "prefill_busy_threshold",
    "decode_busy_threshold",
];
const POLICIES: [(&str, &str); 3] = [
    ("isl_bounding", "IslBounding"),
    ("prefill_load", "PrefillLoad"),
    ("isl_or_load", "IslOrLoad"),
];

/// Where settings of Dynamo come from.
#[derive(Clone, Copy, Debug)]
pub enum Settings<'a> {
    /// A JSON config, or a command line with its flags.
    Text(&'a str, &'a Path),
    /// Variables of an environment.
    Environment(&'a [(String, String)]),
}

/// What Dynamo was told.
#[derive(Debug)]
struct Told {
    enabled: bool,
    kind: &'static str,
    isl_threshold: i128,
    isl_ratio: f64,
    prefill_busy: Option<f64>,
    decode_busy: Option<f64>,
    queue: Option<f64>,
}

impl Default for Told {
    /// Dynamo's own defaults.
    fn default() -> Told {
        Told {
            enabled: true,
            kind: "IslBounding",
            isl_threshold: 2048,
            isl_ratio: 0.7,
            prefill_busy: None,
            decode_busy: None,
            queue: None,
        }
    }
}

/// The policy that does what Dynamo does with these settings. `queue` is its router queue threshold, if it
/// is known from elsewhere.
///
/// # Errors
/// What Dynamo would refuse, too.
pub fn from_dynamo(from: Settings<'_>, queue: Option<f64>) -> Result<Converted, Diagnostics> {
    let mut notes = Notes::default();
    let (mut told, origin) = match from {
        Settings::Text(source, origin) if has_flags(source) => (flags(source, origin)?, origin),
        Settings::Text(source, origin) => (json(source, origin)?, origin),
        Settings::Environment(variables) => {
            (environment(variables, &mut notes), Path::new("environment"))
        }
    };
    told.queue = queue.or(told.queue);
    let yaml = translated(&told, origin, &mut notes)?;
    Ok(Converted {
        yaml,
        notes: notes.0,
    })
}

fn refused(origin: &Path, message: String) -> Diagnostics {
    Diagnostics::of_file(Arc::from(origin), message)
}

fn json(source: &str, origin: &Path) -> Result<Told, Diagnostics> {
    let mut foreign = Foreign::read(source, origin)?;
    let told = object(&foreign.root, &mut foreign.report);
    foreign.finish()?;
    Ok(told)
}

fn object(root: &Node, report: &mut Report) -> Told {
    let mut told = Told::default();
    let Value::Map(entries) = &root.value else {
        report.fault(root.id, Wrong::new("a JSON object", root.to_string()));
        return told;
    };
    for entry in entries {
        let node = &entry.node;
        match &*entry.key {
            "policy" => {
                let found = POLICIES
                    .iter()
                    .find(|(name, _)| matches!(&node.value, Value::Text(text) if &**text == *name));
                match found {
                    Some((_, kind)) => told.kind = kind,
                    None => report.fault(
                        node.id,
                        Wrong::new(
                            "isl_bounding, prefill_load or isl_or_load",
                            node.to_string(),
                        ),
                    ),
                }
            }
            "eff_isl_threshold" => {
                told.isl_threshold = super::tokens(Some(node), told.isl_threshold, report);
            }
            "eff_isl_ratio_threshold" => {
                if let Some(share) = number(node, "a number from 0 to 1", report) {
                    told.isl_ratio = share;
                }
            }
            "prefill_busy_threshold" => told.prefill_busy = optional(node, report),
            "decode_busy_threshold" => told.decode_busy = optional(node, report),
            _ => {
                let found = format!("the unknown key {}", quoted(&entry.key));
                let expected = format!("one of the keys {}", KEYS.join(", "));
                report.fault(entry.id, Wrong::new(expected, found));
            }
        }
    }
    told
}

fn optional(node: &Node, report: &mut Report) -> Option<f64> {
    match node.value {
        Value::Null => None,
        _ => number(node, "a number of at least 0, or null", report),
    }
}

fn number(node: &Node, expected: &str, report: &mut Report) -> Option<f64> {
    let value = match node.value {
        #[allow(clippy::cast_precision_loss)] // Far above every range that a number is held to.
        Value::Whole(value) => Some(value as f64),
        Value::Float(value) => Some(value),
        _ => None,
    };
    let most = if expected.contains("to 1") {
        1.0
    } else {
        f64::INFINITY
    };
    let fits = value.filter(|value| 0.0 <= *value && *value <= most);
    if fits.is_none() {
        report.fault(node.id, Wrong::new(expected, node.to_string()));
    }
    fits
}

/// Whether this is a command line, not JSON.
fn has_flags(source: &str) -> bool {
    !source.trim_start().starts_with(['{', '['])
        && source.split_whitespace().any(|word| word.starts_with("--"))
}

/// Reads the flags out of a command line, or of any text in which they stand.
fn flags(source: &str, origin: &Path) -> Result<Told, Diagnostics> {
    let words = words(source);
    let value = |name: &str| {
        words.iter().enumerate().find_map(|(index, word)| {
            let joined = word
                .strip_prefix(name)
                .and_then(|rest| rest.strip_prefix('='));
            joined.map(str::to_owned).or_else(|| {
                (word == name)
                    .then(|| words.get(index + 1).cloned())
                    .flatten()
            })
        })
    };
    let enabled = words
        .iter()
        .any(|word| word == ENABLE || word == &format!("{ENABLE}=true"));
    let mut told = match value(CONFIG) {
        Some(_) if !enabled => {
            let message = format!("expected {ENABLE} beside {CONFIG}, found nothing");
            return Err(refused(origin, message));
        }
        Some(config) => json(&config, origin)?,
        None => Told::default(),
    };
    told.enabled = enabled;
    if let Some(queue) = value(QUEUE) {
        let number = queue.parse().ok().filter(|queue: &f64| 0.0 <= *queue);
        let message = format!(
            "{QUEUE}: expected a number of at least 0, found {}",
            quoted(&queue)
        );
        told.queue = Some(number.ok_or_else(|| refused(origin, message))?);
    }
    Ok(told)
}

/// The words of a command line; quotes, and backslashes outside single ones, are as in a shell.
fn words(source: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    let mut letters = source.chars();
    while let Some(letter) = letters.next() {
        match (quote, letter) {
            (Some(open), _) if letter == open => quote = None,
            (None, '\'' | '"') => {
                quote = Some(letter);
                word.get_or_insert_default();
            }
            (None | Some('"'), '\\') => match letters.next() {
                Some('\n') | None => {}
                Some(next) => word.get_or_insert_default().push(next),
            },
            (None, _) if letter.is_whitespace() => words.extend(word.take()),
            _ => word.get_or_insert_default().push(letter),
        }
    }
    words.extend(word);
    words
}

/// Reads the environment as Dynamo's router does: what cannot be understood is ignored there.
fn environment(variables: &[(String, String)], notes: &mut Notes) -> Told {
    let mut told = Told::default();
    let get = |name: &str| {
        let mut found = variables.iter().filter(|(key, _)| key == name);
        found.next_back().map(|(_, value)| value.trim().to_owned())
    };
    let mut ignored = |name: &str, value: &str, kept: String| {
        notes.assumed(format!(
            "{name}: Dynamo ignores {} and keeps {kept}",
            quoted(value)
        ));
    };
    told.enabled = match get(ENV).as_deref() {
        Some("1" | "true" | "True" | "TRUE" | "yes" | "on") => true,
        Some("" | "0" | "false" | "False" | "FALSE" | "no" | "off") | None => false,
        Some(other) => {
            ignored(ENV, other, "the feature off".to_owned());
            false
        }
    };
    let name = format!("{ENV}_POLICY");
    if let Some(value) = get(&name) {
        match POLICIES.iter().find(|(policy, _)| *policy == value) {
            Some((_, kind)) => told.kind = kind,
            None => ignored(&name, &value, "isl_bounding".to_owned()),
        }
    }
    let name = format!("{ENV}_EFF_ISL_THRESHOLD");
    if let Some(value) = get(&name) {
        match value.parse::<u64>() {
            Ok(tokens) => told.isl_threshold = tokens.into(),
            Err(_) => ignored(&name, &value, told.isl_threshold.to_string()),
        }
    }
    let mut number = |name: &str, most: f64, kept: &str| {
        let value = get(name)?;
        let number = value.parse::<f64>().ok();
        let number = number.filter(|number| 0.0 <= *number && *number <= most);
        if number.is_none() {
            ignored(name, &value, kept.to_owned());
        }
        number
    };
    let ratio = number(&format!("{ENV}_EFF_ISL_RATIO_THRESHOLD"), 1.0, "0.7");
    told.isl_ratio = ratio.unwrap_or(told.isl_ratio);
    let most = f64::INFINITY;
    told.prefill_busy = number(
        &format!("{ENV}_PREFILL_BUSY_THRESHOLD"),
        most,
        "no threshold",
    );
    told.decode_busy = number(&format!("{ENV}_DECODE_BUSY_THRESHOLD"), most, "no gate");
    told.queue = number(ENV_QUEUE, most, "no threshold");
    told
}

fn translated(told: &Told, origin: &Path, notes: &mut Notes) -> Result<String, Diagnostics> {
    let name = "from-dynamo";
    if !told.enabled {
        notes.assumed("conditional disaggregation is not enabled, so nothing bypasses");
        return Ok(policy(name, &Written::of("Never"), "Local", ""));
    }
    let mut bypass = Written::of(told.kind);
    if told.kind != "PrefillLoad" {
        let most = i128::from(MOST_TOKENS);
        if most < told.isl_threshold {
            notes.differs(format!(
                "eff_isl_threshold: {most} is the most here, and above any prompt"
            ));
        }
        bypass = bypass
            .with("effectiveIslThreshold", told.isl_threshold.min(most))
            .with("effectiveIslRatioThreshold", told.isl_ratio)
            .with("tierCredit", "Weighted");
        notes.differs(
            "a prompt of which nothing is cached never bypasses by its net-new tokens, as in Dynamo; \
             coldBypassBelow lets short ones",
        );
        notes.differs(
            "a decode pod without KV events, which looks empty to Dynamo, has a reason of its own \
             (no_kv_source) and is warned of",
        );
    }
    if told.kind != "IslBounding" {
        bypass = bypass.with("prefillBusyThreshold", busy(told, origin, notes)?);
        notes.differs(
            "a prefill pod of unknown capacity, which Dynamo takes for 10000000 tokens, is never busy \
             here and has a reason of its own (prefill_capacity_unknown)",
        );
    } else if told.prefill_busy.is_some() {
        notes.no_equivalent("prefill_busy_threshold: isl_bounding does not look at it");
    }
    if let Some(gate) = told.decode_busy {
        bypass = bypass.with(
            "decodeBusyThreshold",
            bounded(gate, "decode_busy_threshold", notes),
        );
        notes.differs(
            "decode_busy_threshold: Dynamo compares its own estimate of the blocks in use, which reads \
             low where prefixes are shared; here the engine's own figure counts while it is fresh, so \
             set the threshold anew",
        );
        notes.differs(
            "decode_busy_threshold: the capacity is believed when the engine reports it or the \
             configuration gives it (trustCapacity); unknown means no bypass, as in Dynamo",
        );
    }
    notes.no_equivalent(
        "workers of Dynamo are told by its own runtime; the pods of this policy are told by headers \
         (handoff.dialect)",
    );
    Ok(policy(name, &bypass, "Local", ""))
}

/// The threshold for prefill load, which Dynamo takes from its queue when it is not given.
fn busy(told: &Told, origin: &Path, notes: &mut Notes) -> Result<f64, Diagnostics> {
    if let Some(threshold) = told.prefill_busy {
        return Ok(bounded(threshold, "prefill_busy_threshold", notes));
    }
    let Some(queue) = told.queue else {
        let message = "prefill_busy_threshold: expected a number, or the router's queue threshold \
                       (--queue-threshold), found neither"
            .to_owned();
        return Err(refused(origin, message));
    };
    notes.assumed(format!(
        "prefill_busy_threshold: not given, so the router's queue threshold {queue} counts"
    ));
    Ok(bounded(queue, "router_queue_threshold", notes))
}

fn bounded(value: f64, key: &str, notes: &mut Notes) -> f64 {
    if LARGEST_FACTOR < value {
        notes.differs(format!("{key}: {LARGEST_FACTOR} is the most here"));
    }
    value.min(LARGEST_FACTOR)
}

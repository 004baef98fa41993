//! The EndpointPickerConfig of llm-d's router: its profile handler, its prefill decider, its plugins.
//!
//! Lives here: what they mean as a policy.
//! Never here: plugins that have nothing to do with routes (they are only noted).
//! Invariant: every plugin of the file is translated, or noted, or known to say what every policy says.
//!
//! The decider `prefix-based-pd-decider` disaggregates a prompt of n tokens, of which c are cached on the
//! chosen decode pod, when `promptTokens <= n` and `nonCachedTokens <= n - c`. It bypasses otherwise:
//! when `n < promptTokens`, which is `coldBypassBelow`, or when `n - c < nonCachedTokens`. The latter, if
//! c is not 0, is `effectiveIslThreshold` under a share of 1, since n - c is then less than n; if c is 0,
//! it is `n < nonCachedTokens`, which is `coldBypassBelow` again. So the larger of the two goes there.

use crate::config::Diagnostics;
use crate::config::convert::{
    Converted, Foreign, Notes, Written, entries, items, policy, text, tokens,
};
use crate::config::diagnostic::{Report, Wrong};
use crate::config::node::{Node, NodeId, quoted};
use crate::config::parse::values::MOST_TOKENS;
use std::path::Path;

/// Handlers that have a decider.
const HANDLERS: [&str; 2] = ["disagg-profile-handler", "pd-profile-handler"];
const PREFIX_DECIDER: &str = "prefix-based-pd-decider";
const ALWAYS_DECIDER: &str = "always-disagg-pd-decider";
/// Plugins that say what holds for every policy.
const UNDERSTOOD: [&str; 8] = [
    "decode-filter",
    "prefill-filter",
    "max-score-picker",
    "disagg-headers-handler",
    "prefill-header-handler",
    "approx-prefix-cache-producer",
    "precise-prefix-cache-producer",
    "token-producer",
];
/// Sections beside the plugins that are not about routes.
const SECTIONS: [&str; 6] = [
    "featureGates",
    "dataLayer",
    "flowControl",
    "requestHandler",
    "saturationDetector",
    "parser",
];

/// One plugin of the file.
#[derive(Clone, Copy, Debug)]
struct Plugin<'a> {
    at: NodeId,
    name: &'a str,
    kind: &'a str,
    parameters: Option<&'a Node>,
}

impl<'a> Plugin<'a> {
    fn parameter(&self, key: &str) -> Option<&'a Node> {
        self.parameters?.get(key)
    }
}

/// The policy that decides as the router with this config does.
///
/// # Errors
/// When `source`, said to come from `origin`, is no such config.
pub fn from_llm_d(source: &str, origin: &Path) -> Result<Converted, Diagnostics> {
    let mut foreign = Foreign::read(source, origin)?;
    let mut notes = Notes::default();
    let yaml = translated(&foreign.root, &mut foreign.report, &mut notes);
    foreign.finish()?;
    Ok(Converted {
        yaml,
        notes: notes.0,
    })
}

fn translated(root: &Node, report: &mut Report, notes: &mut Notes) -> String {
    if text(root.get("kind")) != Some("EndpointPickerConfig") {
        let at = root.get("kind").unwrap_or(root);
        let wrong = Wrong::new("a file of the kind EndpointPickerConfig", at.to_string());
        report.fault(at.id, wrong);
        return String::new();
    }
    let plugins = plugins(root, report);
    let handler = plugins
        .iter()
        .find(|plugin| HANDLERS.contains(&plugin.kind));
    let bypass = match handler {
        Some(handler) => decided(handler, &plugins, (report, notes)),
        None => {
            notes
                .assumed("no profile handler disaggregates, so every request is prefilled locally");
            Written::of("Always")
        }
    };
    let more = sessions(&plugins, notes);
    let decider = handler.and_then(|handler| decider_name(handler));
    for plugin in &plugins {
        let used = HANDLERS.contains(&plugin.kind)
            || Some(plugin.name) == decider
            || UNDERSTOOD.contains(&plugin.kind)
            || plugin.kind == "session-affinity-scorer";
        if !used {
            unused(plugin, notes);
        }
    }
    for entry in entries(root) {
        if SECTIONS.contains(&&*entry.key) {
            notes.no_equivalent(format!("{}: not about routes", entry.key));
        }
    }
    notes.differs(
        "a prefill stage without a pod falls back to the decode pod (onNoPrefill: Local); newer \
         versions of the router refuse the request, which is onNoPrefill: Fail",
    );
    policy("from-llm-d", &bypass, "Local", &more)
}

fn plugins<'a>(root: &'a Node, report: &mut Report) -> Vec<Plugin<'a>> {
    let mut plugins = Vec::new();
    for node in items(root.get("plugins")) {
        let Some(kind) = text(node.get("type")) else {
            report.fault(
                node.id,
                Wrong::new("a plugin with a type", node.to_string()),
            );
            continue;
        };
        plugins.push(Plugin {
            at: node.id,
            name: text(node.get("name")).unwrap_or(kind),
            kind,
            parameters: node.get("parameters"),
        });
    }
    plugins
}

/// The name of the plugin that decides about prefill; several keys have been in use for it.
fn decider_name<'a>(handler: &Plugin<'a>) -> Option<&'a str> {
    let nested = handler
        .parameter("deciders")
        .and_then(|node| node.get("prefill"));
    let flat = ["prefillDeciderPluginName", "deciderPluginName"];
    text(nested).or_else(|| flat.iter().find_map(|key| text(handler.parameter(key))))
}

fn decided(
    handler: &Plugin<'_>,
    plugins: &[Plugin<'_>],
    (report, notes): (&mut Report, &mut Notes),
) -> Written {
    let encoder = handler
        .parameter("deciders")
        .and_then(|node| node.get("encode"));
    if encoder
        .or(handler.parameter("encodeDeciderPluginName"))
        .is_some()
    {
        notes.no_equivalent("the encode stage: requests go to prefill and decode pods only");
    }
    if text(handler.parameter("stageOrder")) == Some("prefill-first") {
        notes.differs(
            "stageOrder prefill-first: prefill always runs, and the decode pod is chosen after it; \
             here the decode pod is chosen first, and handoff.dialect only says who is told of whom",
        );
        return Written::of("Never");
    }
    let Some(name) = decider_name(handler) else {
        notes.assumed(format!(
            "{}: without a prefill decider its prefill stage is off, so every request is prefilled locally",
            handler.name
        ));
        return Written::of("Always");
    };
    match plugins.iter().find(|plugin| plugin.name == name) {
        Some(decider) if decider.kind == ALWAYS_DECIDER => Written::of("Never"),
        Some(decider) if decider.kind == PREFIX_DECIDER => by_prefix(decider, report, notes),
        found => {
            let at = handler.at;
            let found = match found {
                Some(decider) => format!("the decider {}", quoted(decider.kind)),
                None => format!("the name {}, which no plugin has", quoted(name)),
            };
            let expected = format!("a plugin of the type {PREFIX_DECIDER} or {ALWAYS_DECIDER}");
            report.fault(at, Wrong::new(expected, found));
            Written::of("Never")
        }
    }
}

fn by_prefix(decider: &Plugin<'_>, report: &mut Report, notes: &mut Notes) -> Written {
    let uncached = tokens(decider.parameter("nonCachedTokens"), 0, report);
    let prompt = tokens(decider.parameter("promptTokens"), 0, report);
    if uncached == 0 {
        notes.assumed("nonCachedTokens is 0, by which the decider never disaggregates");
        return Written::of("Always");
    }
    notes.differs(
        "cached tokens: the decider counts what it remembers of earlier requests; here the engines' own \
         KV events count, so prompts it takes for cached may no longer be",
    );
    notes.differs(
        "where nothing is known of a decode pod's cache the decider prefills locally; here prefill is \
         remote (no_kv_source), unless the prompt is shorter than coldBypassBelow",
    );
    let most = i128::from(MOST_TOKENS);
    if most < uncached.max(prompt) {
        notes.differs(format!(
            "{most} tokens are the most here, and above any prompt"
        ));
    }
    // The form for unequal bounds and why it is exact: see the head of this file.
    Written::of("IslBounding")
        .with("effectiveIslThreshold", uncached.min(most))
        .with("effectiveIslRatioThreshold", 1)
        .with("coldBypassBelow", uncached.max(prompt).min(most))
        .with("tierCredit", "Full")
}

/// The lines of the spec about sessions.
fn sessions(plugins: &[Plugin<'_>], notes: &mut Notes) -> String {
    let scorer = plugins
        .iter()
        .find(|plugin| plugin.kind == "session-affinity-scorer");
    let Some(scorer) = scorer else {
        return String::new();
    };
    if text(scorer.parameter("strategy")) == Some("session_id") {
        notes.differs(
            "session-affinity-scorer: its weight competes with other scorers; here the pod of the last \
             turn is taken while it is eligible (mode: Soft)",
        );
        return "  sessionAffinity:\n    mode: Soft\n    header: x-session-id\n    ttl: 5m\n"
            .to_owned();
    }
    notes.no_equivalent(
        "session-affinity-scorer: pods are not named to clients in x-session-token; sessionAffinity \
         goes by the client's own name of its session",
    );
    String::new()
}

fn unused(plugin: &Plugin<'_>, notes: &mut Notes) {
    let name = quoted(plugin.kind);
    if plugin.kind.ends_with("-scorer") {
        notes.no_equivalent(format!(
            "{name}: pods are compared by one cost in KV blocks (scoring), not by weighted scorers"
        ));
    } else if plugin.kind.ends_with("-picker") {
        notes.no_equivalent(format!(
            "{name}: scoring.temperature draws pods by their cost instead"
        ));
    } else if plugin.kind.ends_with("-filter") {
        notes.no_equivalent(format!(
            "{name}: pods are eligible by role, model, readiness and the gateway's subset"
        ));
    } else {
        notes.no_equivalent(format!("{name}: not about routes, or not known"));
    }
}

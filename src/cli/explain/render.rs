//! An explanation as text for a terminal.
//!
//! Lives here: [`render`] and its table.
//! Never here: colour, terminal width, what an explanation contains.
//! Invariant: every number shown stands in the explanation; a comparison that was made with two
//! different numbers never shows them as equal.

use crate::telemetry::explanation::{
    CheckLine, Explanation, PodLine, PodName, ShadowVerdict, Standing, Verdict,
};
use std::fmt::Write as _;

/// `explanation` in lines.
#[must_use]
pub fn render(explanation: &Explanation) -> String {
    let mut text = String::new();
    let mut line = |label: &str, content: &str| {
        if !content.is_empty() {
            let _ = writeln!(text, "{label:<9}{content}");
        }
    };
    if let Some(id) = &explanation.decision {
        line("decision", id);
    }
    line("request", &request(explanation));
    let policy = &explanation.policy;
    line(
        "policy",
        &format!(
            "{} (version {}), rule {}",
            policy.name, policy.generation, explanation.verdict.rule
        ),
    );
    line("verdict", &verdict(&explanation.verdict));
    line("", &pods_of(&explanation.verdict));
    line("checks", &checks(&explanation.verdict.checks));
    let flip = match (
        &explanation.verdict.flip,
        explanation.verdict.route.as_str(),
    ) {
        (Some(flip), _) => flip.as_str(),
        (None, "refused") => "",
        (None, _) => "no single threshold would change it",
    };
    line("flip", flip);
    if let Some(shadow) = &explanation.shadow {
        line("shadow", &shadow_line(shadow));
        line("", &pods_of(&shadow.verdict));
        line("", &checks(&shadow.verdict.checks));
    }
    text.push('\n');
    text.push_str(&table(&explanation.pods));
    if 0 < explanation.pods_left_out {
        let _ = writeln!(text, "and {} pods more", explanation.pods_left_out);
    }
    text.push_str(&terms(&explanation.pods));
    text
}

fn request(explanation: &Explanation) -> String {
    let request = &explanation.request;
    let mut parts = vec![
        request
            .operation
            .clone()
            .unwrap_or_else(|| "not a generation".to_owned()),
    ];
    if let Some(model) = &request.model {
        parts.push(format!("model {model}"));
    }
    parts.push(format!(
        "{} prompt tokens ({})",
        request.prompt_tokens,
        spaced(&request.counted)
    ));
    if let Some(trouble) = &request.encode_trouble {
        parts.push(format!("not tokenised: {}", spaced(trouble)));
    }
    if request.session != "none" {
        parts.push(format!("session {}", request.session));
    }
    parts.join(" · ")
}

fn verdict(verdict: &Verdict) -> String {
    let bypass = if verdict.bypass { ", bypass" } else { "" };
    let meaning = verdict.meaning.trim_end_matches('.');
    // The meaning of a reason begins with the route it belongs to.
    let meaning = meaning
        .split_once(": ")
        .filter(|(start, _)| start.to_lowercase().starts_with(&verdict.route))
        .map_or(meaning, |(_, rest)| rest);
    format!("{}{bypass}: {} ({meaning})", verdict.route, verdict.because)
}

fn pods_of(verdict: &Verdict) -> String {
    let name = |pod: &PodName| match &pod.name {
        Some(name) => format!("{name} {}", pod.endpoint),
        None => pod.endpoint.clone(),
    };
    match (&verdict.prefill, &verdict.decode) {
        (Some(prefill), Some(decode)) => {
            format!("prefill on {}, decode on {}", name(prefill), name(decode))
        }
        (None, Some(decode)) if verdict.because == "not_generation" => {
            format!("to {}", name(decode))
        }
        (None, Some(decode)) => format!("prefill and decode on {}", name(decode)),
        _ => String::new(),
    }
}

fn shadow_line(shadow: &ShadowVerdict) -> String {
    let agrees = match shadow.agrees {
        true => "agrees",
        false => "DIFFERS",
    };
    format!(
        "{} (version {}), rule {}: {agrees}; {}",
        shadow.policy.name,
        shadow.policy.generation,
        shadow.verdict.rule,
        verdict(&shadow.verdict)
    )
}

/// `net_new 412 < 2048 ✓ · ratio 0.21 < 0.70 ✓ · decode busy 0.41 ≤ 0.85 ✓`
fn checks(checks: &[CheckLine]) -> String {
    let line = |check: &CheckLine| {
        let what = match check.what.as_str() {
            // The name of a quantity stays as it is written everywhere.
            "net_new" => "net_new".to_owned(),
            what => spaced(what),
        };
        let operator = match check.operator.as_str() {
            "<=" => "≤",
            operator => operator,
        };
        let (value, threshold) = numbers(check);
        let mark = if check.allows_bypass { '✓' } else { '✗' };
        format!("{what} {value} {operator} {threshold} {mark}")
    };
    checks.iter().map(line).collect::<Vec<_>>().join(" · ")
}

/// Both sides with as many digits as it takes to tell them apart, two at least.
fn numbers(check: &CheckLine) -> (String, String) {
    let (value, threshold) = (check.value, check.threshold);
    if matches!(check.what.as_str(), "net_new" | "prompt") {
        return (format!("{value:.0}"), format!("{threshold:.0}"));
    }
    let with = |digits: usize| (format!("{value:.digits$}"), format!("{threshold:.digits$}"));
    (2..17)
        .map(with)
        .find(|(left, right)| left != right)
        .unwrap_or_else(|| with(2))
}

fn spaced(word: &str) -> String {
    word.replace('_', " ")
}

/// One pod per line, columns aligned.
fn table(pods: &[PodLine]) -> String {
    let mut rows = vec![
        [
            "pod",
            "role",
            "state",
            "kv events",
            "cached tokens",
            "booked",
            "kv used",
            "local",
            "prefill",
            "decode",
        ]
        .map(str::to_owned),
    ];
    rows.extend(pods.iter().map(|pod| {
        [
            pod.name.clone().unwrap_or_else(|| pod.endpoint.clone()),
            pod.role.clone(),
            spaced(&pod.availability),
            pod.kv_source.clone(),
            cached(pod),
            booked(pod),
            used(pod),
            standing(&pod.local),
            standing(&pod.prefill),
            standing(&pod.decode),
        ]
    }));
    let mut widths = [0; 10];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    for row in &rows {
        let cells = row.iter().zip(widths);
        let line: Vec<String> = cells
            .map(|(cell, width)| format!("{cell:<width$}"))
            .collect();
        let _ = writeln!(text, "{}", line.join("  ").trim_end());
    }
    text
}

fn cached(pod: &PodLine) -> String {
    let tiers = pod.cached;
    match (tiers.host, tiers.disk) {
        (0, 0) => tiers.device.to_string(),
        (host, disk) => format!("{} +{host} host +{disk} disk", tiers.device),
    }
}

fn booked(pod: &PodLine) -> String {
    format!(
        "{} req, {} tok, {} blk",
        pod.load.requests, pod.load.prefill_tokens, pod.load.decode_blocks
    )
}

fn used(pod: &PodLine) -> String {
    let of = pod
        .kv_capacity
        .value
        .map_or("?".to_owned(), |blocks| blocks.to_string());
    match &pod.engine {
        Some(engine) => format!("{:.0} % of {of}", engine.kv_usage * 100.0),
        None => format!("? of {of}"),
    }
}

/// A cost, marked when it was the one selected; or why there is none.
fn standing(standing: &Standing) -> String {
    match (&standing.cost, &standing.ineligible) {
        (Some(cost), _) if standing.selected => format!("{:.1} ←", cost.total),
        (Some(cost), _) => format!("{:.1}", cost.total),
        (None, Some(why)) => spaced(why),
        (None, None) => "-".to_owned(),
    }
}

/// How a pod stands for one purpose.
type Column = fn(&PodLine) -> &Standing;

/// The costs of the selected pods by their terms.
fn terms(pods: &[PodLine]) -> String {
    let columns: [(&str, Column); 3] = [
        ("local", |pod| &pod.local),
        ("prefill", |pod| &pod.prefill),
        ("decode", |pod| &pod.decode),
    ];
    let mut text = String::new();
    for (purpose, column) in columns {
        let selected = pods.iter().find(|pod| column(pod).selected);
        let Some((pod, cost)) = selected.and_then(|pod| Some((pod, column(pod).cost?))) else {
            continue;
        };
        let start = if text.is_empty() {
            "\ncost, in blocks\n"
        } else {
            ""
        };
        let name = pod.name.as_ref().unwrap_or(&pod.endpoint);
        let _ = writeln!(
            text,
            "{start}{purpose:<9}{name}: prefill {:.1} + blocks {:.1} + requests {:.1} = {:.1} (credit for cached blocks: {:.1})",
            cost.prefill, cost.decode, cost.requests, cost.total, cost.credit
        );
    }
    text
}

#[cfg(test)]
mod tests;

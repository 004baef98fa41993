//! What `sidestep top` shows: pods and decisions as text.
//!
//! Lives here: [`Screen`], the state behind it, its lines.
//! Never here: sockets, the terminal.
//! Invariant: no line is longer than the screen is wide, and no control character that the picker
//! sends reaches the terminal.

use serde::Deserialize;
use std::collections::VecDeque;
use std::fmt::Write as _;

/// Decisions kept.
const KEPT: usize = 500;
/// Decisions listed when the screen is as long as need be.
const LISTED: usize = 20;

/// Whether colours are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Style {
    /// No.
    Plain,
    /// ANSI colours.
    Colour,
}

/// One pod, as `/v1/pods` tells.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Pod {
    name: String,
    role: String,
    availability: String,
    kv_source: String,
    requests: u64,
    prefill_tokens: u64,
    decode_blocks: u64,
    kv_usage: Option<f64>,
}

/// The policy, as `/v1/policy` tells.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Policy {
    name: String,
    generation: u64,
}

/// One decision, as the live stream tells.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Decision {
    id: String,
    sequence: u64,
    time_ms: u64,
    route: String,
    because: String,
    bypass: bool,
    decode_pod: String,
    prefill_pod: Option<String>,
    prompt_tokens: u64,
    net_new_tokens: u64,
    status: Option<u16>,
    ttft_ms: Option<f64>,
    end: Option<String>,
}

/// What became of a decision.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Outcome {
    id: String,
    status: Option<u16>,
    ttft_ms: Option<f64>,
    end: Option<String>,
}

/// What is known.
#[derive(Debug, Default)]
pub(super) struct Screen {
    pods: Vec<Pod>,
    policy: Policy,
    decisions: VecDeque<Decision>,
    trouble: Option<String>,
}

/// How a line is meant.
#[derive(Clone, Copy, PartialEq)]
enum Tone {
    Normal,
    Faint,
    Strong,
    Good,
    Warn,
    Bad,
}

impl Tone {
    fn code(self) -> &'static str {
        match self {
            Tone::Normal => "",
            Tone::Faint => "\x1b[2m",
            Tone::Strong => "\x1b[1m",
            Tone::Good => "\x1b[32m",
            Tone::Warn => "\x1b[33m",
            Tone::Bad => "\x1b[1;31m",
        }
    }
}

/// `text` without anything that a terminal would act on.
pub(super) fn printable(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { '\u{fffd}' } else { c })
        .collect()
}

impl Screen {
    /// Takes in what the pods and the policy are now.
    pub(super) fn look(&mut self, mut pods: Vec<Pod>, policy: Policy) {
        pods.sort_by(|a, b| {
            let key = |pod: &Pod| (pod.tone() != Tone::Bad, pod.tone() != Tone::Warn);
            key(a)
                .cmp(&key(b))
                .then_with(|| b.role.cmp(&a.role))
                .then_with(|| a.name.cmp(&b.name))
        });
        self.pods = pods;
        self.policy = policy;
        self.trouble = None;
    }

    /// Takes in decisions, oldest first; those it has already are left out.
    pub(super) fn decided(&mut self, records: Vec<Decision>) {
        for record in records {
            if self
                .decisions
                .iter()
                .rev()
                .take(KEPT)
                .any(|known| known.id == record.id)
            {
                continue;
            }
            if self.decisions.len() == KEPT {
                self.decisions.pop_front();
            }
            self.decisions.push_back(record);
        }
    }

    /// Takes in what became of decisions.
    pub(super) fn settled(&mut self, outcomes: Vec<Outcome>) {
        for outcome in outcomes {
            let mut newest_first = self.decisions.iter_mut().rev();
            if let Some(known) = newest_first.find(|known| known.id == outcome.id) {
                known.status = outcome.status;
                known.ttft_ms = outcome.ttft_ms;
                known.end = outcome.end;
            }
        }
    }

    /// The picker cannot be reached; what is known stays.
    pub(super) fn lost(&mut self, why: String) {
        self.trouble = Some(why);
    }

    /// Everything, for a screen of `columns` and `lines`.
    pub(super) fn draw(&self, url: &str, style: Style, (columns, lines): (usize, usize)) -> String {
        let mut page = Page {
            text: String::new(),
            style,
            columns,
        };
        let name = match self.policy.name.as_str() {
            "" => "unnamed",
            name => name,
        };
        let generation = self.policy.generation;
        page.line(
            Tone::Strong,
            &format!(
                "sidestep  {url}  policy {name}, generation {generation}  {}",
                self.shares()
            ),
        );
        let (tone, health) = self.health();
        page.line(tone, &health);
        page.line(Tone::Normal, "");
        let left = lines.saturating_sub(7);
        let listed = self.decisions.len().min(LISTED);
        let pods = self
            .pods
            .len()
            .min(left.saturating_sub(listed.min(left / 2)));
        self.draw_pods(&mut page, pods);
        page.line(Tone::Normal, "");
        self.draw_decisions(&mut page, left.saturating_sub(pods).min(listed));
        page.text
    }

    fn shares(&self) -> String {
        let judged: Vec<&Decision> = self
            .decisions
            .iter()
            .filter(|one| one.because != "not_generation")
            .collect();
        let (Some(first), Some(last)) = (judged.first(), judged.last()) else {
            return "no decision yet".to_owned();
        };
        let share = |count: usize| 100.0 * count as f64 / judged.len() as f64;
        let bypass = judged.iter().filter(|one| one.bypass).count();
        let remote = judged.iter().filter(|one| one.route == "remote").count();
        let seconds = last.time_ms.saturating_sub(first.time_ms) as f64 / 1e3;
        let rate = match seconds {
            some if 0.0 < some => format!("{:.1} decisions/s, ", (judged.len() - 1) as f64 / some),
            _ => String::new(),
        };
        format!(
            "{rate}of the last {}: bypass {:.0} %, remote {:.0} %",
            judged.len(),
            share(bypass),
            share(remote)
        )
    }

    fn health(&self) -> (Tone, String) {
        if let Some(why) = &self.trouble {
            return (Tone::Bad, format!("no connection: {why}"));
        }
        let down: Vec<String> = self
            .pods
            .iter()
            .filter(|pod| pod.availability != "ready")
            .map(|pod| format!("{} ({})", pod.name, pod.availability.replace('_', " ")))
            .collect();
        let silent: Vec<&str> = self
            .pods
            .iter()
            .filter(|pod| pod.availability == "ready" && pod.kv_source == "lost")
            .map(|pod| pod.name.as_str())
            .collect();
        let total = self.pods.len();
        match (down.len(), silent.len()) {
            _ if total == 0 => (Tone::Bad, "no pods are known".to_owned()),
            (0, 0) => (Tone::Good, format!("all {total} pods can take requests")),
            (0, _) => (Tone::Warn, format!("KV events lost: {}", silent.join(", "))),
            (count, _) => (
                Tone::Bad,
                format!(
                    "{count} of {total} pods cannot take requests: {}",
                    down.join(", ")
                ),
            ),
        }
    }

    fn draw_pods(&self, page: &mut Page, most: usize) {
        let head = [
            "POD",
            "ROLE",
            "STATE",
            "KV EVENTS",
            "REQUESTS",
            "PREFILL TOKENS",
            "DECODE BLOCKS",
            "KV USAGE",
        ];
        let rows = self.pods.iter().take(most).map(|pod| {
            let usage = pod
                .kv_usage
                .map_or("-".to_owned(), |usage| format!("{:.0} %", usage * 100.0));
            let cells = [
                pod.name.clone(),
                pod.role.clone(),
                pod.availability.replace('_', " "),
                pod.kv_source.clone(),
                pod.requests.to_string(),
                pod.prefill_tokens.to_string(),
                pod.decode_blocks.to_string(),
                usage,
            ];
            (pod.tone(), cells)
        });
        page.table(head, 4, rows.collect());
        if most < self.pods.len() {
            page.line(
                Tone::Faint,
                &format!("and {} more pods", self.pods.len() - most),
            );
        }
    }

    fn draw_decisions(&self, page: &mut Page, most: usize) {
        let head = [
            "TIME", "ROUTE", "BECAUSE", "PODS", "PROMPT", "NEW", "TTFT", "END", "DECISION",
        ];
        let rows = self.decisions.iter().rev().take(most).map(|one| {
            let pods = match &one.prefill_pod {
                Some(prefill) => format!("{prefill} -> {}", one.decode_pod),
                None => one.decode_pod.clone(),
            };
            let route = if one.bypass { "bypass" } else { &one.route };
            let end = match (&one.end, one.status) {
                (None, _) => "running".to_owned(),
                (Some(end), Some(status)) if end == "completed" => status.to_string(),
                (Some(end), _) => end.clone(),
            };
            let tone = if end == "aborted" {
                Tone::Warn
            } else {
                Tone::Normal
            };
            let cells = [
                clock(one.time_ms),
                route.to_owned(),
                one.because.clone(),
                pods,
                one.prompt_tokens.to_string(),
                one.net_new_tokens.to_string(),
                one.ttft_ms
                    .map_or("-".to_owned(), |ms| format!("{ms:.0} ms")),
                end,
                one.id.clone(),
            ];
            (tone, cells)
        });
        page.table(head, 4, rows.collect());
    }
}

impl Pod {
    fn tone(&self) -> Tone {
        match (self.availability.as_str(), self.kv_source.as_str()) {
            ("ready", "live" | "absent") => Tone::Normal,
            ("ready", "syncing") | ("draining", _) => Tone::Warn,
            _ => Tone::Bad,
        }
    }
}

/// Time of day (UTC) of milliseconds since 1970.
fn clock(ms: u64) -> String {
    let seconds = ms / 1000;
    format!(
        "{:02}:{:02}:{:02}.{:03}",
        seconds / 3600 % 24,
        seconds / 60 % 60,
        seconds % 60,
        ms % 1000
    )
}

/// Text that grows line by line.
struct Page {
    text: String,
    style: Style,
    columns: usize,
}

impl Page {
    fn line(&mut self, tone: Tone, text: &str) {
        let cut: String = printable(text).chars().take(self.columns).collect();
        let cut = cut.trim_end();
        // Writing to a string does not fail.
        let _ = match (self.style, tone.code()) {
            (Style::Plain, _) | (_, "") => writeln!(self.text, "{cut}"),
            (Style::Colour, code) => writeln!(self.text, "{code}{cut}\x1b[0m"),
        };
    }

    /// A table whose columns are as wide as need be; numbers, to the right, from `numbers` on to the
    /// last three.
    fn table<const N: usize>(
        &mut self,
        head: [&str; N],
        numbers: usize,
        rows: Vec<(Tone, [String; N])>,
    ) {
        let mut widths = head.map(|cell| cell.chars().count());
        for (_, row) in &rows {
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = (*width).max(cell.chars().count());
            }
        }
        let line = |cells: &[String; N]| {
            let mut text = String::new();
            for (index, (cell, width)) in cells.iter().zip(widths).enumerate() {
                let number = numbers <= index && (N == 8 || index < N - 2);
                let _ = if number {
                    write!(text, "{cell:>width$}  ")
                } else {
                    write!(text, "{cell:<width$}  ")
                };
            }
            text
        };
        self.line(Tone::Faint, &line(&head.map(str::to_owned)));
        for (tone, row) in &rows {
            self.line(*tone, &line(row));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn screen() -> Screen {
        let pods = r#"[
            {"name":"decode-1","role":"decode","availability":"ready","kv_source":"live","requests":3,"prefill_tokens":120,"decode_blocks":40,"kv_usage":0.25},
            {"name":"prefill-1","role":"prefill","availability":"ready","kv_source":"absent","requests":1,"prefill_tokens":4000,"decode_blocks":0,"kv_usage":null},
            {"name":"decode-2","role":"decode","availability":"unreachable","kv_source":"lost"}]"#;
        let mut screen = Screen::default();
        screen.look(
            serde_json::from_str(pods).unwrap(),
            serde_json::from_str(r#"{"name":"demo","generation":2,"rules":[]}"#).unwrap(),
        );
        let one = |id: &str, bypass| Decision {
            id: id.into(),
            time_ms: 3_723_004,
            route: if bypass { "local" } else { "remote" }.into(),
            because: "net_new_below_thresholds".into(),
            bypass,
            decode_pod: "decode-1".into(),
            prefill_pod: (!bypass).then(|| "prefill-1".into()),
            prompt_tokens: 1000,
            ..Decision::default()
        };
        screen.decided(vec![one("a", true), one("b", false)]);
        screen
    }

    #[test]
    fn pods_in_trouble_come_first_and_are_named() {
        let text = screen().draw("http://x", Style::Plain, (200, 50));
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].contains("policy demo, generation 2"), "{text}");
        assert!(lines[0].contains("bypass 50 %, remote 50 %"), "{text}");
        assert_eq!(
            lines[1],
            "1 of 3 pods cannot take requests: decode-2 (unreachable)"
        );
        assert!(lines[3].starts_with("POD"), "{text}");
        assert!(lines[4].starts_with("decode-2"), "{text}");
        assert!(text.contains("01:02:03.004  remote"), "{text}");
        assert!(text.contains("prefill-1 -> decode-1"), "{text}");
    }

    #[test]
    fn an_outcome_finds_its_decision_and_a_decision_told_twice_is_one() {
        let mut screen = screen();
        let again = screen.decisions.back().unwrap().clone();
        screen.decided(vec![again]);
        assert_eq!(screen.decisions.len(), 2);
        let outcome = r#"[{"id":"a","status":200,"ttft_ms":41.6,"end":"completed"},{"id":"gone"}]"#;
        screen.settled(serde_json::from_str(outcome).unwrap());
        let text = screen.draw("http://x", Style::Plain, (200, 50));
        assert!(text.contains("42 ms  200"), "{text}");
        assert!(text.contains("running"), "{text}");
    }

    #[test]
    fn nothing_is_wider_or_longer_than_the_screen_or_acts_on_the_terminal() {
        let mut screen = screen();
        screen.pods[0].name = "evil\x1b[2Jname".into();
        for _ in 0..3000 {
            let id = screen.decisions.len().to_string();
            screen.decided(vec![Decision {
                id,
                ..Decision::default()
            }]);
        }
        assert!(screen.decisions.len() <= KEPT);
        for (columns, lines) in [(20, 10), (80, 24), (1, 1), (300, 100)] {
            let text = screen.draw("http://x", Style::Plain, (columns, lines));
            assert!(
                text.lines().all(|line| line.chars().count() <= columns),
                "{text}"
            );
            assert!(
                lines < 7 || text.lines().count() <= lines,
                "{lines}: {text}"
            );
            assert!(!text.contains('\x1b'), "{text}");
        }
    }

    #[test]
    fn a_lost_picker_is_said_and_what_was_known_stays() {
        let mut screen = screen();
        screen.lost("refused".into());
        let text = screen.draw("http://x", Style::Colour, (200, 50));
        assert!(text.contains("no connection: refused"), "{text}");
        assert!(text.contains("decode-1"), "{text}");
    }
}

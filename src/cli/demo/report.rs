//! What the demo shows: one line per decision, one JSON object per request, a summary.
//!
//! Lives here: [`Row`], [`Summary`].
//! Never here: HTTP, processes.
//! Invariant: every number comes from the picker's own record of the decision or from the client's clock.

use crate::cli::demo::client::Answer;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// One request with the decision it got.
#[derive(Clone, Debug)]
pub(super) struct Row {
    conversation: String,
    turn: usize,
    status: u16,
    failure: Option<String>,
    ttft_ms: Option<f64>,
    decision: Option<String>,
    /// The picker's record of the decision; null when there is none.
    record: Value,
}

impl Row {
    /// A request that was answered, with the picker's record of it.
    #[must_use]
    pub(super) fn answered(
        conversation: &str,
        turn: usize,
        answer: &Answer,
        record: Option<Value>,
    ) -> Row {
        let failure = match &answer.error {
            Some(error) => Some(error.clone()),
            None if !answer.complete => Some("the stream ended without [DONE]".into()),
            None if answer.first_token.is_none() => Some("the answer is empty".into()),
            None if record.is_none() => Some("the picker has no record of a decision".into()),
            None => None,
        };
        Row {
            conversation: conversation.to_owned(),
            turn,
            status: answer.status,
            failure,
            ttft_ms: answer
                .first_token
                .map(|time| round(time.as_secs_f64() * 1000.0)),
            decision: answer.decision.clone(),
            record: record.unwrap_or_default(),
        }
    }

    /// A request that nobody answered.
    #[must_use]
    pub(super) fn unanswered(conversation: &str, turn: usize, error: &anyhow::Error) -> Row {
        Row {
            conversation: conversation.to_owned(),
            turn,
            status: 0,
            failure: Some(format!("{error:#}")),
            ttft_ms: None,
            decision: None,
            record: Value::Null,
        }
    }

    /// Why the request failed, if it did.
    #[must_use]
    pub(super) fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    /// The request as one JSON object.
    #[must_use]
    pub(super) fn to_json(&self) -> Value {
        let record = &self.record;
        let thresholds: serde_json::Map<String, Value> = record["checks"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|check| {
                Some((
                    check["what"].as_str()?.to_owned(),
                    check["threshold"].clone(),
                ))
            })
            .collect();
        let mut object = json!({
            "id": self.decision,
            "conversation": self.conversation,
            "turn": self.turn,
            "status": self.status,
            "error": self.failure,
            "ttft_ms": self.ttft_ms,
            "thresholds": thresholds,
        });
        for field in [
            "route",
            "because",
            "bypass",
            "decode",
            "prefill",
            "decode_pod",
            "prefill_pod",
            "prompt_tokens",
            "counted",
            "cached_tokens",
            "net_new_tokens",
            "policy",
            "rule",
            "checks",
            "considered",
            "session",
            "trace_id",
        ] {
            object[field] = record[field].clone();
        }
        object
    }

    /// The request as one line of the table under [`header`].
    #[must_use]
    pub(super) fn to_line(&self) -> String {
        let record = &self.record;
        let text = |field: &str| record[field].as_str().unwrap_or("-").to_owned();
        let number = |field: &str| {
            record[field]
                .as_u64()
                .map_or("-".into(), |value| value.to_string())
        };
        let mut pods = text("decode_pod");
        if let Some(prefill) = record["prefill_pod"].as_str() {
            pods = format!("{prefill} > {pods}");
        }
        let mut line = format!(
            "{:<13} {:>4}  {:<6} {:<29} {:<20} {:>6} {:>6} {:>7} {:>8}  {}",
            self.conversation,
            self.turn,
            text("route"),
            text("because"),
            pods,
            number("prompt_tokens"),
            number("cached_tokens"),
            number("net_new_tokens"),
            self.ttft_ms.map_or("-".into(), |ms| format!("{ms:.0} ms")),
            self.decision.as_deref().unwrap_or("-"),
        );
        if let Some(failure) = &self.failure {
            // The error's own words only; they never hold the prompt.
            write!(line, "  FAILED ({}): {failure}", self.status).ok();
        }
        line
    }
}

/// The head of the table that [`Row::to_line`] fills.
#[must_use]
pub(super) fn header() -> String {
    format!(
        "{:<13} {:>4}  {:<6} {:<29} {:<20} {:>6} {:>6} {:>7} {:>8}  {}",
        "conversation",
        "turn",
        "route",
        "because",
        "pods",
        "prompt",
        "cached",
        "net-new",
        "ttft",
        "decision"
    )
}

/// What all requests come to.
#[derive(Clone, Debug, Default)]
pub(super) struct Summary {
    requests: usize,
    failed: usize,
    prompt_tokens: u64,
    cached_tokens: u64,
    /// Requests by route and reason.
    reasons: BTreeMap<(String, String), usize>,
    bypassed: Vec<f64>,
    remote: Vec<f64>,
}

impl Summary {
    /// Counts one more request.
    pub(super) fn add(&mut self, row: &Row) {
        self.requests += 1;
        self.failed += usize::from(row.failure.is_some());
        let record = &row.record;
        if record.is_null() {
            return;
        }
        self.prompt_tokens += record["prompt_tokens"].as_u64().unwrap_or(0);
        self.cached_tokens += record["cached_tokens"].as_u64().unwrap_or(0);
        let text = |field: &str| record[field].as_str().unwrap_or("-").to_owned();
        let route = text("route");
        let bypass = record["bypass"].as_bool().unwrap_or(false);
        if let Some(ttft) = row.ttft_ms {
            if bypass {
                self.bypassed.push(ttft);
            } else if route == "remote" {
                self.remote.push(ttft);
            }
        }
        let kind = if bypass { "bypass".into() } else { route };
        *self.reasons.entry((kind, text("because"))).or_default() += 1;
    }

    /// How many requests failed.
    #[must_use]
    pub(super) fn failed(&self) -> usize {
        self.failed
    }

    /// How many requests there were.
    #[must_use]
    pub(super) fn requests(&self) -> usize {
        self.requests
    }
}

impl std::fmt::Display for Summary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "requests {}, failed {}", self.requests, self.failed)?;
        let bypassed: usize = self
            .reasons
            .iter()
            .filter(|((kind, _), _)| kind == "bypass")
            .map(|(_, count)| count)
            .sum();
        writeln!(
            f,
            "bypassed {bypassed} ({})",
            share(bypassed as u64, self.requests as u64)
        )?;
        for ((kind, because), count) in &self.reasons {
            let part = share(*count as u64, self.requests as u64);
            writeln!(f, "  {kind:<7} {because:<30} {count:>5}  {part:>5}")?;
        }
        writeln!(
            f,
            "prompt tokens {}, of them cached on the pod judged {} ({})",
            self.prompt_tokens,
            self.cached_tokens,
            share(self.cached_tokens, self.prompt_tokens)
        )?;
        for (name, times) in [("bypassed", &self.bypassed), ("remote", &self.remote)] {
            if let (Some(p50), Some(p90)) = (quantile(times, 0.5), quantile(times, 0.9)) {
                writeln!(
                    f,
                    "time to first token, {name:<8} p50 {p50:>6.0} ms   p90 {p90:>6.0} ms"
                )?;
            }
        }
        Ok(())
    }
}

fn share(part: u64, whole: u64) -> String {
    if whole == 0 {
        return "-".into();
    }
    format!("{:.0} %", 100.0 * part as f64 / whole as f64)
}

/// The smallest value that at least `q` of all values do not exceed.
fn quantile(values: &[f64], q: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (q * sorted.len() as f64).ceil().max(1.0) as usize;
    sorted.get(rank - 1).copied()
}

fn round(ms: f64) -> f64 {
    (ms * 10.0).round() / 10.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn answer() -> Answer {
        Answer {
            status: 200,
            decision: Some("d1".into()),
            first_token: Some(Duration::from_micros(12_340)),
            text: "hello".into(),
            complete: true,
            error: None,
        }
    }

    fn record(route: &str, because: &str, bypass: bool) -> Value {
        json!({
            "route": route, "because": because, "bypass": bypass, "decode": "127.0.0.1:1", "decode_pod": "decode-1",
            "prompt_tokens": 1000, "cached_tokens": 800, "net_new_tokens": 200,
            "checks": [{"what": "net_new", "value": 200.0, "threshold": 512.0, "allows_bypass": true}],
        })
    }

    #[test]
    fn a_json_line_carries_the_decision_and_the_clients_clock() {
        let row = Row::answered(
            "c",
            2,
            &answer(),
            Some(record("local", "net_new_below_thresholds", true)),
        );
        let json = row.to_json();
        assert_eq!(row.failure(), None);
        assert_eq!(json["id"], "d1");
        assert_eq!(json["turn"], 2);
        assert_eq!(json["ttft_ms"], 12.3);
        assert_eq!(json["net_new_tokens"], 200);
        assert_eq!(json["prefill"], Value::Null);
        assert_eq!(json["thresholds"]["net_new"], 512.0);
    }

    #[test]
    fn what_did_not_go_well_is_a_failure() {
        let cut = Answer {
            complete: false,
            ..answer()
        };
        let empty = Answer {
            first_token: None,
            ..answer()
        };
        let refused = Answer {
            status: 503,
            error: Some("{}".into()),
            ..answer()
        };
        for bad in [cut, empty, refused] {
            assert!(
                Row::answered("c", 1, &bad, Some(record("local", "x", false)))
                    .failure()
                    .is_some()
            );
        }
        assert!(Row::answered("c", 1, &answer(), None).failure().is_some());
        assert!(
            Row::unanswered("c", 1, &anyhow::anyhow!("gone"))
                .failure()
                .is_some()
        );
    }

    #[test]
    fn the_summary_counts_by_reason_and_route() {
        let mut summary = Summary::default();
        summary.add(&Row::answered(
            "c",
            1,
            &answer(),
            Some(record("remote", "net_new_above_threshold", false)),
        ));
        summary.add(&Row::answered(
            "c",
            2,
            &answer(),
            Some(record("local", "net_new_below_thresholds", true)),
        ));
        summary.add(&Row::unanswered("c", 3, &anyhow::anyhow!("gone")));
        let text = summary.to_string();
        assert!(text.contains("requests 3, failed 1"), "{text}");
        assert!(text.contains("bypassed 1 (33 %)"), "{text}");
        assert!(
            text.contains("cached on the pod judged 1600 (80 %)"),
            "{text}"
        );
        assert!(
            text.contains("time to first token, remote   p50     12 ms"),
            "{text}"
        );
    }

    #[test]
    fn quantiles_are_values_that_occurred() {
        assert_eq!(quantile(&[], 0.5), None);
        assert_eq!(quantile(&[3.0], 0.9), Some(3.0));
        assert_eq!(quantile(&[4.0, 1.0, 3.0, 2.0], 0.5), Some(2.0));
        assert_eq!(quantile(&[4.0, 1.0, 3.0, 2.0], 0.9), Some(4.0));
    }
}

//! The status of policies, as it is written to the cluster. Pure.
//!
//! Lives here: [`status`], from conditions and counts to the status of one policy.
//! Never here: what a condition means (`config::conditions`), writing (`fleet::kubernetes`).
//! Invariant: a status that says nothing new is not written; a condition keeps the time of its last
//! change.

use crate::config::conditions::{Condition, Observed};
use serde_json::{Map, Value, json};

/// What is to be written of one policy.
pub(super) struct Said<'a> {
    /// Its conditions.
    pub(super) conditions: &'a [Condition],
    /// The generation of its spec that they are about.
    pub(super) generation: u64,
    /// What was decided by it, when it is in force.
    pub(super) observed: Option<&'a Observed>,
}

/// The status to write, given the one that is there; `None` when that says it all.
pub(super) fn status(there: &Value, said: &Said<'_>, now: &str) -> Option<Value> {
    let old = |kind: &str| {
        let conditions = there["conditions"].as_array();
        conditions
            .into_iter()
            .flatten()
            .find(|one| one["type"] == kind)
    };
    let conditions: Vec<Value> = said
        .conditions
        .iter()
        .map(|one| {
            let kind = one.kind.as_str();
            let holds = if one.holds { "True" } else { "False" };
            let since = old(kind)
                .filter(|old| old["status"] == holds)
                .and_then(|old| old["lastTransitionTime"].as_str());
            json!({
                "type": kind,
                "status": holds,
                "reason": one.reason.as_str(),
                "message": one.message,
                "observedGeneration": said.generation,
                "lastTransitionTime": since.unwrap_or(now),
            })
        })
        .collect();
    let mut status = json!({"conditions": conditions});
    if let Some(observed) = said.observed {
        let by_reason: Map<String, Value> = observed
            .by_reason
            .iter()
            .map(|(because, count)| (because.as_str().to_owned(), json!(count)))
            .collect();
        status["observed"] = json!({
            "windowSeconds": observed.window.as_secs(),
            "decisions": observed.decisions(),
            "byReason": by_reason,
        });
    }
    (!same(&status, there)).then_some(status)
}

/// Whether two statuses say the same, in whatever order.
fn same(new: &Value, there: &Value) -> bool {
    let sorted = |status: &Value| {
        let mut conditions = status["conditions"].as_array().cloned().unwrap_or_default();
        conditions.sort_by_key(|one| one["type"].to_string());
        conditions
    };
    sorted(new) == sorted(there) && new["observed"] == there["observed"]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::conditions::{ConditionReason, ConditionType};

    fn accepted(holds: bool) -> [Condition; 1] {
        [Condition {
            kind: ConditionType::Accepted,
            holds,
            reason: if holds {
                ConditionReason::Accepted
            } else {
                ConditionReason::Invalid
            },
            message: "why".to_owned(),
        }]
    }

    fn said(conditions: &[Condition]) -> Said<'_> {
        Said {
            conditions,
            generation: 3,
            observed: None,
        }
    }

    #[test]
    fn a_condition_keeps_the_time_of_its_last_change() {
        let conditions = accepted(true);
        let first = status(&Value::Null, &said(&conditions), "then").unwrap();
        assert_eq!(first["conditions"][0]["lastTransitionTime"], "then");
        assert_eq!(status(&first, &said(&conditions), "now"), None);
        let conditions = accepted(false);
        let changed = status(&first, &said(&conditions), "now").unwrap();
        assert_eq!(changed["conditions"][0]["lastTransitionTime"], "now");
        assert_eq!(changed["conditions"][0]["status"], "False");
        assert_eq!(changed["conditions"][0]["reason"], "Invalid");
    }

    #[test]
    fn another_generation_is_said_without_another_time() {
        let conditions = accepted(true);
        let first = status(&Value::Null, &said(&conditions), "then").unwrap();
        let later = Said {
            generation: 4,
            ..said(&conditions)
        };
        let second = status(&first, &later, "now").unwrap();
        assert_eq!(second["conditions"][0]["observedGeneration"], 4);
        assert_eq!(second["conditions"][0]["lastTransitionTime"], "then");
    }
}

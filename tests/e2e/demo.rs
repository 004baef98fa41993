//! The demo as a user runs it, and what its lines say.

use serde_json::Value;
use sidestep::cli::demo::process::Process;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

const SIDESTEP: &str = env!("CARGO_BIN_EXE_sidestep");

/// The process ids of a process's children.
fn children(parent: u32) -> Vec<u32> {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let ids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    ids.filter(|id| parent_of(*id) == Some(parent)).collect()
}

fn parent_of(id: u32) -> Option<u32> {
    let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    // The name before it, in brackets, may hold anything.
    stat.rsplit_once(')')?
        .1
        .split_whitespace()
        .nth(1)?
        .parse()
        .ok()
}

/// The number of a field that every decision has.
fn number(line: &Value, field: &str) -> f64 {
    line[field]
        .as_f64()
        .unwrap_or_else(|| panic!("{field}: {line}"))
}

/// The check of that name.
fn check<'a>(line: &'a Value, what: &str) -> Option<&'a Value> {
    line["checks"]
        .as_array()
        .unwrap()
        .iter()
        .find(|check| check["what"] == what)
}

/// A bypass must follow from the policy's inequalities on the line's own numbers.
fn bypass_is_justified(line: &Value) {
    let (prompt, net_new) = (
        number(line, "prompt_tokens"),
        number(line, "net_new_tokens"),
    );
    let cached = number(line, "cached_tokens");
    assert_eq!(net_new, prompt - cached.min(prompt), "{line}");
    let threshold = |what: &str| {
        line["thresholds"][what]
            .as_f64()
            .unwrap_or_else(|| panic!("{what}: {line}"))
    };
    match line["because"].as_str().unwrap() {
        "net_new_below_thresholds" => {
            assert!(net_new < threshold("net_new"), "{line}");
            assert!(net_new / prompt < threshold("ratio"), "{line}");
        }
        "cold_prompt_short" => assert!(prompt < threshold("prompt"), "{line}"),
        "prefill_busy" => {
            let busy = check(line, "prefill_busy").unwrap_or_else(|| panic!("{line}"));
            assert!(number(busy, "threshold") < number(busy, "value"), "{line}");
        }
        other => panic!("{other} is no reason of this policy: {line}"),
    }
    if let Some(gate) = check(line, "decode_busy") {
        assert!(number(gate, "value") <= number(gate, "threshold"), "{line}");
    }
    assert!(line["prefill"].is_null(), "{line}");
}

#[test]
fn every_line_of_the_demo_holds_on_its_own_numbers() {
    // The room that deployments of other tests share is for them; this one brings its own.
    let output = Command::new(SIDESTEP)
        .args(["demo", "--json", "--requests", "120"])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{}\n{log}", output.status);
    let text = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")))
        .collect();
    assert_eq!(lines.len(), 120);

    let ids: BTreeSet<&str> = lines
        .iter()
        .map(|line| line["id"].as_str().unwrap())
        .collect();
    assert_eq!(ids.len(), 120, "every decision has its own id");
    let mut reasons: BTreeMap<&str, usize> = BTreeMap::new();
    let mut turns: BTreeMap<(&str, u64), &Value> = BTreeMap::new();
    for line in &lines {
        assert_eq!(line["status"], 200, "{line}");
        assert!(0.0 <= number(line, "ttft_ms"), "{line}");
        assert!(0.0 < number(line, "prompt_tokens"), "{line}");
        assert!(line["decode"].is_string(), "{line}");
        *reasons
            .entry(line["because"].as_str().unwrap())
            .or_default() += 1;
        match line["route"].as_str().unwrap() {
            "remote" => assert!(
                line["prefill"].is_string() && line["bypass"] == false,
                "{line}"
            ),
            "local" => assert!(line["prefill"].is_null(), "{line}"),
            other => panic!("{other}"),
        }
        if line["bypass"] == true {
            bypass_is_justified(line);
        }
        turns.insert(
            (
                line["conversation"].as_str().unwrap(),
                line["turn"].as_u64().unwrap(),
            ),
            line,
        );
    }
    assert!(
        lines.iter().any(|line| line["route"] == "remote"),
        "{reasons:?}"
    );
    assert!(
        lines.iter().any(|line| line["route"] == "local"),
        "{reasons:?}"
    );
    for reason in [
        "net_new_below_thresholds",
        "cold_prompt_short",
        "prefill_busy",
        "net_new_above_threshold",
        "net_new_share_above_threshold",
    ] {
        assert!(reasons.contains_key(reason), "{reason} occurs: {reasons:?}");
    }

    let mut later = 0;
    for ((conversation, turn), line) in &turns {
        let Some(before) = turns.get(&(*conversation, turn.wrapping_sub(1))) else {
            continue;
        };
        if line["bypass"] == true {
            assert_eq!(
                line["decode"], before["decode"],
                "turn {turn} of {conversation} left the pod of its last turn: {line}"
            );
            // Whole blocks of 16 tokens are cached.
            let held = (number(before, "prompt_tokens") / 16.0).floor() * 16.0;
            assert!(
                held <= number(line, "cached_tokens"),
                "turn {turn} of {conversation} is not where its prefix is: {line}"
            );
            later += 1;
        }
    }
    assert!(
        10 <= later,
        "later turns bypass: {later} of {}",
        turns.len()
    );
}

#[tokio::test]
async fn an_interrupted_demo_leaves_no_process_behind() {
    let logs = tempfile::tempdir().unwrap();
    let arguments = ["demo", "--requests", "0", "--keep"];
    let mut demo = Process::spawn("demo", Path::new(SIDESTEP), &arguments, logs.path()).unwrap();
    let id = demo.id().unwrap();
    crate::stack::eventually("the demo is up", async || {
        assert!(demo.ended().is_none(), "{}", demo.log_tail(20));
        demo.log_tail(20).contains("curl").then_some(())
    })
    .await;
    let started = children(id);
    assert_eq!(started.len(), 7, "Envoy, the picker and five engines");
    let names: Vec<PathBuf> = started
        .iter()
        .filter_map(|id| std::fs::read_link(format!("/proc/{id}/exe")).ok())
        .collect();
    assert_eq!(names.len(), 7);
    demo.terminate();
    let ended = tokio::time::timeout(Duration::from_secs(20), demo.wait()).await;
    assert_eq!(ended.expect("it ends").unwrap().code(), Some(143));
    crate::stack::eventually("every process it started is gone", async || {
        let gone = |id: &u32| std::fs::read_link(format!("/proc/{id}/exe")).is_err();
        started.iter().all(gone).then_some(())
    })
    .await;
}

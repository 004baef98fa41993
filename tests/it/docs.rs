//! The tables in the documentation are those of the source.
//!
//! With `SIDESTEP_BLESS=1` the test writes them instead of comparing.

use sidestep::config::conditions::{ConditionReason, ConditionType};
use sidestep::decide::eligibility::Ineligible;
use sidestep::decide::prerequisite::Prerequisite;
use sidestep::decide::reason::Because;
use sidestep::route::names;
use sidestep::telemetry::fields::{EVENTS, SPANS};
use std::fmt::Write;
use std::fs;
use std::path::Path;

fn reasons() -> String {
    let mut table = String::from("| word | meaning |\n| --- | --- |\n");
    for because in Because::ALL {
        writeln!(table, "| `{because}` | {} |", because.meaning()).unwrap();
    }
    table
}

fn headers() -> String {
    let mut table = String::from("| name | direction | meaning |\n| --- | --- | --- |\n");
    for (name, direction, meaning) in names::rows().filter(|row| row.1 != "removed") {
        writeln!(table, "| `{name}` | {direction} | {meaning} |").unwrap();
    }
    let removed: Vec<String> = names::rows()
        .filter(|row| row.1 == "removed")
        .map(|(name, _, _)| format!("`{name}`"))
        .collect();
    writeln!(table, "| {} | removed | |", removed.join(", ")).unwrap();
    table
}

fn attributes() -> String {
    let mut table = String::from("| attribute | meaning |\n| --- | --- |\n");
    for (key, meaning) in sidestep::telemetry::fields::TABLE {
        writeln!(table, "| `{key}` | {meaning} |").unwrap();
    }
    table
}

fn conditions() -> String {
    let mut table = String::from("| word | meaning |\n| --- | --- |\n");
    for kind in ConditionType::ALL {
        writeln!(
            table,
            "| condition `{}` | {} |",
            kind.as_str(),
            kind.meaning()
        )
        .unwrap();
    }
    for reason in ConditionReason::ALL {
        writeln!(
            table,
            "| reason `{}` | {} |",
            reason.as_str(),
            reason.meaning()
        )
        .unwrap();
    }
    table
}

fn same(file: &str, name: &str, table: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
    let text = fs::read_to_string(&path).unwrap();
    let (begin, end) = (
        format!("<!-- begin: {name} -->\n"),
        format!("<!-- end: {name} -->"),
    );
    let from = text
        .find(&begin)
        .unwrap_or_else(|| panic!("{file} has no `{begin}`"))
        + begin.len();
    let to = from
        + text[from..]
            .find(&end)
            .unwrap_or_else(|| panic!("{file} has no `{end}`"));
    if std::env::var_os("SIDESTEP_BLESS").is_some() {
        fs::write(&path, format!("{}{table}{}", &text[..from], &text[to..])).unwrap();
        return;
    }
    assert_eq!(
        &text[from..to],
        table,
        "the table `{name}` of {file} is not that of the source; run the test with SIDESTEP_BLESS=1"
    );
}

#[test]
fn the_readme_lists_every_reason_and_every_header() {
    same("README.md", "reasons", &reasons());
    same("README.md", "headers", &headers());
}

#[test]
fn the_telemetry_page_lists_every_span_attribute() {
    same("docs/telemetry.md", "attributes", &attributes());
    for (name, rows) in [("spans", SPANS), ("events", EVENTS)] {
        let mut table = String::from("| name | meaning |\n| --- | --- |\n");
        for (key, meaning) in rows {
            writeln!(table, "| `{key}` | {meaning} |").unwrap();
        }
        same("docs/telemetry.md", name, &table);
    }
}

#[tokio::test]
async fn the_telemetry_page_lists_every_metric() {
    let text = crate::metrics::everything().await;
    let kinds: std::collections::BTreeMap<&str, &str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '))
        .collect();
    let mut table = String::from("| name | type | meaning |\n| --- | --- | --- |\n");
    let help = text
        .lines()
        .filter_map(|line| line.strip_prefix("# HELP ")?.split_once(' '));
    let rows: std::collections::BTreeMap<&str, &str> = help.collect();
    for (name, meaning) in rows {
        let kind = kinds[name];
        let suffix = if kind == "counter" { "_total" } else { "" };
        let meaning = meaning.trim_end_matches('.');
        writeln!(table, "| `{name}{suffix}` | {kind} | {meaning} |").unwrap();
    }
    same("docs/telemetry.md", "metrics", &table);
}

#[test]
fn the_policy_page_lists_every_key_and_every_condition() {
    same("docs/policy.md", "policy", &sidestep::config::crd::table());
    same("docs/policy.md", "conditions", &conditions());
}

#[test]
fn the_explain_page_lists_why_pods_are_left_out_and_what_policies_need() {
    let words = |rows: Vec<(&str, &str)>| {
        let mut table = String::from("| word | meaning |\n| --- | --- |\n");
        for (word, meaning) in rows {
            writeln!(table, "| `{word}` | {meaning} |").unwrap();
        }
        table
    };
    let ineligible = Ineligible::ALL.iter();
    let rows = ineligible.map(|word| (word.as_str(), word.meaning()));
    same("docs/explain.md", "ineligible", &words(rows.collect()));
    let needs = Prerequisite::ALL.iter();
    let rows = needs.map(|word| (word.as_str(), word.meaning()));
    same("docs/explain.md", "prerequisites", &words(rows.collect()));
}

#[test]
fn the_examples_of_the_readme_are_valid() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let readme = fs::read_to_string(root.join("README.md")).unwrap();
    let fenced = readme.split("```yaml\n").skip(1);
    let examples: Vec<&str> = fenced
        .map(|rest| rest.split("```").next().unwrap())
        .collect();
    let folder = tempfile::tempdir().unwrap();
    let names = ["sidestep.yaml", "pods.yaml", "policy.yaml"];
    assert_eq!(examples.len(), names.len());
    for (name, example) in names.iter().zip(examples) {
        fs::write(folder.path().join(name), example).unwrap();
    }
    let tokenizer = folder.path().join("llama/tokenizer.json");
    fs::create_dir(tokenizer.parent().unwrap()).unwrap();
    fs::copy(root.join("src/prompt/builtin/tokenizer.json"), tokenizer).unwrap();
    let loaded = sidestep::config::load(&folder.path().join("sidestep.yaml")).unwrap();
    assert_eq!(loaded.pods.len(), 2);
    let warnings: Vec<String> = loaded.warnings.iter().map(ToString::to_string).collect();
    assert!(warnings.is_empty(), "{warnings:?}");
}

#[test]
fn the_readme_is_short() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md");
    let lines = fs::read_to_string(path).unwrap().lines().count();
    assert!(lines <= 300, "README.md has {lines} lines; 300 is the most");
}

//! `sidestep check`, `crd` and `policy` as commands: output and exit codes.

use serde_json::Value;
use std::process::{Command, Output};
use tempfile::TempDir;

fn sidestep(folder: &TempDir, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sidestep"));
    let variables: Vec<String> = std::env::vars()
        .map(|(name, _)| name)
        .filter(|name| name.starts_with("DYN_"))
        .collect();
    for variable in variables {
        command.env_remove(variable);
    }
    command
        .current_dir(folder.path())
        .args(arguments)
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

const HEAD: &str =
    "apiVersion: sidestep.dev/v1alpha1\nkind: DisaggregationPolicy\nmetadata: {name: p}\n";

fn files() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, spec) in [
        ("good.yaml", "spec: {rules: [{bypass: {type: Always}}]}\n"),
        (
            "warned.yaml",
            "spec: {rules: [{bypass: {type: Always, coldBypassBelow: 1}}]}\n",
        ),
        (
            "bad.yaml",
            "spec: {rules: [{bypass: {type: Alway, decodeBusyThreshold: -1}}]}\n",
        ),
    ] {
        std::fs::write(folder.path().join(name), format!("{HEAD}{spec}")).unwrap();
    }
    folder
}

#[test]
fn the_exit_code_says_valid_warned_or_invalid() {
    let folder = files();
    for (arguments, code) in [
        (&["good.yaml"][..], 0),
        (&["--strict", "good.yaml"], 0),
        (&["warned.yaml", "good.yaml"], 0),
        (&["--strict", "good.yaml", "warned.yaml"], 1),
        (&["bad.yaml"], 2),
        (&["--strict", "bad.yaml", "warned.yaml"], 2),
        (&["good.yaml", "nowhere.yaml"], 2),
    ] {
        for form in ["text", "json"] {
            let arguments = [&["check", "--output", form], arguments].concat();
            assert_eq!(
                sidestep(&folder, &arguments).status.code(),
                Some(code),
                "{arguments:?}"
            );
        }
    }
}

#[test]
fn text_has_a_line_per_finding_and_per_valid_file() {
    let folder = files();
    let output = sidestep(&folder, &["check", "bad.yaml", "warned.yaml"]);
    assert_eq!(
        text(&output.stdout),
        "spec.rules[0].bypass.type: expected Never, Always, IslBounding, PrefillLoad or IslOrLoad, found the text \
         \"Alway\"; is Always meant? (bad.yaml, line 4, column 32)\n\
         spec.rules[0].bypass.decodeBusyThreshold: expected a number from 0 to 1000000, found -1 (bad.yaml, line 4, \
         column 60)\n\
         warning: spec.rules[0].bypass.coldBypassBelow: has no effect: the type Always does not look at net-new \
         tokens (warned.yaml, line 4, column 57)\n\
         warned.yaml: valid\n"
    );
}

#[test]
fn json_is_a_list_of_findings_with_their_places() {
    let folder = files();
    let output = sidestep(
        &folder,
        &[
            "check",
            "--output",
            "json",
            "bad.yaml",
            "warned.yaml",
            "nowhere.yaml",
        ],
    );
    let found: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(found.len(), 4);
    assert_eq!(
        found[0],
        serde_json::json!({
            "file": "bad.yaml",
            "path": "spec.rules[0].bypass.type",
            "line": 4,
            "column": 32,
            "severity": "error",
            "message": "expected Never, Always, IslBounding, PrefillLoad or IslOrLoad, found the text \"Alway\"",
            "hint": "is Always meant?",
        })
    );
    assert_eq!(found[2]["severity"], "warning");
    assert_eq!(
        (&found[3]["file"], &found[3]["line"]),
        (&"nowhere.yaml".into(), &Value::Null)
    );
    let none = sidestep(&folder, &["check", "--output", "json", "good.yaml"]);
    assert_eq!(text(&none.stdout), "[]\n");
}

#[test]
fn the_crd_is_printed_as_it_is_in_the_repository() {
    let folder = files();
    let output = sidestep(&folder, &["crd"]);
    assert_eq!(output.status.code(), Some(0));
    let file = std::fs::read_to_string("manifests/crds/disaggregationpolicies.yaml").unwrap();
    assert_eq!(text(&output.stdout), file);
}

#[test]
fn a_translation_prints_the_policy_alone_and_the_notes_beside_it() {
    let folder = files();
    let at = |name: &str| folder.path().join(name);
    std::fs::write(
        at("dynamo.json"),
        r#"{"eff_isl_threshold": 100, "decode_busy_threshold": 0.8}"#,
    )
    .unwrap();
    let output = sidestep(&folder, &["policy", "from-dynamo", "dynamo.json"]);
    assert_eq!(output.status.code(), Some(0));
    std::fs::write(at("out.yaml"), &output.stdout).unwrap();
    assert_eq!(
        sidestep(&folder, &["check", "--strict", "out.yaml"])
            .status
            .code(),
        Some(0)
    );
    let notes = text(&output.stderr);
    assert!(notes.lines().count() >= 4, "{notes}");
    for line in notes.lines() {
        let sort = line.split(':').next().unwrap();
        assert!(
            ["differs", "no equivalent", "assumed"].contains(&sort),
            "{line}"
        );
    }

    std::fs::write(at("bad.json"), r#"{"policy": "never"}"#).unwrap();
    let output = sidestep(&folder, &["policy", "from-dynamo", "bad.json"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(output.stdout.is_empty());
    assert!(text(&output.stderr).starts_with("policy: expected isl_bounding"));

    let output = sidestep(&folder, &["policy", "from-dynamo", "--env"]);
    assert!(text(&output.stdout).contains("type: Never"));
    let output = sidestep(&folder, &["policy", "from-llm-d", "good.yaml"]);
    assert_eq!(output.status.code(), Some(2));
    let output = sidestep(&folder, &["policy", "from-llm-d", "nowhere.yaml"]);
    assert_eq!(output.status.code(), Some(1));
}

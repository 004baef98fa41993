//! A running process whose files change: what it says of the policy in force.

use serde_json::Value;
use sidestep::app::App;
use sidestep::config;
use sidestep::pick::{Head, InForce, Picked};
use sidestep::route::{Dialect, HeaderEdit};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;
use tempfile::TempDir;

/// Long enough for a busy machine; a file is looked at twice a second.
const PATIENCE: Duration = Duration::from_secs(30);

const PODS: &str = "pods:
- name: d
  address: '127.0.0.1:1'
  role: decode
  probe: off
  kvEvents: {address: '127.0.0.1:2'}
";

fn policy(name: &str, bypass: &str, more: &str) -> String {
    format!(
        "apiVersion: sidestep.dev/v1alpha1\nkind: DisaggregationPolicy\nmetadata: {{name: {name}}}\n\
         spec:\n  rules: [{{bypass: {{{bypass}}}}}]\n{more}"
    )
}

/// A mounted ConfigMap: its files are links through `..data`, which is swapped as a whole.
struct Mounted {
    folder: TempDir,
    versions: usize,
}

impl Mounted {
    fn new(files: &[(&str, &str)]) -> Mounted {
        let folder = tempfile::tempdir().unwrap();
        let mut mounted = Mounted {
            folder,
            versions: 0,
        };
        mounted.swap(files);
        for (name, _) in files {
            symlink(Path::new("..data").join(name), mounted.path(name)).unwrap();
        }
        mounted
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn swap(&mut self, files: &[(&str, &str)]) {
        let before = self.path(&format!("..{}", self.versions));
        self.versions += 1;
        let version = format!("..{}", self.versions);
        let data = self.path(&version);
        std::fs::create_dir(&data).unwrap();
        for (name, content) in files {
            std::fs::write(data.join(name), content).unwrap();
        }
        let fresh = self.path("..data_tmp");
        symlink(version, &fresh).unwrap();
        std::fs::rename(fresh, self.path("..data")).unwrap();
        let _ = std::fs::remove_dir_all(before);
    }
}

/// A running `sidestep serve`.
struct Process {
    child: Child,
    lines: Receiver<Value>,
    admin: String,
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Process {
    fn start(config: &Path) -> Process {
        let mut child = Command::new(env!("CARGO_BIN_EXE_sidestep"))
            .args(["--log-json", "--log", "info", "serve", "--config"])
            .arg(config)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                if let Ok(line) = serde_json::from_str(&line) {
                    let _ = sender.send(line);
                }
            }
        });
        let mut process = Process {
            child,
            lines,
            admin: String::new(),
        };
        let serving = process.said(|fields| fields["message"] == "serving");
        process.admin = serving["admin"].as_str().unwrap().to_owned();
        process
    }

    /// The fields of the next line in the log for which `sought` is true.
    fn said(&self, sought: impl Fn(&Value) -> bool) -> Value {
        loop {
            let line = self
                .lines
                .recv_timeout(PATIENCE)
                .expect("the line is logged");
            if sought(&line["fields"]) {
                return line["fields"].clone();
            }
        }
    }

    fn get(&self, path: &str) -> String {
        let mut stream = TcpStream::connect(&self.admin).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        write!(
            stream,
            "GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200"), "{head}");
        body.to_owned()
    }

    fn policy(&self) -> Value {
        serde_json::from_str(&self.get("/v1/policy")).unwrap()
    }

    /// Status and reason of a condition.
    fn condition(&self, kind: &str) -> (String, String) {
        let policy = self.policy();
        let mut conditions = policy["conditions"].as_array().unwrap().iter();
        let one = conditions.find(|one| one["type"] == kind).unwrap();
        let text = |key: &str| one[key].as_str().unwrap().to_owned();
        (text("status"), text("reason"))
    }

    fn wait_for(&self, kind: &str, reason: &str) {
        self.said(|fields| fields["condition"] == kind && fields["reason"] == reason);
    }

    fn failures(&self) -> u64 {
        let metrics = self.get("/metrics");
        let mut lines = metrics.lines();
        let line = lines
            .find_map(|line| line.strip_prefix("sidestep_config_reload_failures_total "))
            .unwrap();
        line.parse().unwrap()
    }
}

fn state(condition: (&str, &str)) -> (String, String) {
    (condition.0.to_owned(), condition.1.to_owned())
}

#[test]
fn a_mounted_policy_is_followed_and_a_bad_one_leaves_the_old_in_force() {
    let config = "apiVersion: sidestep.dev/v1alpha1
kind: SidestepConfig
listen: {extProc: '127.0.0.1:0', health: '127.0.0.1:0', admin: '127.0.0.1:0'}
pods: {file: pods.yaml}
policy: {file: policy.yaml}
";
    let first = policy("first", "type: IslBounding", "");
    let files = |policy: &str, pods: &str| {
        [
            ("sidestep.yaml", config.to_owned()),
            ("pods.yaml", pods.to_owned()),
            ("policy.yaml", policy.to_owned()),
        ]
    };
    let swap = |mounted: &mut Mounted, policy: &str, pods: &str| {
        let files = files(policy, pods);
        mounted.swap(
            &files
                .each_ref()
                .map(|(name, content)| (*name, content.as_str())),
        );
    };
    let start = files(&first, PODS);
    let mut mounted = Mounted::new(
        &start
            .each_ref()
            .map(|(name, content)| (*name, content.as_str())),
    );
    let process = Process::start(&mounted.path("sidestep.yaml"));
    let policy_now = process.policy();
    assert_eq!(
        (&policy_now["name"], &policy_now["generation"]),
        (&"first".into(), &1.into())
    );
    assert_eq!(policy_now["dialect"], "decodeFirst");
    for kind in ["Accepted", "ResolvedRefs", "Effective"] {
        assert_eq!(process.condition(kind).0, "True", "{kind}");
    }

    // Another policy, with another dialect: both are in force at once.
    let second = policy(
        "second",
        "type: Always",
        "  handoff: {dialect: prefillFirst}\n",
    );
    swap(&mut mounted, &second, PODS);
    process.said(|fields| fields["message"] == "policy in force" && fields["generation"] == 2);
    let policy_now = process.policy();
    assert_eq!(
        (&policy_now["name"], &policy_now["generation"]),
        (&"second".into(), &2.into())
    );
    assert_eq!(policy_now["dialect"], "prefillFirst");
    assert_eq!(process.failures(), 0);

    // A bad one changes nothing but what is said of it.
    swap(&mut mounted, &second.replace("Always", "Sometimes"), PODS);
    process.wait_for("Accepted", "Invalid");
    let policy_now = process.policy();
    assert_eq!(
        (&policy_now["name"], &policy_now["generation"]),
        (&"second".into(), &2.into())
    );
    assert_eq!(process.condition("Accepted"), state(("False", "Invalid")));
    assert_eq!(
        process.condition("Effective"),
        state(("False", "NotAccepted"))
    );
    assert!(
        policy_now
            .to_string()
            .contains("spec.rules[0].bypass.type: expected Never, Always")
    );
    assert_eq!(process.failures(), 1);

    // The next good one is picked up.
    let third = policy("third", "type: IslBounding", "");
    swap(&mut mounted, &third, PODS);
    process.wait_for("Accepted", "Accepted");
    assert_eq!(process.policy()["generation"], 3);
    assert_eq!(process.condition("Effective"), state(("True", "Effective")));

    // The files are judged together, whichever of them changes.
    swap(
        &mut mounted,
        &third,
        &PODS.replace("  kvEvents: {address: '127.0.0.1:2'}\n", ""),
    );
    process.said(|fields| {
        let message = fields["message"].as_str().unwrap_or_default();
        message.starts_with(
            "the policy compares net-new tokens, and no kvEvents are configured for \"d\"",
        )
    });
    process.wait_for("Effective", "NothingBypasses");
    assert_eq!(
        process.condition("Effective"),
        state(("False", "NothingBypasses"))
    );
    assert_eq!(process.policy()["generation"], 3);
    swap(&mut mounted, "", PODS);
    process.wait_for("Accepted", "Invalid");
    assert_eq!(process.failures(), 2);
    assert_eq!(process.policy()["name"], "third");
}

/// What must never start, each with the place of its fault.
#[test]
fn a_policy_that_can_never_work_stops_the_start_at_once() {
    let bad = [
        (
            "type: IslBounding, effectiveIslRatioThreshold: 1.5",
            "effectiveIslRatioThreshold: expected a number from 0 to 1",
        ),
        (
            "type: IslBounding, effectiveIslRatioThreshold: -1",
            "effectiveIslRatioThreshold: expected a number from 0 to 1",
        ),
        (
            "type: IslBounding, effectiveIslRatioThreshold: .nan",
            "effectiveIslRatioThreshold: expected a number from 0 to 1",
        ),
        (
            "type: IslBounding, effectiveIslThreshold: \"2k\"",
            "effectiveIslThreshold: expected a whole number",
        ),
        (
            "type: IslBounding, eff_isl_treshold: 10",
            "eff_isl_treshold: expected a known key",
        ),
    ];
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    std::fs::write(
        path("sidestep.yaml"),
        "apiVersion: sidestep.dev/v1alpha1\nkind: SidestepConfig\n\
         pods: {inline: [{name: d, address: '127.0.0.1:1', role: decode}]}\npolicy: {file: policy.yaml}\n",
    )
    .unwrap();
    let texts = bad
        .map(|(bypass, said)| (policy("p", bypass, ""), said.to_owned()))
        .into_iter()
        .chain([
            (
                String::new(),
                "file: expected a DisaggregationPolicy, found an empty file".to_owned(),
            ),
            (
                "spec:\n\trules: []\n".to_owned(),
                "file: expected spaces, found a tab".to_owned(),
            ),
        ]);
    for (text, said) in texts {
        std::fs::write(path("policy.yaml"), &text).unwrap();
        let output = Command::new(env!("CARGO_BIN_EXE_sidestep"))
            .arg("serve")
            .arg("--config")
            .arg(path("sidestep.yaml"))
            .output()
            .unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{text}\n{stderr}");
        assert!(
            stderr.contains(&said) && stderr.contains("policy.yaml"),
            "{text}\n{stderr}"
        );
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
    }
}

fn edits(picked: &Picked) -> Vec<&'static str> {
    let names = picked.plan.edits.iter().filter_map(|edit| match edit {
        HeaderEdit::Set(name, _) => Some(*name),
        HeaderEdit::Remove(_) => None,
    });
    names.filter(|name| name.ends_with("host-port")).collect()
}

#[tokio::test]
async fn a_request_keeps_the_policy_it_was_decided_by() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sidestep.yaml");
    std::fs::write(
        &path,
        "apiVersion: sidestep.dev/v1alpha1
kind: SidestepConfig
listen: {extProc: '127.0.0.1:0', health: '127.0.0.1:0', admin: '127.0.0.1:0'}
pods:
  inline:
  - {name: d, address: '127.0.0.1:1', role: decode, probe: off}
  - {name: p, address: '127.0.0.1:2', role: prefill, probe: off}
policy: {inline: {rules: [{bypass: {type: Never}}]}}
",
    )
    .unwrap();
    let app = App::start(config::load(&path).unwrap()).await.unwrap();
    let picker = Arc::clone(app.picker());
    let ask = || {
        let head = Head {
            method: "POST".to_owned(),
            path: "/v1/completions".to_owned(),
            ..Head::default()
        };
        picker.pick(head, Some(r#"{"model": "m", "prompt": "hello"}"#.into()))
    };
    let before = ask().await.unwrap();
    picker.set_policy(InForce {
        dialect: Dialect::PrefillFirst,
        ..(*picker.in_force()).clone()
    });
    let after = ask().await.unwrap();
    assert_eq!(edits(&before), ["x-prefiller-host-port"]);
    assert_eq!(edits(&after), ["x-decoder-host-port"]);
    before.flight.finish();
    after.flight.finish();
    let records = picker.journal().after(0, 10);
    let generations: Vec<Value> = records
        .iter()
        .map(|record| serde_json::to_value(&**record).unwrap()["generation"].clone())
        .collect();
    assert_eq!(generations, [1, 2]);
}

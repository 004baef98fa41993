//! The decision page in a real Chromium, driven by `page.mjs` (Node, playwright-core, axe-core).
//!
//! Each test brings up a picker and hands its address to one scenario of `page.mjs`. Needs `npm ci` in
//! this folder and a Chromium (`CHROMIUM`, or one on the path); `tests/run browser` sees to both.
//! Screenshots are left under `target/tmp/browser`.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests fail the test, as the tests do"
)]

mod fleet;
mod scenario;

use fleet::{Fleet, Pods};
use scenario::{PATIENCE, scenario};
use std::process::Stdio;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};

const SIDESTEP: &str = env!("CARGO_BIN_EXE_sidestep");
#[tokio::test(flavor = "multi_thread")]
async fn a_fleet_in_trouble_is_shown_filtered_explained_and_decided_again_by_mouse_and_keyboard() {
    let fleet = Fleet::start(Pods::Trouble, "").await;
    fleet.traffic(20);
    let policy = fleet.policy_file();
    let settings = [("PAGE", fleet.url()), ("POLICY_FILE", policy)];
    scenario("trouble", &settings).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_pods_are_a_map_a_bounded_list_and_decisions_that_open() {
    let fleet = Fleet::start(Pods::Thousand, "").await;
    fleet.traffic(100);
    scenario("thousand", &[("PAGE", fleet.url())]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn with_a_token_the_page_asks_for_it_and_shows_nothing_before() {
    let secret = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(secret.path(), "correct-horse-battery\n").unwrap();
    let admin = format!(
        "admin:\n  token: {{file: \"{}\"}}\n  traceLink: \"http://traces.example/{{trace_id}}\"\n",
        secret.path().display()
    );
    let fleet = Fleet::start(Pods::Trouble, &admin).await;
    fleet.traffic(20);
    let settings = [("PAGE", fleet.url()), ("TOKEN", "correct-horse-battery")];
    scenario("token", &settings).await;
}

/// A demo that goes on until it is dropped.
struct Demo {
    child: Child,
    page: String,
    chat: String,
}

impl Demo {
    async fn start() -> Demo {
        let mut child = Command::new(SIDESTEP)
            .args(["demo", "--keep", "--requests=60", "--time-scale=1"])
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let (mut page, mut chat) = (None, None);
        let found = async {
            while page.is_none() || chat.is_none() {
                let line = lines.next_line().await.unwrap();
                let line = line.expect("the demo says where its page is");
                let address = |line: &str| {
                    let from = line.find("http://")?;
                    line[from..].split_whitespace().next().map(str::to_owned)
                };
                if line.trim_start().starts_with("page ") {
                    page = address(&line);
                } else if line.contains("curl ") {
                    chat = address(&line);
                }
            }
        };
        tokio::time::timeout(PATIENCE, found)
            .await
            .expect("the demo comes up in time");
        // What it says further is read, so that it never waits for a reader.
        tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
        Demo {
            child,
            page: page.unwrap(),
            chat: chat.unwrap(),
        }
    }

    /// Ends it as Ctrl-C would, so that its own children end too.
    async fn stop(mut self) {
        let id = rustix::process::Pid::from_raw(self.child.id().unwrap() as i32).unwrap();
        rustix::process::kill_process(id, rustix::process::Signal::INT).unwrap();
        self.child.wait().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_page_follows_requests_through_a_whole_deployment() {
    let demo = Demo::start().await;
    scenario("demo", &[("PAGE", &demo.page), ("CHAT", &demo.chat)]).await;
    demo.stop().await;
}

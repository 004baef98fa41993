//! A picker in this process with made-up pods and made-up traffic.

use bytes::Bytes;
use sidestep::app::App;
use sidestep::decide::snapshot::Availability;
use sidestep::fleet::Reported;
use sidestep::pick::{Head, Headers, Picker};
use sidestep::units::{Blocks, Ratio};
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, sleep};

const POLICY: &str = "apiVersion: sidestep.dev/v1alpha1
kind: DisaggregationPolicy
metadata: {name: night-shift}
spec:
  shadow: {file: shadow.yaml}
  rules:
  - match: {models: [chat-large]}
    bypass: {type: PrefillLoad, prefillBusyThreshold: 0.5}
  - bypass: {type: IslOrLoad, effectiveIslThreshold: 512, effectiveIslRatioThreshold: 0.5, coldBypassBelow: 256, prefillBusyThreshold: 0.9, decodeBusyThreshold: 0.9}
";
const SHADOW: &str = "apiVersion: sidestep.dev/v1alpha1
kind: DisaggregationPolicy
metadata: {name: always-remote}
spec: {rules: [{bypass: {type: Never}}]}
";
/// Between two bursts of requests.
const TICK: Duration = Duration::from_millis(20);

/// Which pods.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Pods {
    /// A few, two of them in trouble.
    Trouble,
    /// A thousand, a few of them in trouble.
    Thousand,
}

pub(crate) struct Fleet {
    picker: Arc<Picker>,
    url: String,
    policy: String,
    tasks: parking_lot::Mutex<JoinSet<()>>,
    _folder: TempDir,
}

impl Fleet {
    pub(crate) async fn start(pods: Pods, admin: &str) -> Fleet {
        let folder = tempfile::tempdir().unwrap();
        let policy = folder.path().join("policy.yaml");
        std::fs::write(&policy, POLICY).unwrap();
        std::fs::write(folder.path().join("shadow.yaml"), SHADOW).unwrap();
        std::fs::write(folder.path().join("pods.yaml"), pods.file()).unwrap();
        let config = format!(
            "apiVersion: sidestep.dev/v1alpha1
kind: SidestepConfig
listen: {{extProc: '127.0.0.1:0', health: '127.0.0.1:0', admin: '127.0.0.1:0'}}
tls: {{mode: Plaintext}}
models: [{{name: chat-small}}, {{name: chat-large}}]
pods: {{file: pods.yaml}}
policy: {{file: policy.yaml}}
{admin}"
        );
        let file = folder.path().join("picker.yaml");
        std::fs::write(&file, config).unwrap();
        let app = App::start(sidestep::config::load(&file).unwrap())
            .await
            .unwrap();
        let (picker, url) = (
            Arc::clone(app.picker()),
            format!("http://{}", app.bound().admin),
        );
        let mut tasks = JoinSet::new();
        tasks.spawn(async move { app.run(std::future::pending()).await.unwrap() });
        tasks.spawn(reports(Arc::clone(&picker)));
        Fleet {
            picker,
            url,
            policy: policy.to_str().unwrap().to_owned(),
            tasks: parking_lot::Mutex::new(tasks),
            _folder: folder,
        }
    }

    /// Where its page is.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// The policy, which is watched.
    pub(crate) fn policy_file(&self) -> &str {
        &self.policy
    }

    /// Sends `rate` requests a second until the fleet is dropped.
    pub(crate) fn traffic(&self, rate: usize) {
        self.tasks
            .lock()
            .spawn(traffic(Arc::clone(&self.picker), rate));
    }
}

impl Pods {
    fn file(self) -> String {
        let mut text = String::from("pods:\n");
        let mut pod = |name: String, role: &str, number: usize, more: &str| {
            let (high, low) = (number / 250, number % 250 + 1);
            writeln!(
                text,
                "- {{name: {name}, address: '127.1.{high}.{low}:8000', role: {role}, probe: 'off', \
                 capacity: {{kvBlocks: 2000, prefillTokens: 2048}}{more}}}"
            )
            .unwrap();
        };
        match self {
            Pods::Trouble => {
                for number in 0..2 {
                    pod(format!("prefill-{}", number + 1), "prefill", number, "");
                }
                for number in 2..6 {
                    // Nobody publishes there.
                    let events = ", kvEvents: {address: 'tcp://127.0.0.1:9'}";
                    let more = if number == 5 { events } else { "" };
                    pod(format!("decode-{}", number - 1), "decode", number, more);
                }
            }
            Pods::Thousand => {
                for number in 0..1000 {
                    let role = if number < 250 { "prefill" } else { "decode" };
                    pod(format!("{role}-{number:04}"), role, number, "");
                }
            }
        }
        text
    }
}

/// Engines that say how they are, and some that do not answer.
async fn reports(picker: Arc<Picker>) {
    let mut ticks = interval(Duration::from_millis(500));
    loop {
        ticks.tick().await;
        for pod in &picker.observer().roster.view().pods {
            let name = &*pod.spec.name;
            let number: usize = name.rsplit('-').next().unwrap().parse().unwrap();
            let availability = match number {
                _ if name == "decode-2" => Availability::Unreachable,
                401 | 402 | 777 => Availability::Unreachable,
                120 | 640 => Availability::NotReady,
                900 => Availability::Draining,
                _ => Availability::Ready,
            };
            pod.status().set_availability(availability);
            if availability == Availability::Ready {
                let load = picker.ledger().load(pod.id);
                let usage = f64::from(load.decode_blocks.0) / 2000.0 + 0.1;
                let report = Reported {
                    waiting: Some(load.requests / 4),
                    running: Some(load.requests),
                    kv_usage: Ratio::new(usage.min(1.0)),
                    kv_blocks: Some(Blocks(2000)),
                    ..Reported::default()
                };
                pod.status().record(&report, Instant::now());
            }
        }
    }
}

async fn traffic(picker: Arc<Picker>, rate: usize) {
    let mut ticks = interval(TICK);
    // What a busy machine does not get done in time is left out: a backlog would load it for ever.
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut requests = JoinSet::new();
    let (mut sent, mut due) = (0, 0.0);
    loop {
        ticks.tick().await;
        due += rate as f64 * TICK.as_secs_f64();
        while (sent as f64) < due {
            requests.spawn(request(Arc::clone(&picker), sent));
            sent += 1;
        }
        while requests.try_join_next().is_some() {}
    }
}

async fn request(picker: Arc<Picker>, number: usize) {
    let model = if number.is_multiple_of(4) {
        "chat-large"
    } else {
        "chat-small"
    };
    // 30 to some 1,600 tokens, estimated at four bytes each.
    let words = 25 + number * 7919 % 1300;
    let body = format!(
        r#"{{"model":"{model}","prompt":"{}"}}"#,
        "word ".repeat(words)
    );
    let head = Head {
        method: "POST".into(),
        path: "/v1/completions".into(),
        headers: Headers::default(),
        ..Head::default()
    };
    let Ok(picked) = picker.pick(head, Some(Bytes::from(body))).await else {
        return;
    };
    let mut flight = picked.flight;
    // As a gateway's stream does once its answer is out.
    flight.settle();
    sleep(Duration::from_millis(20 + (words / 4) as u64)).await;
    flight.response_headers(Some(200), None);
    flight.first_bytes();
    sleep(Duration::from_millis(300)).await;
    if !number.is_multiple_of(50) {
        flight.finish();
    }
}

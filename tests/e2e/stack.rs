//! A deployment for one test: Envoy, the picker, engines, each a process of its own.
//!
//! Lives here: [`Setup`] (what a test wants), [`Stack`] (what it gets), waiting for conditions.
//! Never here: assertions about the picker.
//! Invariant: a stack that is dropped leaves no process; when its test fails, its logs are printed.

use crate::recorder::Recorder;
use bytes::Bytes;
use http::{Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use serde_json::{Value, json};
use sidestep::cli::demo::client::{Answer, Client};
use sidestep::cli::demo::envoy;
use sidestep::cli::demo::gateway::{GatewayConfig, Pods};
use sidestep::cli::demo::picker::{MODEL, PickerConfig, Pod};
use sidestep::cli::demo::process::{Process, free_addresses};
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, SemaphorePermit};

/// The program under test.
const SIDESTEP: &str = env!("CARGO_BIN_EXE_sidestep");
/// How long a condition may take to come true.
const DEADLINE: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(20);
/// Deployments at once, whatever the number of test threads: each has processes of its own.
static ROOM: Semaphore = Semaphore::const_new(2);

/// Bypass when less than half of the prompt is new; everything else goes remote.
pub(crate) const POLICY: &str = "
apiVersion: sidestep.dev/v1alpha1
kind: DisaggregationPolicy
metadata: {name: test}
spec:
  rules:
  - bypass: {type: IslBounding, effectiveIslThreshold: 4096, effectiveIslRatioThreshold: 0.5}
";

/// What a test wants.
pub(crate) struct Setup {
    pub(crate) pods: Vec<Pod>,
    pub(crate) policy: String,
    /// Keys and values of the picker's `limits`.
    pub(crate) limits: Vec<(&'static str, &'static str)>,
    /// Where spans go.
    pub(crate) otlp: Option<SocketAddr>,
    /// Changes to the gateway's configuration.
    pub(crate) gateway: Box<dyn Fn(&mut GatewayConfig) + Send>,
    /// Filters of Envoy's before the picker's, in YAML.
    pub(crate) filters: String,
    /// Further sections of the picker's config, in YAML.
    pub(crate) sections: String,
}

impl Setup {
    pub(crate) fn new(pods: Vec<Pod>) -> Setup {
        Setup {
            pods,
            policy: POLICY.into(),
            limits: Vec::new(),
            otlp: None,
            gateway: Box::new(|_| ()),
            filters: String::new(),
            sections: String::new(),
        }
    }

    pub(crate) fn gateway(mut self, change: impl Fn(&mut GatewayConfig) + Send + 'static) -> Setup {
        self.gateway = Box::new(change);
        self
    }

    pub(crate) fn limit(mut self, key: &'static str, value: &'static str) -> Setup {
        self.limits.push((key, value));
        self
    }

    pub(crate) fn policy(mut self, policy: &str) -> Setup {
        self.policy = policy.into();
        self
    }
}

/// A simulated engine on free ports.
pub(crate) fn engine(name: &str, role: &'static str) -> Pod {
    let [address, events, replay] = free_addresses().unwrap();
    Pod {
        name: name.into(),
        address,
        role,
        events: Some(events),
        replay: Some(replay),
        batch_tokens: 8192,
    }
}

/// A recorder as a pod of the picker's: no KV events, nothing to ask it.
pub(crate) fn recorded(name: &str, role: &'static str, recorder: &Recorder) -> Pod {
    Pod {
        name: name.into(),
        address: recorder.address,
        role,
        events: None,
        replay: None,
        batch_tokens: 8192,
    }
}

/// A running deployment.
pub(crate) struct Stack {
    pub(crate) gateway: SocketAddr,
    pub(crate) admin: SocketAddr,
    pub(crate) client: Client,
    envoy: Process,
    picker: Option<Process>,
    engines: Vec<Process>,
    folder: tempfile::TempDir,
    _room: SemaphorePermit<'static>,
}

impl Drop for Stack {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        for process in self.engines.iter().chain(&self.picker).chain([&self.envoy]) {
            eprintln!("---- {}\n{}", process.name(), process.log_tail(60));
        }
    }
}

impl Stack {
    /// Starts everything and waits until every pod is ready.
    pub(crate) async fn start(setup: Setup) -> Stack {
        let stack = Stack::start_without_waiting(setup).await;
        stack.wait_until_ready().await;
        stack
    }

    pub(crate) async fn start_without_waiting(setup: Setup) -> Stack {
        let room = ROOM.acquire().await.unwrap();
        let folder = tempfile::tempdir().unwrap();
        let [gateway, ext_proc, health, admin] = free_addresses().unwrap();
        let destinations = setup.pods.iter().filter(|pod| pod.role != "prefill");
        let mut config = GatewayConfig::new(
            gateway,
            ext_proc,
            destinations.map(|pod| pod.address).collect(),
        );
        (setup.gateway)(&mut config);
        let path = folder.path();
        const PICKER_FILTER: &str = "          - name: envoy.filters.http.ext_proc\n";
        let envoy_yaml = config.to_yaml().unwrap();
        assert!(envoy_yaml.contains(PICKER_FILTER));
        let filters = format!("{}{PICKER_FILTER}", setup.filters);
        let envoy_yaml = envoy_yaml.replacen(PICKER_FILTER, &filters, 1);
        std::fs::write(path.join("envoy.yaml"), envoy_yaml).unwrap();
        std::fs::write(path.join("policy.yaml"), &setup.policy).unwrap();
        let limits = setup
            .limits
            .iter()
            .map(|(key, value)| ((*key).into(), (*value).into()));
        let picker_config = PickerConfig {
            ext_proc,
            health,
            admin,
            transport: config.transport,
            limits: limits.collect(),
            pods: setup.pods.clone(),
            policy: path.join("policy.yaml"),
            otlp: setup.otlp,
        };
        let picker_yaml = picker_config.to_yaml().unwrap() + &setup.sections;
        std::fs::write(path.join("picker.yaml"), picker_yaml).unwrap();
        let mut engines = Vec::new();
        for pod in setup.pods.iter().filter(|pod| pod.events.is_some()) {
            engines.push(
                Process::spawn(
                    &pod.name,
                    Path::new(SIDESTEP),
                    &pod.engine_arguments(0.0),
                    path,
                )
                .unwrap(),
            );
        }
        let picker = Some(spawn_picker(path));
        let envoy = envoy::find().await.unwrap();
        let config = path.join("envoy.yaml").to_string_lossy().into_owned();
        let arguments = [
            "-c",
            &config,
            "--disable-hot-restart",
            "--concurrency",
            "1",
            "--log-level",
            "warning",
        ];
        let envoy = Process::spawn("envoy", &envoy, &arguments, path).unwrap();
        Stack {
            gateway,
            admin,
            client: Client::default(),
            envoy,
            picker,
            engines,
            folder,
            _room: room,
        }
    }

    /// Waits until the picker has every pod ready and Envoy answers.
    pub(crate) async fn wait_until_ready(&self) {
        eventually("every pod is ready", async || {
            let pods = self.pods().await?;
            let ready =
                |pod: &Value| pod["availability"] == "ready" && pod["kv_source"] != "syncing";
            (!pods.is_empty() && pods.iter().all(ready)).then_some(())
        })
        .await;
        eventually("Envoy listens", async || {
            TcpStream::connect(self.gateway).await.ok()
        })
        .await;
    }

    /// The URL of a path through Envoy.
    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.gateway)
    }

    /// Sends a request through Envoy; the answer's head, its body still to come.
    pub(crate) async fn send(
        &self,
        request: http::request::Builder,
        body: impl Into<Bytes>,
    ) -> http::Response<Incoming> {
        let request: Request<Full<Bytes>> = request.body(Full::new(body.into())).unwrap();
        self.client.send(request).await.unwrap()
    }

    /// Sends a request through Envoy and reads the whole answer.
    pub(crate) async fn ask(
        &self,
        request: http::request::Builder,
        body: impl Into<Bytes>,
    ) -> (StatusCode, Bytes) {
        let response = self.send(request, body).await;
        let status = response.status();
        (
            status,
            response.into_body().collect().await.unwrap().to_bytes(),
        )
    }

    /// A request whose body does not end; the picker has its beginning.
    pub(crate) async fn unfinished(&self) -> TcpStream {
        const BEGINNING: &str = "{\"model\"";
        let before = self.metric("sidestep_request_bytes_total").await.unwrap();
        let mut connection = TcpStream::connect(self.gateway).await.unwrap();
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\n\
             content-type: application/json\r\ncontent-length: 100\r\n\r\n{BEGINNING}"
        );
        connection.write_all(head.as_bytes()).await.unwrap();
        eventually("the picker has the beginning of the body", async || {
            let now = self.metric("sidestep_request_bytes_total").await?;
            (now == before + BEGINNING.len() as f64).then_some(())
        })
        .await;
        connection
    }

    /// A streamed chat completion through Envoy.
    pub(crate) async fn chat(&self, messages: &Value) -> Answer {
        let body = json!({"model": MODEL, "messages": messages, "max_tokens": 8, "stream": true});
        self.client
            .chat(&self.url("/v1/chat/completions"), "test", &body)
            .await
            .unwrap()
    }

    /// The picker's pods, if it answers.
    pub(crate) async fn pods(&self) -> Option<Vec<Value>> {
        let (status, body) = self
            .client
            .get(&format!("http://{}/v1/pods", self.admin))
            .await
            .ok()?;
        let pods: Value = serde_json::from_slice(&body).ok()?;
        status
            .is_success()
            .then(|| pods.as_array().cloned().unwrap_or_default())
    }

    /// The picker's last decision.
    pub(crate) async fn last_decision(&self) -> Value {
        let (_, body) = self
            .client
            .get(&format!("http://{}/v1/decisions?limit=1000", self.admin))
            .await
            .unwrap();
        let decisions: Value = serde_json::from_slice(&body).unwrap();
        decisions
            .as_array()
            .unwrap()
            .last()
            .expect("a decision")
            .clone()
    }

    /// The picker's record of the decision behind an answer.
    pub(crate) async fn decision(&self, answer: &Answer) -> Value {
        let id = answer
            .decision
            .as_ref()
            .expect("the answer names its decision");
        let (status, body) = self
            .client
            .get(&format!("http://{}/v1/decisions/{id}", self.admin))
            .await
            .unwrap();
        assert_eq!(status, StatusCode::OK);
        serde_json::from_slice(&body).unwrap()
    }

    /// A metric without labels.
    pub(crate) async fn metric(&self, name: &str) -> Option<f64> {
        let (_, body) = self
            .client
            .get(&format!("http://{}/metrics", self.admin))
            .await
            .ok()?;
        let text = String::from_utf8_lossy(&body).into_owned();
        let line = text
            .lines()
            .find(|line| line.split([' ', '{']).next() == Some(name))?;
        line.rsplit(' ').next()?.parse().ok()
    }

    /// Waits until the picker counts this many requests in flight, on itself and on its pods.
    pub(crate) async fn wait_for_in_flight(&self, count: u64) {
        eventually(&format!("{count} requests are in flight"), async || {
            let gauge = self.metric("sidestep_requests_in_flight").await?;
            let pods = self.pods().await?;
            let booked: u64 = pods.iter().filter_map(|pod| pod["requests"].as_u64()).sum();
            (gauge == count as f64 && booked == count).then_some(())
        })
        .await;
    }

    pub(crate) fn picker(&mut self) -> &mut Process {
        self.picker.as_mut().expect("the picker runs")
    }

    /// Ends the picker at once.
    pub(crate) async fn kill_picker(&mut self) {
        self.picker
            .take()
            .expect("the picker runs")
            .kill()
            .await
            .unwrap();
    }

    /// Starts the picker again, on the same ports, with the same configuration.
    pub(crate) fn restart_picker(&mut self) {
        self.picker = Some(spawn_picker(self.folder.path()));
    }

    /// Ends an engine at once.
    pub(crate) async fn kill_engine(&mut self, name: &str) {
        let index = self
            .engines
            .iter()
            .position(|process| process.name() == name)
            .expect("a running engine");
        self.engines.remove(index).kill().await.unwrap();
    }

    /// What the picker has logged.
    pub(crate) fn picker_log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("picker.log")).unwrap()
    }
}

fn spawn_picker(folder: &Path) -> Process {
    let config = folder.join("picker.yaml").to_string_lossy().into_owned();
    Process::spawn(
        "picker",
        Path::new(SIDESTEP),
        &["serve", "--config", &config],
        folder,
    )
    .unwrap()
}

/// Waits until `condition` gives a value; fails the test when it does not in time.
pub(crate) async fn eventually<T>(what: &str, mut condition: impl AsyncFnMut() -> Option<T>) -> T {
    let waited = tokio::time::timeout(DEADLINE, async {
        loop {
            if let Some(value) = condition().await {
                return value;
            }
            tokio::time::sleep(POLL).await;
        }
    });
    waited
        .await
        .unwrap_or_else(|_| panic!("within {DEADLINE:?}: {what}"))
}

/// Any address may be named by the picker, as gateways that follow a pool have it.
pub(crate) fn any_address(config: &mut GatewayConfig) {
    config.pods = Pods::AnyAddress;
}

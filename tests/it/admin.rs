//! The admin port over HTTP: who sees what, the live stream, what-if, the pods of a decision; and
//! `sidestep top`, which looks at all of it.

use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use serde_json::{Value, json};
use sidestep::app::App;
use sidestep::cli::demo::client::{Client, Events};
use sidestep::decide::policy::{Bypass, DecodeGate};
use sidestep::pick::recent::MOST_REMEMBERED;
use sidestep::pick::whatif::{Edit, MOST_DECISIONS, Rules};
use sidestep::pick::{Head, InForce, Picker};
use std::net::SocketAddr;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

const PATIENCE: Duration = Duration::from_secs(20);
const SIDESTEP: &str = env!("CARGO_BIN_EXE_sidestep");

/// A picker with its ports, in this process.
struct Served {
    picker: Arc<Picker>,
    admin: SocketAddr,
    client: Client,
    task: JoinHandle<()>,
    _folder: TempDir,
}

impl Drop for Served {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Served {
    /// One with `pods` decode pods and a prefill pod, and `more` in its config.
    async fn start(pods: usize, listen: &str, more: &str) -> Served {
        let folder = tempfile::tempdir().unwrap();
        let list: String = (0..pods)
            .map(|at| {
                format!(
                    "  - {{name: d{at}, address: '127.2.{}.{}:80', role: decode, probe: 'off'}}\n",
                    at / 250,
                    at % 250 + 1
                )
            })
            .collect();
        let config = format!(
            "apiVersion: sidestep.dev/v1alpha1
kind: SidestepConfig
listen: {{extProc: '127.0.0.1:0', health: '127.0.0.1:0', admin: '{listen}'}}
tls: {{mode: Plaintext}}
models: [{{name: m}}]
pods:
  inline:
  - {{name: p0, address: '127.3.0.1:80', role: prefill, probe: 'off'}}
{list}policy:
  inline:
    rules:
    - bypass: {{type: IslOrLoad, coldBypassBelow: 200, prefillBusyThreshold: 2, effectiveIslThreshold: 100}}
{more}"
        );
        let file = folder.path().join("sidestep.yaml");
        std::fs::write(&file, config).unwrap();
        std::fs::write(folder.path().join("token"), "0123456789abcdef\n").unwrap();
        let app = App::start(sidestep::config::load(&file).unwrap())
            .await
            .unwrap();
        let (picker, bound) = (Arc::clone(app.picker()), app.bound());
        Served {
            picker,
            admin: SocketAddr::from(([127, 0, 0, 1], bound.admin.port())),
            client: Client::default(),
            task: tokio::spawn(async move { app.run(std::future::pending()).await.unwrap() }),
            _folder: folder,
        }
    }

    async fn local() -> Served {
        Served::start(3, "127.0.0.1:0", "").await
    }

    /// Decides a request of about `tokens` tokens, whose answer then breaks off.
    async fn decide(&self, tokens: usize) {
        let body = json!({"model": "m", "prompt": "four".repeat(tokens)}).to_string();
        let head = Head {
            method: "POST".into(),
            path: "/v1/completions".into(),
            ..Head::default()
        };
        self.picker.pick(head, Some(body.into())).await.unwrap();
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> (StatusCode, HeaderMap, Incoming) {
        let mut request = Request::builder()
            .method(method)
            .uri(format!("http://{}{path}", self.admin));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::from(body.to_owned())).unwrap();
        let (head, body) = self.client.send(request).await.unwrap().into_parts();
        (head.status, head.headers, body)
    }

    async fn get(&self, path: &str, headers: &[(&str, &str)]) -> (StatusCode, Value) {
        let (status, _, body) = self.send(Method::GET, path, headers, "").await;
        (status, value(body).await)
    }

    async fn what_if(&self, body: &Value) -> (StatusCode, Value) {
        let json = [("content-type", "application/json")];
        let body = body.to_string();
        let (status, _, body) = self.send(Method::POST, "/v1/what-if", &json, &body).await;
        (status, value(body).await)
    }

    async fn newest(&self) -> String {
        let (_, records) = self.get("/v1/decisions", &[]).await;
        let newest = records.as_array().unwrap().last().unwrap().clone();
        newest["id"].as_str().unwrap().to_owned()
    }
}

async fn value(body: Incoming) -> Value {
    let bytes = body.collect().await.unwrap().to_bytes();
    serde_json::from_slice(&bytes).unwrap_or_default()
}

/// The events of a live stream that is read.
struct Stream {
    body: Incoming,
    events: Events,
}

impl Stream {
    async fn open(served: &Served) -> Stream {
        let (status, headers, body) = served
            .send(Method::GET, "/v1/decisions/stream", &[], "")
            .await;
        assert_eq!(status, StatusCode::OK);
        assert_eq!(headers["content-type"], "text/event-stream");
        Stream {
            body,
            events: Events::default(),
        }
    }

    /// The first event for which `wanted` holds.
    async fn until(&mut self, wanted: impl Fn(&Value) -> bool) -> Value {
        let read = async {
            loop {
                let frame = self.body.frame().await.expect("the stream goes on");
                for event in self.events.push(frame.unwrap().data_ref().unwrap()) {
                    let event: Value = serde_json::from_str(&event).unwrap();
                    if wanted(&event) {
                        return event;
                    }
                }
            }
        };
        tokio::time::timeout(PATIENCE, read)
            .await
            .expect("an event")
    }
}

fn records(event: &Value) -> usize {
    event["records"].as_array().map_or(0, Vec::len)
}

#[tokio::test]
async fn the_page_is_served_with_a_policy_that_allows_nothing_foreign() {
    let served = Served::local().await;
    for path in ["/", "/page/main.js", "/page/page.css", "/page/icon.svg"] {
        let (status, headers, body) = served.send(Method::GET, path, &[], "").await;
        assert_eq!(status, StatusCode::OK, "{path}");
        let policy = headers["content-security-policy"].to_str().unwrap();
        assert!(policy.starts_with("default-src 'self';"), "{policy}");
        assert!(!policy.contains("unsafe"), "{policy}");
        assert_eq!(headers["x-content-type-options"], "nosniff");
        assert!(!body.collect().await.unwrap().to_bytes().is_empty());
    }
    let (status, _) = served.get("/page/../Cargo.toml", &[]).await;
    assert_eq!(status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn a_request_that_names_another_host_sees_metrics_and_health_alone() {
    let served = Served::local().await;
    let rebound = [("host", "evil.example:9090")];
    for path in [
        "/",
        "/v1/pods",
        "/v1/decisions",
        "/v1/policy",
        "/v1/settings",
    ] {
        let (status, answer) = served.get(path, &rebound).await;
        assert_eq!(status, StatusCode::FORBIDDEN, "{path}");
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(message.contains("localhost"), "{message}");
    }
    for path in ["/metrics", "/healthz", "/readyz"] {
        let (status, _) = served.get(path, &rebound).await;
        assert_eq!(status, StatusCode::OK, "{path}");
    }
    let (status, _) = served.get("/v1/pods", &[("host", "localhost:1")]).await;
    assert_eq!(status, StatusCode::OK);
}

#[tokio::test]
async fn where_there_is_a_token_nothing_is_shown_without_it() {
    let served = Served::start(1, "0.0.0.0:0", "admin: {token: {file: token}}\n").await;
    for path in [
        "/v1/pods",
        "/v1/decisions",
        "/v1/decisions/stream",
        "/v1/explain/x",
    ] {
        let (status, headers, _) = served.send(Method::GET, path, &[], "").await;
        assert_eq!(status, StatusCode::UNAUTHORIZED, "{path}");
        assert_eq!(headers["www-authenticate"], "Bearer");
    }
    for path in ["/v1/what-if", "/v1/explain"] {
        let (status, _, _) = served.send(Method::POST, path, &[], "{}").await;
        assert_eq!(status, StatusCode::UNAUTHORIZED, "{path}");
    }
    let (status, _) = served.get("/", &[]).await;
    assert_eq!(status, StatusCode::OK, "the page asks for the token");
    let token = [("authorization", "Bearer 0123456789abcdef")];
    // With a token, the host may be any: an ingress in front has a name.
    for headers in [&token[..], &[token[0], ("host", "picker.example")]] {
        let (status, pods) = served.get("/v1/pods", headers).await;
        assert_eq!(status, StatusCode::OK);
        assert_eq!(pods.as_array().unwrap().len(), 2);
    }
    let (status, _) = served.get("/metrics", &[]).await;
    assert_eq!(status, StatusCode::OK);
}

#[tokio::test]
async fn a_token_that_is_no_secret_keeps_the_program_from_starting() {
    let folder = tempfile::tempdir().unwrap();
    let config = "apiVersion: sidestep.dev/v1alpha1
kind: SidestepConfig
listen: {extProc: '127.0.0.1:0', health: '127.0.0.1:0', admin: '127.0.0.1:0'}
pods: {inline: []}
policy: {inline: {rules: []}}
admin: {token: {file: token}}
";
    std::fs::write(folder.path().join("sidestep.yaml"), config).unwrap();
    std::fs::write(folder.path().join("token"), "short").unwrap();
    let loaded = sidestep::config::load(&folder.path().join("sidestep.yaml")).unwrap();
    let error = App::start(loaded).await.unwrap_err().to_string();
    assert!(error.starts_with("admin.token: "), "{error}");
    assert!(error.ends_with("found 5 bytes"), "{error}");
}

#[tokio::test]
async fn the_stream_tells_what_there_is_then_what_comes_then_what_became_of_it() {
    let served = Served::local().await;
    served.decide(30).await;
    let mut stream = Stream::open(&served).await;
    let first = stream.until(|event| records(event) == 1).await;
    assert_eq!(first["missed"], 0);
    assert_eq!(first["records"][0]["because"], "cold_prompt_short");
    assert!(first["records"][0]["sequence"].as_u64().is_some());
    let body = json!({"model": "m", "prompt": "four".repeat(900)}).to_string();
    let head = Head {
        method: "POST".into(),
        path: "/v1/completions".into(),
        ..Head::default()
    };
    let picked = served.picker.pick(head, Some(body.into())).await.unwrap();
    let told = stream.until(|event| records(event) == 1).await;
    assert_eq!(told["records"][0]["route"], "remote");
    assert_eq!(told["records"][0]["end"], Value::Null);
    let id = told["records"][0]["id"].clone();
    let mut flight = picked.flight;
    flight.response_headers(Some(200), None);
    flight.first_bytes();
    let begun = stream.until(|event| event[0]["id"] == id).await;
    assert!(begun[0]["ttft_ms"].as_f64().is_some(), "{begun}");
    flight.finish();
    let ended = stream.until(|event| event[0]["id"] == id).await;
    assert_eq!(ended[0]["end"], "completed");
}

#[tokio::test]
async fn a_client_that_does_not_read_is_dropped_and_the_seventeenth_is_turned_away() {
    let served = Served::local().await;
    // Plain sockets, so that nothing reads ahead.
    let mut idle = Vec::new();
    for _ in 0..16 {
        let mut socket = TcpStream::connect(served.admin).await.unwrap();
        let request = b"GET /v1/decisions/stream HTTP/1.1\r\nhost: localhost\r\n\r\n";
        socket.write_all(request).await.unwrap();
        let mut head = [0; 12];
        socket.read_exact(&mut head).await.unwrap();
        assert_eq!(&head, b"HTTP/1.1 200");
        idle.push(socket);
    }
    let (status, answer) = served.get("/v1/decisions/stream", &[]).await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(
        answer["error"]["message"]
            .as_str()
            .unwrap()
            .contains("too many")
    );
    // Enough to fill the sockets' buffers and then the queues; those that do not read are let go.
    let freed = async {
        loop {
            for _ in 0..200 {
                served.decide(5).await;
            }
            let (status, _, _) = served
                .send(Method::GET, "/v1/decisions/stream", &[], "")
                .await;
            if status == StatusCode::OK {
                return;
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(60), freed)
        .await
        .expect("room again");
}

#[tokio::test]
async fn what_if_decides_again_exactly_and_counts_what_changes() {
    let served = Served::local().await;
    for tokens in [50, 150, 400, 900, 1500] {
        served.decide(tokens).await;
    }
    // As in force: nothing changes, and every decision is the one that was recorded.
    let same = json!({"bypass": {"type": "IslOrLoad", "coldBypassBelow": 200, "prefillBusyThreshold": 2, "effectiveIslThreshold": 100}});
    let (status, answer) = served.what_if(&same).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    assert_eq!(
        (&answer["considered"], &answer["changed"]),
        (&json!(5), &json!(0))
    );
    assert_eq!(answer["before"], answer["after"]);
    assert_eq!(answer["before"]["bypass"], 2);
    for one in answer["decisions"].as_array().unwrap() {
        let id = one["id"].as_str().unwrap();
        let (_, record) = served.get(&format!("/v1/decisions/{id}"), &[]).await;
        for key in ["route", "because", "bypass", "decode_pod", "prefill_pod"] {
            assert_eq!(one["before"][key], record[key], "{key} of {record}");
        }
    }
    let (_, never) = served
        .what_if(&json!({"bypass": {"type": "Never"}, "last": 4}))
        .await;
    assert_eq!(never["considered"], 4);
    assert_eq!(never["after"]["remote"], 4);
    assert_eq!(never["changed"], 1);
    let (_, always) = served
        .what_if(&json!({"bypass": {"type": "Always"}, "rule": 0}))
        .await;
    assert_eq!(always["after"]["bypass"], 5);
    assert_eq!(always["after"]["prefill_tokens_remote"], 0);
    assert_eq!(
        served.picker.in_force().policy.generation,
        1,
        "nothing is put in force"
    );
}

#[tokio::test]
async fn what_if_refuses_what_a_policy_file_would_and_what_is_too_much() {
    let served = Served::local().await;
    let (status, answer) = served
        .what_if(&json!({"bypass": {"type": "PrefillLoad", "effectiveIslRatioThreshold": 2}}))
        .await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY);
    let faults = answer["error"]["faults"].as_array().unwrap();
    let paths: Vec<&str> = faults.iter().map(|f| f["path"].as_str().unwrap()).collect();
    assert!(paths.contains(&"bypass.prefillBusyThreshold"), "{faults:?}");
    assert!(
        paths.contains(&"bypass.effectiveIslRatioThreshold"),
        "{faults:?}"
    );
    let (status, _) = served
        .what_if(&json!({"bypass": {"type": "Never"}, "rule": 99}))
        .await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY);
    let long = json!({"bypass": {"type": "x".repeat(20_000)}});
    let (status, _) = served.what_if(&long).await;
    assert_eq!(status, StatusCode::PAYLOAD_TOO_LARGE);
    // A form of another site can send this without asking; it is not answered.
    let plain = [("content-type", "text/plain")];
    let body = r#"{"bypass":{"type":"Never"}}"#;
    let (status, _, _) = served.send(Method::POST, "/v1/what-if", &plain, body).await;
    assert_eq!(status, StatusCode::UNSUPPORTED_MEDIA_TYPE);
}

#[tokio::test]
async fn every_pod_of_a_decision_is_shown_with_its_cost_or_why_it_has_none() {
    let served = Served::local().await;
    served.decide(900).await;
    let id = served.newest().await;
    let (status, seen) = served
        .get(&format!("/v1/decisions/{id}/candidates"), &[])
        .await;
    assert_eq!(status, StatusCode::OK);
    let pods = seen["pods"].as_array().unwrap();
    assert_eq!((pods.len(), &seen["left_out"]), (4, &json!(0)));
    let chosen = |what: &str| pods.iter().find(|pod| pod["chosen"] == what).unwrap();
    let (_, record) = served.get(&format!("/v1/decisions/{id}"), &[]).await;
    assert_eq!(chosen("decode")["pod"], record["decode_pod"]);
    assert_eq!(chosen("prefill")["pod"], record["prefill_pod"]);
    let cost = &record["considered"]["decode"]["cost"];
    assert_eq!(&chosen("decode")["decode"]["cost"], cost);
    assert_eq!(chosen("prefill")["decode"]["not"], "prefill_role");
    let (status, _) = served.get("/v1/decisions/gone/candidates", &[]).await;
    assert_eq!(status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn what_is_remembered_is_bounded_in_decisions_and_in_bytes() {
    let edit = Edit {
        rules: Rules::All,
        bypass: Bypass::Never,
        gate: DecodeGate::Off,
    };
    let small = Served::local().await;
    for _ in 0..MOST_DECISIONS + 5 {
        small.decide(5).await;
    }
    let answer = small.picker.what_if(&edit, usize::MAX).unwrap();
    assert_eq!(answer.considered, MOST_DECISIONS);
    assert!(
        answer
            .decisions
            .is_sorted_by_key(|one| u64::MAX - one.sequence)
    );
    let large = Served::start(999, "127.0.0.1:0", "").await;
    large.decide(5).await;
    let first = large.newest().await;
    let seen = large.picker.candidates(&first, 100).unwrap();
    assert_eq!((seen.pods.len(), seen.left_out), (100, 900));
    let path = format!("/v1/decisions/{first}/candidates?most=1000");
    let (_, seen) = large.get(&path, &[]).await;
    assert_eq!(seen["pods"].as_array().unwrap().len(), 1000);
    let path = format!("/v1/decisions/{first}/candidates?most=all");
    let (status, _) = large.get(&path, &[]).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    for _ in 0..1000 {
        large.decide(5).await;
    }
    let (_, remembered) = large.picker.hold(None);
    assert!(
        (500..1000).contains(&remembered),
        "32 MiB, found {remembered} decisions"
    );
}

#[tokio::test]
async fn what_is_held_can_be_looked_at_however_many_decisions_follow() {
    let served = Served::local().await;
    served.decide(5).await;
    let id = served.newest().await;
    let path = format!("/v1/decisions/{id}/candidates");
    let hold = async |instead: &str| {
        let path = format!("/v1/decisions/hold{instead}");
        let (status, _, body) = served.send(Method::POST, &path, &[], "").await;
        (status, value(body).await)
    };
    let (_, held) = hold("").await;
    assert_eq!(held, json!({"hold": 0, "decisions": 1}));
    for _ in 0..MOST_REMEMBERED + 100 {
        served.decide(5).await;
    }
    let (status, seen) = served.get(&path, &[]).await;
    assert_eq!(
        (status, seen["pods"].as_array().unwrap().len()),
        (StatusCode::OK, 4)
    );
    let (_, held) = hold("?instead=0").await;
    assert_eq!(held["hold"], 1);
    let (status, _) = served.get(&path, &[]).await;
    assert_eq!(
        status,
        StatusCode::NOT_FOUND,
        "another hold of the same reader ends it"
    );
    let (status, _) = hold("?instead=x").await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn the_policy_says_what_each_generation_changed() {
    let served = Served::local().await;
    let before = served.picker.in_force();
    for threshold in [1, 2] {
        let mut policy = before.policy.clone();
        policy.rules[0].bypass = match policy.rules[0].bypass {
            Bypass::IslOrLoad(mut bound, busy) => {
                bound.threshold = sidestep::units::Tokens(threshold);
                Bypass::IslOrLoad(bound, busy)
            }
            other => other,
        };
        let dialect = before.dialect;
        served.picker.set_policy(InForce { policy, dialect });
    }
    let (_, policy) = served.get("/v1/policy", &[]).await;
    let change = |from: &str, to: &str| json!([{"key": "rules[0].bypass.effectiveIslThreshold", "from": from, "to": to}]);
    assert_eq!(policy["generation"], 3);
    assert_eq!(policy["changes"], change("1", "2"));
    assert_eq!(policy["history"][0]["changes"], change("100", "1"));
    assert_eq!(policy["history"][1]["generation"], 1);
    let says = policy["rules"][0]["says"].as_str().unwrap();
    assert!(says.contains("fewer than 2 tokens are new"), "{says}");
    for _ in 0..20 {
        served.picker.set_policy((*before).clone());
    }
    let (_, policy) = served.get("/v1/policy", &[]).await;
    assert_eq!(policy["history"].as_array().unwrap().len(), 7);
}

/// Runs a program that looks at `served`.
async fn run(mut command: Command) -> (i32, String, String) {
    let output = tokio::task::spawn_blocking(move || command.output().unwrap());
    let output = output.await.unwrap();
    (
        output.status.code().unwrap(),
        String::from_utf8(output.stdout).unwrap(),
        String::from_utf8(output.stderr).unwrap(),
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn top_prints_pods_and_decisions_once_and_says_why_it_cannot() {
    let served = Served::start(3, "127.0.0.1:0", "admin: {token: {file: token}}\n").await;
    served.decide(30).await;
    served.decide(900).await;
    let url = format!("http://{}", served.admin);
    let mut command = Command::new(SIDESTEP);
    command.args(["top", "--once", "--url", &url]);
    let (code, out, err) = run(command).await;
    assert_eq!((code, out.as_str()), (1, ""));
    assert!(err.contains("401"), "{err}");
    let token = served._folder.path().join("token");
    let mut command = Command::new(SIDESTEP);
    command
        .args(["top", "--once", "--url", &url, "--token-file"])
        .arg(token);
    let (code, out, err) = run(command).await;
    assert_eq!((code, err.as_str()), (0, ""));
    assert!(out.contains("all 4 pods can take requests"), "{out}");
    assert!(out.contains("cold_prompt_short"), "{out}");
    assert!(out.contains("p0 -> d"), "{out}");
    assert!(
        !out.contains('\x1b'),
        "no colour where there is no terminal"
    );
}

#[tokio::test]
async fn called_kubectl_sidestep_the_program_is_a_plugin() {
    let folder = tempfile::tempdir().unwrap();
    let plugin = folder.path().join("kubectl-sidestep");
    std::os::unix::fs::symlink(SIDESTEP, &plugin).unwrap();
    let mut command = Command::new(&plugin);
    command.args(["top", "--help"]);
    let (code, out, _) = run(command).await;
    assert_eq!(code, 0);
    assert!(out.contains("Usage: kubectl sidestep top"), "{out}");
    let (_, out, _) = run({
        let mut command = Command::new(SIDESTEP);
        command.arg("--help");
        command
    })
    .await;
    assert!(out.contains("Usage: sidestep "), "{out}");
}

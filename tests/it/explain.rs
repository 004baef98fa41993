//! Explain: over HTTP, gRPC and the command line; it books nothing and says what the next pick does.

use crate::decide_fixture;
use http_body_util::{BodyExt, Full};
use hyper::{Request, StatusCode};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};
use sidestep::admin::grpc::pb;
use sidestep::admin::grpc::pb::explainer_client::ExplainerClient;
use sidestep::app::App;
use sidestep::decide::Checked;
use sidestep::decide::snapshot::PodLoad;
use sidestep::decide::{Flip, decide, nearest_flip};
use sidestep::pick::{ExplainLimits, Explainer, Head, Picker};
use sidestep::telemetry::explanation::{Explanation, flip_sentence};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tonic::Code;

const CONFIG: &str = "apiVersion: sidestep.dev/v1alpha1
kind: SidestepConfig
listen: {extProc: '127.0.0.1:0', health: '127.0.0.1:0', admin: '127.0.0.1:0'}
tls: {mode: Plaintext}
limits: {requestBytes: 64Ki}
models:
- {name: m, tokenizer: {builtin: true}}
pods:
  inline:
  - {name: d1, address: '127.0.0.11:8000', role: decode, probe: off, capacity: {kvBlocks: 1000}}
  - {name: d2, address: '127.0.0.12:8000', role: decode, probe: off, capacity: {kvBlocks: 1000}}
  - {name: p1, address: '127.0.0.21:8000', role: prefill, probe: off, capacity: {prefillTokens: 512}}
policy:
  inline:
    rules:
    - match: {policyClasses: [urgent]}
      bypass: {type: Always}
    - bypass:
        type: IslOrLoad
        effectiveIslThreshold: 64
        coldBypassBelow: 64
        prefillBusyThreshold: 1
        decodeBusyThreshold: 0.25
    scoring: {activeRequestWeight: 4}
    sessionAffinity: {mode: Soft}
    clientPins: Honor
";

struct Running {
    picker: Arc<Picker>,
    admin: SocketAddr,
    health: SocketAddr,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Running {
    async fn start(more: &str) -> Running {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sidestep.yaml");
        std::fs::write(&path, format!("{CONFIG}{more}")).unwrap();
        let loaded = sidestep::config::load(&path).unwrap_or_else(|faults| panic!("{faults}"));
        let app = App::start(loaded).await.unwrap();
        let (picker, bound) = (Arc::clone(app.picker()), app.bound());
        let task = tokio::spawn(async move {
            app.run(std::future::pending()).await.unwrap();
        });
        Running {
            picker,
            admin: bound.admin,
            health: bound.health,
            task,
        }
    }

    async fn send(&self, request: Request<Full<bytes::Bytes>>) -> (StatusCode, Value) {
        let client = Client::builder(TokioExecutor::new()).build_http();
        let answer = client.request(request).await.unwrap();
        let status = answer.status();
        let body = answer.into_body().collect().await.unwrap().to_bytes();
        (status, serde_json::from_slice(&body).unwrap_or(Value::Null))
    }

    async fn post(&self, body: &Value, headers: &[(&str, &str)]) -> (StatusCode, Value) {
        let mut request = Request::post(format!("http://{}/v1/explain", self.admin))
            .body(Full::from(body.to_string()))
            .unwrap();
        for (name, value) in headers {
            let name: hyper::header::HeaderName = name.parse().unwrap();
            request.headers_mut().append(name, value.parse().unwrap());
        }
        self.send(request).await
    }

    async fn get(&self, path: &str) -> (StatusCode, Value) {
        let request = Request::get(format!("http://{}{path}", self.admin));
        self.send(request.body(Full::default()).unwrap()).await
    }

    fn loads(&self) -> Vec<PodLoad> {
        let view = self.picker.observer().roster.view();
        let pods = view.pods.iter();
        pods.map(|pod| self.picker.ledger().load(pod.id)).collect()
    }

    async fn grpc(&self) -> ExplainerClient<tonic::transport::Channel> {
        ExplainerClient::connect(format!("http://{}", self.health))
            .await
            .unwrap()
    }
}

const ON: &str = "admin: {explain: Enabled}\n";

fn chat(words: usize) -> Value {
    json!({"model": "m", "messages": [{"role": "user", "content": "secret ".repeat(words)}]})
}

fn head(headers: &[(&str, &str)]) -> Head {
    let mut head = Head {
        method: "POST".into(),
        path: "/v1/chat/completions".into(),
        ..Head::default()
    };
    for (name, value) in headers {
        head.headers.push(name, value.to_string());
    }
    head
}

#[tokio::test]
async fn an_explanation_says_what_the_next_pick_does_and_books_nothing() {
    let running = Running::start(ON).await;
    let mut flights = Vec::new();
    // Bookings pile up, so that rules, gate and selection come out differently from turn to turn.
    let turns: [(usize, &[(&str, &str)]); 9] = [
        (1, &[]),
        (200, &[("x-session-id", "a")]),
        (300, &[("x-session-id", "a")]),
        (200, &[("x-session-id", "b")]),
        (300, &[("x-sidestep-policy-class", "urgent")]),
        (300, &[("x-sidestep-decode-pod", "127.0.0.12:8000")]),
        (300, &[("x-sidestep-prefill-pod", "127.0.0.21")]),
        (3000, &[]),
        (100, &[]),
    ];
    let mut routes = std::collections::BTreeSet::new();
    for (words, headers) in turns {
        let before = (running.loads(), running.picker.ledger().sessions());
        let (status, explained) = running.post(&chat(words), headers).await;
        assert_eq!(status, StatusCode::OK, "{explained}");
        let after = (running.loads(), running.picker.ledger().sessions());
        assert_eq!(before, after, "an explanation booked something");

        let body = chat(words).to_string().into();
        let picked = running
            .picker
            .pick(head(headers), Some(body))
            .await
            .unwrap();
        let verdict = &explained["verdict"];
        let records = running.picker.journal().after(0, 1000);
        let record = serde_json::to_value(records.last().unwrap()).unwrap();
        assert_eq!(verdict["because"], record["because"], "{explained}");
        assert_eq!(verdict["route"], record["route"]);
        assert_eq!(verdict["rule"], record["rule"]);
        assert_eq!(verdict["checks"], record["checks"]);
        assert_eq!(verdict["flip"], record["flip"]);
        assert_eq!(explained["request"]["session"], record["session"]);
        assert_eq!(
            explained["request"]["prompt_tokens"],
            record["prompt_tokens"]
        );
        // Equal pods are drawn among: only where one is best must it be the same.
        if !headers.is_empty() {
            let prefill = &verdict["prefill"]["endpoint"];
            assert_eq!(prefill, &record["prefill"]);
        }
        routes.insert(record["because"].as_str().unwrap().to_owned());
        flights.push(picked.flight);
    }
    assert!(5 <= routes.len(), "{routes:?}");
    assert_eq!(running.picker.journal().after(0, 1000).len(), turns.len());
}

#[tokio::test]
async fn every_pod_is_shown_with_its_numbers_or_why_it_is_not_considered() {
    let running = Running::start(ON).await;
    let headers = [(
        "x-gateway-destination-endpoint-subset",
        "127.0.0.11:8000, 127.0.0.99",
    )];
    let (_, explained) = running.post(&chat(200), &headers).await;
    let explanation: Explanation = serde_json::from_value(explained).unwrap();
    assert_eq!(explanation.pods_left_out, 0);
    let pod = |name: &str| {
        let named =
            |pod: &&sidestep::telemetry::explanation::PodLine| pod.name.as_deref() == Some(name);
        explanation.pods.iter().find(named).unwrap()
    };
    let why = |standing: &sidestep::telemetry::explanation::Standing| standing.ineligible.clone();
    assert!(pod("d1").local.selected && pod("d1").decode.selected);
    assert!(pod("p1").prefill.selected);
    assert_eq!(why(&pod("d2").local).as_deref(), Some("outside_subset"));
    assert_eq!(why(&pod("p1").local).as_deref(), Some("prefill_role"));
    assert_eq!(why(&pod("d1").prefill).as_deref(), Some("decode_role"));
    let cost = pod("d1").local.cost.unwrap();
    assert!((cost.total - (cost.prefill + cost.decode + cost.requests)).abs() < 1e-9);
    assert_eq!(pod("d1").kv_capacity.value, Some(1000));
    assert_eq!(pod("d1").kv_capacity.source.as_deref(), Some("Configured"));
    assert_eq!(pod("d1").kv_source, "absent");
}

#[tokio::test]
async fn no_prompt_text_comes_back_or_stays() {
    let running = Running::start(ON).await;
    let headers = [
        ("x-session-id", "my-secret-session"),
        ("authorization", "secret"),
    ];
    let (_, explained) = running.post(&chat(50), &headers).await;
    assert!(!explained.to_string().contains("secret"), "{explained}");
    let bad = json!({"model": "m", "messages": "secret"});
    let (status, answer) = running.post(&bad, &headers).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert!(!answer.to_string().contains("secret"), "{answer}");
    assert_eq!(running.picker.journal().after(0, 10).len(), 0);
    let metrics = running.picker.metrics().encode();
    assert!(
        !metrics.contains("sidestep_decisions_total{"),
        "explaining is no decision"
    );
}

#[tokio::test]
async fn a_refusal_is_explained_too() {
    let running = Running::start(ON).await;
    let nobody = [("x-gateway-destination-endpoint-subset", "127.0.0.21")];
    let (status, explained) = running.post(&chat(5), &nobody).await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(explained["verdict"]["route"], "refused");
    assert_eq!(explained["verdict"]["because"], "no_pod_in_subset");
    let stranger = [("x-sidestep-decode-pod", "10.9.9.9:1")];
    let (_, explained) = running.post(&chat(5), &stranger).await;
    assert_eq!(explained["verdict"]["because"], "pinned_pod_unknown");
    let rubbish = [("x-sidestep-decode-pod", "the fast one")];
    let (status, answer) = running.post(&chat(5), &rubbish).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert_eq!(answer["error"]["code"], "invalid_pin");
}

#[tokio::test]
async fn another_api_is_explained_by_its_path() {
    let running = Running::start(ON).await;
    let ask = |path: &str, body: Value| {
        let url = format!("http://{}/v1/explain?path={path}", running.admin);
        Request::post(url)
            .body(Full::from(body.to_string()))
            .unwrap()
    };
    let body = json!({"model": "m", "prompt": "one two three"});
    let (_, explained) = running.send(ask("%2Fv1%2Fcompletions", body)).await;
    assert_eq!(explained["request"]["operation"], "text_completion");
    let (_, explained) = running.send(ask("/v1/models", json!({}))).await;
    assert_eq!(explained["verdict"]["because"], "not_generation");
}

#[tokio::test]
async fn without_the_setting_nothing_is_explained() {
    let running = Running::start("").await;
    let (status, answer) = running.post(&chat(5), &[]).await;
    assert_eq!(status, StatusCode::FORBIDDEN);
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(message.contains("admin: {explain: Enabled}"), "{message}");
    let request = pb::ExplainRequest::default();
    let status = running.grpc().await.explain(request).await.unwrap_err();
    assert_eq!(status.code(), Code::Unimplemented);
    let (status, _) = running.get("/v1/explain").await;
    assert_eq!(status, StatusCode::FORBIDDEN);
}

#[tokio::test]
async fn a_body_that_is_too_long_is_refused() {
    let running = Running::start(ON).await;
    let (status, answer) = running.post(&chat(10_000), &[]).await;
    assert_eq!(status, StatusCode::PAYLOAD_TOO_LARGE, "{answer}");
    let (status, _) = running.get("/v1/explain").await;
    assert_eq!(status, StatusCode::METHOD_NOT_ALLOWED);
}

#[tokio::test(start_paused = true)]
async fn only_so_many_are_explained_per_second_and_at_once() {
    let limits = ExplainLimits {
        per_second: 3,
        at_once: 2,
        ..ExplainLimits::default()
    };
    let explainer = Explainer::new(picker(), limits);
    let (first, second) = (explainer.turn().unwrap(), explainer.turn().unwrap());
    let busy = explainer.turn().unwrap_err();
    assert_eq!((busy.status, busy.code), (429, "too_many_explanations"));
    drop((first, second));
    drop(explainer.turn().unwrap());
    let refused = explainer.turn().unwrap_err();
    assert_eq!(refused.status, 429);
    assert!(refused.retry_after.is_some());
    tokio::time::advance(Duration::from_millis(400)).await;
    drop(explainer.turn().unwrap());
    assert!(explainer.turn().is_err());
    // An hour of silence is worth no more than one second.
    tokio::time::advance(Duration::from_secs(3600)).await;
    let turns = std::iter::repeat_with(|| explainer.turn().ok()).take(9);
    assert_eq!(turns.flatten().map(drop).count(), 3);
}

fn picker() -> Arc<Picker> {
    use sidestep::kv::index::Index;
    use sidestep::prompt::{Encoder, Profile, Profiles};
    let model = Profile::byte_estimate("m".into(), Vec::new());
    Arc::new(Picker::new(sidestep::pick::Parts {
        encoder: Encoder::new(Profiles::new(vec![model]).unwrap(), 0),
        observer: sidestep::observe::Observer::new(
            Arc::default(),
            Arc::new(Index::new(Default::default())),
            Arc::default(),
            decide_fixture::size(16),
        ),
        ledger: sidestep::load::Ledger::default(),
        in_force: sidestep::pick::InForce {
            policy: decide_fixture::isl(),
            dialect: sidestep::route::Dialect::DecodeFirst,
        },
        metrics: sidestep::telemetry::metrics::Metrics::new(),
        tracing: sidestep::telemetry::trace::Tracing::Off,
        journal: sidestep::telemetry::journal::Journal::new(8),
    }))
}

/// A request whose body does not come to its end.
async fn unfinished(to: SocketAddr) -> tokio::net::TcpStream {
    use tokio::io::AsyncWriteExt;
    let mut stream = tokio::net::TcpStream::connect(to).await.unwrap();
    let start = "POST /v1/explain HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{";
    stream.write_all(start.as_bytes()).await.unwrap();
    stream
}

#[tokio::test]
async fn who_comes_while_too_many_are_explained_is_told_to_come_back() {
    let running = Running::start(ON).await;
    let mut held = Vec::new();
    for _ in 0..ExplainLimits::default().at_once {
        held.push(unfinished(running.admin).await);
    }
    let answered = async |wanted: StatusCode| {
        // The server gets to each of them in its own time; 150 ms apart stays below the rate.
        loop {
            let (status, answer) = running.post(&chat(1), &[]).await;
            if status == wanted {
                return answer;
            }
            tokio::time::sleep(Duration::from_millis(150)).await;
        }
    };
    let answer = answered(StatusCode::TOO_MANY_REQUESTS).await;
    assert_eq!(answer["error"]["type"], "rate_limit_error");
    let request = pb::ExplainRequest {
        body: chat(1).to_string().into_bytes(),
        ..Default::default()
    };
    let status = running.grpc().await.explain(request).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    drop(held);
    answered(StatusCode::OK).await;
}

#[tokio::test]
async fn grpc_says_the_same_as_http() {
    let running = Running::start(ON).await;
    let headers = [
        ("x-sidestep-policy-class", "urgent"),
        ("x-sidestep-decode-pod", "127.0.0.12"),
    ];
    let (_, http) = running.post(&chat(100), &headers).await;
    let mut client = running.grpc().await;
    let header = |(name, value): (&str, &str)| pb::Header {
        name: name.to_owned(),
        value: value.to_owned(),
    };
    let request = pb::ExplainRequest {
        path: String::new(),
        headers: headers.into_iter().map(header).collect(),
        body: chat(100).to_string().into_bytes(),
    };
    let grpc = client.explain(request).await.unwrap().into_inner();
    let verdict = grpc.verdict.unwrap();
    assert_eq!(http["verdict"]["because"], verdict.because);
    assert_eq!(verdict.because, "policy_always");
    assert_eq!(
        http["verdict"]["decode"]["name"],
        verdict.decode.unwrap().name
    );
    assert_eq!(
        http["request"]["prompt_tokens"],
        grpc.request.unwrap().prompt_tokens
    );
    assert_eq!(http["pods"].as_array().unwrap().len(), grpc.pods.len());
    let selected = grpc.pods[0].local.clone().unwrap();
    assert!(selected.selected);
    assert_eq!(
        http["pods"][0]["local"]["cost"]["total"],
        selected.cost.unwrap().total
    );

    let bad = pb::ExplainRequest {
        body: b"{".to_vec(),
        ..Default::default()
    };
    let status = client.explain(bad).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    let unknown = pb::ExplainDecisionRequest {
        decision: "none".into(),
    };
    let status = client.explain_decision(unknown).await.unwrap_err();
    assert_eq!(status.code(), Code::NotFound);
}

#[tokio::test]
async fn a_decision_of_the_journal_is_shown_in_the_same_form() {
    let running = Running::start("").await;
    let body = chat(300).to_string().into();
    let picked = running.picker.pick(head(&[]), Some(body)).await.unwrap();
    let id = picked.plan.decision_id.to_string();
    let (status, explained) = running.get(&format!("/v1/explain/{id}")).await;
    assert_eq!(status, StatusCode::OK);
    let explanation: Explanation = serde_json::from_value(explained).unwrap();
    assert_eq!(explanation.decision.as_deref(), Some(&*id));
    let decode = explanation.verdict.decode.clone().unwrap();
    assert_eq!(decode.endpoint, picked.plan.destination.to_string());
    assert_eq!(explanation.pods.len() + explanation.pods_left_out, 3);
    assert!(explanation.pods.iter().any(|pod| pod.prefill.selected));
    let text = sidestep::cli::explain::render(&explanation);
    assert!(text.contains(&format!("decision {id}\n")), "{text}");
    let (status, _) = running.get("/v1/explain/unknown").await;
    assert_eq!(status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn the_command_line_prints_the_report_and_its_exit_code_says_whose_fault_it_was() {
    let running = Running::start(ON).await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("body.json");
    std::fs::write(&file, chat(300).to_string()).unwrap();
    let url = format!("http://{}", running.admin);
    let run = |what: String, more: Vec<String>| {
        let url = url.clone();
        async move {
            tokio::process::Command::new(env!("CARGO_BIN_EXE_sidestep"))
                .args(["explain", &what, "--url", &url])
                .args(more)
                .output()
                .await
                .unwrap()
        }
    };
    let path = file.display().to_string();
    let out = run(path.clone(), Vec::new()).await;
    let text = String::from_utf8(out.stdout).unwrap();
    assert_eq!(out.status.code(), Some(0), "{text}");
    for part in ["verdict  ", "checks   ", "flip     ", "d1 ", "p1 "] {
        assert!(text.contains(part), "{text}");
    }
    let out = run(
        path,
        vec![
            "--json".into(),
            "--header".into(),
            "x-sidestep-policy-class: urgent".into(),
        ],
    )
    .await;
    let explained: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(explained["verdict"]["because"], "policy_always");
    let out = run("0123456789abcdef".into(), Vec::new()).await;
    assert_eq!(out.status.code(), Some(2));
    std::fs::write(&file, "{").unwrap();
    let out = run(file.display().to_string(), Vec::new()).await;
    assert_eq!(out.status.code(), Some(2));
    let out = run("missing.json".into(), Vec::new()).await;
    assert_eq!(out.status.code(), Some(1));
}

#[test]
fn a_flip_says_a_threshold_that_gives_the_other_answer() {
    let flip = |what, from, to, becomes| {
        flip_sentence(&Flip {
            what,
            from,
            to,
            becomes,
        })
    };
    use sidestep::decide::Because;
    assert_eq!(
        flip(
            Checked::NetNewTokens,
            400.0,
            413.0,
            Because::NetNewBelowThresholds
        ),
        "would bypass if effectiveIslThreshold were above 412"
    );
    assert_eq!(
        flip(
            Checked::NetNewTokens,
            2048.0,
            412.0,
            Because::NetNewAboveThreshold
        ),
        "would not bypass if effectiveIslThreshold were at most 412"
    );
    assert_eq!(
        flip(
            Checked::NetNewShare,
            0.7,
            0.712_34,
            Because::NetNewBelowThresholds
        ),
        "would bypass if effectiveIslRatioThreshold were at least 0.7124"
    );
    assert_eq!(
        flip(Checked::PrefillBusy, 1.0, 0.527_49, Because::PrefillBusy),
        "would bypass if prefillBusyThreshold were at most 0.5274"
    );
    assert_eq!(
        flip(Checked::DecodeBusy, 0.85, 0.563_01, Because::DecodeBusy),
        "would not bypass if decodeBusyThreshold were at most 0.563"
    );
    // What the sentence says is then tried.
    let pods = decide_fixture::snapshot([
        decide_fixture::holding(decide_fixture::decode(0), 8_000),
        decide_fixture::prefill(1),
    ]);
    let policy = decide_fixture::isl();
    let decision = decide(&decide_fixture::ask(10_100), &pods, &policy).unwrap();
    let sentence = flip_sentence(&nearest_flip(&decision, &policy).unwrap());
    assert_eq!(
        sentence,
        "would bypass if effectiveIslThreshold were above 2100"
    );
    let with = |tokens| {
        let bypass =
            sidestep::decide::policy::Bypass::IslBounding(decide_fixture::bound(tokens, 0.7));
        let policy = decide_fixture::policy([decide_fixture::rule(bypass)]);
        decide(&decide_fixture::ask(10_100), &pods, &policy)
            .unwrap()
            .because
            .is_bypass()
    };
    assert!(!with(2100) && with(2101));
}

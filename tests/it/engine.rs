//! The simulated engine over its sockets: HTTP, events, replay, handoff. Time scale 0 throughout,
//! except where a request has to be caught in the middle.

mod answers;
mod events;
mod handoff;
mod picker;
mod refusals;

use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};
use sidestep::engine::timing::Pace;
use sidestep::engine::{Addresses, Engine, EngineConfig, Listeners, Role};
use sidestep::kv::event::{Batch, Event};
use sidestep::prompt::{Encoder, Profile, Profiles};
use sidestep::units::{BlockSize, Blocks, Ratio, Tokens};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use zeromq::{DealerSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

const MODEL: &str = "small";
const ADAPTER: &str = "small-legal";
const BLOCK: u64 = 16;
/// How long any condition may take to come true on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);

fn encoder() -> Arc<Encoder> {
    static ENCODER: OnceLock<Arc<Encoder>> = OnceLock::new();
    let build = || {
        let profile = Profile::builtin().expect("the built-in model loads");
        let profile = profile.named(MODEL.into(), vec![ADAPTER.into()]);
        let profiles = Profiles::new(vec![profile]).expect("one name each");
        Arc::new(Encoder::new(profiles, 0))
    };
    ENCODER.get_or_init(build).clone()
}

fn config(role: Role) -> EngineConfig {
    let size = BlockSize::new(BLOCK as u32).expect("not zero");
    EngineConfig {
        blocks: Blocks(1_024),
        max_model_len: Tokens(8_192),
        pace: Pace(Ratio::ZERO),
        ..EngineConfig::new(role, MODEL.into(), encoder(), size)
    }
}

/// A running engine; dropped, it is stopped.
struct Running {
    addresses: Addresses,
    task: JoinHandle<()>,
    client: Client<HttpConnector, Full<Bytes>>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn start(config: EngineConfig) -> Running {
    let free = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let listeners = Listeners {
        http: TcpListener::bind(free).await.expect("a free port"),
        events: free,
        replay: free,
    };
    let engine = Engine::bind(config, listeners).await.expect("an engine");
    Running {
        addresses: engine.addresses(),
        task: tokio::spawn(engine.serve(std::future::pending())),
        client: Client::builder(TokioExecutor::new()).build_http(),
    }
}

impl Running {
    async fn send(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> Response<Incoming> {
        let mut request = Request::builder()
            .method(method)
            .uri(format!("http://{}{path}", self.addresses.http));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::new(body.into())).expect("a request");
        self.client.request(request).await.expect("an answer")
    }

    async fn text(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> (StatusCode, HeaderMap, String) {
        let (head, body) = self.send(method, path, headers, body).await.into_parts();
        let bytes = body.collect().await.expect("a whole answer").to_bytes();
        let text = String::from_utf8(bytes.to_vec()).expect("text");
        (head.status, head.headers, text)
    }

    async fn post(&self, path: &str, body: &Value) -> (StatusCode, Value) {
        self.post_with(path, &[], body).await
    }

    async fn post_with(
        &self,
        path: &str,
        headers: &[(&str, &str)],
        body: &Value,
    ) -> (StatusCode, Value) {
        let (status, _, text) = self.text("POST", path, headers, body.to_string()).await;
        (status, serde_json::from_str(&text).unwrap_or(Value::Null))
    }

    /// A chat that must succeed.
    async fn chat(&self, body: &Value) -> Value {
        let (status, answer) = self.post("/v1/chat/completions", body).await;
        assert_eq!(status, StatusCode::OK, "{answer}");
        answer
    }

    async fn get(&self, path: &str) -> String {
        let (status, _, text) = self.text("GET", path, &[], "").await;
        assert_eq!(status, StatusCode::OK, "{text}");
        text
    }

    /// One value of the metrics page; `series` is the name with the labels that matter.
    async fn metric(&self, name: &str, label: &str) -> f64 {
        let page = self.get("/metrics").await;
        let line = page
            .lines()
            .find(|line| line.starts_with(&format!("{name}{{")) && line.contains(label))
            .unwrap_or_else(|| panic!("no series {name} {label} in\n{page}"));
        let (_, value) = line.rsplit_once(' ').expect("a value");
        value.parse().expect("a number")
    }

    async fn source(&self, source: &str) -> f64 {
        let label = format!("source=\"{source}\"");
        self.metric("vllm:prompt_tokens_by_source_total", &label)
            .await
    }

    /// Waits until a gauge shows `value`.
    async fn until(&self, name: &str, value: f64) {
        let reached = async { while self.metric(name, "").await != value {} };
        let waited = tokio::time::timeout(PATIENCE, reached).await;
        waited.unwrap_or_else(|_| panic!("{name} never became {value}"));
    }

    /// Every batch in the replay buffer, with its sequence number.
    async fn replay(&self, start: u64) -> Vec<(u64, Batch)> {
        let mut dealer = DealerSocket::new();
        let endpoint = format!("tcp://{}", self.addresses.replay);
        dealer.connect(&endpoint).await.expect("a connection");
        let mut request = ZmqMessage::from(Bytes::new());
        request.push_back(Bytes::copy_from_slice(&start.to_be_bytes()));
        dealer.send(request).await.expect("sent");
        let mut batches = Vec::new();
        loop {
            let received = tokio::time::timeout(PATIENCE, dealer.recv()).await;
            let frames = received.expect("in time").expect("a message").into_vec();
            assert_eq!(frames.len(), 4, "the layout of vLLM 0.27.1 and later");
            assert!(frames[0].is_empty());
            if frames[2].as_ref() == [0xff; 8] {
                assert!(frames[1].is_empty() && frames[3].is_empty());
                return batches;
            }
            let seq = u64::from_be_bytes(frames[2].as_ref().try_into().expect("eight bytes"));
            batches.push((seq, Batch::decode(&frames[3]).expect("a batch")));
        }
    }

    /// All events so far.
    async fn events(&self) -> Vec<Event> {
        let batches = self.replay(0).await;
        batches
            .into_iter()
            .flat_map(|(_, batch)| batch.events)
            .collect()
    }

    /// The tokens of the prompt `body` makes.
    async fn tokens(&self, body: &Value) -> Vec<u32> {
        let (status, answer) = self.post("/tokenize", body).await;
        assert_eq!(status, StatusCode::OK, "{answer}");
        serde_json::from_value(answer["tokens"].clone()).expect("token ids")
    }
}

fn chat(messages: &[(&str, &str)], max_tokens: u32) -> Value {
    let messages: Vec<Value> = messages
        .iter()
        .map(|(role, content)| json!({"role": role, "content": content}))
        .collect();
    json!({"model": MODEL, "messages": messages, "max_tokens": max_tokens, "ignore_eos": true})
}

/// A text long enough for a few blocks, different for each `topic`.
fn essay(topic: &str) -> String {
    (0..60)
        .map(|line| format!("Line {line} is about {topic}. "))
        .collect()
}

fn cached(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        .as_u64()
        .expect("cached tokens")
}

fn prompt_tokens(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens"].as_u64().expect("a count")
}

fn text_of(answer: &Value) -> &str {
    let message = &answer["choices"][0]["message"]["content"];
    message.as_str().expect("a text")
}

/// The `data:` objects of a stream, which must end with `[DONE]`.
fn chunks(stream: &str) -> Vec<Value> {
    let mut lines: Vec<&str> = stream
        .split("\n\n")
        .filter(|event| !event.is_empty())
        .map(|event| event.strip_prefix("data: ").expect("a data line"))
        .collect();
    assert_eq!(lines.pop(), Some("[DONE]"));
    let parse = |line: &str| serde_json::from_str(line).expect("json");
    lines.into_iter().map(parse).collect()
}

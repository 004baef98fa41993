//! What a request costs the picker's process, beside a server that does nothing but answer.
//!
//!     cargo bench --bench server
//!
//! Two processes take turns: the picker, and an echo, which is the same gRPC service on the same transport
//! and sends the very messages that the picker sent, without reading anything but their kind. One gateway
//! on one connection, a stream per request, 64 at once: 12 headers and a body of 4 KB, then an answer of
//! one piece. Each server has one thread; prompts are estimated from their bytes, so none is tokenised.
//! Shown are medians of the rounds: processor time of the server's process per request, and requests per
//! second with a client that needs a core of its own.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a benchmark stops at the first fault"
)]

use bytes::Bytes;
use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue};
use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::processing_mode::BodySendMode;
use envoy_types::pb::envoy::service::ext_proc::v3::body_mutation::Mutation;
use envoy_types::pb::envoy::service::ext_proc::v3::external_processor_client::ExternalProcessorClient;
use envoy_types::pb::envoy::service::ext_proc::v3::external_processor_server::{
    ExternalProcessor, ExternalProcessorServer,
};
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request as Ask;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response as Answer;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    BodyMutation, BodyResponse, CommonResponse, HttpBody, HttpHeaders, ProcessingRequest,
    ProcessingResponse, ProtocolConfiguration, StreamedBodyResponse,
};
use futures_util::{Stream, StreamExt};
use prost::Message;
use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::pin::Pin;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Server};
use tonic::{Request, Response, Status, Streaming};

const ROUNDS: usize = 15;
const REQUESTS: usize = 6000;
/// Streams at once.
const CONCURRENCY: usize = 64;
const BODY: usize = 4096;
const SERVERS: [&str; 2] = ["picker", "echo"];

const CONFIG: &str = "apiVersion: sidestep.dev/v1alpha1
kind: SidestepConfig
listen: {extProc: '127.0.0.1:0', health: '127.0.0.1:0', admin: '127.0.0.1:0'}
tls: {mode: Plaintext}
models: [{name: m}]
pods:
  inline:
  - {name: p1, address: '127.0.1.1:8000', role: prefill, probe: 'off'}
  - {name: p2, address: '127.0.1.2:8000', role: prefill, probe: 'off'}
  - {name: d1, address: '127.0.1.3:8000', role: decode, probe: 'off'}
  - {name: d2, address: '127.0.1.4:8000', role: decode, probe: 'off'}
  - {name: d3, address: '127.0.1.5:8000', role: decode, probe: 'off'}
  - {name: d4, address: '127.0.1.6:8000', role: decode, probe: 'off'}
policy:
  inline:
    rules: [{bypass: {type: IslOrLoad, effectiveIslThreshold: 512, coldBypassBelow: 256, prefillBusyThreshold: 2}}]
    sessionAffinity: {mode: Soft, header: x-session-id, ttl: 5m}
";

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.get(1).map(String::as_str) {
        Some("picker") => runtime().block_on(picker()),
        Some("echo") => runtime().block_on(echo(&arguments[2])),
        _ => runtime().block_on(measure()),
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap()
}

/// Processor time of this process so far, all threads.
fn cpu() -> Duration {
    let spent = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(spent.tv_sec as u64, spent.tv_nsec as u32)
}

/// Says what was spent whenever it is asked; resolves when nobody asks any more.
async fn answer_for_time(address: SocketAddr) {
    println!("{address}");
    let (ended, end) = tokio::sync::oneshot::channel::<()>();
    std::thread::spawn(move || {
        for _ in std::io::stdin().lines() {
            println!("{}", cpu().as_nanos());
        }
        drop(ended);
    });
    let _ = end.await;
}

async fn picker() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("sidestep.yaml");
    std::fs::write(&file, CONFIG).unwrap();
    let app = sidestep::app::App::start(sidestep::config::load(&file).unwrap())
        .await
        .unwrap();
    let end = answer_for_time(app.bound().ext_proc);
    app.run(end).await.unwrap();
}

/// Answers without looking: the picker's own messages, and the body that came.
struct Echo(Arc<Answers>);

struct Answers {
    plan: ProcessingResponse,
    headers: ProcessingResponse,
    body: ProcessingResponse,
}

/// The picker's answers, as the client hands them to the echo.
async fn echo(answers: &str) {
    let mut answers = answers.split(',').map(|text| {
        let byte = |at| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
        let bytes: Vec<u8> = (0..text.len()).step_by(2).map(byte).collect();
        ProcessingResponse::decode(&bytes[..]).unwrap()
    });
    let echo = Answers {
        plan: answers.next().unwrap(),
        headers: answers.next().unwrap(),
        body: answers.next().unwrap(),
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let end = answer_for_time(listener.local_addr().unwrap());
    // As the picker's own transport.
    Server::builder()
        .initial_stream_window_size(1 << 20)
        .initial_connection_window_size(16 << 20)
        .max_concurrent_streams(65_536)
        .add_service(ExternalProcessorServer::new(Echo(Arc::new(echo))))
        .serve_with_incoming_shutdown(TcpIncoming::from(listener).with_nodelay(Some(true)), end)
        .await
        .unwrap();
}

#[tonic::async_trait]
impl ExternalProcessor for Echo {
    type ProcessStream = Pin<Box<dyn Stream<Item = Result<ProcessingResponse, Status>> + Send>>;

    async fn process(
        &self,
        request: Request<Streaming<ProcessingRequest>>,
    ) -> Result<Response<Self::ProcessStream>, Status> {
        let known = Arc::clone(&self.0);
        let answers = move |message: Result<ProcessingRequest, Status>| {
            let mut answers = smallvec::SmallVec::<[_; 2]>::new();
            match message.map(|message| message.request) {
                Ok(Some(Ask::RequestBody(part))) => {
                    answers.push(Ok(known.plan.clone()));
                    answers.push(Ok(returned(part)));
                }
                Ok(Some(Ask::ResponseHeaders(_))) => answers.push(Ok(known.headers.clone())),
                Ok(Some(Ask::ResponseBody(_))) => answers.push(Ok(known.body.clone())),
                _ => {}
            }
            futures_util::stream::iter(answers)
        };
        let answers = request.into_inner().flat_map(answers);
        Ok(Response::new(Box::pin(answers)))
    }
}

fn returned(part: HttpBody) -> ProcessingResponse {
    let mutation = Mutation::StreamedResponse(StreamedBodyResponse {
        body: part.body,
        end_of_stream: part.end_of_stream,
        ..StreamedBodyResponse::default()
    });
    let common = CommonResponse {
        body_mutation: Some(BodyMutation {
            mutation: Some(mutation),
        }),
        ..CommonResponse::default()
    };
    ProcessingResponse {
        response: Some(Answer::RequestBody(BodyResponse {
            response: Some(common),
        })),
        ..ProcessingResponse::default()
    }
}

/// A server in a process of its own.
struct Process {
    child: Child,
    tell: ChildStdin,
    hear: BufReader<ChildStdout>,
    channel: Channel,
}

impl Process {
    async fn start(arguments: &[&str]) -> Process {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let tell = child.stdin.take().unwrap();
        let mut hear = BufReader::new(child.stdout.take().unwrap());
        let mut address = String::new();
        hear.read_line(&mut address).unwrap();
        let channel = Channel::from_shared(format!("http://{}", address.trim())).unwrap();
        Process {
            child,
            tell,
            hear,
            channel: channel.connect().await.unwrap(),
        }
    }

    fn spent(&mut self) -> Duration {
        writeln!(self.tell).unwrap();
        let mut line = String::new();
        self.hear.read_line(&mut line).unwrap();
        Duration::from_nanos(line.trim().parse().unwrap())
    }

    /// Microseconds of its processor time per request, and requests per second.
    async fn round(&mut self) -> (f64, f64) {
        let (spent, began) = (self.spent(), Instant::now());
        let mut streams = tokio::task::JoinSet::new();
        for task in 0..CONCURRENCY {
            let channel = self.channel.clone();
            streams.spawn(async move {
                for number in 0..REQUESTS / CONCURRENCY {
                    exchange(&channel, number * CONCURRENCY + task).await;
                }
            });
        }
        streams.join_all().await;
        let requests = (REQUESTS / CONCURRENCY * CONCURRENCY) as f64;
        let seconds = began.elapsed().as_secs_f64();
        let spent = (self.spent() - spent).as_secs_f64();
        (spent * 1e6 / requests, requests / seconds)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

async fn measure() {
    let picker = Process::start(&["picker"]).await;
    let [plan, back, headers, body] = exchange(&picker.channel, 0).await;
    assert!(matches!(back.response, Some(Answer::RequestBody(_))));
    let written: Vec<String> = [plan, headers, body]
        .iter()
        .map(|answer| {
            answer
                .encode_to_vec()
                .iter()
                .map(|byte| format!("{byte:02x}"))
                .collect()
        })
        .collect();
    let echo = Process::start(&["echo", &written.join(",")]).await;
    let mut servers = [picker, echo];
    let mut seen = [const { Vec::new() }; SERVERS.len()];
    for round in 0..=ROUNDS {
        for turn in 0..servers.len() {
            let which = (turn + round) % servers.len();
            let figures = servers[which].round().await;
            // The first round warms caches.
            if 0 < round {
                seen[which].push(figures);
            }
        }
    }
    println!(
        "{ROUNDS} rounds of {REQUESTS} requests of {BODY} bytes, {CONCURRENCY} streams at once\n"
    );
    println!("server   us/request   requests/s");
    for (server, seen) in SERVERS.iter().zip(&seen) {
        let time = median(seen.iter().map(|figures| figures.0));
        let rate = median(seen.iter().map(|figures| figures.1));
        println!("{server:<8} {time:>10.1} {rate:>12.0}");
    }
    let pairs = || seen[0].iter().zip(&seen[1]);
    println!(
        "\npicker/echo, median of rounds: {:.2} of the time, {:.2} of the rate",
        median(pairs().map(|(picker, echo)| picker.0 / echo.0)),
        median(pairs().map(|(picker, echo)| picker.1 / echo.1)),
    );
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// One request and its answer on a stream of their own; what the server sent.
async fn exchange(channel: &Channel, number: usize) -> [ProcessingResponse; 4] {
    let (send, receive) = tokio::sync::mpsc::channel(8);
    let mut client = ExternalProcessorClient::new(channel.clone());
    let session = format!("session-{}", number % 512);
    let request = [
        (":method", "POST"),
        (":path", "/v1/completions"),
        (":authority", "inference.example.com"),
        (":scheme", "http"),
        ("content-type", "application/json"),
        ("accept", "text/event-stream"),
        ("user-agent", "OpenAI/Python 1.99.0"),
        ("authorization", "Bearer 0123456789abcdef0123456789abcdef"),
        ("x-request-id", "7d7d6a3c-7a4a-4a56-9a8a-5a4d0c2f9a11"),
        ("x-forwarded-for", "10.0.0.7"),
        ("x-envoy-expected-rq-timeout-ms", "600000"),
        ("x-session-id", session.as_str()),
    ];
    send.send(message(Ask::RequestHeaders(headers(&request))))
        .await
        .unwrap();
    send.send(message(Ask::RequestBody(piece(&body()))))
        .await
        .unwrap();
    let asked = client.process(ReceiverStream::new(receive));
    let mut answers = asked.await.unwrap().into_inner();
    let plan = answers.message().await.unwrap().unwrap();
    let back = answers.message().await.unwrap().unwrap();
    let status = headers(&[(":status", "200")]);
    send.send(message(Ask::ResponseHeaders(status)))
        .await
        .unwrap();
    let head = answers.message().await.unwrap().unwrap();
    let end = br#"{"choices":[],"usage":{"prompt_tokens":1000,"completion_tokens":12}}"#;
    send.send(message(Ask::ResponseBody(piece(end))))
        .await
        .unwrap();
    let last = answers.message().await.unwrap().unwrap();
    drop(send);
    assert!(answers.message().await.unwrap().is_none());
    [plan, back, head, last]
}

fn body() -> Bytes {
    static BYTES: std::sync::OnceLock<Bytes> = std::sync::OnceLock::new();
    let made = || {
        let head = r#"{"model":"m","max_tokens":64,"prompt":""#;
        let words = "The quick brown fox jumps over the lazy dog.\\n ".repeat(BODY / 40);
        // Not in the middle of an escape.
        let words = words[..BODY - head.len() - 2].trim_end_matches('\\');
        Bytes::from(format!("{head}{words}\"}}"))
    };
    BYTES.get_or_init(made).clone()
}

fn message(ask: Ask) -> ProcessingRequest {
    ProcessingRequest {
        protocol_config: Some(ProtocolConfiguration {
            request_body_mode: BodySendMode::FullDuplexStreamed.into(),
            response_body_mode: BodySendMode::Streamed.into(),
            send_body_without_waiting_for_header_response: false,
        }),
        request: Some(ask),
        ..ProcessingRequest::default()
    }
}

fn headers(pairs: &[(&str, &str)]) -> HttpHeaders {
    let header = |(key, value): &(&str, &str)| HeaderValue {
        key: (*key).to_owned(),
        raw_value: value.as_bytes().to_vec(),
        ..HeaderValue::default()
    };
    HttpHeaders {
        headers: Some(HeaderMap {
            headers: pairs.iter().map(header).collect(),
        }),
        ..HttpHeaders::default()
    }
}

fn piece(bytes: &[u8]) -> HttpBody {
    HttpBody {
        body: bytes.to_vec(),
        end_of_stream: true,
        ..HttpBody::default()
    }
}

//! What tracing costs: CPU time per request with spans off, on at 0 % and on at 100 %, in one run.
//!
//!     cargo bench --bench tracing
//!
//! Two paths: `pick` alone (parse, encode, observe, decide, book, flight) in this process, and whole
//! requests through the gRPC service from a client in another process. CPU time is that of this whole
//! process, the exporter included; the receiver of spans and the client are processes of their own, this
//! program run again. Variants take turns, so that a busy machine disturbs all of them alike.

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
use envoy_types::pb::envoy::service::ext_proc::v3::external_processor_client::ExternalProcessorClient;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request as Ask;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    HttpBody, HttpHeaders, ProcessingRequest, ProtocolConfiguration,
};
use sidestep::decide::policy::{
    Bypass, ClientPins, DecodeGate, IslBound, Match, OnNoPrefill, Policy, Rule, Scoring,
    SessionAffinity, SessionKey, TierCredit,
};
use sidestep::decide::snapshot::{LocalPrefill, Role};
use sidestep::extproc::counters::Counters;
use sidestep::extproc::server::{Limits, Settings, Tls, serve, tls_material};
use sidestep::extproc::wire::MetadataKeys;
use sidestep::fleet::{PodSpec, Probe, Roster};
use sidestep::kv::index::Index;
use sidestep::load::Ledger;
use sidestep::names::Endpoint;
use sidestep::observe::{Observer, Sources};
use sidestep::pick::{Head, InForce, Parts, Picker};
use sidestep::prompt::{Encoder, Profile, Profiles};
use sidestep::route::Dialect;
use sidestep::telemetry::journal::Journal;
use sidestep::telemetry::metrics::Metrics;
use sidestep::telemetry::trace::Tracing;
use sidestep::telemetry::trace::settings::{FileSettings, resolve};
use sidestep::units::{BlockSize, Ratio, Tokens};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;

const PODS: u16 = 32;
const ROUNDS: usize = 15;
const PICKS: usize = 2000;
const REQUESTS: usize = 6000;
/// Streams that the client keeps open at once.
const CONCURRENCY: usize = 8;
const VARIANTS: [&str; 3] = ["off", "0 %", "100 %"];

/// CPU time of this process so far, all threads.
fn cpu() -> Duration {
    let spent = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(spent.tv_sec as u64, spent.tv_nsec as u32)
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.get(1).map(String::as_str) {
        Some("receiver") => receiver(),
        Some("client") => client(),
        _ => measure(),
    }
}

fn runtime(threads: usize) -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(threads)
        .enable_all()
        .build()
        .unwrap()
}

/// A child process of this program that says one line when it is ready.
struct Helper {
    child: Child,
    tell: ChildStdin,
    hear: BufReader<ChildStdout>,
}

impl Helper {
    fn start(what: &str) -> (Helper, String) {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .arg(what)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let tell = child.stdin.take().unwrap();
        let hear = BufReader::new(child.stdout.take().unwrap());
        let mut helper = Helper { child, tell, hear };
        let line = helper.line();
        (helper, line)
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.hear.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Takes OTLP over HTTP/1.1 and throws it away.
fn receiver() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    println!("{}", listener.local_addr().unwrap());
    for stream in listener.incoming() {
        let stream = stream.unwrap();
        std::thread::spawn(move || swallow(stream));
    }
}

fn swallow(stream: TcpStream) {
    let mut writer = stream.try_clone().unwrap();
    let mut reader = BufReader::new(stream);
    loop {
        let mut length = 0;
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line).unwrap_or(0) == 0 {
                return;
            }
            if let Some(value) = line.to_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse().unwrap();
            }
            if line == "\r\n" {
                break;
            }
        }
        let read = std::io::copy(&mut reader.by_ref().take(length), &mut std::io::sink());
        if read.is_err()
            || writer
                .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                .is_err()
        {
            return;
        }
    }
}

fn tracing(variant: &str, receiver: &str) -> Tracing {
    let ratio = match variant {
        "off" => return Tracing::Off,
        "0 %" => 0.0,
        _ => 1.0,
    };
    let file = FileSettings {
        endpoint: Some(format!("http://{receiver}")),
        protocol: Some(sidestep::telemetry::trace::settings::Protocol::HttpProtobuf),
        sample_ratio: Some(ratio),
        ..FileSettings::default()
    };
    Tracing::start(&resolve(file, |_| None).unwrap().unwrap()).unwrap()
}

fn pod(number: u16) -> PodSpec {
    let role = if number.is_multiple_of(4) {
        Role::Prefill
    } else {
        Role::Decode
    };
    let name = format!("llama-{number:02}");
    PodSpec {
        name: name.as_str().into(),
        uid: name.as_str().into(),
        endpoint: Endpoint(SocketAddr::from(([127, 0, 1, number as u8], 8000))),
        role,
        models: Vec::new(),
        adapters: Vec::new(),
        local_prefill: LocalPrefill::Able,
        kv_events: None,
        block_size: BlockSize::new(16),
        kv_blocks: None,
        prefill_batch_tokens: None,
        probe: Probe::Off,
        listed: sidestep::fleet::Listed::Ready,
    }
}

fn policy() -> Policy {
    let rule = Rule {
        matches: Match::default(),
        bypass: Bypass::IslBounding(IslBound {
            threshold: Tokens(512),
            ratio: Ratio::new(0.5).unwrap(),
            cold_bypass_below: Tokens(100),
            tier_credit: TierCredit::Full,
        }),
        gate: DecodeGate::Off,
        on_no_prefill: OnNoPrefill::Local,
    };
    Policy {
        name: Arc::from("bench"),
        generation: 1,
        rules: vec![rule],
        scoring: Scoring::default(),
        session_affinity: SessionAffinity::Soft(SessionKey {
            header: Arc::from("x-session-id"),
            ttl: Duration::from_secs(300),
        }),
        client_pins: ClientPins::Ignore,
    }
}

fn picker(tracing: Tracing) -> Arc<Picker> {
    let roster = Arc::new(Roster::new());
    roster.apply((0..PODS).map(pod).collect());
    Arc::new(Picker::new(Parts {
        encoder: Encoder::new(
            Profiles::new(vec![Profile::builtin().unwrap()]).unwrap(),
            64 << 20,
        ),
        observer: Observer::new(
            roster,
            Arc::new(Index::new(Default::default())),
            Arc::new(Sources::default()),
            BlockSize::new(16).unwrap(),
        ),
        ledger: Ledger::default(),
        in_force: InForce {
            policy: policy(),
            dialect: Dialect::DecodeFirst,
        },
        metrics: Metrics::new(),
        tracing,
        journal: Journal::new(2048),
    }))
}

/// A chat request of about 1,000 tokens, the last message its own.
fn body(number: usize) -> Bytes {
    let history = "The quick brown fox jumps over the lazy dog. ".repeat(70);
    let model = sidestep::cli::demo::picker::MODEL;
    Bytes::from(format!(
        r#"{{"model":"{model}","max_tokens":64,"messages":[{{"role":"system","content":"{history}"}},{{"role":"user","content":"question {number}"}}]}}"#
    ))
}

const ANSWER: &[u8] = br#"{"choices":[],"usage":{"prompt_tokens":1000,"completion_tokens":12,"prompt_tokens_details":{"cached_tokens":960}}}"#;

fn measure() {
    let (_receiver, address) = Helper::start("receiver");
    let runtime = runtime(2);
    let _inside = runtime.enter();
    let pickers: Vec<Arc<Picker>> = VARIANTS
        .iter()
        .map(|variant| picker(tracing(variant, &address)))
        .collect();
    println!(
        "{ROUNDS} rounds, {PODS} pods, prompts of about 1,000 tokens; CPU time of the whole process\n"
    );
    report("pick alone", &mut |variant, round| {
        let picker = &pickers[variant];
        runtime.block_on(async {
            for number in 0..PICKS {
                pick(picker, round * PICKS + number).await;
            }
        });
        PICKS
    });
    let (mut client, _) = Helper::start("client");
    let ports: Vec<SocketAddr> = pickers
        .iter()
        .map(|picker| serving(&runtime, picker))
        .collect();
    report("whole request through gRPC", &mut |variant, _| {
        writeln!(client.tell, "{} {REQUESTS}", ports[variant]).unwrap();
        assert_eq!(client.line(), "done");
        REQUESTS
    });
    for (variant, picker) in VARIANTS.iter().zip(&pickers) {
        runtime.block_on(picker.tracing().shutdown());
        println!("{variant}: {:?}", picker.tracing().stats());
    }
}

async fn pick(picker: &Picker, number: usize) {
    let mut head = Head {
        method: "POST".into(),
        path: "/v1/chat/completions".into(),
        ..Head::default()
    };
    head.headers
        .push("x-session-id", format!("session-{}", number % 64));
    let picked = picker.pick(head, Some(body(number % 256))).await.unwrap();
    let mut flight = picked.flight;
    flight.response_headers(Some(200), None);
    flight.response_bytes(ANSWER);
    flight.finish();
}

/// Medians over all rounds, and the median of the ratios to `off` within a round.
fn report(what: &str, run: &mut dyn FnMut(usize, usize) -> usize) {
    let mut spent = vec![Vec::new(); VARIANTS.len()];
    for round in 0..=ROUNDS {
        for turn in 0..VARIANTS.len() {
            let variant = (turn + round) % VARIANTS.len();
            let before = cpu();
            let requests = run(variant, round);
            // The exporter sends what waits within a second; it belongs to this round. All variants
            // rest, because a processor that comes out of a rest is slower for a while.
            std::thread::sleep(Duration::from_millis(1100));
            let each = (cpu() - before).as_nanos() as f64 / requests as f64;
            // The first round warms caches.
            if 0 < round {
                spent[variant].push(each);
            }
        }
    }
    println!("{what}");
    let off = spent[0].clone();
    let least = |times: &[f64]| times.iter().copied().fold(f64::INFINITY, f64::min);
    for (variant, times) in VARIANTS.iter().zip(&spent) {
        // What disturbs a round only adds to it.
        let (best, best_off) = (least(times), least(&off));
        let mut ratios: Vec<f64> = times.iter().zip(&off).map(|(on, off)| on / off).collect();
        let mut times = times.clone();
        println!(
            "  {variant:>6}  {:8.1} us per request   {:+.1} % (median of rounds)   {:8.1} us   {:+.1} % (best rounds)",
            median(&mut times) / 1e3,
            (median(&mut ratios) - 1.0) * 100.0,
            best / 1e3,
            (best / best_off - 1.0) * 100.0
        );
    }
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn serving(runtime: &tokio::runtime::Runtime, picker: &Arc<Picker>) -> SocketAddr {
    let listener = runtime
        .block_on(tokio::net::TcpListener::bind("127.0.0.1:0"))
        .unwrap();
    let address = listener.local_addr().unwrap();
    let settings = Settings {
        limits: Limits::default(),
        tls: tls_material(&Tls::Plaintext).unwrap(),
        metadata: MetadataKeys::default(),
        counters: Arc::new(Counters::default()),
        conformance: sidestep::extproc::conformance::Conformance::Disabled,
    };
    runtime.spawn(serve(
        listener,
        Arc::clone(picker),
        settings,
        std::future::pending(),
    ));
    address
}

/// Sends requests as a gateway would; told by lines `address count`.
fn client() {
    println!("ready");
    let runtime = runtime(1);
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let (address, count) = line.split_once(' ').unwrap();
        let (address, count): (String, usize) = (address.to_owned(), count.parse().unwrap());
        runtime.block_on(async {
            let channel = Channel::from_shared(format!("http://{address}")).unwrap();
            let channel = channel.connect().await.unwrap();
            let mut tasks = tokio::task::JoinSet::new();
            for task in 0..CONCURRENCY {
                let channel = channel.clone();
                tasks.spawn(async move {
                    for number in 0..count / CONCURRENCY {
                        exchange(&channel, number * CONCURRENCY + task).await;
                    }
                });
            }
            tasks.join_all().await;
        });
        println!("done");
    }
}

async fn exchange(channel: &Channel, number: usize) {
    let (send, receive) = tokio::sync::mpsc::channel(8);
    let mut client = ExternalProcessorClient::new(channel.clone());
    let mut answers = client
        .process(ReceiverStream::new(receive))
        .await
        .unwrap()
        .into_inner();
    let session = format!("session-{}", number % 64);
    let asked = [
        (":method", "POST"),
        (":path", "/v1/chat/completions"),
        ("content-type", "application/json"),
        ("x-session-id", session.as_str()),
    ];
    send.send(message(Ask::RequestHeaders(headers(&asked))))
        .await
        .unwrap();
    send.send(message(Ask::RequestBody(piece(&body(number % 256), true))))
        .await
        .unwrap();
    for _ in 0..2 {
        answers.message().await.unwrap().unwrap();
    }
    send.send(message(Ask::ResponseHeaders(headers(&[(
        ":status", "200",
    )]))))
    .await
    .unwrap();
    answers.message().await.unwrap().unwrap();
    for (bytes, end) in [(&b"data: {}"[..], false), (ANSWER, true)] {
        send.send(message(Ask::ResponseBody(piece(bytes, end))))
            .await
            .unwrap();
        answers.message().await.unwrap().unwrap();
    }
    drop(send);
    while let Ok(Some(_)) = answers.message().await {}
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

fn piece(bytes: &[u8], end_of_stream: bool) -> HttpBody {
    HttpBody {
        body: bytes.to_vec(),
        end_of_stream,
        ..HttpBody::default()
    }
}

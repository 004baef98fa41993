//! How large `/metrics` is and how long it takes at 1,000 pods, asked over HTTP as Prometheus does.
//!
//!     cargo bench --bench metrics
//!
//! Pod names are as long as Kubernetes makes them, and each pod has a KV feed (nobody publishes, so its
//! state is `lost`). Engines that answer add four more series per pod, about 0.5 MiB together.

#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::panic,
    reason = "a benchmark stops at the first fault"
)]

use sidestep::app::App;
use sidestep::config;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

const PODS: usize = 1000;
const ROUNDS: usize = 51;

#[tokio::main(worker_threads = 2)]
async fn main() {
    let app = start().await;
    let admin = app.bound().admin;
    tokio::spawn(app.run(std::future::pending()));
    let (mut times, mut size) = (Vec::new(), 0);
    for _ in 0..ROUNDS {
        let began = Instant::now();
        size = scrape(admin).await;
        times.push(began.elapsed());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let first = times[0];
    times.sort();
    println!(
        "/metrics at {PODS} pods: {size} bytes; first {first:?}, median {:?}, 90 % within {:?}, longest {:?}",
        times[ROUNDS / 2],
        times[ROUNDS * 9 / 10],
        times[ROUNDS - 1],
    );
}

async fn scrape(admin: SocketAddr) -> usize {
    let mut stream = TcpStream::connect(admin).await.unwrap();
    let request = "GET /metrics HTTP/1.1\r\nhost: sidestep\r\nconnection: close\r\n\r\n";
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    assert!(answer.ends_with(b"# EOF\n"));
    answer.len()
}

async fn start() -> App {
    let mut pods = String::new();
    for n in 0..PODS {
        let role = if n.is_multiple_of(4) {
            "prefill"
        } else {
            "decode"
        };
        let address = format!("127.1.{}.{}", n / 250, n % 250 + 1);
        writeln!(
            pods,
            "  - {{name: llama-3-70b-instruct-{role}-7c9f4d5b8-{n:05}, address: '{address}:8000', role: {role}, kvEvents: {{address: '{address}:5557'}}, probe: off}}"
        )
        .unwrap();
    }
    let config = format!(
        "apiVersion: sidestep.dev/v1alpha1
kind: SidestepConfig
listen: {{extProc: '127.0.0.1:0', health: '127.0.0.1:0', admin: '127.0.0.1:0'}}
tls: {{mode: Plaintext}}
models: [{{name: m}}]
pods:
  inline:
{pods}policy:
  inline: {{rules: [{{bypass: {{type: Never}}}}]}}
"
    );
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sidestep.yaml");
    std::fs::write(&path, config).unwrap();
    let loaded = config::load(&path).unwrap_or_else(|faults| panic!("{faults}"));
    App::start(loaded).await.unwrap()
}

//! What is around the picker: its files, engines' metrics, a receiver of spans.

use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

pub(super) const PODS: usize = 1000;
/// The first pods prefill.
const PREFILL: usize = 250;
/// Pods that publish KV events, and those whose metrics are asked for.
pub(super) const PUBLISHERS: usize = 36;
const PUBLISHING: std::ops::Range<usize> = PREFILL..PREFILL + PUBLISHERS;
const ASKED: std::ops::Range<usize> = 230..310;
/// Each rewriting of the pods' file leaves out one pod in so many.
const LEAVE: usize = 17;
/// Answers of the pods of which one in so many fails.
const TROUBLED: u8 = 13;

/// The model whose prompts are counted, the one whose streams are given up early, and an estimated one.
pub(super) const EXACT: &str = "exact";
pub(super) const HASTY: &str = "hasty";
pub(super) const ESTIMATED: &str = "estimated";

/// Most requests that the picker holds at once.
pub(super) const HELD: usize = 96;
/// Longest pause within a body.
pub(super) const STALL: Duration = Duration::from_secs(3);

/// A pod's address: the metrics of all of them come from one port.
pub(super) fn address(number: usize, port: u16) -> SocketAddr {
    let (high, low) = (number / 250, number % 250 + 1);
    let ip = Ipv4Addr::new(127, 1, high as u8, low as u8);
    SocketAddr::new(IpAddr::V4(ip), port)
}

/// The picker's files.
pub(super) struct Files {
    folder: tempfile::TempDir,
    port: u16,
    publishers: Vec<(String, String)>,
}

impl Files {
    pub(super) fn new(port: u16, publishers: Vec<(String, String)>, spans: SocketAddr) -> Files {
        let files = Files {
            folder: tempfile::tempdir().unwrap(),
            port,
            publishers,
        };
        files.write_pods(None);
        files.write_policy(0);
        let stall = STALL.as_secs();
        let config = format!(
            "apiVersion: sidestep.dev/v1alpha1
kind: SidestepConfig
listen: {{extProc: '127.0.0.1:0', health: '127.0.0.1:0', admin: '127.0.0.1:0'}}
tls: {{mode: Plaintext}}
limits: {{requestBytes: 128Ki, inFlight: {HELD}, bodyTimeout: {stall}s, drainTimeout: 5s}}
models:
- {{name: {EXACT}, tokenizer: {{builtin: true}}}}
- {{name: {HASTY}, tokenizer: {{builtin: true}}}}
- {{name: {ESTIMATED}}}
pods: {{file: pods.yaml}}
policy: {{file: policy.yaml}}
telemetry: {{otlpEndpoint: 'http://{spans}', otlpProtocol: http/protobuf}}
"
        );
        std::fs::write(files.config(), config).unwrap();
        files
    }

    pub(super) fn config(&self) -> PathBuf {
        self.path("sidestep.yaml")
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn replace(&self, name: &str, text: &str) {
        let beside = self.path(&format!("{name}.new"));
        std::fs::write(&beside, text).unwrap();
        std::fs::rename(beside, self.path(name)).unwrap();
    }

    /// All pods, or all but some, which others in each round.
    pub(super) fn write_pods(&self, round: Option<usize>) {
        let mut text = String::from("pods:\n");
        for number in 0..PODS {
            if round.is_some_and(|round| number % LEAVE == round % LEAVE) {
                continue;
            }
            let address = address(number, self.port);
            let role = if number < PREFILL {
                "prefill"
            } else {
                "decode"
            };
            let probe = match ASKED.contains(&number) {
                true => "{path: /metrics}",
                false => "'off'",
            };
            write!(
                text,
                "- {{name: {role}-{number:04}, address: '{address}', role: {role}, probe: {probe}, models: [{EXACT}, {HASTY}, {ESTIMATED}], \
                 capacity: {{kvBlocks: 20000, prefillTokens: 8192}}"
            )
            .unwrap();
            if PUBLISHING.contains(&number) {
                let (events, replay) = &self.publishers[number - PUBLISHING.start];
                write!(
                    text,
                    ", kvEvents: {{address: '{events}', replay: '{replay}'}}"
                )
                .unwrap();
            }
            text.push_str("}\n");
        }
        self.replace("pods.yaml", &text);
    }

    /// A policy: others in each round, some of them with faults. Whether this one is valid.
    pub(super) fn write_policy(&self, round: usize) -> bool {
        let affinity = "sessionAffinity: {mode: Soft, header: x-session-id, ttl: 5m}";
        let (valid, spec) = match round % 5 {
            0 => (
                true,
                format!(
                    "rules: [{{bypass: {{type: IslOrLoad, effectiveIslThreshold: 2048, prefillBusyThreshold: 2.0, coldBypassBelow: 256}}}}]\n  {affinity}"
                ),
            ),
            1 => (
                true,
                "rules: [{bypass: {type: Never}}]\n  handoff: {dialect: prefillFirst}".to_owned(),
            ),
            2 => (false, "rules: [{bypass: {type: Sometimes}}]".to_owned()),
            3 => (
                true,
                format!(
                    "rules: [{{bypass: {{type: IslBounding}}, onNoPrefill: Fail}}]\n  {affinity}"
                ),
            ),
            _ => (false, "rules: [".to_owned()),
        };
        self.replace(
            "policy.yaml",
            &format!(
                "# {round}\napiVersion: sidestep.dev/v1alpha1\nkind: DisaggregationPolicy\n\
                 metadata: {{name: round-{}}}\nspec:\n  {spec}\n",
                round % 5
            ),
        );
        valid
    }
}

/// Answers as vLLM does, for every pod; one pod in a while has trouble.
pub(super) async fn engines(listener: TcpListener) {
    let mut connections = JoinSet::new();
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        let IpAddr::V4(ip) = stream.local_addr().unwrap().ip() else {
            continue;
        };
        let low = ip.octets()[3];
        let answer = if low.is_multiple_of(TROUBLED) {
            http_answer("503 Service Unavailable", "")
        } else {
            let (running, usage) = (low % 32, f64::from(low % 50) / 100.0);
            http_answer(
                "200 OK",
                &format!(
                    "vllm:num_requests_running{{engine=\"0\"}} {running}.0\n\
                     vllm:num_requests_waiting{{engine=\"0\"}} {}.0\n\
                     vllm:kv_cache_usage_perc{{engine=\"0\"}} {usage}\n\
                     vllm:cache_config_info{{block_size=\"16\",engine=\"0\",num_gpu_blocks=\"20000\"}} 1.0\n",
                    running / 8
                ),
            )
        };
        connections.spawn(serve(stream, answer));
        while connections.try_join_next().is_some() {}
    }
}

/// Takes spans on `address` for a while, then refuses connections for a while.
pub(super) async fn spans(address: SocketAddr, open: Duration, shut: Duration) {
    loop {
        if let Ok(listener) = TcpListener::bind(address).await {
            let _ = timeout(open, async {
                // What is open ends with this.
                let mut connections = JoinSet::new();
                while let Ok((stream, _)) = listener.accept().await {
                    connections.spawn(serve(stream, http_answer("200 OK", "")));
                }
            })
            .await;
        }
        sleep(shut).await;
    }
}

fn http_answer(status: &str, body: &str) -> String {
    let length = body.len();
    format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\n\r\n{body}")
}

/// Gives every request on a connection the same answer.
async fn serve(stream: TcpStream, answer: String) {
    let (read, mut write) = stream.into_split();
    let mut read = BufReader::new(read);
    loop {
        let mut length = 0;
        loop {
            let mut line = String::new();
            match read.read_line(&mut line).await {
                Ok(0) | Err(_) => return,
                Ok(_) if line == "\r\n" => break,
                Ok(_) => {
                    if let Some(value) = line.to_lowercase().strip_prefix("content-length:") {
                        length = value.trim().parse().unwrap();
                    }
                }
            }
        }
        let mut body = (&mut read).take(length);
        if tokio::io::copy(&mut body, &mut tokio::io::sink())
            .await
            .is_err()
            || write.write_all(answer.as_bytes()).await.is_err()
        {
            return;
        }
    }
}

/// An address that is free now and has nobody on it yet.
pub(super) async fn free() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    listener.local_addr().unwrap()
}

/// Reads the live stream of decisions more slowly than it comes, and comes back when it is cut off.
pub(super) async fn slow_reader(admin: SocketAddr) -> ! {
    loop {
        let mut stream = TcpStream::connect(admin).await.unwrap();
        let head = format!("GET /v1/decisions/stream HTTP/1.1\r\nhost: {admin}\r\n\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut bytes = vec![0; 4096];
        while let Ok(1..) = stream.read(&mut bytes).await {
            sleep(Duration::from_millis(200)).await;
        }
    }
}

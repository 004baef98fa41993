//! The picker as a process of its own: its ports, log, memory, processor time, admin port.

use serde_json::Value;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::task::JoinHandle;
use tokio::time::timeout;

const PATIENCE: Duration = Duration::from_secs(20);
/// Ticks of `/proc/PID/stat` in a second: the same on every Linux.
const USER_HZ: u64 = 100;

/// What was logged: a line that is no JSON counts as an error.
#[derive(Default)]
pub(super) struct Log {
    pub(super) errors: Vec<String>,
    /// By kind: place and text without numbers.
    pub(super) warnings: Vec<String>,
    pub(super) lines: usize,
}

pub(super) struct Process {
    child: Child,
    id: u32,
    pub(super) ext_proc: SocketAddr,
    pub(super) admin: SocketAddr,
    log: Arc<parking_lot::Mutex<Log>>,
    reading: JoinHandle<()>,
}

impl Process {
    pub(super) async fn start(config: &Path) -> Process {
        let mut child = Command::new(env!("CARGO_BIN_EXE_sidestep"))
            .args(["--log-json", "--log", "info", "serve", "--config"])
            .arg(config)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let id = child.id().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let log = Arc::new(parking_lot::Mutex::new(Log::default()));
        let ports = async {
            while let Some(line) = lines.next_line().await.unwrap() {
                log.lock().add(&line);
                let said: Value = serde_json::from_str(&line).unwrap_or_default();
                let port = |name| said["fields"][name].as_str()?.parse().ok();
                if let (Some(ext_proc), Some(admin)) = (port("ext_proc"), port("admin")) {
                    return (ext_proc, admin);
                }
            }
            panic!("the picker did not start: {:?}", log.lock().errors);
        };
        let (ext_proc, admin) = timeout(PATIENCE, ports).await.unwrap();
        let shared = Arc::clone(&log);
        let reading = tokio::spawn(async move {
            while let Ok(Some(line)) = lines.next_line().await {
                shared.lock().add(&line);
            }
        });
        Process {
            child,
            id,
            ext_proc,
            admin,
            log,
            reading,
        }
    }

    /// Memory in use, in KiB.
    pub(super) fn memory(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.id)).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let number = line.unwrap().split_whitespace().next().unwrap();
        number.parse().unwrap()
    }

    /// Processor time spent so far.
    pub(super) fn spent(&self) -> Duration {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.id)).unwrap();
        // The name before it may hold anything.
        let (_, fields) = stat.rsplit_once(") ").unwrap();
        let fields = fields.split(' ').skip(11).take(2);
        let ticks: u64 = fields.map(|ticks| ticks.parse::<u64>().unwrap()).sum();
        Duration::from_millis(ticks * 1000 / USER_HZ)
    }

    /// Asks it to end, and waits for it.
    pub(super) async fn stop(mut self) -> (ExitStatus, Log) {
        let id = rustix::process::Pid::from_raw(i32::try_from(self.id).unwrap()).unwrap();
        rustix::process::kill_process(id, rustix::process::Signal::TERM).unwrap();
        let status = timeout(PATIENCE, self.child.wait()).await.unwrap().unwrap();
        self.reading.await.unwrap();
        let log = std::mem::take(&mut *self.log.lock());
        (status, log)
    }
}

impl Log {
    fn add(&mut self, line: &str) {
        self.lines += 1;
        let said: Value = serde_json::from_str(line).unwrap_or_default();
        match said["level"].as_str() {
            Some("INFO") => {}
            Some("WARN") => self.warnings.push(line.to_owned()),
            _ => self.errors.push(line.to_owned()),
        }
    }

    /// How often each warning was written, whatever its subject.
    pub(super) fn kinds(&self) -> BTreeMap<String, usize> {
        let mut kinds = BTreeMap::new();
        for line in &self.warnings {
            let said: Value = serde_json::from_str(line).unwrap_or_default();
            let text = said["fields"]["message"].as_str().unwrap_or(line);
            let kind: String = text.chars().take(60).filter(|c| !c.is_numeric()).collect();
            *kinds.entry(kind).or_default() += 1;
        }
        kinds
    }
}

/// What the admin port answers, which must be 200.
pub(super) async fn get(admin: SocketAddr, path: &str) -> String {
    let asked = async {
        let mut stream = TcpStream::connect(admin).await?;
        let head = format!("GET {path} HTTP/1.1\r\nhost: {admin}\r\nconnection: close\r\n\r\n");
        stream.write_all(head.as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        Ok::<_, std::io::Error>(answer)
    };
    let answer = timeout(PATIENCE, asked).await.unwrap().unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200"), "{path}: {head}");
    body.to_owned()
}

pub(super) async fn get_json(admin: SocketAddr, path: &str) -> Value {
    serde_json::from_str(&get(admin, path).await).unwrap()
}

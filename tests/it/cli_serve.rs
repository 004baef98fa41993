//! `sidestep serve` and the signals that end it.

use crate::extproc_gateway::{Gateway, PATIENCE};
use std::net::{SocketAddr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::time::Instant;
use tempfile::TempDir;
use tonic::transport::Channel;

/// A picker in a process of its own.
struct Served {
    child: Child,
    ext_proc: SocketAddr,
    _folder: TempDir,
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn free() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap()
}

impl Served {
    fn start() -> Served {
        let folder = tempfile::tempdir().unwrap();
        let ext_proc = free();
        let config = format!(
            "apiVersion: sidestep.dev/v1alpha1
kind: SidestepConfig
listen: {{extProc: '{ext_proc}', health: '127.0.0.1:0', admin: '127.0.0.1:0'}}
tls: {{mode: Plaintext}}
models: [{{name: m}}]
pods:
  inline:
  - {{name: d1, address: '127.0.0.11:8000', role: decode, probe: 'off'}}
policy: {{inline: {{rules: [{{bypass: {{type: Never}}}}]}}}}
"
        );
        let file = folder.path().join("sidestep.yaml");
        std::fs::write(&file, config).unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_sidestep"))
            .args(["serve", "--config"])
            .arg(file)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Served {
            child,
            ext_proc,
            _folder: folder,
        }
    }

    /// A connection, once the port is open.
    async fn channel(&self) -> Channel {
        let address = format!("http://{}", self.ext_proc);
        let connected = async {
            loop {
                let endpoint = Channel::from_shared(address.clone()).unwrap();
                match endpoint.connect().await {
                    Ok(channel) => return channel,
                    Err(_) => tokio::time::sleep(std::time::Duration::from_millis(20)).await,
                }
            }
        };
        tokio::time::timeout(PATIENCE, connected).await.unwrap()
    }

    /// Sends SIGTERM and waits until it is heeded: the port takes nothing new.
    async fn terminate(&self) {
        self.signal();
        let deadline = Instant::now() + PATIENCE;
        while tokio::net::TcpStream::connect(self.ext_proc).await.is_ok() {
            assert!(Instant::now() < deadline, "the port stays open");
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    }

    fn signal(&self) {
        let pid = self.child.id().to_string();
        let sent = Command::new("kill").args(["-TERM", &pid]).status();
        assert!(sent.unwrap().success());
    }

    /// The exit code, well before the time to drain is over.
    async fn ended(&mut self) -> Option<i32> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(Instant::now() < deadline, "still running");
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    }
}

/// A stream whose request is on its way and whose answer has not come.
async fn in_flight(channel: &Channel) -> Gateway {
    let mut gateway = Gateway::duplex(channel).await;
    gateway.headers("POST", "/v1/completions", false);
    gateway.body(br#"{"model": "m", "prompt": "hello"}"#, true);
    gateway.planned().await;
    gateway
}

#[tokio::test]
async fn a_signal_lets_what_runs_end_and_a_second_one_does_not() {
    let mut patient = Served::start();
    let channel = patient.channel().await;
    let gateway = in_flight(&channel).await;
    patient.terminate().await;
    assert_eq!(patient.child.try_wait().unwrap(), None, "a stream runs");
    drop((gateway, channel));
    assert_eq!(patient.ended().await, Some(0));

    let mut hurried = Served::start();
    let channel = hurried.channel().await;
    let _gateway = in_flight(&channel).await;
    hurried.terminate().await;
    hurried.signal();
    assert_eq!(hurried.ended().await, Some(1));
}

#[tokio::test]
async fn a_signal_without_streams_ends_it_at_once() {
    let mut served = Served::start();
    drop(served.channel().await);
    served.signal();
    assert_eq!(served.ended().await, Some(0));
}

//! The demo's deployment: engines, picker, Envoy, all on free loopback ports.
//!
//! Lives here: [`Stack`], what is started in which order and when it is ready.
//! Never here: traffic (see `mod`), how a process ends (see `process`).
//! Invariant: a stack that has started answers requests; one that is dropped leaves no process.

use crate::cli::demo::client::Client;
use crate::cli::demo::envoy;
use crate::cli::demo::gateway::{GatewayConfig, Transport};
use crate::cli::demo::picker::{MODEL, PickerConfig, Pod};
use crate::cli::demo::process::{Process, free_addresses};
use anyhow::{Context as _, bail};
use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

const POLICY: &str = include_str!("policy.yaml");
const PREFILL: usize = 2;
const DECODE: usize = 3;
const PODS: usize = PREFILL + DECODE;
/// The gateway, and the picker's three ports.
const OTHERS: usize = 4;
const ADDRESSES: usize = 3 * PODS + OTHERS;
/// Small enough that a few long prompts at once make a prefill pod busy.
const BATCH_TOKENS: u32 = 4096;
/// How often the whole is started anew when another program takes a port first.
const ATTEMPTS: usize = 3;
const READY_WITHIN: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(50);
const GRACE: Duration = Duration::from_secs(3);

/// What is started.
#[derive(Clone, Debug)]
pub(super) struct Options {
    /// The Envoy to run.
    pub(super) envoy: PathBuf,
    /// The user's policy, if not the demo's own.
    pub(super) policy: Option<PathBuf>,
    /// How slow the engines are.
    pub(super) time_scale: f64,
}

/// Where it can be reached.
#[derive(Clone, Debug)]
pub(super) struct Urls {
    gateway: SocketAddr,
    admin: SocketAddr,
}

impl Urls {
    /// Chat completions, through Envoy.
    #[must_use]
    pub(super) fn chat(&self) -> String {
        format!("http://{}/v1/chat/completions", self.gateway)
    }

    /// The picker's record of a decision.
    #[must_use]
    pub(super) fn decision(&self, id: &str) -> String {
        format!("http://{}/v1/decisions/{id}", self.admin)
    }

    /// What to try while it runs.
    #[must_use]
    pub(super) fn invitation(&self) -> String {
        format!(
            "\nrunning until Ctrl-C; try\n\n  curl -i {} -H 'content-type: application/json' \\\n    -d '{{\"model\": \"{MODEL}\", \"messages\": [{{\"role\": \"user\", \"content\": \"hello\"}}], \"max_tokens\": 16}}'\n\n  \
             page       http://{admin}/\n  decisions  http://{admin}/v1/decisions\n  pods       http://{admin}/v1/pods\n  metrics    http://{admin}/metrics\n\n",
            self.chat(),
            admin = self.admin,
        )
    }
}

/// A running deployment.
#[derive(Debug)]
pub(super) struct Stack {
    // In the order in which they are ended: no request may arrive where nobody answers.
    processes: Vec<Process>,
    urls: Urls,
    folder: Folder,
}

/// Where configurations and logs are; removed with the deployment, unless the logs tell of a fault.
#[derive(Debug)]
struct Folder {
    path: PathBuf,
    keep: bool,
}

impl Drop for Folder {
    fn drop(&mut self) {
        if self.keep {
            eprintln!("logs are in {}", self.path.display());
        } else {
            std::fs::remove_dir_all(&self.path).ok();
        }
    }
}

impl Stack {
    /// Starts everything and waits until it answers.
    ///
    /// # Errors
    /// When a process cannot be started, ends, or is not ready in time.
    pub(super) async fn start(options: &Options) -> anyhow::Result<Stack> {
        let executable = std::env::current_exe().context("where this program lies")?;
        let home = envoy::home(&executable)?;
        eprintln!("starting {PREFILL} prefill pods, {DECODE} decode pods, the picker and Envoy");
        let mut attempt = 1;
        loop {
            let path = home.join(format!("run-{}-{attempt}", std::process::id()));
            std::fs::create_dir_all(&path).with_context(|| format!("{}", path.display()))?;
            let folder = Folder { path, keep: false };
            let mut stack = Stack::spawn(options, &executable, folder)?;
            match stack.ready().await {
                Ok(()) => return Ok(stack),
                Err(_) if attempt < ATTEMPTS && stack.lost_a_port() => {
                    eprintln!("another program took a port; starting again");
                    attempt += 1;
                }
                Err(error) => {
                    stack.keep_logs();
                    return Err(error);
                }
            }
        }
    }

    fn spawn(options: &Options, executable: &Path, folder: Folder) -> anyhow::Result<Stack> {
        let addresses = free_addresses::<ADDRESSES>().context("free ports")?;
        let [gateway, ext_proc, health, admin, pod_addresses @ ..] = addresses;
        let pods = pods(&pod_addresses);
        let decode = pods.iter().filter(|pod| pod.role == "decode");
        let config = GatewayConfig::new(gateway, ext_proc, decode.map(|pod| pod.address).collect());
        let envoy_file = write(&folder.path, "envoy.yaml", &config.to_yaml()?)?;
        let policy = match &options.policy {
            Some(file) => {
                std::path::absolute(file).with_context(|| format!("{}", file.display()))?
            }
            None => write(&folder.path, "policy.yaml", POLICY)?,
        };
        let config = PickerConfig {
            ext_proc,
            health,
            admin,
            transport: Transport::Tls,
            limits: Vec::new(),
            pods: pods.clone(),
            policy,
            otlp: None,
        };
        let picker_file = write(&folder.path, "picker.yaml", &config.to_yaml()?)?;

        let start = |name: &str, program: &Path, arguments: &[OsString]| {
            Process::spawn(name, program, arguments, &folder.path)
        };
        let arguments = [
            "--config-path".into(),
            envoy_file.into(),
            // Without it, two Envoys on one machine share memory by their base id.
            "--disable-hot-restart".into(),
            "--concurrency".into(),
            "2".into(),
            "--log-level".into(),
            "warning".into(),
        ];
        let mut processes = vec![start("envoy", &options.envoy, &arguments)?];
        let arguments = ["serve".into(), "--config".into(), picker_file.into()];
        processes.push(start("picker", executable, &arguments)?);
        for pod in &pods {
            let arguments = pod.engine_arguments(options.time_scale);
            let arguments: Vec<OsString> = arguments.into_iter().map(OsString::from).collect();
            processes.push(start(&pod.name, executable, &arguments)?);
        }
        Ok(Stack {
            processes,
            urls: Urls { gateway, admin },
            folder,
        })
    }

    /// Where it can be reached.
    #[must_use]
    pub(super) fn urls(&self) -> &Urls {
        &self.urls
    }

    /// Returns when a process has ended, with what it said last.
    ///
    /// # Errors
    /// Always: this is not how a demo ends.
    pub(super) async fn ended(&mut self) -> anyhow::Result<()> {
        loop {
            if let Err(ended) = self.check() {
                self.keep_logs();
                return Err(ended);
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// Leaves the logs where they are.
    pub(super) fn keep_logs(&mut self) {
        self.folder.keep = true;
    }

    /// Ends everything.
    pub(super) async fn stop(self) {
        for process in &self.processes {
            process.terminate();
        }
        for process in self.processes {
            process.stop(GRACE).await;
        }
    }

    /// Waits until every pod is ready for the picker and a request goes through.
    async fn ready(&mut self) -> anyhow::Result<()> {
        let client = Client::default();
        let urls = self.urls.clone();
        let deadline = tokio::time::Instant::now() + READY_WITHIN;
        loop {
            self.check()?;
            let missing = match not_ready(&client, &urls).await {
                Ok(()) => return Ok(()),
                Err(missing) => missing,
            };
            if deadline <= tokio::time::Instant::now() {
                return Err(
                    missing.context(format!("not ready within {} s", READY_WITHIN.as_secs()))
                );
            }
            tokio::time::sleep(POLL).await;
        }
    }

    fn check(&mut self) -> anyhow::Result<()> {
        for process in &mut self.processes {
            if let Some(status) = process.ended() {
                bail!(
                    "{} ended with {status}:\n{}",
                    process.name(),
                    process.log_tail(20)
                );
            }
        }
        Ok(())
    }

    fn lost_a_port(&self) -> bool {
        self.processes.iter().any(|process| {
            process
                .log_tail(50)
                .to_lowercase()
                .contains("address already in use")
        })
    }
}

fn pods(addresses: &[SocketAddr]) -> Vec<Pod> {
    addresses
        .chunks_exact(3)
        .enumerate()
        .map(|(index, ports)| {
            let (role, number) = if index < PREFILL {
                ("prefill", index + 1)
            } else {
                ("decode", index + 1 - PREFILL)
            };
            Pod {
                name: format!("{role}-{number}"),
                address: ports[0],
                role,
                events: Some(ports[1]),
                replay: Some(ports[2]),
                batch_tokens: BATCH_TOKENS,
            }
        })
        .collect()
}

async fn not_ready(client: &Client, urls: &Urls) -> anyhow::Result<()> {
    let (status, body) = client
        .get(&format!("http://{}/v1/pods", urls.admin))
        .await?;
    let pods: serde_json::Value = serde_json::from_slice(&body).context("the picker's pods")?;
    if !status.is_success() || !all_pods_ready(&pods) {
        bail!("not every pod is ready: {pods}");
    }
    let (status, _) = client
        .get(&format!("http://{}/v1/models", urls.gateway))
        .await?;
    if !status.is_success() {
        bail!("the gateway answers {status}");
    }
    Ok(())
}

/// Whether the picker reaches every pod and follows its KV events.
fn all_pods_ready(pods: &serde_json::Value) -> bool {
    let pods = pods.as_array().map(Vec::as_slice).unwrap_or_default();
    let ready =
        |pod: &serde_json::Value| pod["availability"] == "ready" && pod["kv_source"] == "live";
    pods.len() == PODS && pods.iter().all(ready)
}

fn write(folder: &Path, name: &str, text: &str) -> anyhow::Result<PathBuf> {
    let file = folder.join(name);
    std::fs::write(&file, text).with_context(|| format!("{}", file.display()))?;
    Ok(file)
}

//! Child processes that end with their owner.
//!
//! Lives here: [`Process`], free ports.
//! Never here: what the processes are (see `stack`).
//! Invariant: dropping a [`Process`] kills it; nothing is ever ended by name.

use anyhow::Context as _;
use rustix::process::{Pid, Signal, kill_process};
use std::ffi::OsStr;
use std::fs::OpenOptions;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;
use tokio::process::{Child, Command};

/// A running program, its output in a log file of its own.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts `program`; its output goes to `<logs>/<name>.log`, after what may be there already.
    ///
    /// # Errors
    /// When the log cannot be written or the program cannot be started.
    pub fn spawn<A: AsRef<OsStr>>(
        name: &str,
        program: &Path,
        arguments: &[A],
        logs: &Path,
    ) -> anyhow::Result<Process> {
        let log = logs.join(format!("{name}.log"));
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&log)
            .with_context(|| format!("{}", log.display()))?;
        let child = Command::new(program)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(file.try_clone().context("log file")?)
            .stderr(file)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("starting {}", program.display()))?;
        Ok(Process {
            name: name.to_owned(),
            child,
            log,
        })
    }

    /// What it is called.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its process id, while it runs.
    #[must_use]
    pub fn id(&self) -> Option<u32> {
        self.child.id()
    }

    /// How it ended, if it has.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Asks it to end (SIGTERM). Does nothing when it already has.
    pub fn terminate(&self) {
        self.signal(Signal::TERM);
    }

    /// Ends it at once (SIGKILL) and waits until it is gone.
    ///
    /// # Errors
    /// When the operating system does not let us.
    pub async fn kill(mut self) -> std::io::Result<()> {
        self.child.kill().await
    }

    /// Waits until it ends by itself.
    ///
    /// # Errors
    /// When the operating system does not say how it ended.
    pub async fn wait(&mut self) -> std::io::Result<ExitStatus> {
        self.child.wait().await
    }

    /// Asks it to end, waits for at most `grace`, then ends it. Returns how it ended by itself.
    pub async fn stop(mut self, grace: Duration) -> Option<ExitStatus> {
        self.terminate();
        if let Ok(Ok(status)) = tokio::time::timeout(grace, self.child.wait()).await {
            return Some(status);
        }
        // Dropping it would do the same; waiting leaves no zombie.
        self.child.kill().await.ok();
        None
    }

    /// The last lines of its output.
    #[must_use]
    pub fn log_tail(&self, lines: usize) -> String {
        let bytes = std::fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes);
        let all: Vec<&str> = text.lines().collect();
        all[all.len().saturating_sub(lines)..].join("\n")
    }

    fn signal(&self, signal: Signal) {
        // The id is `None` once the child was waited for, so it cannot be another process's.
        let pid = self
            .child
            .id()
            .and_then(|id| i32::try_from(id).ok())
            .and_then(Pid::from_raw);
        if let Some(pid) = pid {
            kill_process(pid, signal).ok();
        }
    }
}

/// `N` loopback addresses that were free a moment ago, all different.
///
/// Another program may take one before its user does; whoever starts a program on one starts again
/// with others when that happens.
///
/// # Errors
/// When the system has no free port.
pub fn free_addresses<const N: usize>() -> std::io::Result<[SocketAddr; N]> {
    // All are held until the last is known, so that no port is handed out twice.
    let held = (0..N)
        .map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)))
        .collect::<std::io::Result<Vec<_>>>()?;
    let mut addresses = [SocketAddr::from((Ipv4Addr::LOCALHOST, 0)); N];
    for (address, listener) in addresses.iter_mut().zip(&held) {
        *address = listener.local_addr()?;
    }
    Ok(addresses)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, logs: &Path) -> Process {
        Process::spawn("sh", Path::new("/bin/sh"), &["-c", script], logs).unwrap()
    }

    async fn until(mut condition: impl FnMut() -> bool) {
        let waited = tokio::time::timeout(Duration::from_secs(10), async {
            while !condition() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        waited.await.expect("the condition came true in time");
    }

    #[tokio::test]
    async fn output_is_kept_and_the_end_is_seen() {
        let logs = tempfile::tempdir().unwrap();
        let mut process = shell("echo one; echo two >&2; exit 3", logs.path());
        assert_eq!(process.wait().await.unwrap().code(), Some(3));
        assert_eq!(process.ended().unwrap().code(), Some(3));
        assert_eq!(process.log_tail(1), "two");
        assert_eq!(process.log_tail(9), "one\ntwo");
    }

    #[tokio::test]
    async fn a_process_that_is_asked_to_end_may_clean_up() {
        let logs = tempfile::tempdir().unwrap();
        let process = shell(
            "trap 'echo bye; exit 0' TERM; echo up; while :; do sleep 0.01; done",
            logs.path(),
        );
        until(|| process.log_tail(1) == "up").await;
        let status = process.stop(Duration::from_secs(10)).await;
        assert_eq!(status.and_then(|status| status.code()), Some(0));
        let log = std::fs::read_to_string(logs.path().join("sh.log")).unwrap();
        assert_eq!(log, "up\nbye\n");
    }

    #[tokio::test]
    async fn a_process_that_does_not_end_is_ended() {
        let logs = tempfile::tempdir().unwrap();
        let process = shell(
            "trap '' TERM; echo up; while :; do sleep 0.01; done",
            logs.path(),
        );
        until(|| process.log_tail(1) == "up").await;
        assert_eq!(process.stop(Duration::from_millis(50)).await, None);
    }

    #[tokio::test]
    async fn a_dropped_process_is_gone() {
        let logs = tempfile::tempdir().unwrap();
        let process = shell("echo up; while :; do sleep 0.01; done", logs.path());
        until(|| process.log_tail(1) == "up").await;
        let pid = Pid::from_raw(i32::try_from(process.id().unwrap()).unwrap()).unwrap();
        drop(process);
        until(|| {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
            stat.map_or(true, |stat| stat.contains(") Z "))
        })
        .await;
    }

    #[test]
    fn free_addresses_are_different() {
        let addresses = free_addresses::<16>().unwrap();
        let ports: std::collections::BTreeSet<u16> =
            addresses.iter().map(SocketAddr::port).collect();
        assert_eq!(ports.len(), 16);
        assert!(!ports.contains(&0));
    }
}

//! Files that change while the process runs.
//!
//! Lives here: [`Watch`], which looks at a file again and again.
//! Never here: what to do with a new value, or with a bad one (keep the old).
//! Invariant: each new content is reported once, right or wrong, and only after two equal readings in
//! a row, so that a file in the middle of being written is not taken for a short one.
//!
//! The path is opened anew each time. A mounted ConfigMap, whose files are symbolic links that are
//! swapped as a whole, therefore needs nothing special; nor do editors that replace the file.

use crate::config::diagnostic::Diagnostics;
use crate::config::load::{Content, pods_from, policy_from, read};
use crate::config::{LoadedPods, LoadedPolicy};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, spawn_blocking};
use tokio::time::{MissedTickBehavior, interval, sleep};

/// How often to look, unless told otherwise.
pub const DEFAULT_INTERVAL: Duration = Duration::from_millis(500);

/// Readings in search of two equal ones, before it is left for the next look.
const MOST_SETTLING: usize = 20;

/// A watched file. Dropping it ends the watch.
#[derive(Debug)]
pub struct Watch<T> {
    updates: mpsc::Receiver<Result<T, Diagnostics>>,
    task: AbortHandle,
}

impl<T> Watch<T> {
    /// The next content: its value, or all its faults. Waits until there is one.
    ///
    /// `None` only if the runtime is shutting down. Cancel safe.
    pub async fn next(&mut self) -> Option<Result<T, Diagnostics>> {
        self.updates.recv().await
    }
}

impl<T> Drop for Watch<T> {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Watches the policy at `path`, whose content was last `seen`, looking `every` so often.
///
/// Must be called within a tokio runtime.
#[must_use]
pub fn policy(path: PathBuf, every: Duration, seen: Content) -> Watch<LoadedPolicy> {
    watch(path, every, seen, policy_from)
}

/// Watches the list of pods at `path`, whose content was last `seen`, looking `every` so often.
///
/// Must be called within a tokio runtime.
#[must_use]
pub fn pods(path: PathBuf, every: Duration, seen: Content) -> Watch<LoadedPods> {
    watch(path, every, seen, pods_from)
}

type Parse<T> = fn(&[u8], &Path) -> Result<T, Diagnostics>;

fn watch<T: Send + 'static>(
    path: PathBuf,
    every: Duration,
    seen: Content,
    parse: Parse<T>,
) -> Watch<T> {
    // One waiting update is enough: whoever is slow gets the newest content next.
    let (sender, updates) = mpsc::channel(1);
    let task = tokio::spawn(run(Arc::from(path), every, seen, (sender, parse)));
    Watch {
        updates,
        task: task.abort_handle(),
    }
}

type Sink<T> = (mpsc::Sender<Result<T, Diagnostics>>, Parse<T>);

async fn run<T: Send + 'static>(
    path: Arc<Path>,
    every: Duration,
    mut seen: Content,
    (sender, parse): Sink<T>,
) {
    let mut looks = interval(every.max(Duration::from_millis(1)));
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        looks.tick().await;
        let Some(found) = settled(&path, seen, every / 5).await else {
            continue;
        };
        seen = found.content();
        let from = Arc::clone(&path);
        let parsed = spawn_blocking(move || match found {
            Found::Bytes(bytes) => parse(&bytes, &from),
            Found::Trouble(trouble) => Err(trouble),
        });
        let Ok(parsed) = parsed.await else {
            return;
        };
        if sender.send(parsed).await.is_err() {
            return;
        }
    }
}

/// What one look found.
enum Found {
    Bytes(Vec<u8>),
    /// The file could not be read. This too is a content, reported once.
    Trouble(Diagnostics),
}

impl Found {
    fn content(&self) -> Content {
        match self {
            Found::Bytes(bytes) => Content::of(bytes),
            Found::Trouble(trouble) => Content::of(trouble.to_string().as_bytes()),
        }
    }
}

/// What is at `path`, if that is not `seen` and has come to rest.
async fn settled(path: &Arc<Path>, seen: Content, pause: Duration) -> Option<Found> {
    let mut last = look(path).await?;
    if last.content() == seen {
        return None;
    }
    for _ in 0..MOST_SETTLING {
        sleep(pause).await;
        let next = look(path).await?;
        if next.content() == last.content() {
            return Some(next).filter(|next| next.content() != seen);
        }
        last = next;
    }
    None
}

/// `None` only if the runtime is shutting down.
async fn look(path: &Arc<Path>) -> Option<Found> {
    let path = Arc::clone(path);
    let read = spawn_blocking(move || match read(&path) {
        Ok(bytes) => Found::Bytes(bytes),
        Err(trouble) => Found::Trouble(trouble),
    });
    read.await.ok()
}

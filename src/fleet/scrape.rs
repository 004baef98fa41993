//! Asks engines for their own numbers, again and again.
//!
//! Lives here: one task per pod (`Scraper`), and the set of them that follows the roster
//! ([`Scrapers`]).
//! Never here: what the numbers mean (`exposition`, `status`), which pods exist (`roster`).
//! Invariant: a task belongs to one incarnation of a pod and ends with its owner; time, bytes and
//! connections of one scrape are bounded, and a slow pod delays no other.
//!
//! A scraped pod is not ready until it has answered once. It is unreachable as soon as its address refuses
//! connections, which it does only while nothing listens there, or when it has missed several answers in a
//! row for other causes, which may pass (a lost packet, an engine that pauses). It is ready again from the
//! next answer on.

use crate::decide::snapshot::Availability;
use crate::fleet::exposition;
use crate::fleet::pod::{Pod, Probe};
use crate::fleet::roster::View;
use crate::fleet::status::{Reported, Status};
use crate::names::PodId;
use bytes::Bytes;
use http::{Request, StatusCode, Uri};
use http_body_util::{BodyExt, Empty, LengthLimitError, Limited};
use hyper_util::client::legacy::Client as HttpClient;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use rustc_hash::FxBuildHasher;
use std::collections::HashMap;
use std::future::Future;
use std::io::ErrorKind;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::AbortHandle;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};

/// The longest answer that is read: a large vLLM with many models stays well below.
pub const MAX_BODY_BYTES: usize = 4 << 20;

/// The first scrapes of pods that appear together are spread over this many parts of the interval.
const PHASES: u32 = 64;

/// How often and how patiently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// From one scrape of a pod to the next.
    pub every: Duration,
    /// From connecting to the last byte.
    pub timeout: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            every: Duration::from_secs(1),
            timeout: Duration::from_secs(1),
        }
    }
}

type Client = HttpClient<HttpConnector, Empty<Bytes>>;

/// One task per pod that has a probe.
#[derive(Debug)]
pub struct Scrapers {
    client: Client,
    settings: Settings,
    tasks: HashMap<PodId, (Probe, Scraper), FxBuildHasher>,
}

impl Scrapers {
    /// No tasks yet.
    #[must_use]
    pub fn new(settings: Settings) -> Scrapers {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(settings.timeout));
        connector.set_nodelay(true);
        let client = HttpClient::builder(TokioExecutor::new())
            .pool_max_idle_per_host(1)
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(settings.every.saturating_mul(10))
            .build(connector);
        Scrapers {
            client,
            settings,
            tasks: HashMap::default(),
        }
    }

    /// Starts a task for each pod of `view` that has none, and ends those of pods that are gone or
    /// are to be asked otherwise.
    ///
    /// Must be called within a tokio runtime.
    pub fn follow(&mut self, view: &View) {
        self.tasks
            .retain(|id, (probe, _)| view.get(*id).is_some_and(|pod| pod.spec.probe == *probe));
        for pod in &view.pods {
            if self.tasks.contains_key(&pod.id) {
                continue;
            }
            if let Some(scraper) = Scraper::spawn(pod, &self.client, self.settings) {
                let probe = pod.spec.probe.clone();
                self.tasks.insert(pod.id, (probe, scraper));
            }
        }
    }

    /// How many pods are being asked.
    #[must_use]
    pub fn len(&self) -> usize {
        self.tasks.len()
    }

    /// Whether no pod is being asked.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }
}

/// The task of one pod. Dropping it ends the task.
#[derive(Debug)]
struct Scraper(AbortHandle);

impl Drop for Scraper {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Scraper {
    /// `None` if the pod is not to be asked.
    fn spawn(pod: &Pod, client: &Client, settings: Settings) -> Option<Scraper> {
        let Probe::Metrics {
            path,
            failure_threshold,
        } = &pod.spec.probe
        else {
            return None;
        };
        let address = format!("http://{}{path}", pod.spec.endpoint);
        let uri: Uri = match address.parse() {
            Ok(uri) => uri,
            Err(error) => {
                tracing::warn!(pod = %pod.spec.name, %address, %error, "pod cannot be asked; check its address and probe path");
                return None;
            }
        };
        // Three readings may fail before the last one is no longer believed.
        let age_limit = settings.every.saturating_mul(3);
        pod.status()
            .set_age_limit(age_limit.saturating_add(settings.timeout));
        let target = Target {
            pod: Arc::clone(&pod.spec.name),
            phase: settings.every * (u32::from(pod.id.slot) % PHASES + 1) / PHASES,
            status: Arc::clone(pod.status()),
            uri: uri.clone(),
            failure_threshold: *failure_threshold,
            missed: 0,
        };
        let client = client.clone();
        let asking = move || ask(client.clone(), uri.clone(), settings.timeout);
        let task = tokio::spawn(target.run(asking, settings));
        Some(Scraper(task.abort_handle()))
    }
}

/// What one task asks.
struct Target {
    pod: Arc<str>,
    uri: Uri,
    status: Arc<Status>,
    /// From the first scrape to the second.
    phase: Duration,
    failure_threshold: NonZeroU32,
    /// Answers missed in a row.
    missed: u32,
}

impl Target {
    async fn run<A>(mut self, mut asking: impl FnMut() -> A, settings: Settings)
    where
        A: Future<Output = Result<Reported, Trouble>>,
    {
        let mut ticks = interval(settings.every.max(Duration::from_millis(1)));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        ticks.tick().await;
        self.note(asking().await);
        ticks.reset_after(self.phase);
        loop {
            ticks.tick().await;
            self.note(asking().await);
        }
    }

    fn note(&mut self, answer: Result<Reported, Trouble>) {
        let now = Instant::now().into_std();
        self.missed = match &answer {
            Err(Trouble::Late | Trouble::Connect(_)) => self.missed.saturating_add(1),
            _ => 0,
        };
        let availability = match &answer {
            Ok(reported) => {
                self.status.record(reported, now);
                Availability::Ready
            }
            Err(Trouble::Silent) => Availability::Ready,
            Err(Trouble::Refused(_)) => Availability::NotReady,
            Err(Trouble::Late | Trouble::Connect(_))
                if self.missed < self.failure_threshold.get()
                    && self.status.availability() == Availability::Ready =>
            {
                Availability::Ready
            }
            Err(Trouble::Closed | Trouble::Connect(_) | Trouble::Late) => Availability::Unreachable,
        };
        if let (1.., Err(trouble)) = (self.missed, &answer) {
            tracing::debug!(pod = %self.pod, missed = self.missed, %trouble, "pod missed an answer");
        }
        if self.status.observe(availability) == availability {
            return;
        }
        // Once per change, not once per scrape.
        match answer {
            Ok(_) => tracing::info!(pod = %self.pod, "pod answers"),
            Err(trouble) => {
                tracing::warn!(pod = %self.pod, uri = %self.uri, %trouble, "pod does not report; check its metrics port and path (probe)");
            }
        }
    }
}

/// Why a scrape brought no numbers.
#[derive(Debug, thiserror::Error)]
enum Trouble {
    /// Nothing listens at its address.
    #[error("connection: expected an answer, found the connection refused")]
    Closed,
    /// No connection, or it broke.
    #[error("connection: expected an answer, found {0}")]
    Connect(String),
    /// Too slow.
    #[error("connection: expected an answer in time, found none")]
    Late,
    /// An answer that is not 200.
    #[error("answer: expected status 200, found {0}")]
    Refused(StatusCode),
    /// An answer too long to be read: the pod serves, its numbers stay unknown.
    #[error("answer: expected at most {MAX_BODY_BYTES} bytes, found more")]
    Silent,
}

async fn ask(client: Client, uri: Uri, patience: Duration) -> Result<Reported, Trouble> {
    timeout(patience, fetch(&client, uri))
        .await
        .unwrap_or(Err(Trouble::Late))
}

async fn fetch(client: &Client, uri: Uri) -> Result<Reported, Trouble> {
    let mut request = Request::new(Empty::new());
    *request.uri_mut() = uri;
    let response = client
        .request(request)
        .await
        .map_err(|error| unanswered(&error))?;
    if response.status() != StatusCode::OK {
        return Err(Trouble::Refused(response.status()));
    }
    let body = Limited::new(response.into_body(), MAX_BODY_BYTES);
    let bytes = body.collect().await.map_err(|error| {
        if error.is::<LengthLimitError>() {
            Trouble::Silent
        } else {
            Trouble::Connect(error.to_string())
        }
    })?;
    Ok(exposition::read(&String::from_utf8_lossy(
        &bytes.to_bytes(),
    )))
}

/// What a request without an answer came to.
fn unanswered(error: &(dyn std::error::Error + 'static)) -> Trouble {
    let mut cause = Some(error);
    while let Some(one) = cause {
        if one
            .downcast_ref::<std::io::Error>()
            .is_some_and(|error| error.kind() == ErrorKind::ConnectionRefused)
        {
            return Trouble::Closed;
        }
        cause = one.source();
    }
    Trouble::Connect(chain(error))
}

/// An error with its causes, which is where the connector says what happened.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(&format!(": {error}"));
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests;

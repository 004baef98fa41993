//! One kind of object, followed: list once, then watch, for ever.
//!
//! Lives here: [`follow`], and how well it goes ([`Watches`]).
//! Never here: what the objects mean.
//! Invariant: whoever listens to the reports in order knows what the server knew at the last one. A
//! gap in what is known is closed by a new list, never jumped over.
//!
//! The server ends a watch after [`WATCH_SECONDS`], and it is taken up where it ended; so a connection
//! that is dead without saying so is found out soon after that, and the time since the server was last
//! heard of stays below it while all is well. Protocol:
//! <https://kubernetes.io/docs/reference/using-api/api-concepts/#efficient-detection-of-changes>.

use crate::fleet::kubernetes::client::{Call, Cluster, Page, Trouble};
use crate::fleet::kubernetes::objects::Object;
pub use crate::fleet::kubernetes::picture::Heard;
use crate::fleet::kubernetes::rights::{LEASE_GROUP, POLICY_GROUP, POOL_GROUP};
use futures_util::StreamExt;
use kube::core::params::{ListParams, WatchParams};
use kube::core::{Request, WatchEvent};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};

/// How long a watch lasts before it is taken up anew, in seconds.
pub const WATCH_SECONDS: u32 = 30;
/// How much later than that the end of a watch may be noticed.
const GRACE: Duration = Duration::from_secs(5);
/// Longest wait for a watch to begin.
const BEGIN: Duration = Duration::from_secs(10);
/// Objects per page of a list.
const PAGE: u32 = 500;
/// First wait after a failure, and the longest one. A cluster that is back is known within the latter.
const WAITS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(3));
/// From one mention of the same trouble in the log to the next.
const MENTION: Duration = Duration::from_secs(60);

/// A kind of object that is followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Pods.
    Pods,
    /// InferencePools.
    Pools,
    /// DisaggregationPolicies.
    Policies,
    /// The status of DisaggregationPolicies, which is only written.
    PolicyStatus,
    /// The Lease of whoever writes it.
    Leases,
}

impl Kind {
    /// The resource, as a right names it.
    #[must_use]
    pub fn resource(self) -> &'static str {
        match self {
            Kind::Pods => "pods",
            Kind::Pools => "inferencepools",
            Kind::Policies => "disaggregationpolicies",
            Kind::PolicyStatus => "disaggregationpolicies/status",
            Kind::Leases => "leases",
        }
    }

    /// Whether it is followed, rather than only written.
    #[must_use]
    pub fn is_followed(self) -> bool {
        match self {
            Kind::Pods | Kind::Pools | Kind::Policies => true,
            Kind::PolicyStatus | Kind::Leases => false,
        }
    }

    pub(super) fn path(self, namespace: &str) -> String {
        let resource = self.resource();
        match self {
            Kind::Pods => format!("/api/v1/namespaces/{namespace}/{resource}"),
            Kind::Pools => format!("/apis/{POOL_GROUP}/v1/namespaces/{namespace}/{resource}"),
            Kind::Policies | Kind::PolicyStatus => {
                let resource = Kind::Policies.resource();
                format!("/apis/{POLICY_GROUP}/v1alpha1/namespaces/{namespace}/{resource}")
            }
            Kind::Leases => format!("/apis/{LEASE_GROUP}/v1/namespaces/{namespace}/{resource}"),
        }
    }
}

/// Which objects of a kind are followed.
#[derive(Clone, Debug, Default)]
pub struct Which {
    /// Their namespace.
    pub namespace: String,
    /// A label selector; `None` is all.
    pub labels: Option<String>,
    /// A field selector; `None` is all.
    pub fields: Option<String>,
}

/// How well the following goes, kind by kind.
#[derive(Debug, Default)]
pub struct Watches {
    states: Mutex<BTreeMap<Kind, Watched>>,
}

/// How well the following of one kind goes.
#[derive(Clone, Debug)]
pub struct Watched {
    /// When the server last said something, or, before it ever did, when it was first asked.
    heard: Instant,
    /// How often lists were asked for, and watches begun.
    pub lists: u64,
    /// Watches begun.
    pub watches: u64,
    /// Requests that failed, by verb and kind of trouble.
    pub failures: BTreeMap<(&'static str, &'static str), u64>,
    /// The trouble there is now, in words.
    pub trouble: Option<Arc<str>>,
    /// What is wrong with an object of this kind, in words.
    pub object: Option<Arc<str>>,
    mentioned: Option<Instant>,
}

impl Watches {
    /// Each kind that is followed: seconds since the server last confirmed what is known of it, and the
    /// counts.
    #[must_use]
    pub fn all(&self) -> Vec<(Kind, f64, Watched)> {
        let states = self.states.lock();
        let seconds = |watched: &Watched| watched.heard.elapsed().as_secs_f64();
        states
            .iter()
            .map(|(kind, watched)| (*kind, seconds(watched), watched.clone()))
            .collect()
    }

    /// What troubles the finding of pods, in words.
    #[must_use]
    pub fn trouble(&self) -> Option<Arc<str>> {
        let states = self.states.lock();
        [Kind::Pools, Kind::Pods].iter().find_map(|kind| {
            let watched = states.get(kind)?;
            watched.trouble.clone().or_else(|| watched.object.clone())
        })
    }

    /// Whether the following of `kind` is in trouble now.
    #[must_use]
    pub fn is_troubled(&self, kind: Kind) -> bool {
        let states = self.states.lock();
        states
            .get(&kind)
            .is_some_and(|watched| watched.trouble.is_some())
    }

    /// Notes what is wrong with an object that is followed, or that nothing is any more.
    pub(super) fn object(&self, kind: Kind, fault: Option<String>) {
        self.update(kind, |watched| watched.object = fault.map(Arc::from));
    }

    fn update(&self, kind: Kind, change: impl FnOnce(&mut Watched)) {
        let mut states = self.states.lock();
        let watched = states.entry(kind).or_insert_with(|| Watched {
            heard: Instant::now(),
            lists: 0,
            watches: 0,
            failures: BTreeMap::new(),
            trouble: None,
            object: None,
            mentioned: None,
        });
        change(watched);
    }

    /// Notes that the server answered.
    pub(super) fn heard(&self, kind: Kind) {
        self.update(kind, |watched| {
            watched.heard = Instant::now();
            if watched.trouble.take().is_some() {
                watched.mentioned = None;
                tracing::info!(resource = kind.resource(), "the API server answers again");
            }
        });
    }

    /// Notes a failure; in the log the same trouble is mentioned once in a while.
    pub(super) fn failed(&self, kind: Kind, trouble: &Trouble) {
        self.update(kind, |watched| {
            let key = (trouble.call().0, trouble.kind());
            *watched.failures.entry(key).or_default() += 1;
            let words: Arc<str> = Arc::from(trouble.to_string());
            let known = watched.trouble.as_ref() == Some(&words);
            let lately = watched
                .mentioned
                .is_some_and(|mentioned| mentioned.elapsed() < MENTION);
            if !(known && lately) {
                tracing::warn!("{trouble}; what is known stays, and it is tried again");
                watched.mentioned = Some(Instant::now());
            }
            watched.trouble = Some(words);
        });
    }
}

/// Follows objects and sends reports of them, until the receiver is gone.
pub async fn follow<T: Object>(
    cluster: Cluster,
    kind: Kind,
    which: Which,
    (watches, reports): (Arc<Watches>, mpsc::Sender<Heard<T>>),
) {
    let follower = Follower {
        request: Request::new(kind.path(&which.namespace)),
        cluster,
        kind,
        which,
        watches,
        reports,
    };
    follower.watches.update(kind, |_| {});
    let mut position = None;
    let mut wait = WAITS.0;
    loop {
        let began = Instant::now();
        let outcome = match position.take() {
            None => follower.list().await,
            Some(version) => follower.watch(version).await,
        };
        match outcome {
            Ok(Next::Watch(version)) => position = Some(version),
            Ok(Next::WatchAgain(version)) => {
                position = Some(version);
                wait = WAITS.0;
                // A server that ends every watch at once is not asked more often either.
                sleep_until(began + WAITS.0).await;
            }
            Ok(Next::Unwanted) => return,
            Err((Trouble::Outdated { .. }, None)) => {
                // No failure: it is what a list is for.
                tracing::info!(
                    resource = kind.resource(),
                    "too much has changed, listing anew"
                );
                sleep_until(began + WAITS.0).await;
            }
            Err((trouble, from)) => {
                position = from;
                follower.watches.failed(kind, &trouble);
                sleep(wait).await;
                wait = (wait * 3 / 2).min(WAITS.1);
            }
        }
    }
}

/// Where to go on.
enum Next {
    /// With a watch from this version.
    Watch(String),
    /// With another watch, from this version.
    WatchAgain(String),
    /// Nobody listens.
    Unwanted,
}

struct Follower<T> {
    cluster: Cluster,
    request: Request,
    kind: Kind,
    which: Which,
    watches: Arc<Watches>,
    reports: mpsc::Sender<Heard<T>>,
}

/// A failure, and the version from which what is known is still whole.
type Failed = (Trouble, Option<String>);

impl<T: Object> Follower<T> {
    fn call(&self, verb: &'static str) -> Call {
        Call {
            verb,
            resource: self.kind.resource(),
        }
    }

    /// Reads all objects, page by page, of one state of the cluster.
    async fn list(&self) -> Result<Next, Failed> {
        let call = self.call("list");
        let mut params = ListParams {
            label_selector: self.which.labels.clone(),
            field_selector: self.which.fields.clone(),
            limit: Some(PAGE),
            ..ListParams::default()
        };
        self.watches.update(self.kind, |watched| watched.lists += 1);
        let mut all = Vec::new();
        loop {
            let request = self.request.list(&params);
            let page: Page<T> = self
                .cluster
                .ask(call, request)
                .await
                .map_err(|trouble| (trouble, None))?;
            all.extend(page.items);
            if page.metadata.more.is_empty() {
                self.watches.heard(self.kind);
                return match self.reports.send(Heard::Listed(all)).await {
                    Ok(()) => Ok(Next::Watch(page.metadata.resource_version)),
                    Err(_) => Ok(Next::Unwanted),
                };
            }
            params.continue_token = Some(page.metadata.more);
        }
    }

    /// Watches from `version` on, until the server ends it or there is trouble.
    async fn watch(&self, version: String) -> Result<Next, Failed> {
        let call = self.call("watch");
        let params = WatchParams {
            label_selector: self.which.labels.clone(),
            field_selector: self.which.fields.clone(),
            timeout: Some(WATCH_SECONDS),
            bookmarks: true,
            ..WatchParams::default()
        };
        let request = self
            .request
            .watch(&params, &version)
            .map_err(|error| (call.failed(kube::Error::BuildRequest(error)), None))?;
        let begun = timeout(BEGIN, self.cluster.client().request_events::<T>(request)).await;
        let events = match begun {
            Ok(Ok(events)) => events,
            Ok(Err(error)) => return Err(self.kept(call.failed(error), version)),
            Err(_) => return Err((call.late(), Some(version))),
        };
        self.watches.heard(self.kind);
        self.watches
            .update(self.kind, |watched| watched.watches += 1);
        let mut events = std::pin::pin!(events);
        let end = Instant::now() + Duration::from_secs(WATCH_SECONDS.into()) + GRACE;
        let mut version = version;
        loop {
            let event = match timeout_at(end, events.next()).await {
                Ok(Some(Ok(event))) => event,
                Ok(Some(Err(error))) => return Err(self.kept(call.failed(error), version)),
                // The usual end.
                Ok(None) => return Ok(Next::WatchAgain(version)),
                Err(_) => return Err((call.late(), Some(version))),
            };
            self.watches.heard(self.kind);
            let heard = match event {
                WatchEvent::Bookmark(bookmark) => {
                    version = bookmark.metadata.resource_version;
                    continue;
                }
                WatchEvent::Error(status) => {
                    return Err(self.kept(call.refused(status.code, &status.message), version));
                }
                WatchEvent::Added(object) | WatchEvent::Modified(object) => Heard::Applied(object),
                WatchEvent::Deleted(object) => Heard::Deleted(object),
            };
            let (Heard::Applied(object) | Heard::Deleted(object)) = &heard else {
                continue;
            };
            version.clone_from(&object.meta().resource_version);
            if self.reports.send(heard).await.is_err() {
                return Ok(Next::Unwanted);
            }
        }
    }

    /// A failure of a watch: the position is kept unless the server no longer knows it, or what it sent
    /// could not be read, which would come again.
    fn kept(&self, trouble: Trouble, version: String) -> Failed {
        match trouble {
            Trouble::Away { .. } | Trouble::Forbidden { .. } => (trouble, Some(version)),
            _ => (trouble, None),
        }
    }
}

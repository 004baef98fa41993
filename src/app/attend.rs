//! What each pod needs while it exists: a KV feed, a probe, and a clean goodbye.
//!
//! Lives here: [`Attendant`].
//! Never here: where the list of pods comes from (see `reload`).
//! Invariant: a pod that is gone leaves nothing behind: its tasks are stopped before its blocks and
//! its load are forgotten, so nothing can put them back.

use crate::fleet::{Pod, PodSpec, Probe, Roster, scrape};
use crate::kv::feed::{self, Feed, FeedSource};
use crate::kv::index::Index;
use crate::load::Ledger;
use crate::names::PodId;
use crate::observe::Sources;
use std::collections::HashMap;
use std::sync::Arc;

/// Keeps the tasks of all pods.
#[derive(Debug)]
pub(super) struct Attendant {
    roster: Arc<Roster>,
    index: Arc<Index>,
    sources: Arc<Sources>,
    ledger: Ledger,
    pods: HashMap<PodId, Tasks>,
}

#[derive(Debug)]
struct Tasks {
    feed: Option<Arc<Feed>>,
    _probe: Option<scrape::Scrape>,
}

impl Attendant {
    pub(super) fn new(
        roster: Arc<Roster>,
        index: Arc<Index>,
        sources: Arc<Sources>,
        ledger: Ledger,
    ) -> Attendant {
        Attendant {
            roster,
            index,
            sources,
            ledger,
            pods: HashMap::new(),
        }
    }

    /// Keeps the tasks alive until the future is dropped.
    pub(super) async fn stay(self) {
        std::future::pending::<()>().await;
    }

    /// Replaces the set of pods.
    pub(super) fn apply(&mut self, specs: Vec<PodSpec>) {
        let changes = self.roster.apply(specs);
        for pod in &changes.removed {
            tracing::info!(pod = %pod.spec.name, endpoint = %pod.spec.endpoint, "pod removed");
            self.pods.remove(&pod.id);
        }
        for pod in changes.added.iter().chain(&changes.respecified) {
            tracing::info!(
                pod = %pod.spec.name, endpoint = %pod.spec.endpoint, role = pod.spec.role.as_str(),
                "pod listed"
            );
            self.pods.remove(&pod.id);
            let tasks = self.attend(pod);
            self.pods.insert(pod.id, tasks);
        }
        self.sources.set(
            self.pods
                .iter()
                .filter_map(|(id, tasks)| Some((*id, Arc::clone(tasks.feed.as_ref()?)))),
        );
        for pod in &changes.removed {
            self.index.forget(pod.id);
            self.ledger.forget(pod.id);
        }
        for refused in &changes.refused {
            tracing::warn!(
                pod = %refused.name, endpoint = %refused.endpoint,
                "pod left out: its name or address is listed twice, or there are too many pods"
            );
        }
    }

    fn attend(&self, pod: &Arc<Pod>) -> Tasks {
        let feed = pod.spec.kv_events.as_ref().map(|source| {
            Arc::new(feed::spawn(
                Arc::clone(&self.index),
                pod.id,
                FeedSource {
                    events: source.events.clone(),
                    replay: source.replay.clone(),
                    topic: source.topic.clone(),
                },
            ))
        });
        let probe = match &pod.spec.probe {
            Probe::Off => None,
            Probe::Metrics { .. } => Some(scrape::spawn(Arc::clone(pod))),
        };
        Tasks {
            feed,
            _probe: probe,
        }
    }
}

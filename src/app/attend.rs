//! What each pod needs while it exists: a KV feed, a probe, and a clean goodbye.
//!
//! Lives here: [`Attendant`].
//! Never here: where the list of pods comes from (see `reload`).
//! Invariant: a pod that is gone leaves nothing behind: its tasks are stopped before its blocks and
//! its load are forgotten, so nothing can put them back.

use crate::fleet::scrape::{Scrapers, Settings};
use crate::fleet::{KvEventsSpec, Pod, PodSpec, Roster};
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
    feeds: HashMap<PodId, (KvEventsSpec, Arc<Feed>)>,
    scrapers: Scrapers,
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
            feeds: HashMap::new(),
            scrapers: Scrapers::new(Settings::default()),
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
            self.feeds.remove(&pod.id);
        }
        for pod in changes.added.iter().chain(&changes.respecified) {
            tracing::info!(
                pod = %pod.spec.name, endpoint = %pod.spec.endpoint, role = pod.spec.role.as_str(),
                "pod listed"
            );
            self.index.add_pod(pod.id);
            self.attend_feed(pod);
        }
        self.scrapers.follow(&self.roster.view());
        self.sources.set(
            self.feeds
                .iter()
                .map(|(id, (_, feed))| (*id, Arc::clone(feed))),
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

    /// Keeps the feed of a pod whose events still come from the same place: nothing is missed when
    /// only its role or readiness changes.
    fn attend_feed(&mut self, pod: &Pod) {
        let Some(source) = &pod.spec.kv_events else {
            self.feeds.remove(&pod.id);
            return;
        };
        if self.feeds.get(&pod.id).is_some_and(|(of, _)| of == source) {
            return;
        }
        // The old one ends before the new one begins.
        self.feeds.remove(&pod.id);
        let feed = feed::spawn(
            Arc::clone(&self.index),
            pod.id,
            FeedSource {
                events: source.events.clone(),
                replay: source.replay.clone(),
                topic: source.topic.clone(),
            },
        );
        self.feeds.insert(pod.id, (source.clone(), Arc::new(feed)));
    }

    /// The set of pods, with what is known of where they come from.
    pub(super) fn roster(&self) -> &Arc<Roster> {
        &self.roster
    }
}

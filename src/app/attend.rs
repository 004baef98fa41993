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
    /// With the places that they listen to.
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
        }
        let unfollowed: Vec<&Arc<Pod>> = (changes.added.iter())
            .chain(changes.respecified.iter().filter(|pod| !self.follows(pod)))
            .collect();
        for pod in &unfollowed {
            self.feeds.remove(&pod.id);
        }
        // Ends the feeds that were removed.
        self.publish();
        for pod in &unfollowed {
            // What was heard from another place would be counted twice when it is heard again, and
            // nobody would say when it is gone.
            self.index.forget(pod.id);
            self.index.add_pod(pod.id);
            if let Some(feed) = self.feed(pod) {
                self.feeds.insert(pod.id, feed);
            }
        }
        self.publish();
        self.scrapers.follow(&self.roster.view());
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

    /// The set of pods, with what is known of where they come from.
    pub(super) fn roster(&self) -> &Arc<Roster> {
        &self.roster
    }

    /// Shows the feeds to whoever decides.
    fn publish(&self) {
        let feeds = self.feeds.iter();
        self.sources
            .set(feeds.map(|(id, (_, feed))| (*id, Arc::clone(feed))));
    }

    /// Whether the events of `pod` are taken from where it says.
    fn follows(&self, pod: &Pod) -> bool {
        let source = self.feeds.get(&pod.id).map(|(source, _)| source);
        source == pod.spec.kv_events.as_ref()
    }

    fn feed(&self, pod: &Arc<Pod>) -> Option<(KvEventsSpec, Arc<Feed>)> {
        let source = pod.spec.kv_events.clone()?;
        let feed = feed::spawn(
            Arc::clone(&self.index),
            pod.id,
            FeedSource {
                events: source.events.clone(),
                replay: source.replay.clone(),
                topic: source.topic.clone(),
            },
        );
        Some((source, Arc::new(feed)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::snapshot::{LocalPrefill, Role};
    use crate::fleet::Probe;
    use crate::kv::event::{Batch, EngineHash, Event, Skipped, Stored};
    use crate::names::Endpoint;
    use crate::units::Blocks;

    fn spec(events: Option<&str>, kv_blocks: u32) -> PodSpec {
        PodSpec {
            name: "d1".into(),
            uid: "1".into(),
            endpoint: Endpoint("127.0.0.1:1".parse().unwrap()),
            role: Role::Decode,
            models: Vec::new(),
            adapters: Vec::new(),
            local_prefill: LocalPrefill::Able,
            kv_events: events.map(|events| KvEventsSpec {
                events: events.to_owned(),
                replay: None,
                topic: String::new(),
            }),
            block_size: None,
            kv_blocks: Some(Blocks(kv_blocks)),
            prefill_batch_tokens: None,
            probe: Probe::Off,
            listed: crate::fleet::Listed::Ready,
        }
    }

    struct Bench {
        attendant: Attendant,
        pod: PodId,
    }

    impl Bench {
        fn new(first: PodSpec) -> Bench {
            let roster = Arc::new(Roster::new());
            let mut attendant = Attendant::new(
                Arc::clone(&roster),
                Arc::new(Index::new(Default::default())),
                Arc::new(Sources::default()),
                Ledger::default(),
            );
            attendant.apply(vec![first]);
            let pod = roster.view().pods[0].id;
            let bench = Bench { attendant, pod };
            bench.store();
            bench
        }

        /// One block, as a feed would put it there.
        fn store(&self) {
            let stored = Stored {
                hashes: vec![EngineHash(1)],
                tokens: (0..16).collect(),
                block_size: 16,
                ..Stored::default()
            };
            let batch = Batch {
                ts: 0.0,
                rank: 0,
                events: vec![Event::Stored(Box::new(stored))],
                skipped: Skipped::default(),
            };
            self.attendant.index.apply(self.pod, &batch);
            assert_eq!(self.blocks(), 1);
        }

        fn blocks(&self) -> u64 {
            self.attendant.index.blocks(self.pod)
        }

        fn feed(&self) -> Option<Arc<Feed>> {
            self.attendant.sources.feed(self.pod)
        }
    }

    #[tokio::test]
    async fn a_pod_whose_events_come_from_the_same_place_keeps_its_feed_and_its_blocks() {
        let mut bench = Bench::new(spec(Some("tcp://127.0.0.1:2"), 100));
        let before = bench.feed().unwrap();
        bench
            .attendant
            .apply(vec![spec(Some("tcp://127.0.0.1:2"), 200)]);
        assert!(Arc::ptr_eq(&before, &bench.feed().unwrap()));
        assert_eq!(bench.blocks(), 1);
    }

    #[tokio::test]
    async fn what_was_heard_from_another_place_is_dropped() {
        let mut bench = Bench::new(spec(Some("tcp://127.0.0.1:2"), 100));
        let before = bench.feed().unwrap();
        bench
            .attendant
            .apply(vec![spec(Some("tcp://127.0.0.1:3"), 100)]);
        assert!(!Arc::ptr_eq(&before, &bench.feed().unwrap()));
        assert_eq!(bench.blocks(), 0);
        bench.store();
        bench.attendant.apply(vec![spec(None, 100)]);
        assert!(bench.feed().is_none());
        assert_eq!(bench.blocks(), 0);
        bench.attendant.apply(Vec::new());
        assert_eq!(bench.attendant.index.len(), 0);
    }
}

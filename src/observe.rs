//! Where roster, KV index, feeds and engine reports meet: one snapshot per decision.
//!
//! Lives here: [`Observer`], [`Sources`], [`Observation`].
//! Never here: choices, waiting, I/O.
//! Invariant: one decision sees one roster view, one pass over the index and one reading of each
//! pod's state; loads are added last, under the ledger's lock.

use crate::blocks::BlockChain;
use crate::decide::snapshot::{Candidate, KvSource, PodLoad, Serves, Snapshot};
use crate::fleet::{Pod, Roster, View};
use crate::kv::feed::Feed;
use crate::kv::index::{Index, Overlaps};
use crate::load::Loads;
use crate::names::{ModelName, PodId};
use crate::units::BlockSize;
use arc_swap::ArcSwap;
use smallvec::SmallVec;
use std::sync::Arc;
use std::time::Instant;

/// Feeds by slot, each with the incarnation it follows.
type BySlot = Vec<Option<(PodId, Arc<Feed>)>>;

/// The KV feeds of all pods, replaced as a whole when the roster changes.
#[derive(Debug, Default)]
pub struct Sources(ArcSwap<BySlot>);

impl Sources {
    /// Replaces the feeds.
    pub fn set(&self, feeds: impl IntoIterator<Item = (PodId, Arc<Feed>)>) {
        let mut dense = BySlot::new();
        for (pod, feed) in feeds {
            let slot = usize::from(pod.slot);
            if dense.len() <= slot {
                dense.resize_with(slot + 1, || None);
            }
            dense[slot] = Some((pod, feed));
        }
        self.0.store(Arc::new(dense));
    }

    /// The feed of a pod, if one is configured.
    #[must_use]
    pub fn feed(&self, pod: PodId) -> Option<Arc<Feed>> {
        find(&self.0.load(), pod).cloned()
    }
}

fn find(dense: &[Option<(PodId, Arc<Feed>)>], pod: PodId) -> Option<&Arc<Feed>> {
    dense
        .get(usize::from(pod.slot))?
        .as_ref()
        .filter(|(id, _)| *id == pod)
        .map(|(_, feed)| feed)
}

/// Looks at everything a decision needs.
#[derive(Debug)]
pub struct Observer {
    /// The pods.
    pub roster: Arc<Roster>,
    /// What they hold.
    pub index: Arc<Index>,
    /// How current that is.
    pub sources: Arc<Sources>,
    /// Tokens per block of a pod that has not said its own.
    pub default_block_size: BlockSize,
}

/// What was seen for one request.
#[derive(Debug)]
pub struct Observation {
    /// The pods, for names.
    pub view: Arc<View>,
    /// What the kernel looks at; loads are zero until [`Observation::with_loads`].
    pub snapshot: Snapshot,
}

impl Observer {
    /// The block sizes that prompts must be cut into: those the index has learned, else the default.
    #[must_use]
    pub fn block_sizes(&self) -> SmallVec<[BlockSize; 2]> {
        let mut sizes = self.index.block_sizes();
        if sizes.is_empty() {
            sizes.push(self.default_block_size);
        }
        sizes
    }

    /// Looks at all pods at once.
    ///
    /// `names` are the names under which pods may serve the request (the model's own, its adapter's);
    /// empty for a request that names none.
    #[must_use]
    pub fn look(&self, names: &[&ModelName], chains: &[BlockChain], now: Instant) -> Observation {
        let view = self.roster.view();
        let mut overlaps = Overlaps::default();
        if !chains.is_empty() {
            self.index.overlaps(chains, &mut overlaps);
        }
        let sources = self.sources.0.load();
        let candidates = view
            .pods
            .iter()
            .map(|pod| Candidate {
                pod: pod.id,
                endpoint: pod.spec.endpoint,
                role: pod.spec.role,
                availability: pod.availability(),
                serves: serves(pod, names),
                local_prefill: pod.spec.local_prefill,
                block_size: self
                    .index
                    .block_size(pod.id)
                    .or_else(|| pod.block_size())
                    .unwrap_or(self.default_block_size),
                cached: overlaps.get(pod.id),
                kv_source: match (&pod.spec.kv_events, find(&sources, pod.id)) {
                    (None, _) => KvSource::Absent,
                    (Some(_), None) => KvSource::Syncing,
                    (Some(_), Some(feed)) => feed.state(),
                },
                load: PodLoad::default(),
                prefill_capacity: pod.prefill_capacity(),
                kv_capacity: pod.kv_capacity(),
                engine: pod.engine_report(now),
            })
            .collect();
        Observation {
            view,
            snapshot: Snapshot { candidates },
        }
    }
}

impl Observation {
    /// Adds what the ledger says, read under its lock.
    pub fn with_loads(&mut self, loads: &Loads<'_>) {
        for candidate in &mut self.snapshot.candidates {
            candidate.load = loads.of(candidate.pod);
        }
    }

    /// The name of a pod.
    #[must_use]
    pub fn name(&self, pod: PodId) -> Arc<str> {
        self.view
            .get(pod)
            .map_or_else(|| Arc::from("?"), |pod| Arc::clone(&pod.spec.name))
    }
}

fn serves(pod: &Pod, names: &[&ModelName]) -> Serves {
    let listed =
        |name: &&ModelName| pod.spec.models.contains(name) || pod.spec.adapters.contains(name);
    if names.is_empty() || pod.spec.models.is_empty() || names.iter().any(listed) {
        Serves::Yes
    } else {
        Serves::NotThisModel
    }
}

//! Where roster, KV index, feeds and engine reports meet: one snapshot per decision.
//!
//! Lives here: [`Observer`], [`Sources`], [`Observation`].
//! Never here: choices, waiting, I/O.
//! Invariant: one decision sees one roster view, one pass over the index and one reading of each
//! pod's state; loads are added last, under the ledger's lock.

use crate::blocks::BlockChain;
use crate::decide::board::{Board, Member};
use crate::decide::snapshot::{KvSource, Snapshot};
use crate::fleet::{Pod, Roster, View};
use crate::kv::feed::Feed;
use crate::kv::index::{Heard, Index, Overlaps};
use crate::load::Loads;
use crate::names::{ModelName, PodId};
use crate::revision::Revision;
use crate::units::BlockSize;
use arc_swap::{ArcSwap, ArcSwapOption};
use smallvec::SmallVec;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Feeds by slot, each with the incarnation it follows.
type BySlot = Vec<Option<(PodId, Arc<Feed>)>>;

/// The KV feeds of all pods, replaced as a whole when the roster changes.
#[derive(Debug, Default)]
pub struct Sources {
    feeds: ArcSwap<BySlot>,
    revision: Revision,
}

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
        self.feeds.store(Arc::new(dense));
        self.revision.bump();
    }

    /// The feed of a pod, if one is configured.
    #[must_use]
    pub fn feed(&self, pod: PodId) -> Option<Arc<Feed>> {
        find(&self.feeds.load(), pod).cloned()
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
    /// What was seen last, for as long as nothing has changed.
    last: ArcSwapOption<Seen>,
}

/// Pods of a fleet that is looked at anew with every report of an engine. In a larger one that is a
/// thousand times a second and most of the work, and a report may wait for [`REPORTS_WAIT`].
const FEW: usize = 64;
/// How much older than its engine says a report may be in a large fleet: nothing beside the second
/// between two reports.
const REPORTS_WAIT: Duration = Duration::from_millis(10);

/// What does not depend on the request, as it was when `stamp` was read.
#[derive(Debug)]
struct Seen {
    stamp: [u64; 3],
    reports: u64,
    at: Instant,
    /// From then on some engine's report is too old.
    expires: Option<Instant>,
    view: Arc<View>,
    board: Arc<Board>,
}

impl Seen {
    fn holds(&self, stamp: [u64; 3], reports: u64, now: Instant) -> bool {
        let few = self.view.pods.len() <= FEW;
        self.stamp == stamp
            && self.expires.is_none_or(|expires| now < expires)
            && (self.reports == reports || (!few && now < self.at + REPORTS_WAIT))
    }
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
    /// An observer of these; `default_block_size` is that of a pod that has not said its own.
    #[must_use]
    pub fn new(
        roster: Arc<Roster>,
        index: Arc<Index>,
        sources: Arc<Sources>,
        default_block_size: BlockSize,
    ) -> Observer {
        Observer {
            roster,
            index,
            sources,
            default_block_size,
            last: ArcSwapOption::empty(),
        }
    }

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
        let Seen { view, board, .. } = &*self.seen(now);
        let mut cached = Vec::new();
        if !chains.is_empty() {
            let mut overlaps = Overlaps::default();
            self.index.overlaps(chains, &mut overlaps);
            cached.extend(board.ids().iter().map(|pod| overlaps.get(*pod)));
        }
        Observation {
            view: Arc::clone(view),
            snapshot: Snapshot::new(Arc::clone(board), view.serving(names), cached),
        }
    }

    /// What does not depend on the request: looked at again only when something has changed. In a
    /// large fleet that is most of the work.
    fn seen(&self, now: Instant) -> Arc<Seen> {
        // Read before what it stands for: a change in between makes the next request look again.
        let stamp = [
            self.roster.revision(),
            self.index.revision(),
            self.sources.revision.get(),
        ];
        let reports = self.roster.reports();
        if let Some(seen) = &*self.last.load()
            && seen.holds(stamp, reports, now)
        {
            return Arc::clone(seen);
        }
        let view = self.roster.view();
        let sources = self.sources.feeds.load();
        let heard = self.index.heard();
        let member = |pod: &Arc<Pod>| self.member(pod, (&heard, &sources), now);
        let members = view.pods.iter().map(member);
        let expires = view.pods.iter().filter_map(|pod| pod.report_expires());
        let seen = Arc::new(Seen {
            stamp,
            reports,
            at: now,
            expires: expires.filter(|expires| now < *expires).min(),
            board: Arc::new(Board::new(members.collect())),
            view,
        });
        self.last.store(Some(Arc::clone(&seen)));
        seen
    }

    fn member(&self, pod: &Pod, (heard, sources): (&Heard, &BySlot), now: Instant) -> Member {
        Member {
            pod: pod.id,
            endpoint: pod.spec.endpoint,
            role: pod.spec.role,
            availability: pod.availability(),
            local_prefill: pod.spec.local_prefill,
            block_size: heard
                .block_size(pod.id)
                .or_else(|| pod.block_size())
                .unwrap_or(self.default_block_size),
            kv_source: match (&pod.spec.kv_events, find(sources, pod.id)) {
                (None, _) => KvSource::Absent,
                (Some(_), None) => KvSource::Syncing,
                (Some(_), Some(feed)) => feed.state(),
            },
            prefill_capacity: pod.prefill_capacity(),
            kv_capacity: pod.kv_capacity(),
            engine: pod.engine_report(now),
        }
    }
}

impl Observation {
    /// Adds what the ledger says, read under its lock.
    pub fn with_loads(&mut self, loads: &Loads<'_>) {
        self.snapshot.set_loads(|pod| loads.of(pod));
    }

    /// The name of a pod.
    #[must_use]
    pub fn name(&self, pod: PodId) -> Arc<str> {
        self.view
            .get(pod)
            .map_or_else(|| Arc::from("?"), |pod| Arc::clone(&pod.spec.name))
    }
}

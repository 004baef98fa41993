//! Listening to pods: one task per pod keeps the index in step with the engine's events.
//!
//! Lives here: [`spawn`], [`Feed`] and its counters.
//! Never here: what an event means (see `event`, `index`), which pods exist (`fleet`).
//! Invariant: a feed owns its task, and the task ends with it; whatever goes wrong on the wire, the
//! task goes on, and the index holds no block that it cannot vouch for (gap, restart: reset).
//!
//! What happens when, per pod:
//!
//! | event | with a replay endpoint | without |
//! | --- | --- | --- |
//! | connected for the first time | replay from 0, then live | live from here on |
//! | reconnected | replay from the last batch: the same batch proves the same engine process, anything else is a restart | live; the first sequence number tells |
//! | sequence jumps ahead | replay from the first missing; what cannot be had after three attempts: reset | reset |
//! | sequence goes back | reset, replay from 0 | reset |
//! | quiet for a while | replay from the last batch, as after a reconnect | a ping, where the publisher knows it; no answer: reconnect |
//! | unreadable payload | counted, sequence kept | the same |
//!
//! A feed is `Live` while it is connected and without a gap since the last reset: then every block
//! in the index is one the pod announced and has not taken back. What the pod stored before anyone
//! listened, and no replay brings back, is unknown even so, until the engine stores it again.
//!
//! A reset may only hide what the pod holds. The opposite, keeping blocks across a gap that may
//! have hidden removals, would send requests to pods that must compute the prompt after all.

mod follow;
mod replay;
mod sequence;
mod stats;
mod zmtp;

pub use stats::FeedStats;

use super::index::Index;
use crate::decide::snapshot::KvSource;
use crate::names::PodId;
use follow::Follower;
use stats::{State, Stats};
use std::sync::Arc;
use tokio::task::AbortHandle;

/// Where a pod's events are to be had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FeedSource {
    /// The PUB socket, `tcp://host:port`.
    pub events: String,
    /// The ROUTER socket that sends past batches again, `tcp://host:port`.
    pub replay: Option<String>,
    /// Prefix of the topics to listen to; empty for all.
    pub topic: String,
}

/// A running feed; ends when dropped.
#[derive(Debug)]
pub struct Feed {
    stats: Arc<Stats>,
    task: AbortHandle,
}

/// Starts following `pod`, which the index must know (see [`Index::add_pod`]).
///
/// Must be called within a Tokio runtime.
#[must_use]
pub fn spawn(index: Arc<Index>, pod: PodId, source: FeedSource) -> Feed {
    let stats = Arc::new(Stats::new(index.changes()));
    let follower = Follower::new(index, pod, source, Arc::clone(&stats));
    let task = tokio::spawn(follower.run()).abort_handle();
    Feed { stats, task }
}

impl Feed {
    /// How far the index can be trusted for this pod.
    #[must_use]
    pub fn state(&self) -> KvSource {
        match self.stats.state() {
            State::Connecting | State::Syncing => KvSource::Syncing,
            State::Live => KvSource::Live,
            State::Lost => KvSource::Lost,
        }
    }

    /// What has happened so far.
    #[must_use]
    pub fn stats(&self) -> FeedStats {
        self.stats.read()
    }
}

impl Drop for Feed {
    fn drop(&mut self) {
        self.task.abort();
    }
}

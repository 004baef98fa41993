//! Changes to what one pod holds, by whoever listens to it.
//!
//! Lives here: [`Writer`].
//! Never here: what an event changes (see `pod`).
//! Invariant: a writer is heard until its pod is forgotten. When that is added again, even under the same id,
//! whoever listened before is not.

use super::{Applied, Index, Pod};
use crate::kv::event::Batch;
use crate::names::PodId;
use std::sync::Arc;

/// Changes what one pod holds.
pub struct Writer {
    index: Arc<Index>,
    pod: Option<Arc<Pod>>,
}

impl std::fmt::Debug for Writer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Writer")
            .field("pod", &self.pod.as_ref().map(|pod| pod.id))
            .finish_non_exhaustive()
    }
}

impl Writer {
    /// A writer for `pod`, which `index` must know (see [`Index::add_pod`]).
    #[must_use]
    pub fn new(index: Arc<Index>, pod: PodId) -> Writer {
        Writer {
            pod: index.pod(pod),
            index,
        }
    }

    /// As [`Index::apply`].
    pub fn apply(&self, batch: &Batch) -> Applied {
        self.index.apply_to(self.pod.as_deref(), batch)
    }

    /// As [`Index::reset`].
    pub fn reset(&self, rank: u32) {
        self.index.reset_of(self.pod.as_deref(), rank);
    }
}

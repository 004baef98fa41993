//! The answer to "who holds how much of this prompt", for all pods at once.
//!
//! Lives here: [`Overlaps`], a buffer to be reused from request to request.
//! Never here: how the answer was found (see `runs`).
//! Invariant: a pod that is unknown, forgotten or of another incarnation holds nothing.

use super::lanes::LaneTable;
use crate::decide::snapshot::TierBlocks;
use crate::names::PodId;
use crate::units::Blocks;
use std::sync::Arc;

/// Leading blocks per pod, filled by [`super::Index::overlaps`].
#[derive(Default)]
pub struct Overlaps {
    pub(super) table: Arc<LaneTable>,
    pub(super) scores: Vec<u32>,
}

impl std::fmt::Debug for Overlaps {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Overlaps")
            .field("lanes", &self.scores.len())
            .finish_non_exhaustive()
    }
}

impl Overlaps {
    /// An empty buffer.
    #[must_use]
    pub fn new() -> Overlaps {
        Overlaps::default()
    }

    /// What `pod` holds of the prompt.
    ///
    /// Where several data-parallel ranks sit behind one pod, the rank that holds most on the
    /// device (then most in all): a request ends on one rank, and which one is the engine's
    /// choice. Pods with an endpoint per rank are exact.
    #[must_use]
    #[inline]
    pub fn get(&self, pod: PodId) -> TierBlocks {
        let reach = |lane: u32| self.scores.get(lane as usize).copied().unwrap_or(0);
        if let Some(lane) = self.table.single(pod) {
            return TierBlocks {
                device: Blocks(reach(lane)),
                ..TierBlocks::default()
            };
        }
        self.get_any(pod, reach)
    }

    fn get_any(&self, pod: PodId, reach: impl Fn(u32) -> u32) -> TierBlocks {
        let Some(lanes) = self.table.pod(pod) else {
            return TierBlocks::default();
        };
        let best = lanes
            .ranks
            .iter()
            .map(|levels| levels.map(&reach))
            .max_by_key(|[device, host, disk]| (*device, *disk, *host));
        let [device, host, disk] = best.unwrap_or_default();
        TierBlocks {
            device: Blocks(device),
            host: Blocks(host.saturating_sub(device)),
            disk: Blocks(disk.saturating_sub(host)),
        }
    }
}

//! What the clients saw.

use super::client::Fate;
use super::world::HASTY;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::time::Duration;

/// Faults that are kept in full.
const MOST_FAULTS: usize = 20;

#[derive(Default)]
pub(super) struct Tally(Mutex<Counts>);

#[derive(Clone, Default)]
pub(super) struct Counts {
    pub(super) begun: u64,
    /// Streams left while a pod was being chosen: whether there was a decision nobody knows.
    pub(super) hasty: u64,
    pub(super) planned: u64,
    pub(super) refused: BTreeMap<String, u64>,
    pub(super) faults: Vec<String>,
    /// From the end of the body to the plan, in microseconds.
    waits: Vec<u32>,
}

impl Tally {
    pub(super) fn begun(&self, fate: Fate) {
        let mut counts = self.0.lock();
        counts.begun += 1;
        counts.hasty += u64::from(fate == Fate::LeavesAtOnce);
    }

    pub(super) fn planned(&self, fate: Fate, waited: Duration) {
        let mut counts = self.0.lock();
        counts.planned += 1;
        if fate != Fate::Listing {
            counts
                .waits
                .push(u32::try_from(waited.as_micros()).unwrap_or(u32::MAX));
        }
    }

    pub(super) fn refused(&self, code: String) {
        *self.0.lock().refused.entry(code).or_default() += 1;
    }

    pub(super) fn fault(&self, fault: String) {
        let mut counts = self.0.lock();
        if counts.faults.len() < MOST_FAULTS {
            counts.faults.push(fault);
        }
    }

    pub(super) fn counts(&self) -> Counts {
        self.0.lock().clone()
    }
}

impl Counts {
    /// The longest of the shortest `share` of the waits, in milliseconds.
    pub(super) fn wait(&self, share: f64) -> f64 {
        let mut waits = self.waits.clone();
        waits.sort_unstable();
        let at = (waits.len() as f64 * share) as usize;
        waits.get(at).map_or(0.0, |wait| f64::from(*wait) / 1e3)
    }

    /// Whether a series of decisions belongs to answers that were waited for.
    pub(super) fn awaited(series: &str) -> bool {
        !series.contains(&format!("model=\"{HASTY}\""))
    }
}

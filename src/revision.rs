//! Whether anything has changed since somebody looked.
//!
//! Lives here: [`Revision`].
//! Never here: what changed.
//! Invariant: whoever reads the number first and the facts after it never holds facts that are older
//! than the number says; writers change the facts first.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A number that grows with every change of what it stands for. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Revision(Arc<AtomicU64>);

impl Revision {
    /// Says that something has changed.
    pub fn bump(&self) {
        self.0.fetch_add(1, Ordering::Release);
    }

    /// How often something has changed so far.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }
}

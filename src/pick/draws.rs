//! Uniform draws for ties and sampling.
//!
//! Lives here: [`Draws`].
//! Never here: anything that needs secrecy.
//! Invariant: calls from any number of threads get different states.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};

/// A source of uniform numbers: SplitMix64 (Steele, Lea, Flood 2014) over a shared counter.
#[derive(Debug)]
pub(super) struct Draws(AtomicU64);

const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

impl Draws {
    /// A source that starts somewhere else in each process.
    pub(super) fn new() -> Draws {
        Draws(AtomicU64::new(RandomState::new().hash_one(GOLDEN)))
    }

    /// The next number.
    pub(super) fn next(&self) -> u64 {
        let mut z = self.0.fetch_add(GOLDEN, Ordering::Relaxed);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
}

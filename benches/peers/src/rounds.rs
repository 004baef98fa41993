//! Times several pieces of work side by side: in every round each is timed once, in no fixed order,
//! so that what else the machine does, and what one leaves in the caches, falls on all.

use crate::facts::Rng;
use std::time::Instant;

const ROUNDS: usize = 301;

/// Median nanoseconds of one call of each, a round being `calls` calls of it.
pub fn medians<const N: usize>(calls: usize, work: [&mut dyn FnMut(u64); N]) -> [f64; N] {
    let mut rng = Rng(7);
    let mut times: [Vec<f64>; N] = std::array::from_fn(|_| Vec::with_capacity(ROUNDS));
    for _ in 0..ROUNDS {
        for which in rng.order::<N>() {
            let start = Instant::now();
            for _ in 0..calls {
                work[which](rng.next());
            }
            times[which].push(start.elapsed().as_nanos() as f64 / calls as f64);
        }
    }
    times.map(|mut times| {
        times.sort_unstable_by(f64::total_cmp);
        times[ROUNDS / 2]
    })
}

//! One prompt looked up in three indexes that were fed the same events; then lookup, loads and
//! decision together beside Dynamo's.
//!
//! Each query is timed by itself, its hashes having just been read, as a router has just computed
//! them.

use crate::chain_index::Chains;
use crate::dynamo::Dynamo;
use crate::dynamo_index::{self, Tree};
use crate::facts::{Fleet, Rng, Told, pods};
use crate::ours::Ours;
use crate::ours_index::{self, Keyed};
use crate::workload::Workload;
use std::hint::black_box;
use std::time::{Duration, Instant};

const MEMBERSHIPS: usize = 1_000_000;
const PASSES: usize = 9;

/// Who looks a query up.
#[derive(Clone, Copy)]
enum Side {
    Dynamo,
    Chains,
    /// The same, only counting pods.
    Counted,
    Ours,
}

/// The same events and queries in the form that each side takes.
struct Sides {
    ours: Keyed,
    tree: Tree,
    chains: Chains,
    contents: Vec<Vec<u64>>,
    our_queries: Vec<sidestep::blocks::BlockChain>,
    tree_queries: Vec<Vec<dynamo_kv_router::LocalBlockHash>>,
    pods: usize,
    blocks: usize,
}

/// Prints both tables; the ratios of the whole at 1,000 pods.
pub fn run() -> Vec<(String, f64)> {
    println!("Index lookup, 1,000,000 memberships, hot queries. Microseconds, medians.");
    println!(
        "{:>6} {:>6} {:>6} | {:>8} {:>8} {:>8} {:>8} | {:>11} {:>11}",
        "pods",
        "blocks",
        "found",
        "dynamo",
        "kv-index",
        "(counts)",
        "ours",
        "ours/dynamo",
        "/kv-index"
    );
    let mut wholes = Vec::new();
    for (count, blocks) in [(128, 64), (128, 512), (1_000, 64), (1_000, 512)] {
        let mut sides = Sides::new(count, blocks);
        let found = sides.agree();
        let [tree, chains, counted, ours] = sides.look_up();
        println!(
            "{count:>6} {blocks:>6} {found:>6} | {tree:>8.2} {chains:>8.2} {counted:>8.2} {ours:>8.2} | {:>11.3} {:>11.3}",
            ours / tree,
            ours / chains
        );
        if count == 1_000 {
            for fleet in [Fleet::Split, Fleet::Both] {
                wholes.push((blocks, fleet, sides.whole(fleet)));
            }
        }
    }
    println!();
    println!("Lookup, loads and both selections at 1,000 pods. Microseconds, medians.");
    println!(
        "{:>6} {:>6} | {:>8} {:>15} | {:>8} | {:>11}",
        "blocks", "fleet", "dynamo", "with conversion", "ours", "ours/dynamo"
    );
    wholes
        .into_iter()
        .map(|(blocks, fleet, [bare, dynamo, ours])| {
            let name = format!("{fleet:?}").to_lowercase();
            println!(
                "{blocks:>6} {name:>6} | {bare:>8.2} {dynamo:>15.2} | {ours:>8.2} | {:>11.3}",
                ours / bare
            );
            (format!("{name}, {blocks} blocks"), ours / bare)
        })
        .collect()
}

impl Sides {
    fn new(pods: usize, blocks: usize) -> Sides {
        let workload = Workload::new(pods, blocks, MEMBERSHIPS);
        let contents = workload.queries();
        Sides {
            ours: Keyed::new(&workload),
            tree: Tree::new(&workload),
            chains: Chains::new(&workload),
            our_queries: contents.iter().map(|q| ours_index::query(q)).collect(),
            tree_queries: contents.iter().map(|q| dynamo_index::query(q)).collect(),
            contents,
            pods,
            blocks,
        }
    }

    /// All three find the same pods with the same scores; pods found per query.
    fn agree(&mut self) -> usize {
        let mut found = 0;
        for at in 0..self.contents.len() {
            self.ours.look_up(&self.our_queries[at]);
            self.chains.look_up(&self.contents[at]);
            let tree = self.tree.look_up(&self.tree_queries[at]);
            for pod in 0..self.pods as u16 {
                let worker =
                    dynamo_kv_router::protocols::WorkerWithDpRank::from_worker_id(u64::from(pod));
                let held = self.ours.held(pod).device.0;
                let theirs = tree.scores.get(&worker).copied().unwrap_or(0);
                let chained = self.chains.scores[usize::from(pod)];
                assert_eq!((held, held), (theirs, chained), "pod {pod}, query {at}");
            }
            found += tree.scores.len();
        }
        found / self.contents.len()
    }

    /// Median microseconds of Dynamo's lookup, kv-index's, the same only counting, and ours.
    fn look_up(&mut self) -> [f64; 4] {
        let count = self.contents.len();
        let sides = [Side::Dynamo, Side::Chains, Side::Counted, Side::Ours];
        medians(count, |which, at| {
            let side = sides[which];
            self.read(side, at);
            match side {
                Side::Dynamo => timed(|| self.tree.look_up(&self.tree_queries[at])),
                Side::Chains => timed(|| self.chains.look_up(&self.contents[at])),
                Side::Counted => timed(|| self.chains.count(&self.contents[at])),
                Side::Ours => timed(|| self.ours.look_up(&self.our_queries[at])),
            }
        })
    }

    /// Reads the hashes that one side is about to look up.
    fn read(&self, side: Side, at: usize) {
        black_box(match side {
            Side::Dynamo => self.tree_queries[at]
                .iter()
                .fold(0, |all, hash| all ^ hash.0),
            Side::Chains | Side::Counted => {
                self.contents[at].iter().fold(0, |all, hash| all ^ hash)
            }
            Side::Ours => {
                let keys = self.our_queries[at].keys.iter();
                keys.fold(0, |all, key| all ^ key.0 as u64)
            }
        });
    }

    /// Median microseconds of Dynamo without and with the conversion of the index's answer, and ours.
    fn whole(&mut self, fleet: Fleet) -> [f64; 3] {
        let pods = pods(self.pods as u16, fleet);
        let mut dynamo = Dynamo::new(&pods, Told::Loads);
        let mut ours = Ours::new(&pods, Told::Loads);
        let count = self.contents.len();
        medians(count, |which, at| {
            let side = if which == 2 { Side::Ours } else { Side::Dynamo };
            self.read(side, at);
            let start = Instant::now();
            if which == 2 {
                self.ours.look_up(&self.our_queries[at]);
                let held = |slot| self.ours.held(slot);
                black_box(ours.route_by(self.blocks, held, at as u64));
                return start.elapsed();
            }
            let found = self.tree.look_up(&self.tree_queries[at]);
            let (_, converting) = black_box(dynamo.route_by(self.blocks, found));
            let all = start.elapsed();
            if which == 0 { all - converting } else { all }
        })
    }
}

fn timed<T>(work: impl FnOnce() -> T) -> Duration {
    let start = Instant::now();
    black_box(work());
    start.elapsed()
}

/// Median microseconds per query of `N` kinds of work, given by number: each works through all
/// queries, then the next does, in no fixed order, several times. The median of the passes' medians.
fn medians<const N: usize>(
    queries: usize,
    mut once: impl FnMut(usize, usize) -> Duration,
) -> [f64; N] {
    let mut rng = Rng(7);
    let mut passes: [Vec<Duration>; N] = std::array::from_fn(|_| Vec::new());
    for _ in 0..PASSES {
        for which in rng.order::<N>() {
            let times = (0..queries).map(|at| once(which, at));
            passes[which].push(median(times.collect()));
        }
    }
    passes.map(|medians| median(medians).as_nanos() as f64 / 1e3)
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

//! Lookup and apply of the KV index on a multi-turn workload: `cargo bench --bench index`.
//!
//! The workload: 64 system prompts (Zipf) shared by conversations of eight turns that sometimes
//! move to another pod; events as vLLM emits them (prefill in stores of up to 128 blocks, decode in
//! stores of one). Four sizes: W pods, L blocks per prompt, N = 1,000,000 (pod, block) memberships.
//! Every answer to a sample of the queries is checked against a plain set of memberships.
//!
//! Arguments: `W,L[,N]` for other sizes.

use sidestep::blocks::{BlockChain, KeySpace};
use sidestep::kv::event::{Batch, EngineHash, Event, Removed, Stored};
use sidestep::kv::index::{Index, Limits, Overlaps};
use sidestep::names::PodId;
use sidestep::units::BlockSize;
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const SEED: u64 = 42;
const SYSTEMS: usize = 64;
const TURNS: usize = 8;
const CHUNK: usize = 128;
const SIZE: u32 = 16;

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }

    fn below(&mut self, n: usize) -> usize {
        usize::try_from((u128::from(self.next()) * n as u128) >> 64).unwrap_or(0)
    }

    #[allow(clippy::cast_precision_loss)] // 53 bits
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

fn content(kind: u64, id: usize, position: usize) -> u64 {
    let id = mix((SEED ^ (kind << 56)).wrapping_add(0)).wrapping_add(id as u64);
    mix(mix(id)
        .wrapping_add(position as u64)
        .wrapping_add(0x9E37_79B9_7F4A_7C15))
}

#[allow(clippy::cast_possible_truncation)] // the low half is the token
fn tokens(content: &[u64]) -> Vec<u32> {
    content
        .iter()
        .flat_map(|block| (0..u64::from(SIZE)).map(|i| (mix(block.wrapping_add(i)) as u32) >> 12))
        .collect()
}

struct Conversation {
    system: usize,
    content: Vec<u64>,
    names: Vec<u64>,
    turn: usize,
    depth: usize,
    pod: usize,
    held: Vec<(usize, usize)>,
}

struct Workload {
    pods: usize,
    length: usize,
    system_blocks: usize,
    rng: Rng,
    cdf: Vec<f64>,
    next_id: usize,
    done: Vec<Conversation>,
    events: Vec<(PodId, Batch)>,
    memberships: usize,
}

fn pod(slot: usize) -> PodId {
    PodId {
        slot: u16::try_from(slot).unwrap_or(0),
        generation: 0,
    }
}

fn batch(event: Event) -> Batch {
    Batch {
        events: vec![event],
        ..Batch::default()
    }
}

impl Conversation {
    fn store(&self, from: usize, to: usize) -> Batch {
        batch(Event::Stored(Box::new(Stored {
            hashes: self.names[from..to]
                .iter()
                .copied()
                .map(EngineHash)
                .collect(),
            parent: (0 < from).then(|| EngineHash(self.names[from - 1])),
            tokens: tokens(&self.content[from..to]),
            block_size: SIZE,
            ..Stored::default()
        })))
    }
}

impl Workload {
    #[allow(clippy::cast_precision_loss)] // small numbers
    fn new(pods: usize, length: usize, target: usize) -> Workload {
        let weights = (1..=SYSTEMS).map(|i| 1.0 / i as f64);
        let total: f64 = weights.clone().sum();
        let mut sum = 0.0;
        let cdf = weights.map(|w| {
            sum += w / total;
            sum
        });
        let mut workload = Workload {
            pods,
            length,
            system_blocks: (length / 4).max(1),
            rng: Rng(SEED),
            cdf: cdf.collect(),
            next_id: 0,
            done: Vec::new(),
            events: Vec::new(),
            memberships: 0,
        };
        workload.build(target);
        workload
    }

    fn conversation(&mut self) -> Conversation {
        let id = self.next_id;
        self.next_id += 1;
        let draw = self.rng.unit();
        let system = self
            .cdf
            .iter()
            .position(|c| draw <= *c)
            .unwrap_or(SYSTEMS - 1);
        let shared = (0..self.system_blocks).map(|p| content(1, system, p));
        let private = (self.system_blocks..self.length).map(|p| content(2, id, p));
        let content: Vec<u64> = shared.chain(private).collect();
        let mut name = 7;
        let names = content.iter().map(|block| {
            name = mix(name ^ block);
            name
        });
        Conversation {
            system,
            names: names.collect(),
            content,
            turn: 0,
            depth: 0,
            pod: self.rng.below(self.pods),
            held: Vec::new(),
        }
    }

    fn build(&mut self, target: usize) {
        let active = (target / self.length / 8).clamp(16, 8192);
        let mut live: Vec<Conversation> = (0..active).map(|_| self.conversation()).collect();
        let mut systems = vec![vec![false; self.pods]; SYSTEMS];
        while self.memberships < target {
            let at = self.rng.below(active);
            if self.turn(&mut live[at], &mut systems) {
                let next = self.conversation();
                self.done.push(std::mem::replace(&mut live[at], next));
            }
        }
        if self.done.len() < SYSTEMS {
            let length = self.length;
            let deep = live.into_iter().filter(|c| length * 7 / 8 <= c.depth);
            self.done.extend(deep);
        }
    }

    /// Plays one turn; whether it was the last.
    fn turn(&mut self, c: &mut Conversation, systems: &mut [Vec<bool>]) -> bool {
        let (length, shared) = (self.length, self.system_blocks);
        let turn_blocks = ((length - shared) / TURNS).max(1);
        if 0 < c.turn && self.rng.unit() < 0.1 {
            c.pod = self.rng.below(self.pods);
        }
        let start = c.depth.max(shared);
        let end = if c.turn + 1 == TURNS {
            length
        } else {
            (start + turn_blocks).min(length)
        };
        let system = if systems[c.system][c.pod] { shared } else { 0 };
        let known = c.held.iter_mut().find(|(pod, _)| *pod == c.pod);
        let have = known.as_ref().map_or(system, |(_, blocks)| *blocks);
        match known {
            Some(known) => known.1 = end,
            None => c.held.push((c.pod, end)),
        }
        let decode = ((end - start) / 4).max(usize::from(1 < end - start));
        let prefill_end = end - decode;
        let mut at = have;
        while at < prefill_end {
            let to = (at + CHUNK).min(prefill_end);
            self.events.push((pod(c.pod), c.store(at, to)));
            at = to;
        }
        while at < end {
            self.events.push((pod(c.pod), c.store(at, at + 1)));
            at += 1;
        }
        self.memberships += end.saturating_sub(have);
        systems[c.system][c.pod] = true;
        c.depth = end;
        c.turn += 1;
        length <= end
    }

    /// Block contents of the queries.
    fn queries(&self) -> Vec<Vec<u64>> {
        let mut rng = Rng(SEED ^ 0xABCDEF);
        let count = (48_000_000 / (8 * self.length)).min(4096);
        let deep = (self.length * 7 / 8).max(self.system_blocks);
        (0..count)
            .map(|k| {
                let c = &self.done[rng.below(self.done.len())];
                let keep = if rng.unit() < 0.8 {
                    deep
                } else {
                    self.system_blocks
                };
                let fresh = (keep..self.length).map(|p| content(3, k, p));
                c.content[..keep].iter().copied().chain(fresh).collect()
            })
            .collect()
    }

    /// Removals and stores that put the blocks back; and how many blocks they are.
    fn churn(&self) -> (Vec<(PodId, Batch)>, usize) {
        let mut rng = Rng(SEED ^ 0x5555);
        let (mut events, mut blocks) = (Vec::new(), 0);
        while blocks < 400_000.min(self.memberships / 2) {
            let c = &self.done[rng.below(self.done.len())];
            let (holder, depth) = c.held[rng.below(c.held.len())];
            let len = depth.saturating_sub(self.system_blocks).clamp(1, 32);
            let from = depth - len;
            if from == 0 {
                continue;
            }
            let gone = c.names[from..depth].iter().rev().copied().map(EngineHash);
            let removed = Event::Removed(Removed {
                hashes: gone.collect(),
                ..Removed::default()
            });
            events.push((pod(holder), batch(removed)));
            events.push((pod(holder), c.store(from, depth)));
            blocks += 2 * len;
        }
        (events, blocks)
    }
}

/// Resident memory of this process in bytes.
fn resident() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = text.split_whitespace().nth(1).and_then(|n| n.parse().ok());
    pages.map_or(0, |pages: usize| pages * 4096)
}

/// Exactly one lookup. Never inlined, so that instructions can be counted whatever the noise:
/// `valgrind --tool=callgrind --toggle-collect='*one_lookup*' <bench> W,L,100000`.
#[inline(never)]
fn one_lookup(index: &Index, chain: &BlockChain, out: &mut Overlaps) {
    index.overlaps(std::slice::from_ref(chain), out);
}

/// Median and 99th percentile in nanoseconds of the best of three passes.
fn time_all(count: usize, mut once: impl FnMut(usize)) -> (u128, u128) {
    let passes = (0..3).map(|_| {
        let mut times: Vec<u128> = (0..(3 * count).max(2000))
            .map(|i| {
                let start = Instant::now();
                once(i % count);
                start.elapsed().as_nanos()
            })
            .collect();
        times.sort_unstable();
        (times[times.len() / 2], times[times.len() * 99 / 100])
    });
    passes.min().unwrap_or_default()
}

/// Time this thread has run, so that neighbours on the machine do not count.
fn thread_time() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let nanos = text.split_whitespace().next().and_then(|n| n.parse().ok());
    Duration::from_nanos(nanos.unwrap_or(0))
}

fn apply_all(index: &Index, events: &[(PodId, Batch)]) -> Duration {
    let start = thread_time();
    for (pod, batch) in events {
        index.apply(*pod, batch);
    }
    thread_time() - start
}

/// Compares a sample of the answers with a plain set of memberships; pods per answer.
fn check(workload: &Workload, index: &Index, chains: &[BlockChain], queries: &[Vec<u64>]) -> usize {
    let mut held: HashSet<(PodId, u64)> = HashSet::new();
    for (pod, batch) in &workload.events {
        if let Event::Stored(stored) = &batch.events[0] {
            held.extend(stored.hashes.iter().map(|hash| (*pod, hash.0)));
        }
    }
    let mut out = Overlaps::new();
    let mut found = 0;
    let sample = queries.len().min(100);
    for (chain, query) in chains.iter().zip(queries).take(sample) {
        index.overlaps(std::slice::from_ref(chain), &mut out);
        for slot in 0..workload.pods {
            let mut name = 7;
            let leading = query.iter().take_while(|block| {
                name = mix(name ^ **block);
                held.contains(&(pod(slot), name))
            });
            let leading = leading.count();
            assert_eq!(out.get(pod(slot)).device.0 as usize, leading);
            found += usize::from(0 < leading);
        }
    }
    found / sample
}

/// Lookup times while another thread applies events as fast as it can.
fn beside_a_writer(
    index: &Index,
    events: &[(PodId, Batch)],
    chains: &[BlockChain],
) -> (u128, u128) {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                apply_all(index, events);
            }
        });
        let mut out = Overlaps::new();
        let times = time_all(chains.len(), |i| {
            one_lookup(index, &chains[i], &mut out);
            std::hint::black_box(&out);
        });
        stop.store(true, Ordering::Relaxed);
        times
    })
}

#[allow(clippy::cast_precision_loss)] // for people
fn run(pods: usize, length: usize, target: usize) {
    let workload = Workload::new(pods, length, target);
    let index = Index::new(Limits::default());
    (0..pods).for_each(|slot| index.add_pod(pod(slot)));
    let before = resident();
    let build = apply_all(&index, &workload.events);
    let memory = resident().saturating_sub(before);
    assert_eq!(index.len(), workload.memberships as u64);

    let space = KeySpace {
        block_size: BlockSize::new(SIZE).unwrap_or_else(|| unreachable!("sixteen")),
        adapter: None,
        tenant: None,
    };
    let queries = workload.queries();
    let chains: Vec<BlockChain> = queries
        .iter()
        .map(|query| BlockChain::new(&space, &tokens(query)))
        .collect();
    let returned = check(&workload, &index, &chains, &queries);

    let mut out = Overlaps::new();
    let lookup = time_all(chains.len(), |i| {
        one_lookup(&index, &chains[i], &mut out);
        std::hint::black_box(&out);
    });
    let with_read = time_all(chains.len(), |i| {
        index.overlaps(std::slice::from_ref(&chains[i]), &mut out);
        let best = (0..pods).max_by_key(|slot| out.get(pod(*slot)).device);
        std::hint::black_box(best);
    });
    let (events, churned) = workload.churn();
    let churn = apply_all(&index, &events);
    let beside = beside_a_writer(&index, &events, &chains);
    assert_eq!(index.len(), workload.memberships as u64);

    let blocks = workload.memberships as f64;
    println!(
        "{pods:>5} {length:>5} {returned:>5} | {:>6.2} {:>6.2} | {:>6.2} | {:>6.2} {:>6.2} | {:>6.0} {:>5.1} | {:>5.1} | {:>5.0}",
        lookup.0 as f64 / 1e3,
        lookup.1 as f64 / 1e3,
        with_read.0 as f64 / 1e3,
        beside.0 as f64 / 1e3,
        beside.1 as f64 / 1e3,
        workload.events.len() as f64 / build.as_secs_f64() / 1e3,
        blocks / build.as_secs_f64() / 1e6,
        churned as f64 / churn.as_secs_f64() / 1e6,
        memory as f64 / blocks,
    );
}

/// `W,L` or `W,L,N`.
fn size(argument: &str) -> Option<(usize, usize, usize)> {
    let mut numbers = argument.split(',').map_while(|n| n.parse().ok());
    let (pods, length) = (numbers.next()?, numbers.next()?);
    Some((pods, length, numbers.next().unwrap_or(1_000_000)))
}

fn main() -> std::io::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let sizes: Vec<_> = arguments.iter().filter_map(|text| size(text)).collect();
    if let [(pods, length, target)] = sizes.as_slice() {
        run(*pods, *length, *target);
        return Ok(());
    }
    println!(
        "    W     L  pods | lookup p50/p99 µs | +read | beside writer | build kev/s Mblk/s | churn Mblk/s | B/membership"
    );
    // A process for each, so that memory is counted from nothing.
    let standard = ["16,64", "128,512", "1000,64", "1000,512"].map(String::from);
    let chosen: Vec<_> = arguments
        .into_iter()
        .filter(|text| size(text).is_some())
        .collect();
    let chosen = if chosen.is_empty() {
        standard.to_vec()
    } else {
        chosen
    };
    for argument in chosen {
        std::process::Command::new(std::env::current_exe()?)
            .arg(argument)
            .status()?;
    }
    Ok(())
}

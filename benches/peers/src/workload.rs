//! Multi-turn conversations whose blocks pods store and sometimes take over from each other: one
//! stream of events and one set of queries for every index.
//!
//! 64 system prompts (Zipf) of a quarter of a conversation, eight turns, a tenth of the later turns
//! on another pod; a prefill is stored in events of up to 128 blocks, the last quarter of a turn block
//! by block. Nothing is drawn but from `SplitMix64(42)`.

use crate::facts::{Rng, mix};

const SEED: u64 = 42;
const SYSTEMS: usize = 64;
const TURNS: usize = 8;
const CHUNK: usize = 128;

pub struct Workload {
    pub pods: usize,
    pub conversations: Vec<Conversation>,
    pub stores: Vec<Store>,
    /// (pod, block) pairs held in the end.
    pub memberships: usize,
    length: usize,
    system_blocks: usize,
    rng: Rng,
    cdf: Vec<f64>,
    done: Vec<usize>,
}

pub struct Conversation {
    /// What each block contains.
    pub contents: Vec<u64>,
    /// What engines call it: a chained hash.
    pub names: Vec<u64>,
    system: usize,
    turn: usize,
    depth: usize,
    pod: usize,
    held: Vec<(usize, usize)>,
}

/// `pod` stores the blocks `from..to` of a conversation.
pub struct Store {
    pub pod: usize,
    pub conversation: usize,
    pub from: usize,
    pub to: usize,
}

impl Workload {
    pub fn new(pods: usize, length: usize, target: usize) -> Workload {
        let weights = (1..=SYSTEMS).map(|i| 1.0 / i as f64);
        let total: f64 = weights.clone().sum();
        let mut sum = 0.0;
        let cdf = weights.map(|weight| {
            sum += weight / total;
            sum
        });
        let mut workload = Workload {
            pods,
            conversations: Vec::new(),
            stores: Vec::new(),
            memberships: 0,
            length,
            system_blocks: (length / 4).max(1),
            rng: Rng(SEED),
            cdf: cdf.collect(),
            done: Vec::new(),
        };
        workload.play(target);
        workload
    }

    /// Contents of the queries' blocks: four in five are the next turn of a conversation, the others
    /// begin one.
    pub fn queries(&self) -> Vec<Vec<u64>> {
        let mut rng = Rng(SEED ^ 0x00AB_CDEF);
        let count = (48_000_000 / (8 * self.length)).min(4_096);
        let deep = (self.length * 7 / 8).max(self.system_blocks);
        (0..count)
            .map(|query| {
                let from = &self.conversations[self.done[rng.below(self.done.len())]];
                let next_turn = rng.unit() < 0.8;
                let keep = if next_turn { deep } else { self.system_blocks };
                let fresh = (keep..self.length).map(|at| content(3, query, at));
                let kept = from.contents[..keep].iter().copied();
                kept.chain(fresh).collect()
            })
            .collect()
    }

    fn begin(&mut self) -> usize {
        let id = self.conversations.len();
        let draw = self.rng.unit();
        let system = self.cdf.iter().position(|c| draw <= *c);
        let system = system.unwrap_or(SYSTEMS - 1);
        let shared = (0..self.system_blocks).map(|at| content(1, system, at));
        let private = (self.system_blocks..self.length).map(|at| content(2, id, at));
        let contents: Vec<u64> = shared.chain(private).collect();
        let names = contents.iter().scan(7, |name, block| {
            *name = mix(*name ^ block);
            Some(*name)
        });
        self.conversations.push(Conversation {
            names: names.collect(),
            contents,
            system,
            turn: 0,
            depth: 0,
            pod: self.rng.below(self.pods),
            held: Vec::new(),
        });
        id
    }

    fn play(&mut self, target: usize) {
        let active = (target / self.length / 8).clamp(16, 8_192);
        let mut live: Vec<usize> = (0..active).map(|_| self.begin()).collect();
        let mut systems = vec![vec![false; self.pods]; SYSTEMS];
        while self.memberships < target {
            let at = self.rng.below(active);
            if self.turn(live[at], &mut systems) {
                self.done.push(live[at]);
                live[at] = self.begin();
            }
        }
        if self.done.len() < SYSTEMS {
            let deep = |id: &usize| self.length * 7 / 8 <= self.conversations[*id].depth;
            self.done.extend(live.into_iter().filter(deep));
        }
    }

    /// Plays one turn; whether it was the conversation's last.
    fn turn(&mut self, id: usize, systems: &mut [Vec<bool>]) -> bool {
        let (length, shared) = (self.length, self.system_blocks);
        let talk = &mut self.conversations[id];
        if 0 < talk.turn && self.rng.unit() < 0.1 {
            talk.pod = self.rng.below(self.pods);
        }
        let start = talk.depth.max(shared);
        let end = if talk.turn + 1 == TURNS {
            length
        } else {
            (start + ((length - shared) / TURNS).max(1)).min(length)
        };
        let system = if systems[talk.system][talk.pod] {
            shared
        } else {
            0
        };
        let pod = talk.pod;
        let known = talk.held.iter_mut().find(|(holder, _)| *holder == pod);
        let have = known.as_ref().map_or(system, |(_, blocks)| *blocks);
        match known {
            Some(known) => known.1 = end,
            None => talk.held.push((pod, end)),
        }
        talk.depth = end;
        talk.turn += 1;
        systems[talk.system][pod] = true;
        let decode = ((end - start) / 4).max(usize::from(1 < end - start));
        let mut at = have;
        while at < end {
            let to = if at < end - decode {
                (at + CHUNK).min(end - decode)
            } else {
                at + 1
            };
            self.stores.push(Store {
                pod,
                conversation: id,
                from: at,
                to,
            });
            at = to;
        }
        self.memberships += end.saturating_sub(have);
        length <= end
    }
}

fn content(kind: u64, id: usize, at: usize) -> u64 {
    let id = mix(mix(SEED ^ (kind << 56)).wrapping_add(id as u64));
    mix(id
        .wrapping_add(at as u64)
        .wrapping_add(0x9E37_79B9_7F4A_7C15))
}

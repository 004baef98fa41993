//! sidestep's side of the kernel: the ledger that is charged with what runs, and one decision.
//!
//! `read` puts every pod's load into the snapshot under the ledger's lock; `decide` is the kernel:
//! three selections, the bypass rule and the decode gate. Nothing is booked.

use crate::facts::{BLOCK, CAPACITY, PROMPT, Pod, Running, Told, contents};
use sidestep::blocks::{BlockChain, KeySpace};
use sidestep::decide::policy::{
    Bypass, ClientPins, DecodeGate, IslBound, Match, OnNoPrefill, PrefillBusy, Scoring,
    SessionAffinity, TierCredit,
};
use sidestep::decide::ask::{Affinity, AskKind, Counted, Subset};
use sidestep::decide::snapshot::{Availability, Capacity, CapacitySource, EngineReport, KvSource, LocalPrefill, PodLoad, Role, Serves, Serving, TierBlocks};
use sidestep::decide::{Ask, Candidate, Decision, Policy, Rule, Snapshot, decide};
use sidestep::load::{Admission, Booking, Ledger};
use sidestep::names::{Endpoint, PodId};
use sidestep::units::{BlockSize, Blocks, Ratio, Tokens};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

pub struct Ours {
    ledger: Ledger,
    /// What runs, for as long as this lives.
    _running: Vec<Booking>,
    snapshot: Snapshot,
    chains: Vec<BlockChain>,
    ask: Ask,
    policy: Policy,
}

impl Ours {
    pub fn new(pods: &[Pod], told: Told) -> Ours {
        let ledger = Ledger::default();
        // Not in the fleet; takes the other half of what runs on a pod of one role.
        let elsewhere = u16::try_from(pods.len()).expect("pods are numbered in 16 bits");
        let running = pods.iter().flat_map(|pod| {
            let running = pod.running.iter();
            running.map(|running| run(&ledger, pod, running, elsewhere))
        });
        let running = running.collect();
        Ours {
            ledger,
            _running: running,
            snapshot: pods.iter().map(|pod| candidate(pod, pod.held)).collect(),
            chains: match told {
                Told::Loads => Vec::new(),
                Told::Blocks => vec![chain(0, PROMPT)],
            },
            ask: ask(PROMPT),
            policy: policy(),
        }
    }

    /// Every load is read and one decision made, in one step of the ledger.
    pub fn route(&mut self, draw: u64) -> Decision {
        self.ask.draw = draw;
        let (ask, snapshot, policy) = (&self.ask, &mut self.snapshot, &self.policy);
        self.ledger
            .preview(admission(&self.chains), |loads| {
                snapshot.set_loads(|pod| loads.of(pod));
                decide(ask, snapshot, policy)
            })
            .expect("every pod is eligible")
    }

    /// One decision on a request of `blocks` blocks for which the index has answered `held`.
    pub fn route_by(
        &mut self,
        blocks: usize,
        held: impl Fn(u16) -> TierBlocks,
        draw: u64,
    ) -> Decision {
        self.ask.prompt_tokens = Tokens(blocks as u64 * u64::from(BLOCK));
        let board = Arc::clone(self.snapshot.board());
        let cached = board.ids().iter().map(|pod| held(pod.slot)).collect();
        self.snapshot = Snapshot::new(board, Serving::All, cached);
        self.route(draw)
    }

    pub fn read(&mut self) {
        let snapshot = &mut self.snapshot;
        self.ledger
            .preview(admission(&self.chains), |loads| {
                snapshot.set_loads(|pod| loads.of(pod));
            });
    }

    pub fn decide(&mut self, draw: u64) -> Decision {
        self.ask.draw = draw;
        decide(&self.ask, &self.snapshot, &self.policy).expect("every pod is eligible")
    }

    /// What was read for `pod`: requests, tokens to prefill, blocks in use, and how many of them
    /// are the request's.
    pub fn load(&self, pod: &Pod) -> [u64; 4] {
        let load = self.snapshot.candidate(usize::from(pod.id)).load;
        [
            u64::from(load.requests),
            load.prefill_tokens.0,
            u64::from(load.decode_blocks.0),
            u64::from(load.shared_blocks.0),
        ]
    }
}

/// The pods considered for the two halves of a remote route.
pub fn considered(decision: &Decision) -> (u64, u64) {
    let slot = |pick: Option<sidestep::decide::Pick>| {
        u64::from(pick.expect("a pod was found").candidate.pod.slot)
    };
    let considered = &decision.considered;
    (slot(considered.prefill), slot(considered.decode))
}

fn admission(chains: &[BlockChain]) -> Admission<'_> {
    Admission {
        chains,
        session: None,
        now: Instant::now(),
    }
}

/// Charges `pod` with `running`: a pod of both roles does all of it, others their half.
fn run(ledger: &Ledger, pod: &Pod, running: &Running, elsewhere: u16) -> Booking {
    let mut candidates = vec![candidate(pod, running.held)];
    if !(pod.prefills && pod.decodes) {
        candidates.push(candidate(
            &Pod {
                id: elsewhere,
                prefills: !pod.prefills,
                decodes: !pod.decodes,
                held: 0,
                running: Vec::new(),
            },
            0,
        ));
    }
    let snapshot: Snapshot = candidates.into_iter().collect();
    let mut policy = policy();
    policy.rules[0].bypass = Bypass::Never;
    let chains = [chain(running.id, running.blocks)];
    let admitted = ledger.admit(admission(&chains), |_| {
        decide(&ask(running.blocks), &snapshot, &policy)
    });
    admitted.expect("the pods are eligible").1
}

fn chain(id: u32, blocks: u32) -> BlockChain {
    let space = KeySpace {
        block_size: block_size(),
        adapter: None,
        tenant: None,
    };
    let tokens: Vec<u32> = contents(id, blocks)
        .flat_map(|block| (0..BLOCK).map(move |at| (block >> 32) as u32 ^ at))
        .collect();
    BlockChain::new(&space, &tokens)
}

fn block_size() -> BlockSize {
    BlockSize::new(BLOCK).expect("sixteen is a block size")
}

fn candidate(pod: &Pod, held: u32) -> Candidate {
    let [high, low] = pod.id.to_be_bytes();
    Candidate {
        pod: PodId {
            slot: pod.id,
            generation: 0,
        },
        endpoint: Endpoint(SocketAddr::from((Ipv4Addr::new(10, 0, high, low), 8000))),
        role: match (pod.prefills, pod.decodes) {
            (true, true) => Role::Both,
            (true, false) => Role::Prefill,
            _ => Role::Decode,
        },
        availability: Availability::Ready,
        serves: Serves::Yes,
        local_prefill: LocalPrefill::Able,
        block_size: block_size(),
        cached: TierBlocks {
            device: Blocks(held),
            ..TierBlocks::default()
        },
        kv_source: KvSource::Live,
        load: PodLoad::default(),
        prefill_capacity: Capacity::Reported(Tokens(8_192)),
        kv_capacity: Capacity::Reported(Blocks(CAPACITY)),
        engine: EngineReport::None,
    }
}

fn ask(blocks: u32) -> Ask {
    Ask {
        kind: AskKind::Generate,
        model: None,
        policy_class: None,
        priority: 0,
        prompt_tokens: Tokens(u64::from(blocks * BLOCK)),
        counted: Counted::Exact,
        subset: Subset::Any,
        decode_pin: None,
        prefill_pin: None,
        affinity: Affinity::None,
        prefill_affinity: None,
        draw: 0,
    }
}

fn policy() -> Policy {
    let ratio = |value| Ratio::new(value).expect("a share");
    Policy {
        name: "peers".into(),
        generation: 1,
        rules: vec![Rule {
            matches: Match::default(),
            bypass: Bypass::IslOrLoad(
                IslBound {
                    threshold: Tokens(2_048),
                    ratio: ratio(0.7),
                    cold_bypass_below: Tokens::ZERO,
                    tier_credit: TierCredit::Full,
                },
                PrefillBusy {
                    threshold: Ratio::ONE,
                },
            ),
            gate: DecodeGate::On {
                threshold: ratio(0.9),
                trust: vec![CapacitySource::Reported],
            },
            on_no_prefill: OnNoPrefill::Local,
        }],
        scoring: Scoring::default(),
        session_affinity: SessionAffinity::Off,
        client_pins: ClientPins::Ignore,
    }
}

//! Median time of one decision at 8, 64, 256 and 1,000 pods, alone and with its booking, without and
//! with a policy in the shadow.
//!
//! One pod in four prefills; each has some load and some of the prompt. `near` is a shadow that moves
//! thresholds, `far` one that scores otherwise. Rounds with and without a shadow alternate, so that
//! what else the machine does falls on all. `cargo bench --bench decide`.

#![allow(
    clippy::unwrap_used,
    reason = "a bench that cannot run should say so and stop"
)]

use sidestep::blocks::{BlockChain, KeySpace};
use sidestep::decide::ask::{Affinity, AskKind, Counted, Subset};
use sidestep::decide::policy::{
    Bypass, ClientPins, DecodeGate, IslBound, Match, OnNoPrefill, PrefillBusy, Scoring,
    SessionAffinity, TierCredit,
};
use sidestep::decide::shadow::{Decided, opinion};
use sidestep::decide::snapshot::{
    Availability, Capacity, CapacitySource, EngineReport, KvSource, LocalPrefill, PodLoad, Role,
    Serves, TierBlocks,
};
use sidestep::decide::{Ask, Candidate, Decision, NoRoute, Policy, Rule, Snapshot, decide};
use sidestep::load::{Admission, Ledger};
use sidestep::names::{Endpoint, PodId, SessionId};
use sidestep::units::{BlockSize, Blocks, Ratio, Tokens};
use std::hint::black_box;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

const ROUNDS: usize = 5_000;
const PROMPT: usize = 1_000;

fn main() {
    let head = [
        "pods",
        "decide ns",
        "near",
        "far",
        "admit ns",
        "near",
        "far",
    ];
    println!("{}", head.map(|cell| format!("{cell:>12}")).concat());
    for pods in [8, 64, 256, 1_000] {
        let mut row = format!("{pods:>12}");
        for [none, near, far] in [alone(pods), booked(pods)] {
            let more = |with: u64| (with as f64 / none as f64 - 1.0) * 100.0;
            row += &format!("{none:>12}{:>10.1} %{:>10.1} %", more(near), more(far));
        }
        println!("{row}");
    }
}

/// Without a shadow, with a near one and with a far one.
fn shadows() -> [Option<Policy>; 3] {
    let mut near = policy();
    near.rules[0].bypass = Bypass::IslBounding(IslBound {
        threshold: Tokens(4_096),
        ratio: Ratio::new(0.9).unwrap(),
        cold_bypass_below: Tokens(64),
        tier_credit: TierCredit::Full,
    });
    let mut far = near.clone();
    far.scoring.host_tier = Ratio::new(0.5).unwrap();
    [None, Some(near), Some(far)]
}

fn decided(
    ask: &Ask,
    snapshot: &Snapshot,
    policy: &Policy,
    shadow: Option<&Policy>,
) -> Result<Decision, NoRoute> {
    let result = decide(black_box(ask), black_box(snapshot), policy);
    if let Some(shadow) = shadow {
        let decided = Decided {
            policy,
            result: &result,
        };
        black_box(opinion(ask, ask.affinity, snapshot, decided, shadow));
    }
    result
}

fn alone(pods: u16) -> [u64; 3] {
    let (snapshot, policy) = (snapshot(pods), policy());
    let shadows = shadows();
    let mut ask = ask();
    medians(|round, which| {
        ask.draw = mix(round);
        let _ = black_box(decided(&ask, &snapshot, &policy, shadows[which].as_ref()));
    })
}

/// Decision and booking of a stream of prompts that begin alike, with 16 running requests per pod.
fn booked(pods: u16) -> [u64; 3] {
    let (mut snapshot, policy) = (snapshot(pods), policy());
    let shadows = shadows();
    let ledger = Ledger::default();
    let prompts: Vec<BlockChain> = (0..64).map(prompt).collect();
    let sessions: Vec<SessionId> = (0..64)
        .map(|n| SessionId::from(format!("session-{n}").as_str()))
        .collect();
    let mut running = std::collections::VecDeque::new();
    let now = Instant::now();
    let mut ask = ask();
    let mut admit = |round: u64, which: usize| {
        let shadow = shadows[which].as_ref();
        let which = (mix(round) % 64) as usize;
        ask.draw = mix(round ^ 1);
        let admission = Admission {
            chains: &prompts[which..=which],
            session: Some((&sessions[which], Duration::from_secs(600))),
            now,
        };
        let (decision, booking) = ledger
            .admit(admission, |loads| {
                snapshot.set_loads(|pod| loads.of(pod));
                decided(&ask, &snapshot, &policy, shadow)
            })
            .unwrap();
        black_box(decision);
        running.push_back(booking);
        // The oldest request ends while the next one begins.
        if usize::from(pods) * 16 < running.len() {
            running.pop_front();
        }
    };
    for round in 0..u64::from(pods) * 16 {
        admit(round, 0);
    }
    medians(admit)
}

fn medians(mut work: impl FnMut(u64, usize)) -> [u64; 3] {
    let mut times: [Vec<u64>; 3] = Default::default();
    for round in 0..3 * ROUNDS as u64 {
        // In no fixed order: what one leaves in the processor's caches must not favour the next.
        let which = (mix(round ^ 0x5eed) >> 32) as usize % 3;
        let start = Instant::now();
        work(round, which);
        times[which].push(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX));
    }
    times.map(|mut times| {
        times.sort_unstable();
        times[times.len() / 2]
    })
}

fn mix(step: u64) -> u64 {
    let x = (step + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (x ^ (x >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9)
}

/// A prompt whose first half is the same for all.
fn prompt(n: u32) -> BlockChain {
    let space = KeySpace {
        block_size: BlockSize::new(16).unwrap(),
        adapter: None,
        tenant: None,
    };
    let mut tokens = vec![7; PROMPT];
    tokens[PROMPT / 2..].fill(100 + n);
    BlockChain::new(&space, &tokens)
}

fn snapshot(pods: u16) -> Snapshot {
    (0..pods)
        .map(|slot| {
            let noise = mix(u64::from(slot));
            let [high, low] = slot.to_be_bytes();
            let decodes = slot % 4 != 0;
            Candidate {
                pod: PodId {
                    slot,
                    generation: 0,
                },
                endpoint: Endpoint(SocketAddr::from((Ipv4Addr::new(10, 0, high, low), 8000))),
                role: if decodes { Role::Decode } else { Role::Prefill },
                availability: Availability::Ready,
                serves: Serves::Yes,
                local_prefill: LocalPrefill::Able,
                block_size: BlockSize::new(16).unwrap(),
                cached: TierBlocks {
                    device: Blocks((noise % 40) as u32),
                    host: Blocks((noise >> 8) as u32 % 8),
                    disk: Blocks::ZERO,
                },
                kv_source: KvSource::Live,
                load: PodLoad {
                    requests: (noise >> 16) as u32 % 32,
                    prefill_tokens: Tokens((noise >> 24) % 8_192),
                    decode_blocks: Blocks((noise >> 32) as u32 % 4_096),
                    shared_blocks: Blocks::ZERO,
                },
                prefill_capacity: Capacity::Reported(Tokens(8_192)),
                kv_capacity: Capacity::Reported(Blocks(20_000)),
                engine: EngineReport::Fresh {
                    waiting: 0,
                    running: 8,
                    kv_usage: Ratio::new(0.4).unwrap(),
                },
            }
        })
        .collect()
}

fn ask() -> Ask {
    Ask {
        kind: AskKind::Generate,
        model: None,
        policy_class: None,
        priority: 0,
        prompt_tokens: Tokens(PROMPT as u64),
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
    let ratio = |value| Ratio::new(value).unwrap();
    Policy {
        name: "bench".into(),
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
                    threshold: ratio(1.0),
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

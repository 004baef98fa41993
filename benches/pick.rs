//! Where the time of one decision goes, at 8, 64, 256 and 1,000 pods.
//!
//!     cargo bench --bench pick
//!
//! First the stages alone: looking at pods and index, reading what was promised, deciding, booking. Then
//! `pick`, the whole of it over a chat body of about 1,000 tokens (parse, encode, observe, decide, book,
//! records): without a shadow, with one that moves thresholds (`near`) and one that scores otherwise
//! (`far`). A shadow is asked once the answer is out; what that takes is `settle`. Every pod has an engine
//! report, runs some 8 requests, and prompts begin alike. Medians in nanoseconds; pickers with and without
//! a shadow alternate in no fixed order, so that what else the machine does falls on all.

#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a benchmark stops at the first fault"
)]

use bytes::Bytes;
use sidestep::blocks::{BlockChain, KeySpace};
use sidestep::decide::ask::{Affinity, Ask, AskKind, Counted, Subset};
use sidestep::decide::decide;
use sidestep::decide::policy::{
    Bypass, ClientPins, DecodeGate, IslBound, Match, OnNoPrefill, Policy, Rule, Scoring,
    SessionAffinity, TierCredit,
};
use sidestep::decide::snapshot::{LocalPrefill, Role};
use sidestep::fleet::{Listed, PodSpec, Probe, Reported, Roster};
use sidestep::kv::index::Index;
use sidestep::load::{Admission, Ledger};
use sidestep::names::Endpoint;
use sidestep::observe::{Observer, Sources};
use sidestep::pick::{Flight, Head, InForce, InShadow, Parts, Picker};
use sidestep::prompt::{Encoder, Profile, Profiles};
use sidestep::route::Dialect;
use sidestep::telemetry::journal::Journal;
use sidestep::telemetry::metrics::Metrics;
use sidestep::telemetry::trace::Tracing;
use sidestep::units::{BlockSize, Blocks, Ratio, Tokens};
use std::collections::VecDeque;
use std::hint::black_box;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

const ROUNDS: usize = 5_000;
const PROMPT: usize = 1_000;
/// How long reports are believed.
const FAR: Duration = Duration::from_secs(3600);

fn main() {
    let stages_head = ["pods", "look", "look anew", "loads", "decide", "book"];
    let whole_head = ["pick", "near", "far", "settle near", "settle far"];
    let cell = |text: &str| format!("{text:>12}");
    let head = stages_head.iter().chain(&whole_head);
    println!("{}", head.map(|text| cell(text)).collect::<String>());
    for pods in [8, 64, 256, 1_000] {
        let mut row = cell(&pods.to_string());
        for time in stages(pods) {
            row += &cell(&time.to_string());
        }
        let ([none, near, far], settling) = whole(pods);
        let more = |with: u64| format!("{:+.1} %", (with as f64 / none as f64 - 1.0) * 100.0);
        row += &cell(&none.to_string());
        for with in [near, far] {
            row += &cell(&more(with));
        }
        for time in settling {
            row += &cell(&time.to_string());
        }
        println!("{row}");
    }
}

fn picker(pods: u16) -> Picker {
    let roster = Arc::new(Roster::new());
    roster.apply((0..pods).map(pod).collect());
    let report = Reported {
        waiting: Some(0),
        running: Some(8),
        kv_usage: Ratio::new(0.4),
        kv_blocks: Some(Blocks(20_000)),
        block_size: BlockSize::new(16),
        ..Reported::default()
    };
    for pod in &roster.view().pods {
        pod.status().set_age_limit(FAR);
        pod.status().record(&report, Instant::now());
    }
    Picker::new(Parts {
        encoder: Encoder::new(
            Profiles::new(vec![Profile::builtin().unwrap()]).unwrap(),
            64 << 20,
        ),
        observer: Observer::new(
            roster,
            Arc::new(Index::new(Default::default())),
            Arc::new(Sources::default()),
            BlockSize::new(16).unwrap(),
        ),
        ledger: Ledger::default(),
        in_force: InForce {
            policy: policy(),
            dialect: Dialect::DecodeFirst,
        },
        metrics: Metrics::new(),
        tracing: Tracing::Off,
        journal: Journal::new(2048),
    })
}

/// Median nanoseconds of looking, looking after something about a pod has changed, reading loads,
/// deciding, booking.
fn stages(pods: u16) -> [u64; 5] {
    let picker = picker(pods);
    let (observer, policy) = (picker.observer(), policy());
    let ledger = Ledger::default();
    let prompts: Vec<BlockChain> = (0..64).map(prompt).collect();
    let mut running = VecDeque::new();
    let mut times: [Vec<u64>; 5] = Default::default();
    let mut ask = ask();
    for round in 0..ROUNDS + usize::from(pods) * 8 {
        ask.draw = mix(round as u64);
        let which = (mix(ask.draw) % 64) as usize;
        let chains = &prompts[which..=which];
        let began = Instant::now();
        let mut observation = observer.look(&[], chains, began);
        let looked = Instant::now();
        let admission = Admission {
            chains,
            session: None,
            now: began,
        };
        let (mut loaded, mut decided) = (looked, looked);
        let (decision, booking) = ledger
            .admit(admission, |loads| {
                observation.with_loads(loads);
                loaded = Instant::now();
                let decision = decide(&ask, &observation.snapshot, &policy);
                decided = Instant::now();
                decision
            })
            .unwrap();
        let booked = Instant::now();
        black_box((&decision, &observation));
        running.push_back(booking);
        if usize::from(pods) * 8 < running.len() {
            running.pop_front();
            let pods = &observer.roster.view().pods;
            pods[round % pods.len()].status().set_age_limit(FAR);
            let again = Instant::now();
            black_box(observer.look(&[], chains, again));
            let spans = [
                looked - began,
                again.elapsed(),
                loaded - looked,
                decided - loaded,
                booked - decided,
            ];
            for (times, span) in times.iter_mut().zip(spans) {
                times.push(span.as_nanos() as u64);
            }
        }
    }
    times.map(median)
}

/// Median nanoseconds of a whole pick without a shadow, with a near one and with a far one, in no
/// fixed order; and of what the two shadows cost once the answer is out.
fn whole(pods: u16) -> ([u64; 3], [u64; 2]) {
    let pickers = shadows().map(|shadow| {
        let picker = picker(pods);
        picker.set_shadow(shadow);
        picker
    });
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    let mut running: [VecDeque<Flight>; 3] = Default::default();
    let mut times: [Vec<u64>; 3] = Default::default();
    let mut settling: [Vec<u64>; 3] = Default::default();
    let warm = usize::from(pods) * 8;
    runtime.block_on(async {
        for round in 0..3 * (ROUNDS + warm) {
            let which = (mix(round as u64 ^ 0x5eed) >> 32) as usize % 3;
            let head = Head {
                method: "POST".into(),
                path: "/v1/chat/completions".into(),
                ..Head::default()
            };
            let body = body(round % 256);
            let began = Instant::now();
            let picked = pickers[which].pick(head, Some(body)).await.unwrap();
            let picked_at = Instant::now();
            let mut flight = picked.flight;
            flight.settle();
            let settled_at = Instant::now();
            let running = &mut running[which];
            running.push_back(flight);
            if warm < running.len() {
                running.pop_front().unwrap().finish();
                times[which].push((picked_at - began).as_nanos() as u64);
                settling[which].push((settled_at - picked_at).as_nanos() as u64);
            }
        }
    });
    let [_, near, far] = settling.map(median);
    (times.map(median), [near, far])
}

/// None, one that moves thresholds, one that scores otherwise.
fn shadows() -> [InShadow; 3] {
    let mut near = policy();
    if let Bypass::IslBounding(bound) = &mut near.rules[0].bypass {
        bound.threshold = Tokens(4_096);
    }
    let mut far = near.clone();
    far.scoring.host_tier = Ratio::new(0.5).unwrap();
    [
        InShadow::Nothing,
        InShadow::Policy(near),
        InShadow::Policy(far),
    ]
}

fn median(mut times: Vec<u64>) -> u64 {
    times.sort_unstable();
    times[times.len() / 2]
}

fn mix(step: u64) -> u64 {
    let x = (step + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (x ^ (x >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9)
}

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

fn pod(number: u16) -> PodSpec {
    let role = if number.is_multiple_of(4) {
        Role::Prefill
    } else {
        Role::Decode
    };
    let name = format!("llama-{number:04}");
    let [high, low] = number.to_be_bytes();
    PodSpec {
        name: name.as_str().into(),
        uid: name.as_str().into(),
        endpoint: Endpoint(SocketAddr::from(([127, 1, high, low], 8000))),
        role,
        models: Vec::new(),
        adapters: Vec::new(),
        local_prefill: LocalPrefill::Able,
        kv_events: None,
        block_size: BlockSize::new(16),
        kv_blocks: None,
        prefill_batch_tokens: None,
        probe: Probe::Off,
        listed: Listed::Ready,
    }
}

fn policy() -> Policy {
    Policy {
        name: Arc::from("bench"),
        generation: 1,
        rules: vec![Rule {
            matches: Match::default(),
            bypass: Bypass::IslBounding(IslBound {
                threshold: Tokens(512),
                ratio: Ratio::new(0.5).unwrap(),
                cold_bypass_below: Tokens(100),
                tier_credit: TierCredit::Full,
            }),
            gate: DecodeGate::Off,
            on_no_prefill: OnNoPrefill::Local,
        }],
        scoring: Scoring::default(),
        session_affinity: SessionAffinity::Off,
        client_pins: ClientPins::Ignore,
    }
}

/// A chat request of about 1,000 tokens, the last message its own.
fn body(number: usize) -> Bytes {
    let history = "The quick brown fox jumps over the lazy dog. ".repeat(70);
    let model = sidestep::cli::demo::picker::MODEL;
    Bytes::from(format!(
        r#"{{"model":"{model}","max_tokens":64,"messages":[{{"role":"system","content":"{history}"}},{{"role":"user","content":"question {number}"}}]}}"#
    ))
}

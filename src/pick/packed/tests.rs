//! That nothing is lost in packing, and how little it takes.

use super::*;
use crate::decide::policy::{ClientPins, Policy, Scoring, SessionAffinity};
use crate::decide::snapshot::{
    Affinity, AskKind, Availability, Capacity, Counted, EngineReport, KvSource, LocalPrefill, Role,
    Subset,
};
use crate::names::{Endpoint, PodId};
use crate::route::Dialect;
use crate::telemetry::record::{Facts, SessionOutcome, Times};
use crate::units::{BlockSize, Ratio, Tokens};

/// Numbers that look random, the same ones in each run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

fn pod(slot: u16) -> Candidate {
    Candidate {
        pod: PodId {
            slot,
            generation: 0,
        },
        endpoint: Endpoint(([10, 0, (slot >> 8) as u8, slot as u8], 80).into()),
        role: Role::Both,
        availability: Availability::Ready,
        serves: Serves::Yes,
        local_prefill: LocalPrefill::Able,
        block_size: BlockSize::new(16).unwrap(),
        cached: TierBlocks::default(),
        kv_source: KvSource::Live,
        load: PodLoad::default(),
        prefill_capacity: Capacity::Unknown,
        kv_capacity: Capacity::Unknown,
        engine: EngineReport::None,
    }
}

fn remembered(number: usize, pods: Vec<Candidate>) -> Remembered {
    let ask = Ask {
        kind: AskKind::Generate,
        model: None,
        policy_class: None,
        priority: 0,
        prompt_tokens: Tokens(100),
        counted: Counted::Exact,
        subset: Subset::Any,
        decode_pin: None,
        prefill_pin: None,
        affinity: Affinity::None,
        prefill_affinity: None,
        draw: number as u64,
    };
    let policy = Policy {
        name: "p".into(),
        generation: 1,
        rules: Vec::new(),
        scoring: Scoring::default(),
        session_affinity: SessionAffinity::Off,
        client_pins: ClientPins::Ignore,
    };
    let snapshot = snapshot_of(pods);
    let decision = decide(&ask, &snapshot, &policy).unwrap();
    let facts = Facts {
        decision_id: number.to_string(),
        policy: "p".into(),
        generation: 1,
        operation: None,
        model: None,
        stream: false,
        max_tokens: None,
        counted: "exact",
        encode_trouble: None,
        session: SessionOutcome::None,
        decode_pod: "d".into(),
        prefill_pod: None,
        candidates: snapshot.candidates.len(),
        times: Times::default(),
        trace_id: None,
        flip: None,
        shadow: None,
    };
    Remembered {
        record: Arc::new(Record::new(number as u64, &decision, &facts)),
        ask,
        observation: Observation {
            view: Arc::default(),
            snapshot,
        },
        in_force: Arc::new(InForce {
            policy,
            dialect: Dialect::default(),
        }),
    }
}

/// What some requests do to `pods`, and what one of them sees there.
fn observed(pods: &mut Vec<Candidate>, numbers: &mut Numbers) -> Vec<Candidate> {
    if numbers.below(40) == 0 {
        pods.push(pod(pods.len() as u16));
    }
    if numbers.below(30) == 0 {
        // All engines report at once.
        for pod in pods.iter_mut() {
            pod.engine = EngineReport::Fresh {
                waiting: numbers.below(9) as u32,
                running: numbers.below(9) as u32,
                kv_usage: Ratio::new(numbers.below(100) as f64 / 100.0).unwrap(),
            };
        }
    }
    for _ in 0..numbers.below(4) {
        let at = numbers.below(pods.len() as u64) as usize;
        let pod = &mut pods[at];
        pod.load.requests = numbers.below(50) as u32;
        pod.load.prefill_tokens = Tokens(numbers.below(9000));
        pod.load.decode_blocks = Blocks(numbers.below(900) as u32);
    }
    let mut seen = pods.clone();
    for pod in seen.iter_mut().skip(1) {
        match numbers.below(5) {
            0 => pod.cached.device = Blocks(numbers.below(9) as u32),
            1 => pod.load.shared_blocks = Blocks(numbers.below(9) as u32),
            2 => pod.serves = Serves::NotThisModel,
            _ => {}
        }
    }
    seen
}

/// What is kept after `decisions` decisions among `pods` pods, and what was seen for each.
fn many(decisions: usize, pods: u16) -> (Packed, Vec<Vec<Candidate>>) {
    let mut numbers = Numbers(7);
    let mut fleet: Vec<Candidate> = (0..pods).map(pod).collect();
    let mut packed = Packed::default();
    let mut seen = Vec::new();
    for number in 0..decisions {
        let pods = observed(&mut fleet, &mut numbers);
        packed.push(remembered(number, pods.clone()));
        seen.push(pods);
    }
    (packed, seen)
}

fn agree(one: &Remembered, seen: &[Candidate]) -> bool {
    let pods = &one.observation.snapshot.candidates;
    pods.len() == seen.len() && pods.iter().zip(seen).all(|(one, other)| same(one, other))
}

#[test]
fn what_is_unpacked_equals_what_was_put_in() {
    let (packed, seen) = many(400, 40);
    assert!(1 < packed.groups.len() && packed.groups.len() < 100);
    for (number, seen) in seen.iter().enumerate() {
        let one = packed.find(&number.to_string()).unwrap();
        assert_eq!(one.ask.draw, number as u64);
        assert!(agree(&one, seen), "decision {number}");
    }
    let mut next = 300;
    packed.last(100, |one| {
        assert_eq!(one.ask.draw, next as u64);
        assert!(agree(one, &seen[next]), "decision {next}");
        next += 1;
    });
    assert_eq!(next, 400);
    assert!(packed.find("400").is_none());
}

#[test]
fn the_oldest_go_when_there_are_too_many_or_they_take_too_much() {
    let (mut packed, _) = many(400, 40);
    packed.trim(usize::MAX, 100);
    assert!((100..100 + MOST_STEPS).contains(&packed.len()));
    assert!(packed.find("0").is_none() && packed.record("300").is_some());
    let bytes = packed.groups.iter().map(|group| group.bytes).sum::<usize>();
    assert_eq!(packed.bytes, bytes);
    packed.trim(bytes / 2, 100);
    assert!(packed.bytes <= bytes / 2 && packed.record("399").is_some());
    packed.trim(0, 100);
    assert_eq!((packed.len(), packed.bytes), (0, 0));
    packed.push(remembered(400, vec![pod(0)]));
    assert!(packed.find("400").is_some(), "it can be filled again");
}

#[test]
fn a_decision_among_a_thousand_pods_takes_a_fraction_of_its_pods() {
    let (packed, _) = many(64, 1000);
    let whole = 64 * 1000 * size_of::<Candidate>();
    assert!(packed.bytes < whole / 5, "{} of {whole}", packed.bytes);
}

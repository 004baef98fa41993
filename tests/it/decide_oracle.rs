//! The selection against its definition, written a second time and slowly, over odd fleets: slots with
//! gaps, later generations, sizes side by side, numbers at their limits, pins, sessions and subsets at once.

use crate::decide_fixture::{ask, endpoint, pod, policy, ratio, rule, snapshot};
use proptest::prelude::*;
use sidestep::decide::ask::{Affinity, Ask, Pin, Subset, SubsetEntry};
use sidestep::decide::policy::{Bypass, ClientPins, Policy, Scoring};
use sidestep::decide::select::{DecodeAffinity, Terms, select};
use sidestep::decide::snapshot::{
    Availability, Candidate, LocalPrefill, PodLoad, Role, Serves, Snapshot, TierBlocks,
};
use sidestep::decide::{Purpose, decide};
use sidestep::names::PodId;
use sidestep::units::{BlockSize, Blocks, Tokens};

/// As many as there may be in a fleet here.
const MOST: u16 = 9;

/// The slot of the `at`-th pod: sparse, and the last one is the last there is.
fn slot(at: u16) -> u16 {
    at.saturating_mul(8191)
}

fn tokens() -> impl Strategy<Value = Tokens> {
    let most = i64::MAX as u64;
    prop_oneof![
        6 => 0..20_000_u64,
        1 => Just(most),
        1 => Just(u64::MAX),
    ]
    .prop_map(Tokens)
}

fn blocks() -> impl Strategy<Value = Blocks> {
    prop_oneof![6 => 0..900_u32, 1 => Just(u32::MAX)].prop_map(Blocks)
}

fn weight() -> impl Strategy<Value = f64> {
    prop_oneof![
        4 => 0.0..3.0_f64,
        2 => Just(0.0),
        1 => Just(1e308),
        1 => Just(f64::MIN_POSITIVE),
    ]
}

prop_compose! {
    fn pods()(
        shapes in prop::collection::vec(
            (
                (0..3_usize, 0..20_u8, 0..4_usize, any::<bool>()),
                (blocks(), 0..3_u32, 0..3_u32, any::<bool>()),
                (0..4_u32, tokens(), blocks(), 0..60_u32),
            ),
            0..usize::from(MOST),
        ),
        alike in any::<bool>(),
    ) -> Vec<Candidate> {
        let shaped = |(at, ((role, odd, size, later), tiers, load)): (u16, _)| {
            let (device, host, disk, lower): (Blocks, u32, u32, bool) = tiers;
            let (requests, prefill_tokens, decode_blocks, shared): (u32, Tokens, Blocks, u32) = load;
            let mut pod = pod(slot(at), [Role::Decode, Role::Prefill, Role::Both][role]);
            pod.pod.generation = u32::from(later);
            pod.endpoint = endpoint(at);
            match odd {
                0 => pod.availability = Availability::Draining,
                1 => pod.availability = Availability::NotReady,
                2 => pod.availability = Availability::Unreachable,
                3..5 => pod.serves = Serves::NotThisModel,
                5..9 => pod.local_prefill = LocalPrefill::Unable,
                _ => {}
            }
            let size = if alike { 0 } else { size };
            pod.block_size = BlockSize::new([16, 1, 64, 128][size]).unwrap();
            pod.cached = TierBlocks {
                device,
                host: Blocks(if lower { host } else { 0 }),
                disk: Blocks(if lower { disk } else { 0 }),
            };
            pod.load = PodLoad {
                requests,
                prefill_tokens,
                decode_blocks,
                shared_blocks: Blocks(shared.min(decode_blocks.0)),
            };
            pod
        };
        (0..).zip(shapes).map(shaped).collect()
    }
}

fn id(at: u16, generation: u32) -> PodId {
    PodId {
        slot: slot(at),
        generation,
    }
}

prop_compose! {
    fn questions()(
        prompt in tokens(),
        subset in prop::option::weighted(0.4, prop::collection::vec((0..MOST, any::<bool>()), 0..14)),
        throughout in any::<bool>(),
        pins in (prop::option::weighted(0.2, 0..MOST), prop::option::weighted(0.2, 0..MOST)),
        session in prop::option::weighted(0.4, (any::<bool>(), 0..MOST, 0..2_u32)),
        prefill in prop::option::weighted(0.3, (0..MOST, 0..2_u32)),
        draw in any::<u64>(),
    ) -> Ask {
        let mut ask = ask(prompt.0);
        let entry = |(at, whole): (u16, bool)| {
            let endpoint = endpoint(at);
            if whole { SubsetEntry::Ip(endpoint.0.ip()) } else { SubsetEntry::Endpoint(endpoint) }
        };
        if let Some(entries) = subset {
            ask.subset = Subset::Only(entries.into_iter().map(entry).collect());
            if throughout {
                ask.subset = ask.subset.throughout();
            }
        }
        ask.decode_pin = pins.0.map(|at| Pin::Endpoint(endpoint(at)));
        ask.prefill_pin = pins.1.map(|at| Pin::Address(endpoint(at).0.ip()));
        ask.affinity = match session {
            None => Affinity::None,
            Some((true, at, generation)) => Affinity::Hard(id(at, generation)),
            Some((false, at, generation)) => Affinity::Soft(id(at, generation)),
        };
        ask.prefill_affinity = prefill.map(|(at, generation)| id(at, generation));
        ask.draw = draw;
        ask
    }
}

prop_compose! {
    fn scorings()(
        weights in (weight(), weight(), weight(), weight(), weight()),
        temperature in prop_oneof![
            4 => Just(0.0),
            1 => Just(f64::from_bits(1)),
            1 => 0.01..2.0_f64,
            1 => Just(f64::MAX),
        ],
    ) -> Scoring {
        Scoring {
            overlap_credit: ratio(weights.0),
            host_tier: ratio(weights.1),
            disk_tier: ratio(weights.2),
            active_request_weight: ratio(weights.3),
            prefill_load_scale: ratio(weights.4),
            temperature: ratio(temperature),
        }
    }
}

fn count(tokens: Tokens) -> f64 {
    // Beyond what a signed number holds, counts are equal.
    tokens.0.min(i64::MAX as u64) as f64
}

/// The formulas at the head of `decide::cost`.
fn cost(pod: &Candidate, prompt: Tokens, terms: &Terms<'_>, purpose: Purpose) -> f64 {
    let scoring = &terms.scoring;
    let size = f64::from(pod.block_size.get());
    let (device, host, disk) = (pod.cached.device.0, pod.cached.host.0, pod.cached.disk.0);
    let credit = scoring.overlap_credit.get() * f64::from(device)
        + scoring.host_tier.get() * f64::from(host)
        + scoring.disk_tier.get() * f64::from(disk);
    let new = f64::from(pod.block_size.blocks_to_hold(prompt).0);
    let load = &pod.load;
    let requests = scoring.active_request_weight.get() * f64::from(load.requests);
    let total = match purpose {
        Purpose::DecodeOnly => {
            let off = terms.decode_affinity == DecodeAffinity::LoadOnly
                || scoring.overlap_credit.get() == 0.0;
            let credit = if off { 0.0 } else { credit };
            (f64::from(load.decode_blocks.0) + new - credit).max(0.0) + requests
        }
        Purpose::Prefill | Purpose::PrefillAndDecode => {
            let work = (count(load.prefill_tokens) + count(prompt)) / size;
            let potential = f64::from(load.decode_blocks.0 - load.shared_blocks.0) + new;
            scoring.prefill_load_scale.get() * (work - credit).max(0.0) + potential + requests
        }
    };
    total.min(1e300)
}

/// Whether a pod may be chosen at all.
fn usable(pod: &Candidate, ask: &Ask, terms: &Terms<'_>, purpose: Purpose) -> bool {
    let destination = purpose != Purpose::Prefill;
    let role = if destination {
        pod.role != Role::Prefill
    } else {
        pod.role != Role::Decode
    };
    let subject = destination || matches!(ask.subset, Subset::Throughout(_));
    let able = purpose != Purpose::PrefillAndDecode || pod.local_prefill == LocalPrefill::Able;
    role && able
        && pod.serves == Serves::Yes
        && pod.availability == Availability::Ready
        && (!subject || ask.subset.allows(pod.endpoint))
        && terms.taken != Some(pod.pod)
}

/// The pods among which one is chosen by cost.
fn eligible<'a>(
    pods: &'a [Candidate],
    ask: &Ask,
    terms: &Terms<'_>,
    purpose: Purpose,
) -> Vec<&'a Candidate> {
    let usable = |pod: &&Candidate| usable(pod, ask, terms, purpose);
    if let Some(pin) = terms.pin(purpose) {
        let pinned = pods.iter().filter(|pod| pod.endpoint == pin);
        return pinned.filter(usable).collect();
    }
    let (session, hard) = match (purpose, ask.affinity) {
        (Purpose::Prefill, _) => (ask.prefill_affinity, false),
        (_, Affinity::None) => (None, false),
        (_, Affinity::Soft(pod)) => (Some(pod), false),
        (_, Affinity::Hard(pod)) => (Some(pod), true),
    };
    let own = pods.iter().find(|pod| Some(pod.pod) == session);
    match own {
        Some(own) if hard || usable(&own) => Some(own).into_iter().filter(usable).collect(),
        _ => pods.iter().filter(usable).collect(),
    }
}

/// Fails unless `select` chooses as defined above.
fn chooses(
    pods: &[Candidate],
    ask: &Ask,
    terms: &Terms<'_>,
    purpose: Purpose,
) -> Result<(), TestCaseError> {
    let snapshot: Snapshot = snapshot(pods.to_vec());
    let among = eligible(pods, ask, terms, purpose);
    let cost = |pod: &Candidate| cost(pod, ask.prompt_tokens, terms, purpose);
    let Some(pick) = select(ask, &snapshot, terms, purpose) else {
        prop_assert!(among.is_empty(), "{:?}: none of {}", purpose, among.len());
        return Ok(());
    };
    let chosen = pick.candidate;
    prop_assert!(
        among.iter().any(|pod| pod.pod == chosen.pod),
        "{:?}: {:?}",
        purpose,
        chosen
    );
    let total = pick.cost.total;
    prop_assert_eq!(total, cost(&chosen));
    let least = among
        .iter()
        .map(|pod| cost(pod))
        .fold(f64::INFINITY, f64::min);
    let most = among.iter().map(|pod| cost(pod)).fold(0.0, f64::max);
    let temperature = terms.scoring.temperature.get();
    if 0.0 < temperature {
        // A weight of less than e^-100 is never drawn.
        let share = (cost(&chosen) - least) / (most - least);
        prop_assert!(
            least == most || share / temperature < 100.0,
            "{} of {}",
            share,
            temperature
        );
        return Ok(());
    }
    prop_assert_eq!(total, least);
    let fewer = |pod: &&&Candidate| pod.load.requests < chosen.load.requests;
    let fairer = among.iter().filter(fewer).find(|pod| cost(pod) == least);
    prop_assert!(fairer.is_none(), "{:?} has fewer requests", fairer);
    Ok(())
}

fn terms_of<'a>(ask: &'a Ask, pods: &[Candidate], policy: &Policy) -> Option<Terms<'a>> {
    let (_, rule) = policy.rule_for(ask);
    Terms::new(ask, &snapshot(pods.to_vec()), policy, rule).ok()
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn a_selection_is_what_its_definition_says(
        pods in pods(),
        ask in questions(),
        scoring in scorings(),
        honor in any::<bool>(),
        load_only in any::<bool>(),
        taken in prop::option::weighted(0.3, (0..MOST, 0..2_u32)),
    ) {
        let bypass = if load_only { Bypass::Never } else { Bypass::Always };
        let mut policy = policy([rule(bypass)]);
        policy.scoring = scoring;
        if honor {
            policy.client_pins = ClientPins::Honor;
        }
        if let Some(mut terms) = terms_of(&ask, &pods, &policy) {
            terms.taken = taken.map(|(at, generation)| id(at, generation));
            for purpose in Purpose::ALL {
                chooses(&pods, &ask, &terms, purpose)?;
            }
        }
        // Whatever it is asked, it answers.
        let _ = decide(&ask, &snapshot(pods), &policy);
    }
}

#[test]
fn equal_pods_are_drawn_among_alike() {
    let pods: Vec<Candidate> = (0..3).map(|at| pod(slot(at), Role::Decode)).collect();
    let (seen, policy) = (snapshot(pods.clone()), policy([rule(Bypass::Always)]));
    let mut times = [0_u32; 3];
    for round in 0..3_000_u64 {
        let ask = Ask {
            draw: round.wrapping_mul(0x9e37_79b9_7f4a_7c15),
            ..ask(100)
        };
        let terms = terms_of(&ask, &pods, &policy).unwrap();
        let pick = select(&ask, &seen, &terms, Purpose::DecodeOnly).unwrap();
        times[usize::from(pick.candidate.pod.slot / 8191)] += 1;
    }
    // Six standard deviations.
    assert!(
        times.iter().all(|times| (850..1150).contains(times)),
        "{times:?}"
    );
}

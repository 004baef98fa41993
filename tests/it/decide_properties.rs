//! What must hold for every snapshot: eligibility, the subset, the gate, monotony in the overlap.

use crate::decide_fixture::{
    ask, bound, busy, endpoint, gate, id, pod, policy, ratio, rule, snapshot as of,
};
use proptest::prelude::*;
use sidestep::decide::ask::{Affinity, Ask, Pin, Subset, SubsetEntry};
use sidestep::decide::policy::{Bypass, ClientPins, DecodeGate, OnNoPrefill, Policy, TierCredit};
use sidestep::decide::select::{Terms, select, survey};
use sidestep::decide::snapshot::{
    Availability, Candidate, Capacity, CapacitySource, EngineReport, KvSource, LocalPrefill,
    PodLoad, Role, Serves, Snapshot, TierBlocks,
};
use sidestep::decide::{Decision, Purpose, Route, decide};
use sidestep::units::{BlockSize, Blocks, Tokens};

const MOST_PODS: u16 = 8;

fn roles(both: bool) -> impl Strategy<Value = Role> {
    prop_oneof![
        3 => Just(Role::Decode),
        2 => Just(Role::Prefill),
        u32::from(both) => Just(Role::Both),
    ]
}

fn capacity() -> impl Strategy<Value = Capacity<u32>> {
    prop_oneof![
        4 => (1..2_000_u32).prop_map(Capacity::Reported),
        1 => (1..2_000_u32).prop_map(Capacity::Configured),
        1 => (1..2_000_u32).prop_map(Capacity::Assumed),
        1 => Just(Capacity::Unknown),
        1 => Just(Capacity::Reported(0)),
    ]
}

prop_compose! {
    pub(crate) fn candidates(both: bool)(
        pods in prop::collection::vec(
            (
                (roles(both), 0..16_u8, 0..3_usize),
                (0..400_u32, 0..50_u32, 0..50_u32),
                (0..8_u32, 0..20_000_u64, 0..900_u32, 0..60_u32),
                (capacity(), capacity(), prop::option::of(0.0..1.0_f64)),
            ),
            1..usize::from(MOST_PODS),
        ),
    ) -> Vec<Candidate> {
        let mut slot = 0;
        let mut next = || { slot += 1; slot - 1 };
        pods.into_iter()
            .map(|((role, odd, size), tiers, load, (tokens, blocks, usage))| {
                let mut pod = pod(next(), role);
                match odd {
                    0 => pod.availability = Availability::Draining,
                    1 => pod.serves = Serves::NotThisModel,
                    2 => pod.local_prefill = LocalPrefill::Unable,
                    3 => pod.kv_source = KvSource::Absent,
                    _ => {}
                }
                pod.block_size = BlockSize::new([16, 32, 128][size]).unwrap();
                pod.cached = TierBlocks {
                    device: Blocks(tiers.0),
                    host: Blocks(tiers.1),
                    disk: Blocks(tiers.2),
                };
                pod.load = PodLoad {
                    requests: load.0,
                    prefill_tokens: Tokens(load.1),
                    decode_blocks: Blocks(load.2),
                    shared_blocks: Blocks(load.3.min(load.2)),
                };
                pod.prefill_capacity = match tokens {
                    Capacity::Reported(n) => Capacity::Reported(Tokens(u64::from(n))),
                    Capacity::Configured(n) => Capacity::Configured(Tokens(u64::from(n))),
                    Capacity::Assumed(n) => Capacity::Assumed(Tokens(u64::from(n))),
                    Capacity::Unknown => Capacity::Unknown,
                };
                pod.kv_capacity = match blocks {
                    Capacity::Reported(n) => Capacity::Reported(Blocks(n)),
                    Capacity::Configured(n) => Capacity::Configured(Blocks(n)),
                    Capacity::Assumed(n) => Capacity::Assumed(Blocks(n)),
                    Capacity::Unknown => Capacity::Unknown,
                };
                if let Some(usage) = usage {
                    pod.engine = EngineReport::Fresh {
                        waiting: 0,
                        running: 0,
                        kv_usage: ratio(usage),
                    };
                }
                pod
            })
            .collect()
    }
}

fn bypasses() -> impl Strategy<Value = Bypass> {
    let isl = || {
        (0..4_000_u64, 0.0..1.0_f64, 0..2_000_u64, any::<bool>()).prop_map(
            |(tokens, share, cold, weighted)| {
                let mut bound = bound(tokens, share);
                bound.cold_bypass_below = Tokens(cold);
                if weighted {
                    bound.tier_credit = TierCredit::Weighted;
                }
                bound
            },
        )
    };
    let load = || (0.0..10.0_f64).prop_map(busy);
    prop_oneof![
        Just(Bypass::Never),
        Just(Bypass::Always),
        isl().prop_map(Bypass::IslBounding),
        load().prop_map(Bypass::PrefillLoad),
        (isl(), load()).prop_map(|(isl, load)| Bypass::IslOrLoad(isl, load)),
    ]
}

fn gates() -> impl Strategy<Value = DecodeGate> {
    prop_oneof![Just(DecodeGate::Off), (0.0..1.5_f64).prop_map(gate)]
}

prop_compose! {
    pub(crate) fn policies()(
        bypass in bypasses(),
        gate in gates(),
        fail in any::<bool>(),
        honor in any::<bool>(),
        temperature in prop_oneof![3 => Just(0.0), 1 => 0.01..2.0_f64],
        weights in (0.0..2.0_f64, 0.0..1.0_f64, 0.0..1.0_f64, 0.0..5.0_f64),
    ) -> Policy {
        let mut rule = rule(bypass);
        rule.gate = gate;
        if fail {
            rule.on_no_prefill = OnNoPrefill::Fail;
        }
        let mut policy = policy([rule]);
        if honor {
            policy.client_pins = ClientPins::Honor;
        }
        policy.scoring.temperature = ratio(temperature);
        policy.scoring.overlap_credit = ratio(weights.0);
        policy.scoring.host_tier = ratio(weights.1);
        policy.scoring.disk_tier = ratio(weights.2);
        policy.scoring.active_request_weight = ratio(weights.3);
        policy
    }
}

prop_compose! {
    pub(crate) fn asks()(
        prompt in prop_oneof![Just(0), 0..200_u64, 0..20_000_u64],
        subset in prop::option::weighted(0.4, prop::collection::vec(0..MOST_PODS, 0..12)),
        pins in (prop::option::weighted(0.2, 0..MOST_PODS), prop::option::weighted(0.2, 0..MOST_PODS)),
        session in prop::option::weighted(0.3, (any::<bool>(), 0..MOST_PODS)),
        draw in any::<u64>(),
    ) -> Ask {
        let mut ask = ask(prompt);
        if let Some(slots) = subset {
            let entries = slots.into_iter().map(|slot| match slot % 2 {
                0 => SubsetEntry::Endpoint(endpoint(slot)),
                _ => SubsetEntry::Ip(endpoint(slot).0.ip()),
            });
            ask.subset = Subset::Only(entries.collect());
        }
        ask.decode_pin = pins.0.map(|slot| endpoint(slot).into());
        ask.prefill_pin = pins.1.map(|slot| endpoint(slot).into());
        ask.affinity = match session {
            None => Affinity::None,
            Some((true, slot)) => Affinity::Hard(id(slot)),
            Some((false, slot)) => Affinity::Soft(id(slot)),
        };
        ask.draw = draw;
        ask
    }
}

/// The definition of an eligible pod, written a second time.
fn usable(pod: &Candidate) -> bool {
    pod.availability == Availability::Ready && pod.serves == Serves::Yes
}

fn is_bypass(decision: &Decision) -> bool {
    decision.because.is_bypass()
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn chosen_pods_are_eligible(pods in candidates(true), ask in asks(), policy in policies()) {
        let snapshot = of(pods);
        if let Ok(decision) = decide(&ask, &snapshot, &policy) {
            let decode = decision.route.decode().candidate;
            prop_assert!(usable(&decode) && decode.role != Role::Prefill);
            prop_assert!(ask.subset.allows(decode.endpoint));
            match &decision.route {
                Route::Local { decode } => {
                    prop_assert_eq!(decode.candidate.local_prefill, LocalPrefill::Able);
                }
                Route::Remote { prefill, .. } => {
                    prop_assert!(usable(&prefill.candidate));
                    prop_assert!(prefill.candidate.role != Role::Decode);
                    prop_assert_ne!(prefill.candidate.pod, decode.pod);
                    prop_assert!(!is_bypass(&decision));
                }
            }
            if policy.client_pins == ClientPins::Honor {
                if let Some(pin) = ask.decode_pin {
                    prop_assert_eq!(Pin::from(decode.endpoint), pin);
                }
                if let (Some(pin), Some(prefill)) = (ask.prefill_pin, decision.route.prefill()) {
                    prop_assert_eq!(Pin::from(prefill.candidate.endpoint), pin);
                }
            }
            for pick in [Some(decision.route.decode()), decision.route.prefill()].into_iter().flatten() {
                prop_assert_eq!(pick.cached_tokens.0 + pick.net_new_tokens.0, ask.prompt_tokens.0);
            }
        }
    }

    #[test]
    fn a_selection_takes_a_cheapest_one_of_the_pods_that_its_survey_admits(
        pods in candidates(true),
        ask in asks(),
        policy in policies(),
        same_size in any::<bool>(),
    ) {
        let mut policy = policy;
        policy.scoring.temperature = ratio(0.0);
        let mut pods = pods;
        if same_size {
            // Fleets that agree on a block size take another way through the same sums.
            let size = pods[0].block_size;
            pods.iter_mut().for_each(|pod| pod.block_size = size);
        }
        let snapshot = of(pods);
        let (_, rule) = policy.rule_for(&ask);
        if let Ok(terms) = Terms::new(&ask, &snapshot, &policy, rule) {
            for purpose in Purpose::ALL {
                let admitted = survey(&ask, &snapshot, &terms, purpose)
                    .filter_map(|(pod, cost)| Some((cost.ok()?, pod)));
                let least = admitted.min_by(|(a, x), (b, y)| {
                    a.total.total_cmp(&b.total).then(x.load.requests.cmp(&y.load.requests))
                });
                let chosen = select(&ask, &snapshot, &terms, purpose);
                prop_assert_eq!(
                    chosen.map(|pick| (pick.cost.total, pick.candidate.load.requests)),
                    least.map(|(cost, pod)| (cost.total, pod.load.requests))
                );
            }
        }
    }

    #[test]
    fn a_refusal_means_that_something_is_missing(pods in candidates(true), ask in asks()) {
        let mut ask = ask;
        ask.subset = Subset::Any;
        ask.affinity = Affinity::None;
        let able = pods.iter().any(|pod| {
            usable(pod) && pod.role != Role::Prefill && pod.local_prefill == LocalPrefill::Able
        });
        let policy = policy([rule(Bypass::IslBounding(bound(2048, 0.7)))]);
        if able {
            let decision = decide(&ask, &of(pods), &policy);
            prop_assert!(decision.is_ok(), "{:?}", decision.err());
        }
    }

    #[test]
    fn more_overlap_on_the_chosen_pod_never_ends_a_bypass(
        pods in candidates(false),
        ask in asks(),
        policy in policies(),
        more in 1..500_u32,
    ) {
        let mut policy = policy;
        // Drawing by cost is meant to choose other pods now and then.
        policy.scoring.temperature = ratio(0.0);
        let pods_before = pods;
        let snapshot = of(pods_before.clone());
        if let Ok(before) = decide(&ask, &snapshot, &policy)
            && is_bypass(&before)
        {
            let slot = usize::from(before.route.decode().candidate.pod.slot);
            let mut pods = pods_before;
            let device = &mut pods[slot].cached.device;
            *device = device.saturating_add(Blocks(more));
            let after = decide(&ask, &of(pods), &policy).unwrap();
            prop_assert!(is_bypass(&after), "{:?} became {:?}", before.because, after.because);
        }
    }

    #[test]
    fn tightening_the_gate_never_makes_a_bypass(
        pods in candidates(true),
        ask in asks(),
        policy in policies(),
        thresholds in (0.0..1.5_f64, 0.0..1.5_f64),
        fewer in any::<bool>(),
    ) {
        let snapshot = of(pods);
        let (tight, loose) = (thresholds.0.min(thresholds.1), thresholds.0.max(thresholds.1));
        let with = |gate: DecodeGate| {
            let mut policy = policy.clone();
            policy.rules[0].gate = gate;
            decide(&ask, &snapshot, &policy).is_ok_and(|decision| is_bypass(&decision))
        };
        let trust = if fewer {
            vec![CapacitySource::Reported]
        } else {
            vec![CapacitySource::Reported, CapacitySource::Configured]
        };
        let tight = with(DecodeGate::On { threshold: ratio(tight), trust });
        let loose = with(gate(loose));
        let off = with(DecodeGate::Off);
        prop_assert!(!tight || loose);
        prop_assert!(!loose || off);
    }

    #[test]
    fn the_cheapest_pod_is_taken_wherever_it_stands(
        pods in candidates(true),
        ask in asks(),
        policy in policies(),
        turn in 0..8_usize,
    ) {
        let mut policy = policy;
        policy.scoring.temperature = ratio(0.0);
        let snapshot = of(pods.clone());
        let mut turned = pods;
        let turn = turn % turned.len();
        turned.rotate_left(turn);
        let turned = of(turned);
        let cost = |snapshot: &Snapshot| {
            decide(&ask, snapshot, &policy)
                .map(|decision| decision.considered.local.map(|pick| pick.cost.total))
        };
        prop_assert_eq!(cost(&snapshot), cost(&turned));
    }
}

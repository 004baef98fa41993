//! Table tests of the kernel: what the numbers of a decision are, the roles of draw and temperature,
//! and the nearest change of a threshold that would have turned a decision.

use crate::decide_fixture::{
    ask, bound, busy, decode, endpoint, gate, gated, holding, id, isl, pod, policy, prefill, ratio,
    rule, snapshot,
};
use sidestep::decide::ask::{Affinity, Subset, SubsetEntry};
use sidestep::decide::policy::{Bypass, DecodeGate, OnNoPrefill, Policy, Scoring};
use sidestep::decide::reason::Checked;
use sidestep::decide::select::{Terms, survey};
use sidestep::decide::snapshot::{
    Availability, Capacity, EngineReport, KvSource, LocalPrefill, Role, Serves, TierBlocks,
};
use sidestep::decide::{
    Because, Candidate, Cost, Decision, Ineligible, NoRoute, Purpose, Route, decide, nearest_flip,
};
use sidestep::names::PodId;
use sidestep::units::{Blocks, Ratio, Tokens};
use std::collections::HashMap;

fn decided(prompt: u64, pods: impl IntoIterator<Item = Candidate>, policy: &Policy) -> Decision {
    decide(&ask(prompt), &snapshot(pods), policy).unwrap()
}

/// Row by row: the edge cases of the peer's kernel that a decision can reach.
#[test]
fn isl_bounding_follows_the_table() {
    use Because::{EmptyPrompt as Empty, NetNewShareAboveThreshold as Share};
    use Because::{NetNewAboveThreshold as Abs, NetNewBelowThresholds as Yes};
    #[rustfmt::skip]
    let rows = [
        // prompt, cached, threshold, ratio, reason, net-new
        (1_000,    896,    2048, 0.7,  Yes,   104),
        (100_000,  64_000, 2048, 0.7,  Abs,   36_000),
        (200,      0,      2048, 0.7,  Share, 200),
        (0,        0,      2048, 0.7,  Empty, 0),
        (100,      160,    2048, 0.7,  Yes,   0),
        (2_100,    48,     2048, 0.99, Abs,   2_052),
        (1_600,    1_600,  0,    0.7,  Abs,   0),
        (1_600,    1_600,  2048, 0.0,  Share, 0),
        (200,      0,      2048, 1.0,  Share, 200),
        // Both sides of equality, absolute: 2048 of 10048.
        (10_047,   8_000,  2048, 0.7,  Yes,   2_047),
        (10_048,   8_000,  2048, 0.7,  Abs,   2_048),
        (10_049,   8_000,  2048, 0.7,  Abs,   2_049),
        // Both sides of equality, share: a half of 320.
        (319,      160,    2048, 0.5,  Yes,   159),
        (320,      160,    2048, 0.5,  Share, 160),
        (321,      160,    2048, 0.5,  Share, 161),
        // Thresholds of a short prompt (fewer tokens than a block).
        (1,        0,      2,    1.1,  Yes,   1),
        (15,       0,      0,    1.1,  Abs,   15),
        (16,       0,      16,   1.1,  Abs,   16),
        (17,       16,     2,    0.06, Yes,   1),
    ];
    for (prompt, cached, threshold, share, because, net_new) in rows {
        let policy = policy([rule(Bypass::IslBounding(bound(threshold, share)))]);
        let got = decided(prompt, [holding(decode(0), cached), prefill(1)], &policy);
        let row = format!("{prompt} {cached} {threshold} {share}");
        assert_eq!(got.because, because, "{row}");
        assert_eq!(
            got.considered.local.unwrap().net_new_tokens.0,
            net_new,
            "{row}"
        );
        let local = matches!(got.route, Route::Local { .. });
        assert_eq!(local, because.is_bypass(), "{row}");
    }
}

#[test]
fn the_gate_has_five_outcomes() {
    let with = |blocks: u32, capacity| {
        let mut pod = holding(decode(0), 960);
        pod.load.decode_blocks = Blocks(blocks);
        pod.kv_capacity = capacity;
        pod
    };
    let known = Capacity::Reported(Blocks(200));
    #[rustfmt::skip]
    let rows = [
        ("the rule declines",     3_200, isl(), with(199, known),             Because::NetNewAboveThreshold),
        ("no gate",               1_000, isl(), with(199, known),             Because::NetNewBelowThresholds),
        ("capacity unknown",      1_000, gated(isl(), gate(0.5)), with(0, Capacity::Unknown), Because::DecodeCapacityUnknown),
        ("busy: 38 + 63 of 200",  1_000, gated(isl(), gate(0.5)), with(38, known), Because::DecodeBusy),
        ("not busy: 37 + 63",     1_000, gated(isl(), gate(0.5)), with(37, known), Because::NetNewBelowThresholds),
    ];
    for (what, prompt, policy, pod, because) in rows {
        let got = decided(prompt, [pod, prefill(1)], &policy);
        assert_eq!(got.because, because, "{what}");
        let last = got.checks.last().unwrap();
        let gate_spoke = last.what == Checked::DecodeBusy;
        assert_eq!(
            gate_spoke,
            what.contains("busy"),
            "{what}: the gate is asked only after a yes, and only when it can tell"
        );
    }
}

#[test]
fn the_gate_adds_the_request_to_what_the_engine_reports() {
    let mut pod = holding(decode(0), 960);
    pod.kv_capacity = Capacity::Reported(Blocks(1000));
    pod.load.decode_blocks = Blocks(10);
    pod.load.shared_blocks = Blocks(3);
    pod.engine = EngineReport::Fresh {
        waiting: 0,
        running: 0,
        kv_usage: ratio(0.25),
    };
    let got = decided(1000, [pod, prefill(1)], &gated(isl(), gate(0.5)));
    let check = got.checks.last().unwrap();
    // 250 blocks reported, and 63 of the request less the 3 that run already.
    assert_eq!((check.what, check.value), (Checked::DecodeBusy, 0.310));

    pod.engine = EngineReport::None;
    let got = decided(1000, [pod, prefill(1)], &gated(isl(), gate(0.5)));
    assert_eq!(got.checks.last().unwrap().value, 0.070);
}

#[test]
fn costs_follow_the_formula() {
    let mut pod = pod(0, Role::Both);
    pod.cached = TierBlocks {
        device: Blocks(10),
        host: Blocks(8),
        disk: Blocks(4),
    };
    pod.load.requests = 3;
    pod.load.prefill_tokens = Tokens(160);
    pod.load.decode_blocks = Blocks(50);
    pod.load.shared_blocks = Blocks(5);
    let mut scoring_policy = isl();
    scoring_policy.scoring = Scoring {
        overlap_credit: ratio(1.5),
        host_tier: ratio(0.75),
        disk_tier: ratio(0.25),
        prefill_load_scale: ratio(2.0),
        active_request_weight: ratio(4.0),
        temperature: Ratio::ZERO,
    };
    let cost = |policy: &Policy, purpose| {
        let (ask, pods) = (ask(800), snapshot([pod]));
        let terms = Terms::new(&ask, &pods, policy, &policy.rules[0]).unwrap();
        let (_, cost) = survey(&ask, &pods, &terms, purpose).next().unwrap();
        cost.unwrap()
    };
    // credit 1.5*10 + 0.75*8 + 0.25*4 = 22; work (160 + 800) / 16 = 60; blocks 50 - 5 + 50.
    let both = Cost {
        prefill: 76.0,
        credit: 22.0,
        decode: 95.0,
        requests: 12.0,
        total: 183.0,
    };
    assert_eq!(cost(&scoring_policy, Purpose::PrefillAndDecode), both);
    assert_eq!(cost(&scoring_policy, Purpose::Prefill), both);
    // No block is taken for shared, and the credit counts against the blocks.
    let after = Cost {
        prefill: 0.0,
        credit: 22.0,
        decode: 78.0,
        requests: 12.0,
        total: 90.0,
    };
    assert_eq!(cost(&scoring_policy, Purpose::DecodeOnly), after);

    let load_only = Cost {
        credit: 0.0,
        decode: 100.0,
        total: 112.0,
        ..after
    };
    let mut no_credit = scoring_policy.clone();
    no_credit.scoring.overlap_credit = Ratio::ZERO;
    assert_eq!(cost(&no_credit, Purpose::DecodeOnly), load_only);
    let mut never = scoring_policy;
    never.rules[0].bypass = Bypass::Never;
    assert_eq!(cost(&never, Purpose::DecodeOnly), load_only);
}

#[test]
fn equals_are_drawn_alike() {
    let pods = snapshot((0..5).map(decode));
    let mut counts = [0_u32; 5];
    for round in 0..10_000_u64 {
        let mut ask = ask(1000);
        ask.draw = round.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let decision = decide(&ask, &pods, &isl()).unwrap();
        counts[usize::from(decision.route.decode().candidate.pod.slot)] += 1;
    }
    for count in counts {
        assert!((1_850..=2_150).contains(&count), "{counts:?}");
    }
}

#[test]
fn a_temperature_draws_by_cost() {
    // Blocks in use make costs of 63, 163 and 263: normalised 0, 0.5 and 1.
    let pods = (0..3).map(|slot| {
        let mut pod = decode(slot);
        pod.load.decode_blocks = Blocks(u32::from(slot) * 100);
        pod
    });
    let pods = snapshot(pods);
    let mut policy = isl();
    policy.scoring.temperature = ratio(0.5);
    let mut counts = [0_u32; 3];
    for round in 0..10_000_u64 {
        let mut ask = ask(1000);
        ask.draw = round.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let decision = decide(&ask, &pods, &policy).unwrap();
        counts[usize::from(decision.route.decode().candidate.pod.slot)] += 1;
    }
    let weights = [1.0, (-1.0_f64).exp(), (-2.0_f64).exp()];
    let sum: f64 = weights.iter().sum();
    for (count, weight) in counts.into_iter().zip(weights) {
        let expected = weight / sum * 10_000.0;
        assert!((f64::from(count) - expected).abs() < 200.0, "{counts:?}");
    }
}

#[test]
fn extreme_weights_and_loads_still_choose() {
    let mut pods: Vec<_> = (0..4).map(decode).collect();
    pods[1].load.prefill_tokens = Tokens(u64::MAX);
    pods[2].load.decode_blocks = Blocks(u32::MAX);
    pods[3].cached.device = Blocks(u32::MAX);
    pods.push(prefill(4));
    for temperature in [0.0, 1e-300, 1.0, f64::MAX] {
        for weight in [0.0, f64::MIN_POSITIVE, f64::MAX] {
            for prompt in [0, 1, u64::MAX] {
                let mut policy = isl();
                policy.scoring = Scoring {
                    overlap_credit: ratio(weight),
                    host_tier: ratio(weight),
                    disk_tier: ratio(weight),
                    prefill_load_scale: ratio(weight),
                    active_request_weight: ratio(weight),
                    temperature: ratio(temperature),
                };
                for draw in [0, u64::MAX] {
                    let mut ask = ask(prompt);
                    ask.draw = draw;
                    let got = decide(&ask, &snapshot(pods.iter().copied()), &policy).unwrap();
                    let cost = got.route.decode().cost.total;
                    assert!(cost.is_finite() && 0.0 <= cost);
                }
            }
        }
    }
}

#[test]
fn every_excluded_pod_has_its_reason() {
    let mut pods: Vec<_> = (0..8).map(decode).collect();
    pods[0].role = Role::Prefill;
    pods[1].serves = Serves::NotThisModel;
    pods[2].availability = Availability::NotReady;
    pods[3].availability = Availability::Draining;
    pods[4].availability = Availability::Unreachable;
    pods[6].local_prefill = LocalPrefill::Unable;
    let mut ask = ask(100);
    let inside = (0..8).filter(|slot| *slot != 5);
    let entries = inside.map(|slot| SubsetEntry::Endpoint(endpoint(slot)));
    ask.subset = Subset::Only(entries.collect());
    let policy = isl();
    let reasons = |ask: &sidestep::decide::Ask| {
        let pods = snapshot(pods.iter().copied());
        let terms = Terms::new(ask, &pods, &policy, &policy.rules[0]).unwrap();
        survey(ask, &pods, &terms, Purpose::PrefillAndDecode)
            .map(|(_, cost)| cost.err().map(Ineligible::as_str))
            .collect::<Vec<_>>()
    };
    let mut expected = vec![
        Some("prefill_role"),
        Some("not_this_model"),
        Some("not_ready"),
        Some("draining"),
        Some("unreachable"),
        Some("outside_subset"),
        Some("cannot_prefill_locally"),
        None,
    ];
    assert_eq!(reasons(&ask), expected);
    ask.affinity = Affinity::Hard(id(6));
    expected[7] = Some("session_elsewhere");
    assert_eq!(reasons(&ask), expected);
}

#[test]
fn a_session_of_an_earlier_incarnation_does_not_bind() {
    let mut ask = ask(1000);
    ask.affinity = Affinity::Hard(PodId {
        slot: 0,
        generation: 7,
    });
    let pods = snapshot([decode(0), holding(decode(1), 896)]);
    let got = decide(&ask, &pods, &isl()).unwrap();
    assert_eq!(got.route.decode().candidate.pod, id(1));
}

#[test]
fn a_hard_session_whose_engine_cannot_prefill_goes_remote_not_elsewhere() {
    let mut own = holding(decode(0), 896);
    own.local_prefill = LocalPrefill::Unable;
    let mut ask = ask(1000);
    ask.affinity = Affinity::Hard(id(0));
    let pods = snapshot([own, holding(decode(1), 896), prefill(2)]);
    let got = decide(&ask, &pods, &isl()).unwrap();
    assert_eq!(got.because, Because::EngineCannotPrefillLocally);
    assert_eq!(got.route.decode().candidate.pod, id(0));
}

/// Report 26: forced remote prefill with no prefill pod must not run on decode unnoticed.
#[test]
fn forced_remote_prefill_is_refused_by_name_until_a_prefill_pod_is_ready() {
    let mut policy = policy([rule(Bypass::Never)]);
    policy.rules[0].on_no_prefill = OnNoPrefill::Fail;
    let mut pods = [decode(0), decode(1), prefill(2), prefill(3)];
    pods[2].availability = Availability::NotReady;
    pods[3].availability = Availability::NotReady;
    let refused = decide(&ask(4000), &snapshot(pods), &policy).unwrap_err();
    assert_eq!(refused, NoRoute::NoPrefillPod);
    assert!(refused.to_string().contains("prefill"));

    policy.rules[0].on_no_prefill = OnNoPrefill::Local;
    let local = decided(4000, pods, &policy);
    assert_eq!(local.because, Because::NoPrefillPod);
    assert!(!local.because.is_bypass());

    pods[2].availability = Availability::Ready;
    let remote = decided(4000, pods, &policy);
    assert_eq!(remote.route.prefill().unwrap().candidate.pod, id(2));
}

/// Report 27: a prompt without one full block holds nothing, which is not "holds everything".
#[test]
fn prompts_around_one_block_go_remote_when_told_to() {
    for prompt in [1, 15, 16, 17] {
        for bypass in [Bypass::Never, Bypass::IslBounding(bound(0, 0.7))] {
            let got = decided(prompt, [decode(0), prefill(1)], &policy([rule(bypass)]));
            assert!(got.route.prefill().is_some(), "{prompt} {bypass:?}");
        }
    }
}

/// Report 28: tier weights rank pods and stay out of the token arithmetic.
#[test]
fn a_slow_tier_counts_in_full() {
    let policy = policy([rule(Bypass::IslBounding(bound(512, 0.7)))]);
    for host in [true, false] {
        let mut pod = decode(0);
        if host {
            pod.cached.host = Blocks(240);
        } else {
            pod.cached.device = Blocks(240);
        }
        let got = decided(4096, [pod, prefill(1)], &policy);
        assert_eq!(got.because, Because::NetNewBelowThresholds);
        assert_eq!(got.route.decode().net_new_tokens, Tokens(256));
    }
}

/// Report 30 (a) and (d): the destination is a decode pod, or there is none.
#[test]
fn a_prefill_pod_is_never_the_destination() {
    let pods = [decode(0), decode(1), prefill(2), prefill(3)];
    for round in 0..100_u64 {
        let mut ask = ask(round * 100);
        ask.draw = round.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let got = decide(&ask, &snapshot(pods), &isl()).unwrap();
        assert_eq!(got.route.decode().candidate.role, Role::Decode);
    }
    let left = decide(&ask(100), &snapshot([prefill(2), prefill(3)]), &isl());
    assert_eq!(left.unwrap_err(), NoRoute::NoDecodePod);
}

#[test]
fn a_bypass_admits_exactly_the_pod_that_was_judged() {
    let pods = [decode(0), holding(decode(1), 896), prefill(2)];
    let got = decided(1000, pods, &isl());
    let judged = got.considered.local.unwrap();
    let Route::Local { decode } = got.route else {
        panic!("expected a bypass, found {:?}", got.because);
    };
    assert_eq!(decode.candidate.pod, judged.candidate.pod);
    assert_eq!(decode.cost, judged.cost);
    assert_eq!(got.decode_blocks(), Blocks(63));
}

fn with_threshold(mut policy: Policy, what: Checked, to: f64) -> Policy {
    let rule = &mut policy.rules[0];
    match (what, &mut rule.bypass, &mut rule.gate) {
        (Checked::DecodeBusy, _, DecodeGate::On { threshold, .. }) => *threshold = ratio(to),
        (Checked::PrefillBusy, Bypass::IslOrLoad(_, busy), _) => busy.threshold = ratio(to),
        (Checked::NetNewShare, Bypass::IslBounding(bound), _) => bound.ratio = ratio(to),
        (Checked::NetNewTokens, Bypass::IslBounding(bound), _) => {
            bound.threshold = Tokens(to as u64);
        }
        (Checked::PromptTokens, Bypass::IslBounding(bound), _) => {
            bound.cold_bypass_below = Tokens(to as u64);
        }
        other => panic!("{other:?}"),
    }
    policy
}

#[test]
fn the_nearest_flip_turns_the_decision() {
    let mut loaded = holding(decode(0), 896);
    loaded.load.decode_blocks = Blocks(500);
    let mut queue = prefill(1);
    queue.load.prefill_tokens = Tokens(4_321);
    let unknown = {
        let mut pod = decode(0);
        pod.kv_source = KvSource::Absent;
        pod
    };
    let either = policy([rule(Bypass::IslOrLoad(bound(2048, 0.7), busy(1.0)))]);
    #[rustfmt::skip]
    let rows = [
        // The share of 0.104 is far from 0.7, 563 of 1000 blocks are near 0.6.
        (1_000, loaded, queue, gated(isl(), gate(0.6)), Some((Checked::DecodeBusy, 0.563))),
        (1_000, loaded, queue, gated(isl(), gate(0.5)), Some((Checked::DecodeBusy, 0.563))),
        (1_000, loaded, queue, isl(), Some((Checked::NetNewShare, 0.104))),
        (10_100, holding(decode(0), 8_000), queue, isl(), Some((Checked::NetNewTokens, 2_101.0))),
        // All of a cold prompt is new: no share below 1 helps, but a bound for short prompts does.
        (200, decode(0), queue, isl(), Some((Checked::PromptTokens, 201.0))),
        (200, decode(0), queue, either.clone(), Some((Checked::PrefillBusy, 4_321.0 / 8_192.0))),
        (200, unknown, queue, isl(), Some((Checked::PromptTokens, 201.0))),
        (200, decode(0), queue, policy([rule(Bypass::Never)]), None),
    ];
    for (prompt, pod, queue, policy, expected) in rows {
        let got = decided(prompt, [pod, queue], &policy);
        let flip = nearest_flip(&got, &policy);
        let found = flip.map(|flip| (flip.what, flip.to));
        match (found, expected) {
            (None, None) => {}
            (Some((what, to)), Some((which, near))) => {
                assert_eq!(what, which, "{prompt} {:?}", got.because);
                assert!((to - near).abs() < 1e-9, "{prompt}: {to} is not {near}");
                let changed = with_threshold(policy, what, to);
                let turned = decided(prompt, [pod, queue], &changed);
                assert_eq!(turned.because, flip.unwrap().becomes);
                assert_ne!(turned.route.as_str(), got.route.as_str());
            }
            other => panic!("{prompt} {:?}: {other:?}", got.because),
        }
    }
}

#[test]
fn decisions_carry_every_word_once() {
    let mut words = HashMap::new();
    for because in Because::ALL {
        assert!(words.insert(because.as_str(), because).is_none());
    }
}

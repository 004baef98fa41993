use super::*;
use crate::decide::policy::{
    Bypass, ClientPins, DecodeGate, IslBound, Match, OnNoPrefill, Rule, Scoring, SessionAffinity,
    TierCredit,
};
use crate::units::{Ratio, Tokens};

fn policy(bypass: Bypass) -> Policy {
    Policy {
        name: "p".into(),
        generation: 1,
        rules: vec![Rule {
            matches: Match::default(),
            bypass,
            gate: DecodeGate::Off,
            on_no_prefill: OnNoPrefill::Local,
        }],
        scoring: Scoring::default(),
        session_affinity: SessionAffinity::Off,
        client_pins: ClientPins::Ignore,
    }
}

fn isl() -> Policy {
    policy(Bypass::IslBounding(IslBound {
        threshold: Tokens(2048),
        ratio: Ratio::ONE,
        cold_bypass_below: Tokens::ZERO,
        tier_credit: TierCredit::Full,
    }))
}

fn pod(slot: u16, role: Role, kv_source: &'static str, missing: &[Prerequisite]) -> PodStatus {
    PodStatus {
        kv_capacity_blocks: None,
        prefill_capacity_tokens: None,
        name: format!("d{slot}").into(),
        endpoint: String::new(),
        role,
        availability: "ready",
        kv_source,
        kv_blocks: 0,
        kv_last_event_age_s: None,
        requests: 0,
        prefill_tokens: 0,
        decode_blocks: 0,
        waiting: None,
        running: None,
        kv_usage: None,
        missing: missing.to_vec(),
        id: PodId {
            slot,
            generation: 0,
        },
    }
}

fn missing(slot: u16, what: Prerequisite) -> Notice {
    Notice::Missing(format!("d{slot}").into(), what)
}

const EVENTS: Prerequisite = Prerequisite::KvEvents;

#[test]
fn a_silent_pod_is_warned_of_once_and_within_thirty_seconds_of_becoming_ready() {
    let (mut said, policy, start) = (Said::default(), isl(), Instant::now());
    let one = pod(1, Role::Decode, "live", &[]);
    let mut heard = Vec::new();
    for second in (0..60).step_by(2) {
        let now = start + Duration::from_secs(second);
        // d2 becomes ready after ten seconds, and its stream was lost.
        let mut two = pod(2, Role::Decode, "lost", &[EVENTS]);
        if second < 10 {
            two.availability = "not_ready";
        }
        for notice in said.look(&[one.clone(), two], &policy, now) {
            heard.push((second, notice));
        }
    }
    assert_eq!(heard.len(), 1, "{heard:?}");
    assert_eq!(heard[0].1, missing(2, EVENTS));
    assert!((10..=40).contains(&heard[0].0), "{heard:?}");
}

#[test]
fn what_is_not_configured_is_warned_of_at_once() {
    let (mut said, now) = (Said::default(), Instant::now());
    let unable = Prerequisite::LocalPrefill;
    let pods = [
        pod(1, Role::Decode, "live", &[unable]),
        pod(2, Role::Decode, "absent", &[EVENTS]),
    ];
    let heard = said.look(&pods, &isl(), now);
    assert_eq!(heard, [missing(1, unable), missing(2, EVENTS)]);
    assert_eq!(said.look(&pods, &isl(), now + GRACE * 9), []);
}

#[test]
fn a_pod_that_gets_it_and_loses_it_is_warned_of_again() {
    let (mut said, policy, start) = (Said::default(), isl(), Instant::now());
    let with = [pod(1, Role::Decode, "live", &[])];
    let without = [pod(1, Role::Decode, "lost", &[EVENTS])];
    assert_eq!(said.look(&without, &policy, start), []);
    let later = start + GRACE;
    assert_eq!(said.look(&without, &policy, later), [missing(1, EVENTS)]);
    let met = Notice::Met("d1".into(), EVENTS);
    assert_eq!(said.look(&with, &policy, later), [met]);
    assert_eq!(said.look(&without, &policy, later), [missing(1, EVENTS)]);
}

#[test]
fn a_policy_that_compares_net_new_tokens_without_any_kv_events_is_said_aloud() {
    let (mut said, now) = (Said::default(), Instant::now());
    let pods = [
        pod(1, Role::Decode, "absent", &[]),
        pod(2, Role::Decode, "absent", &[]),
        pod(3, Role::Prefill, "live", &[]),
    ];
    assert_eq!(said.look(&pods, &policy(Bypass::Always), now), []);
    assert_eq!(said.look(&pods, &isl(), now), [Notice::NoKvSource]);
    assert_eq!(said.look(&pods, &isl(), now), []);
    let next = Policy {
        generation: 2,
        ..isl()
    };
    assert_eq!(said.look(&pods, &next, now), [Notice::NoKvSource]);
}

#[test]
fn the_loss_of_all_prefill_pods_and_their_return_are_said_once_each() {
    let (mut said, policy, now) = (Said::default(), policy(Bypass::Never), Instant::now());
    let decode = pod(1, Role::Decode, "live", &[]);
    let mut prefill = pod(2, Role::Prefill, "live", &[]);
    let there = [decode.clone(), prefill.clone()];
    prefill.availability = "unreachable";
    let gone = [decode, prefill];
    assert_eq!(said.look(&there, &policy, now), []);
    assert_eq!(said.look(&gone, &policy, now), [Notice::NoPrefillPod]);
    assert_eq!(said.look(&gone, &policy, now), []);
    assert_eq!(said.look(&there, &policy, now), [Notice::PrefillPod]);
}

#[test]
fn a_policy_that_concerns_a_thousand_pods_is_told_of_in_one_line() {
    let (mut said, now) = (Said::default(), Instant::now());
    let without: Vec<_> = (0..1000)
        .map(|slot| pod(slot, Role::Decode, "absent", &[EVENTS]))
        .collect();
    let with: Vec<_> = (0..1000)
        .map(|slot| pod(slot, Role::Decode, "absent", &[]))
        .collect();
    let policy = policy(Bypass::Always);
    let mut said_of = |pods: &[PodStatus]| gathered(said.look(pods, &policy, now));
    let names: Vec<Arc<str>> = without.iter().map(|pod| Arc::clone(&pod.name)).collect();
    let missing = Notice::SeveralMissing(names.clone(), EVENTS);
    assert_eq!(said_of(&without), [missing]);
    assert_eq!(said_of(&with), [Notice::SeveralMet(names, EVENTS)]);
    let few = said_of(&without[..NAMED]);
    assert_eq!(few.len(), NAMED);
    assert!(matches!(few[0], Notice::Missing(..)));
}

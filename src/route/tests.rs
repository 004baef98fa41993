//! Plans for every route and dialect.
use super::*;
use crate::decide::reason::Because;
use crate::decide::snapshot::{
    Availability, Candidate, Capacity, EngineReport, KvSource, LocalPrefill, PodLoad, Role, Serves,
    TierBlocks,
};
use crate::decide::{Considered, Cost, Pick};
use crate::names::PodId;
use crate::units::{BlockSize, Tokens};
use names::{DECODE_PIN, PREFILL_PIN, TABLE};

const ID: DecisionId = DecisionId::from_raw(0xabc);
const DECODE: &str = "10.0.0.1:8000";
const PREFILL: &str = "[fd00::2]:8000";

fn pick(endpoint: &str, role: Role) -> Pick {
    Pick {
        candidate: Candidate {
            pod: PodId {
                slot: 0,
                generation: 0,
            },
            endpoint: Endpoint(endpoint.parse().unwrap()),
            role,
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
        },
        cached_tokens: Tokens::ZERO,
        net_new_tokens: Tokens(100),
        cost: Cost::default(),
    }
}

fn local(because: Because) -> Decision {
    Decision {
        route: Route::Local {
            decode: pick(DECODE, Role::Decode),
        },
        because,
        rule: 0,
        checks: Default::default(),
        prompt_tokens: Tokens(100),
        considered: Considered::default(),
    }
}

fn remote() -> Decision {
    Decision {
        route: Route::Remote {
            prefill: pick(PREFILL, Role::Prefill),
            decode: pick(DECODE, Role::Decode),
        },
        ..local(Because::NetNewAboveThreshold)
    }
}

fn removes(plan: &Plan, name: &str) -> bool {
    plan.header_edits()
        .any(|edit| matches!(edit, HeaderEdit::Remove(removed) if removed == name))
}

#[test]
fn decode_first_sends_a_remote_prefill_to_the_decode_pod_and_names_one_prefill_pod() {
    let plan = plan(Dialect::DecodeFirst, &remote(), ID);
    assert_eq!(plan.destination.to_string(), DECODE);
    assert_eq!(plan.value_of(DESTINATION).as_deref(), Some(DECODE));
    assert_eq!(plan.value_of(PREFILLER).as_deref(), Some(PREFILL));
    assert!(removes(&plan, DECODER));
    assert!(removes(&plan, BYPASS));
}

#[test]
fn prefill_first_sends_a_remote_prefill_to_the_prefill_pod_and_names_one_decode_pod() {
    let plan = plan(Dialect::PrefillFirst, &remote(), ID);
    assert_eq!(plan.destination.to_string(), PREFILL);
    assert_eq!(plan.value_of(DECODER).as_deref(), Some(DECODE));
    assert!(removes(&plan, PREFILLER));
}

#[test]
fn a_bypass_goes_to_the_decode_pod_says_why_and_removes_both_handoff_headers() {
    for dialect in [Dialect::DecodeFirst, Dialect::PrefillFirst] {
        let plan = plan(dialect, &local(Because::NetNewBelowThresholds), ID);
        assert_eq!(plan.destination.to_string(), DECODE);
        assert_eq!(
            plan.value_of(BYPASS).as_deref(),
            Some("net_new_below_thresholds")
        );
        assert!(removes(&plan, PREFILLER) && removes(&plan, DECODER));
    }
}

#[test]
fn a_local_route_that_is_no_bypass_carries_no_bypass_mark() {
    for because in Because::ALL.iter().filter(|because| !because.is_bypass()) {
        let plan = plan(Dialect::DecodeFirst, &local(*because), ID);
        assert!(removes(&plan, BYPASS), "{because}");
    }
}

#[test]
fn every_steering_header_is_set_or_removed_exactly_once_in_every_outcome() {
    let outcomes = Because::ALL.iter().map(|because| local(*because));
    for decision in outcomes.chain([remote()]) {
        for dialect in [Dialect::DecodeFirst, Dialect::PrefillFirst] {
            let plan = plan(dialect, &decision, ID);
            let mut named: Vec<_> = plan.header_edits().map(|edit| edit.name()).collect();
            named.sort_unstable();
            let mut expected = CLIENT_MAY_NOT_SEND.to_vec();
            expected.sort_unstable();
            assert_eq!(named, expected);
        }
    }
}

#[test]
fn pins_never_reach_the_pod_and_the_decision_id_always_does() {
    for decision in [remote(), local(Because::PolicyAlways)] {
        let plan = plan(Dialect::DecodeFirst, &decision, ID);
        assert!(removes(&plan, DECODE_PIN) && removes(&plan, PREFILL_PIN));
        assert_eq!(plan.value_of(DECISION), Some(ID.to_string()));
    }
}

#[test]
fn the_table_has_no_duplicates_and_its_header_names_are_lower_case() {
    let mut names: Vec<_> = TABLE.iter().map(|row| row.name).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), TABLE.len());
    for row in TABLE {
        assert!(row.meaning.ends_with('.'), "{}", row.name);
        assert!(!row.name.bytes().any(|byte| byte.is_ascii_uppercase()));
    }
}

//! Fixtures of the kernel's tests: pods, asks, policies.

use sidestep::blocks::{BlockChain, KeySpace};
use sidestep::decide::ask::{Affinity, Ask, AskKind, Counted, Subset};
use sidestep::decide::policy::{
    Bypass, ClientPins, DecodeGate, IslBound, Match, OnNoPrefill, Policy, PrefillBusy, Rule,
    Scoring, SessionAffinity, TierCredit,
};
use sidestep::decide::snapshot::{
    Availability, Candidate, Capacity, CapacitySource, EngineReport, KvSource, LocalPrefill,
    PodLoad, Role, Serves, Snapshot, TierBlocks,
};
use sidestep::names::{Endpoint, PodId};
use sidestep::units::{BlockSize, Blocks, Ratio, Tokens};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

/// Tokens per block in every test that does not say otherwise.
pub(crate) const BLOCK: u32 = 16;

pub(crate) fn size(tokens: u32) -> BlockSize {
    BlockSize::new(tokens).unwrap()
}

pub(crate) fn ratio(value: f64) -> Ratio {
    Ratio::new(value).unwrap()
}

pub(crate) fn id(slot: u16) -> PodId {
    PodId {
        slot,
        generation: 0,
    }
}

pub(crate) fn endpoint(slot: u16) -> Endpoint {
    let [high, low] = slot.to_be_bytes();
    Endpoint(SocketAddr::new(
        IpAddr::V4(Ipv4Addr::new(10, 0, high, low)),
        8000,
    ))
}

/// A ready, idle pod with an empty cache that does everything its role allows.
pub(crate) fn pod(slot: u16, role: Role) -> Candidate {
    Candidate {
        pod: id(slot),
        endpoint: endpoint(slot),
        role,
        availability: Availability::Ready,
        serves: Serves::Yes,
        local_prefill: LocalPrefill::Able,
        block_size: size(BLOCK),
        cached: TierBlocks::default(),
        kv_source: KvSource::Live,
        load: PodLoad::default(),
        prefill_capacity: Capacity::Reported(Tokens(8192)),
        kv_capacity: Capacity::Reported(Blocks(1000)),
        engine: EngineReport::None,
    }
}

pub(crate) fn decode(slot: u16) -> Candidate {
    pod(slot, Role::Decode)
}

pub(crate) fn prefill(slot: u16) -> Candidate {
    pod(slot, Role::Prefill)
}

/// `pod` with that many tokens of the prompt on its device; full blocks only.
pub(crate) fn holding(mut pod: Candidate, tokens: u64) -> Candidate {
    pod.cached.device = pod.block_size.full_blocks(Tokens(tokens));
    pod
}

pub(crate) fn snapshot(pods: impl IntoIterator<Item = Candidate>) -> Snapshot {
    pods.into_iter().collect()
}

pub(crate) fn ask(prompt: u64) -> Ask {
    Ask {
        kind: AskKind::Generate,
        model: None,
        policy_class: None,
        priority: 0,
        prompt_tokens: Tokens(prompt),
        counted: Counted::Exact,
        subset: Subset::Any,
        decode_pin: None,
        prefill_pin: None,
        affinity: Affinity::None,
        prefill_affinity: None,
        draw: 0,
    }
}

pub(crate) fn bound(threshold: u64, share: f64) -> IslBound {
    IslBound {
        threshold: Tokens(threshold),
        ratio: ratio(share),
        cold_bypass_below: Tokens::ZERO,
        tier_credit: TierCredit::Full,
    }
}

pub(crate) fn busy(threshold: f64) -> PrefillBusy {
    PrefillBusy {
        threshold: ratio(threshold),
    }
}

pub(crate) fn gate(threshold: f64) -> DecodeGate {
    DecodeGate::On {
        threshold: ratio(threshold),
        trust: vec![CapacitySource::Reported, CapacitySource::Configured],
    }
}

pub(crate) fn rule(bypass: Bypass) -> Rule {
    Rule {
        matches: Match::default(),
        bypass,
        gate: DecodeGate::Off,
        on_no_prefill: OnNoPrefill::Local,
    }
}

pub(crate) fn policy(rules: impl IntoIterator<Item = Rule>) -> Policy {
    Policy {
        name: Arc::from("test"),
        generation: 1,
        rules: rules.into_iter().collect(),
        scoring: Scoring::default(),
        session_affinity: SessionAffinity::Off,
        client_pins: ClientPins::Ignore,
    }
}

/// The peer's default: 2,048 tokens and 0.7 of the prompt.
pub(crate) fn isl() -> Policy {
    policy([rule(Bypass::IslBounding(bound(2048, 0.7)))])
}

pub(crate) fn gated(mut policy: Policy, gate: DecodeGate) -> Policy {
    for rule in &mut policy.rules {
        rule.gate = gate.clone();
    }
    policy
}

/// The keys of a prompt of `tokens` tokens that all have the value `seed`.
pub(crate) fn chain(tokens: usize, seed: u32) -> BlockChain {
    chain_of(&vec![seed; tokens])
}

pub(crate) fn chain_of(tokens: &[u32]) -> BlockChain {
    let space = KeySpace {
        block_size: size(BLOCK),
        adapter: None,
        tenant: None,
    };
    BlockChain::new(&space, tokens)
}

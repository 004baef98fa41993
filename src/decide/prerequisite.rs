//! What a policy needs of a pod before it can have any effect there.
//!
//! Lives here: the list of such needs, and which of them a pod does not meet.
//! Never here: how long a pod may take to meet them, who is told (see `app`).
//! Invariant: a pod that meets all of them can be judged by every comparison of the policy; one that
//! does not still serves.

use crate::decide::policy::{Bypass, DecodeGate, Policy};
use crate::decide::reason::words;
use crate::decide::snapshot::{Candidate, KvSource, LocalPrefill};
use smallvec::SmallVec;

words! {
    /// What a policy needs of a pod.
    Prerequisite {
        /// KV events: a rule compares net-new tokens, and nothing is known of the decode pod's cache.
        KvEvents => "kv_events",
        /// Prefix caching: a rule compares net-new tokens, and the engine says that it keeps no prefixes.
        PrefixCaching => "prefix_caching",
        /// Local prefill: a rule has a bypass, and the decode pod's engine refuses to prefill.
        LocalPrefill => "local_prefill",
        /// KV capacity: a rule has a decode gate, and no capacity it trusts is known of the decode pod.
        KvCapacity => "kv_capacity",
        /// Prefill capacity: a rule compares prefill load, and the prefill pod's capacity is unknown.
        PrefillCapacity => "prefill_capacity",
    }
}

impl serde::Serialize for Prerequisite {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

/// Whether an engine keeps the KV blocks of finished requests for later ones that begin alike.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PrefixCaching {
    /// It did not say.
    #[default]
    Unknown,
    /// It does.
    On,
    /// It does not.
    Off,
}

/// What `policy` needs of `pod` and does not get, in order.
#[must_use]
pub fn missing(
    pod: &Candidate,
    caching: PrefixCaching,
    policy: &Policy,
) -> SmallVec<[Prerequisite; 5]> {
    let needs = Needs::of(policy);
    let decodes = pod.role.decodes();
    let no_capacity = match pod.kv_capacity.known() {
        Some((blocks, source)) => blocks.0 == 0 || !needs.gates_trust(policy, source),
        None => true,
    };
    let no_batch = pod
        .prefill_capacity
        .known()
        .is_none_or(|(tokens, _)| tokens.0 == 0);
    [
        (
            Prerequisite::KvEvents,
            needs.overlap && decodes && matches!(pod.kv_source, KvSource::Absent | KvSource::Lost),
        ),
        (
            Prerequisite::PrefixCaching,
            needs.overlap && decodes && caching == PrefixCaching::Off,
        ),
        (
            Prerequisite::LocalPrefill,
            needs.bypass && decodes && pod.local_prefill == LocalPrefill::Unable,
        ),
        (
            Prerequisite::KvCapacity,
            needs.gate && decodes && no_capacity,
        ),
        (
            Prerequisite::PrefillCapacity,
            needs.load && pod.role.prefills() && no_batch,
        ),
    ]
    .into_iter()
    .filter_map(|(what, lacks)| lacks.then_some(what))
    .collect()
}

/// What the rules of a policy look at, all together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Needs {
    /// Some rule compares net-new tokens.
    pub overlap: bool,
    /// Some rule has a bypass.
    pub bypass: bool,
    /// Some rule compares prefill load.
    pub load: bool,
    /// Some rule has a decode gate.
    pub gate: bool,
}

impl Needs {
    /// What `policy` looks at.
    #[must_use]
    pub fn of(policy: &Policy) -> Needs {
        let any = |test: fn(&Bypass) -> bool| policy.rules.iter().any(|rule| test(&rule.bypass));
        Needs {
            overlap: any(|bypass| bypass.isl_bound().is_some()),
            bypass: any(|bypass| *bypass != Bypass::Never),
            load: any(|bypass| matches!(bypass, Bypass::PrefillLoad(_) | Bypass::IslOrLoad(..))),
            gate: policy.rules.iter().any(|rule| {
                rule.bypass != Bypass::Never && matches!(rule.gate, DecodeGate::On { .. })
            }),
        }
    }

    fn gates_trust(self, policy: &Policy, source: super::snapshot::CapacitySource) -> bool {
        policy.rules.iter().all(|rule| match &rule.gate {
            DecodeGate::On { trust, .. } if rule.bypass != Bypass::Never => trust.contains(&source),
            _ => true,
        })
    }
}

//! Why a decision came out as it did: one word per cause, the same in spans, metrics, output and tests.
//!
//! Lives here: [`Because`], [`NoRoute`], [`Check`].
//! Never here: sentences for people (see `telemetry`), thresholds.
//! Invariant: every branch of the kernel that leads to another outcome has its own word.

use crate::decide::ask::Pin;
use crate::names::Endpoint;
use std::net::IpAddr;

macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($(#[doc = $vdoc:literal])+ $variant:ident => $word:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $name {
            $($(#[doc = $vdoc])+ $variant,)+
        }

        impl $name {
            /// Every value, in order.
            pub const ALL: &'static [$name] = &[$($name::$variant,)+];

            /// The word used in spans, metrics, output and tests.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self {
                    $($name::$variant => $word,)+
                }
            }

            /// What it means, in a sentence; the documentation's tables are made of these.
            #[must_use]
            pub fn meaning(self) -> &'static str {
                match self {
                    $($name::$variant => concat!($($vdoc),+).trim_ascii(),)+
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }
    };
}
pub(super) use words;

words! {
    /// Why a request went local or remote.
    Because {
        /// Local, bypass: few net-new tokens, absolutely and as a share.
        NetNewBelowThresholds => "net_new_below_thresholds",
        /// Local, bypass: the prompt is shorter than `coldBypassBelow`.
        ColdPromptShort => "cold_prompt_short",
        /// Local, bypass: the prefill pod is busy.
        PrefillBusy => "prefill_busy",
        /// Local, bypass: the policy always bypasses.
        PolicyAlways => "policy_always",

        /// Local: no prefill pod could be had.
        NoPrefillPod => "no_prefill_pod",
        /// Local: the same pod would prefill and decode.
        SamePod => "same_pod",
        /// Local: the request has several prompts or answers, and a handoff carries one.
        SeveralSequences => "several_sequences",
        /// Local: the request is not a generation.
        NotGeneration => "not_generation",

        /// Remote: the policy never bypasses.
        PolicyNever => "policy_never",
        /// Remote: too many net-new tokens.
        NetNewAboveThreshold => "net_new_above_threshold",
        /// Remote: net-new tokens are too large a share of the prompt.
        NetNewShareAboveThreshold => "net_new_share_above_threshold",
        /// Remote: the decode pod has no KV events, so nothing is known of its cache.
        NoKvSource => "no_kv_source",
        /// Remote: the policy looks at prefill load alone, and the prefill pod is not busy.
        PrefillNotBusy => "prefill_not_busy",
        /// Remote: the policy looks at prefill load alone, and the prefill pod's capacity is unknown.
        PrefillCapacityUnknown => "prefill_capacity_unknown",
        /// Remote: the rule allowed the bypass, the decode pod is busy.
        DecodeBusy => "decode_busy",
        /// Remote: the rule allowed the bypass, the decode pod's capacity is unknown.
        DecodeCapacityUnknown => "decode_capacity_unknown",
        /// Remote: the rule allowed the bypass, the decode pod's capacity has a source the gate does not trust.
        DecodeCapacityUntrusted => "decode_capacity_untrusted",
        /// Remote: no decode pod can prefill what it decodes.
        EngineCannotPrefillLocally => "engine_cannot_prefill_locally",
        /// Remote: the client named its prefill pod.
        PrefillPinned => "prefill_pinned",
        /// Remote: the prompt is empty, so there is nothing to judge.
        EmptyPrompt => "empty_prompt",
    }
}

impl Because {
    /// `local` or `remote`: every reason belongs to one route.
    #[must_use]
    pub fn route(self) -> &'static str {
        match self {
            Because::NoPrefillPod
            | Because::SamePod
            | Because::SeveralSequences
            | Because::NotGeneration => "local",
            bypass if bypass.is_bypass() => "local",
            _ => "remote",
        }
    }

    /// Whether this is a bypass: local by policy although a prefill pod was available.
    #[must_use]
    pub fn is_bypass(self) -> bool {
        matches!(
            self,
            Because::NetNewBelowThresholds
                | Because::ColdPromptShort
                | Because::PrefillBusy
                | Because::PolicyAlways
        )
    }
}

/// Why no pod could be chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoRoute {
    /// No pod serves the model.
    #[error("no pod serves this model")]
    UnknownModel,
    /// The data plane's subset holds no eligible pod.
    #[error("no ready decode pod in the subset that the gateway allows")]
    NoPodInSubset,
    /// No decode pod is ready.
    #[error("no ready decode pod")]
    NoDecodePod,
    /// No prefill pod is ready, and the policy says `onNoPrefill: Fail`.
    #[error("no ready prefill pod, and the policy does not allow local prefill instead")]
    NoPrefillPod,
    /// No decode pod can prefill, and there is no prefill pod or it must not be used.
    #[error("no ready decode pod that can prefill, and no prefill pod for this request")]
    NoPodCanPrefill,
    /// The pod that the request insists on cannot be used.
    #[error("the pinned pod {0} is not eligible")]
    PinnedPodUnavailable(Endpoint),
    /// There is no such pod.
    #[error("the pinned pod {0} is not among the pods")]
    PinnedPodUnknown(Pin),
    /// Several pods are meant.
    #[error("several endpoints at the pinned address {0}; name one with its port")]
    PinNeedsPort(IpAddr),
}

impl NoRoute {
    /// The word used in spans, metrics and error bodies.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            NoRoute::UnknownModel => "unknown_model",
            NoRoute::NoPodInSubset => "no_pod_in_subset",
            NoRoute::NoDecodePod => "no_decode_pod",
            NoRoute::NoPrefillPod => "no_prefill_pod",
            NoRoute::NoPodCanPrefill => "no_pod_can_prefill",
            NoRoute::PinnedPodUnavailable(_) => "pinned_pod_unavailable",
            NoRoute::PinnedPodUnknown(_) => "pinned_pod_unknown",
            NoRoute::PinNeedsPort(_) => "pin_needs_port",
        }
    }

    /// Every word, in order.
    pub const WORDS: &'static [&'static str] = &[
        "unknown_model",
        "no_pod_in_subset",
        "no_decode_pod",
        "no_prefill_pod",
        "no_pod_can_prefill",
        "pinned_pod_unavailable",
        "pinned_pod_unknown",
        "pin_needs_port",
    ];
}

/// One comparison the kernel made, with its numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Check {
    /// What was compared.
    pub what: Checked,
    /// The measured side.
    pub value: f64,
    /// The policy's side.
    pub threshold: f64,
    /// Whether the comparison speaks for a bypass.
    pub allows_bypass: bool,
}

impl Checked {
    /// The policy's key for the threshold.
    #[must_use]
    pub fn setting(self) -> &'static str {
        match self {
            Checked::NetNewTokens => "effectiveIslThreshold",
            Checked::NetNewShare => "effectiveIslRatioThreshold",
            Checked::PromptTokens => "coldBypassBelow",
            Checked::PrefillBusy => "prefillBusyThreshold",
            Checked::DecodeBusy => "decodeBusyThreshold",
        }
    }
}

words! {
    /// What a [`Check`] compared.
    Checked {
        /// Net-new tokens `<` `effectiveIslThreshold`.
        NetNewTokens => "net_new",
        /// Net-new tokens / prompt tokens `<` `effectiveIslRatioThreshold`.
        NetNewShare => "ratio",
        /// Prompt tokens `<` `coldBypassBelow`.
        PromptTokens => "prompt",
        /// Queued prefill tokens / capacity of the prefill pod `>` `prefillBusyThreshold`.
        PrefillBusy => "prefill_busy",
        /// KV blocks in use / capacity of the decode pod `<=` `decodeBusyThreshold`.
        DecodeBusy => "decode_busy",
    }
}

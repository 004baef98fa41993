//! Every header and metadata name this program reads, writes or removes, a sentence each.
//!
//! Lives here: the one table ([`TABLE`]), and what follows from it ([`CLIENT_MAY_NOT_SEND`]).
//! Never here: which of them a decision uses (see the dialects in this module's parent).
//! Invariant: a name that steers routing anywhere on the way to an engine is in
//! [`CLIENT_MAY_NOT_SEND`], so that what a client wrote under it never reaches a pod.

/// The chosen pod, `ip:port`; a request header, and a key of dynamic metadata in [`METADATA_NAMESPACE`].
pub const DESTINATION: &str = "x-gateway-destination-endpoint";
/// The pod that the gateway reached, `ip:port`; metadata on the way back.
pub const SERVED: &str = "x-gateway-destination-endpoint-served";
/// The pods that the gateway allows; metadata in [`SUBSET_NAMESPACE`].
pub const SUBSET: &str = "x-gateway-destination-endpoint-subset";
/// Default namespace of the destination metadata.
pub const METADATA_NAMESPACE: &str = "envoy.lb";
/// Default namespace of the subset hint.
pub const SUBSET_NAMESPACE: &str = "envoy.lb.subset_hint";
/// The pod that prefills, for the sidecar of the decode pod.
pub const PREFILLER: &str = "x-prefiller-host-port";
/// The pod that decodes, for a prefill pod that hands the request on.
pub const DECODER: &str = "x-decoder-host-port";
/// The id under which a decision is found again.
pub const DECISION: &str = "x-sidestep-decision";
/// Why remote prefill was skipped.
pub const BYPASS: &str = "x-sidestep-bypass";
/// The decode pod that the client insists on.
pub const DECODE_PIN: &str = "x-sidestep-decode-pod";
/// The prefill pod that the client insists on.
pub const PREFILL_PIN: &str = "x-sidestep-prefill-pod";
/// The policy class that a rule may match.
pub const POLICY_CLASS: &str = "x-sidestep-policy-class";
/// The priority that a rule may match.
pub const PRIORITY: &str = "x-sidestep-priority";

/// One name of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// The name: a header, or `namespace / key` for metadata.
    pub name: &'static str,
    /// Who tells whom.
    pub direction: Direction,
    /// What it says.
    pub meaning: &'static str,
}

/// Who tells whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// The gateway tells the picker.
    GatewayToPicker,
    /// The picker tells the gateway.
    PickerToGateway,
    /// The picker tells the pod.
    PickerToPod,
    /// The picker tells the pod and the client.
    PickerToPodAndClient,
    /// The client tells the picker; the pod never sees it.
    ClientToPicker,
    /// The client tells the picker, and the pod sees it too.
    ClientToPickerAndPod,
    /// Nobody may say it: removed when a client does.
    Removed,
}

impl Direction {
    /// As written in the documentation.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Direction::GatewayToPicker => "gateway → picker",
            Direction::PickerToGateway => "picker → gateway",
            Direction::PickerToPod => "picker → pod",
            Direction::PickerToPodAndClient => "picker → pod, client",
            Direction::ClientToPicker => "client → picker",
            Direction::ClientToPickerAndPod => "client → picker, pod",
            Direction::Removed => "removed",
        }
    }
}

macro_rules! table {
    (
        metadata { $($mname:literal $mdirection:ident $mmeaning:literal,)+ }
        read { $($rname:literal $rdirection:ident $rmeaning:literal,)+ }
        headers { $($name:expr, $direction:ident $meaning:literal,)+ }
    ) => {
        /// Every name: metadata, headers that are only read, headers that are set or removed. The
        /// README shows this table.
        pub const TABLE: &[Row] = &[
            $(Row { name: $mname, direction: Direction::$mdirection, meaning: $mmeaning },)+
            $(Row { name: $rname, direction: Direction::$rdirection, meaning: $rmeaning },)+
            $(Row { name: $name, direction: Direction::$direction, meaning: $meaning },)+
        ];

        /// Request headers that are taken off every request unless the picker sets them itself.
        ///
        /// A header of this list is in each plan exactly once, set or removed: the order in which
        /// a gateway applies a removal and a setting of the same name is not defined.
        pub const CLIENT_MAY_NOT_SEND: &[&str] = &[$($name,)+];
    };
}

table! {
    metadata {
        "envoy.lb / x-gateway-destination-endpoint" PickerToGateway "The chosen pod, `ip:port`; always the same value as the header of this name.",
        "envoy.lb / x-gateway-destination-endpoint-served" GatewayToPicker "The pod that the gateway reached; when it is another than the chosen one, the booked load moves there.",
        "envoy.lb.subset_hint / x-gateway-destination-endpoint-subset" GatewayToPicker "The only pods that may be chosen: `ip` or `ip:port`, a list or separated by commas; present but empty allows none. A pod that only prefills must be among them with `prefillFirst` alone.",
    }
    read {
        "x-session-id" ClientToPickerAndPod "The conversation, for session affinity; a policy may name another header.",
        "traceparent" ClientToPickerAndPod "The trace that a decision's span joins; the gateway's own comes first, and only when the gateway does not trace is it written for the pod.",
        "content-encoding" ClientToPickerAndPod "`gzip` and `deflate` are decoded for the decision; the pod gets the bytes as they came.",
    }
    headers {
        DESTINATION, PickerToGateway "The chosen pod, `ip:port`: the one the gateway sends the request to.",
        SERVED, Removed "Only metadata carries it.",
        SUBSET, Removed "Only metadata carries it.",
        PREFILLER, PickerToPod "Dialect `decodeFirst`, remote prefill: the pod that prefills, exactly one `ip:port`.",
        DECODER, PickerToPod "Dialect `prefillFirst`, remote prefill: the pod that decodes, exactly one `ip:port`.",
        DECISION, PickerToPodAndClient "The id of the decision, as in spans and on the decision page.",
        BYPASS, PickerToPod "On a bypass: the reason, one word.",
        DECODE_PIN, ClientToPicker "The decode pod that the client insists on, `ip:port`.",
        PREFILL_PIN, ClientToPicker "The prefill pod that the client insists on, `ip:port`.",
        POLICY_CLASS, ClientToPicker "The policy class that a rule may match.",
        PRIORITY, ClientToPicker "The priority that a rule may match, a whole number; beats the body's.",
        "x-prefiller-url", Removed "Former name of the prefill pod in decode sidecars, which call whatever it says.",
        "x-encoder-hosts-ports", Removed "Pods that encode images and audio, for decode sidecars.",
        "x-kv-cache-source-host-port", Removed "A pod to pull cached blocks from, for decode sidecars.",
        "x-data-parallel-host-port", Removed "The rank's own endpoint, for decode sidecars.",
        "x-data-parallel-rank", Removed "The data-parallel rank, for engines that share one port between ranks.",
        "x-dp-rank", Removed "Other name of the data-parallel rank.",
        "x-prefill-dp-rank", Removed "The data-parallel rank of the prefill pod.",
        "x-worker-instance-id", Removed "A worker chosen by id.",
        "x-prefill-instance-id", Removed "A prefill worker chosen by id.",
        "x-decode-instance-id", Removed "A decode worker chosen by id.",
        "x-dynamo-worker-instance-id", Removed "A Dynamo worker chosen by id.",
        "x-dynamo-prefill-instance-id", Removed "A Dynamo prefill worker chosen by id.",
        "x-dynamo-dp-rank", Removed "The data-parallel rank of a Dynamo worker.",
        "x-dynamo-prefill-dp-rank", Removed "The data-parallel rank of a Dynamo prefill worker.",
        "x-dynamo-routing-mode", Removed "Whether a Dynamo worker prefills what it decodes.",
        "x-gateway-inference-fairness-id", Removed "The flow that other pickers share capacity by.",
        "x-gateway-inference-objective", Removed "The objective that other pickers rank requests by.",
        "x-gateway-model-name-rewrite", Removed "The model that other pickers write into the body.",
        "x-llm-d-inference-fairness-id", Removed "Other name of `x-gateway-inference-fairness-id`.",
        "x-llm-d-inference-objective", Removed "Other name of `x-gateway-inference-objective`.",
        "x-llm-d-model-name-rewrite", Removed "Other name of `x-gateway-model-name-rewrite`.",
        "epp-profile", Removed "The scheduling profile that other pickers obey.",
        "test-epp-endpoint-selection", Removed "Pods that conformance tests ask other pickers for.",
    }
}

/// The table as the README shows it: name, direction, meaning.
pub fn rows() -> impl Iterator<Item = (&'static str, &'static str, &'static str)> {
    TABLE
        .iter()
        .map(|row| (row.name, row.direction.as_str(), row.meaning))
}

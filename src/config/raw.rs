//! The files as they are written: every section, every key, in the order of the documentation.
//!
//! Lives here: the mirror of each section. The comments are what a key means to an operator.
//! A key of a policy also names its rule, and what its absence means: from these the CRD and the docs are
//! made (see `crd`).
//! Never here: the rules themselves (see `rules`; of the other files, `parse`). Nothing outside `config`
//! sees these types.
//! Invariant: a key that is not in this file is refused.

use crate::config::keys::{Described, Kind, Section, key, must};
use crate::config::parse::values;
use crate::config::rules::{self, Must};
use crate::config::shape::{
    Flag, Leaf, Number, Size, Skipped, Spot, Text, TextMap, Whole, WordOr, mirror,
};

type List<T> = Vec<Spot<T>>;

mirror! {
    /// `kind: SidestepConfig`.
    struct Process {
        "apiVersion" => api_version: Text,
        "kind" => kind: Text,
        /// Where to listen.
        "listen" => listen: Listen,
        /// How the external-processing port is secured.
        "tls" => tls: Tls,
        /// Bounds on what is held at once.
        "limits" => limits: Limits,
        /// The models that clients may name.
        "models" => models: List<Model>,
        /// Where the pods are listed.
        "pods" => pods: PodSource,
        /// Where the policy is.
        "policy" => policy: PolicySource,
        /// Bounds of the KV index.
        "index" => index: Index,
        /// Where spans go.
        "telemetry" => telemetry: Telemetry,
        /// Who may look at decisions, and what the admin port answers beyond reading.
        "admin" => admin: Admin,
        /// Where the data plane puts what it tells the picker.
        "dataPlane" => data_plane: DataPlane,
    }

    /// Addresses, each `ip:port`.
    struct Listen {
        "extProc" => ext_proc: Text,
        "health" => health: Text,
        "admin" => admin: Text,
    }

    /// The admin port.
    struct Admin {
        /// A file with the token that clients must send; absent: only loopback is shown anything.
        "token" => token: FileRef,
        /// The address of a trace, with `{trace_id}` in it.
        "traceLink" => trace_link: Text,
        /// Enabled or Disabled: whether requests may be explained without being sent.
        "explain" => explain: Text,
    }

    /// TLS of the external-processing port.
    struct Tls {
        /// SelfSigned, Plaintext or Files.
        "mode" => mode: Text,
        "certFile" => cert_file: Text,
        "keyFile" => key_file: Text,
    }

    /// Bounds.
    struct Limits {
        /// The longest request body.
        "requestBytes" => request_bytes: Leaf<Size>,
        /// Most requests between their first message and their end.
        "inFlight" => in_flight: Whole,
        "bodyTimeout" => body_timeout: Text,
        "decisionTimeout" => decision_timeout: Text,
        "drainTimeout" => drain_timeout: Text,
    }

    /// One model.
    struct Model {
        "name" => name: Text,
        "aliases" => aliases: List<Text>,
        "adapters" => adapters: List<Text>,
        /// Absent: the number of tokens is estimated from the number of bytes.
        "tokenizer" => tokenizer: Tokenizer,
        /// Absent: what lies beside the tokenizer.
        "chatTemplate" => chat_template: FileRef,
        /// Tokens per KV block, expected until the first event.
        "blockSize" => block_size: Whole,
    }

    /// `{builtin: true}` or `{file: tokenizer.json}`.
    struct Tokenizer {
        "builtin" => builtin: Flag,
        "file" => file: Text,
    }

    /// A file, relative to the one that names it.
    struct FileRef {
        "file" => file: Text,
    }

    /// `{file: pods.yaml}`, `{inline: […]}` or `{kubernetes: {pool: …}}`.
    struct PodSource {
        "file" => file: Text,
        "inline" => inline: List<Pod>,
        "kubernetes" => kubernetes: PodObjects,
    }

    /// The pods of an InferencePool.
    struct PodObjects {
        /// Absent: the namespace that the program runs in.
        "namespace" => namespace: Text,
        /// The name of the InferencePool.
        "pool" => pool: Text,
        /// The label that holds a pod's role.
        "roleLabel" => role_label: Text,
        /// What its values mean: prefill, decode or both.
        "roles" => roles: TextMap,
        /// What a pod without that label is for: prefill, decode, both or none.
        "unlabelled" => unlabelled: Text,
        /// Absent: the engines publish none.
        "kvEvents" => kv_events: KvPorts,
        /// Absent: every model.
        "models" => models: List<Text>,
        "adapters" => adapters: List<Text>,
        /// What is known about the size of each pod.
        "capacity" => capacity: Capacity,
        /// able or unable.
        "localPrefill" => local_prefill: Text,
        /// `{path: /metrics}`, or off.
        "probe" => probe: WordOr<Probe>,
    }

    /// The ports on which the engines of a pod publish KV events.
    struct KvPorts {
        /// Of the first data-parallel rank; each further one uses the next.
        "port" => port: Whole,
        /// Where missed events can be asked for again.
        "replayPort" => replay_port: Whole,
        /// Absent: everything.
        "topic" => topic: Text,
    }

    /// `{file: policy.yaml}`, `{inline: <spec of a policy>}` or `{kubernetes: {}}`.
    struct PolicySource {
        "file" => file: Text,
        "inline" => inline: PolicySpec,
        "kubernetes" => kubernetes: PolicyObjects,
    }

    /// The DisaggregationPolicies that target an InferencePool.
    struct PolicyObjects {
        /// Absent: that of the pods.
        "namespace" => namespace: Text,
        /// Absent: that of the pods.
        "pool" => pool: Text,
        /// The spec of the policy in force while none is there; absent: every request is prefilled
        /// remotely.
        "default" => default: PolicySpec,
        /// The Lease through which replicas agree who writes the status of policies.
        "lease" => lease: Text,
    }

    /// Bounds of the KV index.
    struct Index {
        /// Most blocks over all pods.
        "maxBlocks" => max_blocks: Whole,
        /// Most blocks of one pod.
        "maxBlocksPerPod" => max_blocks_per_pod: Whole,
    }

    /// Where spans go.
    struct Telemetry {
        /// An OTLP receiver; absent: that of `OTEL_EXPORTER_OTLP_ENDPOINT`, or nowhere.
        "otlpEndpoint" => otlp_endpoint: Text,
        /// grpc or http/protobuf.
        "otlpProtocol" => otlp_protocol: Text,
        "serviceName" => service_name: Text,
        /// Share of requests without a sampled parent that are recorded.
        "sampleRatio" => sample_ratio: Number,
        /// Further resource attributes.
        "resource" => resource: TextMap,
    }

    /// Keys in Envoy's dynamic metadata.
    struct DataPlane {
        /// The endpoints allowed for a request.
        "subsetHint" => subset_hint: MetadataKey,
        /// The destination, as told to the data plane.
        "destination" => destination: MetadataKey,
        /// The endpoint that served, as told by the data plane.
        "served" => served: MetadataKey,
        /// Disabled or Enabled: whether conformance tests may choose endpoints. Not for production.
        "conformance" => conformance: Text,
    }

    /// One key in Envoy's dynamic metadata.
    struct MetadataKey {
        "namespace" => namespace: Text,
        "key" => key: Text,
    }
}

mirror! {
    /// A file of pods.
    struct Pods {
        "pods" => pods: List<Pod>,
    }

    /// One pod.
    struct Pod {
        "name" => name: Text,
        /// `ip:port`, IPv6 in brackets.
        "address" => address: Text,
        /// prefill, decode or both.
        "role" => role: Text,
        /// Absent: every model.
        "models" => models: List<Text>,
        "adapters" => adapters: List<Text>,
        /// Absent: it publishes none.
        "kvEvents" => kv_events: KvEvents,
        /// What is known about its size; the rest is asked or assumed.
        "capacity" => capacity: Capacity,
        /// able or unable.
        "localPrefill" => local_prefill: Text,
        /// `{path: /metrics}`, or off.
        "probe" => probe: WordOr<Probe>,
    }

    /// Where a pod publishes its KV events.
    struct KvEvents {
        /// `tcp://ip:port` or `ip:port`.
        "address" => address: Text,
        /// Where missed events can be asked for again.
        "replay" => replay: Text,
        /// Absent: everything.
        "topic" => topic: Text,
    }

    /// The size of a pod.
    struct Capacity {
        "kvBlocks" => kv_blocks: Whole,
        /// Prompt tokens in one prefill batch (`max_num_batched_tokens`).
        "prefillTokens" => prefill_tokens: Whole,
        /// Tokens per KV block.
        "blockSize" => block_size: Whole,
    }

    /// How a pod is asked for its numbers.
    struct Probe {
        "path" => path: Text,
        /// Answers missed in a row that make a pod unreachable.
        "failureThreshold" => failure_threshold: Whole,
    }
}

mirror! {
    /// When requests skip remote prefill, how pods are compared, and how engines are told.
    #[allow(dead_code)] // What is skipped is never read.
    struct Policy {
        "apiVersion" => api_version: Text [key()],
        "kind" => kind: Text [key()],
        "metadata" => metadata: ObjectMeta [key()],
        /// What the policy says.
        "spec" => spec: PolicySpec [key().required_as("a mapping with the rules of the policy")],
        "status" => status: Skipped [key()],
    }

    /// What an object of Kubernetes says of itself; all but the name is skipped.
    #[allow(dead_code)] // What is skipped is never read.
    struct ObjectMeta {
        "name" => name: Text [key()],
        "namespace" => namespace: Skipped [key()],
        "labels" => labels: Skipped [key()],
        "annotations" => annotations: Skipped [key()],
        "uid" => uid: Skipped [key()],
        "generation" => generation: Skipped [key()],
        "resourceVersion" => resource_version: Skipped [key()],
        "creationTimestamp" => creation_timestamp: Skipped [key()],
        "deletionTimestamp" => deletion_timestamp: Skipped [key()],
        "deletionGracePeriodSeconds" => deletion_grace_period_seconds: Skipped [key()],
        "finalizers" => finalizers: Skipped [key()],
        "ownerReferences" => owner_references: Skipped [key()],
        "managedFields" => managed_fields: Skipped [key()],
        "generateName" => generate_name: Skipped [key()],
        "selfLink" => self_link: Skipped [key()],
    }

    /// The policy proper.
    struct PolicySpec {
        /// What the policy applies to. In a file it has no effect: the process that reads the file obeys it.
        "targetRef" => target_ref: TargetRef [key()],
        /// The first rule that matches a request applies. A request that none matches is prefilled
        /// remotely whenever that can be had.
        "rules" => rules: List<Rule> [must(rules::RULES)],
        /// How pods are compared. The unit of a cost is one KV block.
        "scoring" => scoring: Scoring [key().written("{}")],
        /// How conversations stay on their pod.
        "sessionAffinity" => session_affinity: SessionAffinity [key().written(r#"{"mode": "None"}"#)],
        /// How the engines are told who prefills.
        "handoff" => handoff: Handoff [key().written(r#"{"dialect": "decodeFirst"}"#)],
        /// A candidate: a second policy, evaluated on the same requests and recorded, never obeyed.
        "shadow" => shadow: Shadow [key()],
        /// Whether requests may name the pods they want. Ignore removes such headers without effect;
        /// Honor takes an eligible pod and refuses the request when it is not eligible.
        "clientPins" => client_pins: Text [must(rules::CLIENT_PINS_WORD).written(r#""Ignore""#)],
    }

    /// What a policy applies to, in its own namespace.
    struct TargetRef {
        /// API group, such as inference.networking.k8s.io.
        "group" => group: Text [must(Must::Form(&values::API_GROUP)).written(r#""""#)],
        /// Kind, such as InferencePool.
        "kind" => kind: Text [must(Must::Form(&values::OBJECT_KIND)).required()],
        /// Name.
        "name" => name: Text [must(Must::Form(&values::OBJECT_NAME)).required()],
    }

    /// One rule.
    struct Rule {
        /// Whom the rule concerns: all keys must match, and an absent one does.
        "match" => matches: Match [key()],
        /// When remote prefill is skipped.
        "bypass" => bypass: Bypass [key().required_as("a mapping with the type of the bypass")],
        /// What happens when no prefill pod can be had: Local prefills on the decode pod, Fail refuses
        /// the request.
        "onNoPrefill" => on_no_prefill: Text [must(rules::ON_NO_PREFILL_WORD).written(r#""Local""#)],
    }

    /// Whom a rule concerns.
    struct Match {
        /// Names of models or adapters; a trailing * matches any ending.
        "models" => models: List<Text> [must(rules::MODEL_PATTERNS)],
        /// Policy classes, as requests name them.
        "policyClasses" => policy_classes: List<Text> [must(rules::CLASSES)],
        /// The lowest priority concerned.
        "minPriority" => min_priority: Whole [must(rules::PRIORITY)],
    }

    /// When remote prefill is skipped. All comparisons are strict.
    struct Bypass [rules::of_bypass] {
        /// Never, Always, IslBounding (few of the prompt's tokens are new to the decode pod),
        /// PrefillLoad (the prefill pod is busy) or IslOrLoad (either).
        "type" => kind: Text [must(rules::A_BYPASS_TYPE).required()],
        /// IslBounding, IslOrLoad: bypass when fewer net-new tokens than this, and
        /// effectiveIslRatioThreshold holds too.
        "effectiveIslThreshold" => isl_threshold: Whole [must(rules::TOKENS).assumed("2048")],
        /// IslBounding, IslOrLoad: bypass when net-new tokens are a smaller share of the prompt than
        /// this, and effectiveIslThreshold holds too.
        "effectiveIslRatioThreshold" => isl_ratio_threshold: Number [must(rules::SHARE).assumed("0.7")],
        /// IslBounding, IslOrLoad: a prompt shorter than this, in tokens, bypasses whatever is cached;
        /// 0 turns this off.
        "coldBypassBelow" => cold_bypass_below: Whole [must(rules::TOKENS).assumed("0")],
        /// IslBounding, IslOrLoad: how cached blocks in slower tiers count in net-new tokens. Full: like
        /// any other; Weighted: by scoring.hostTier and scoring.diskTier.
        "tierCredit" => tier_credit: Text [must(rules::A_TIER_CREDIT).assumed("Full")],
        /// PrefillLoad, IslOrLoad: a prefill pod is busy when more prompt tokens are queued on it than
        /// this many of its batches. These types need it.
        "prefillBusyThreshold" => prefill_busy_threshold: Number [must(rules::FACTOR)],
        /// The gate: no bypass to a decode pod of whose KV blocks a larger share than this would be in
        /// use. Absent: no gate.
        "decodeBusyThreshold" => decode_busy_threshold: Number [must(rules::FACTOR)],
        /// The gate believes a pod's capacity only when it comes from one of these: Reported by the
        /// engine, Configured for the pod, or Assumed.
        "trustCapacity" => trust_capacity: List<Text> [must(rules::TRUST).assumed("[Reported, Configured]")],
    }

    /// How pods are compared.
    struct Scoring {
        /// Credit for each cached block on the device; may exceed 1.
        "overlapCredit" => overlap_credit: Number [must(rules::FACTOR).written("1")],
        /// Credit for each cached block in host memory.
        "hostTier" => host_tier: Number [must(rules::SHARE).written("0.75")],
        /// Credit for each cached block on disk or further away.
        "diskTier" => disk_tier: Number [must(rules::SHARE).written("0.25")],
        /// Weight of prefill work.
        "prefillLoadScale" => prefill_load_scale: Number [must(rules::FACTOR).written("1")],
        /// Cost of each running request, in blocks.
        "activeRequestWeight" => active_request_weight: Number [must(rules::FACTOR).written("0")],
        /// 0 takes the cheapest pod; above, pods are drawn by softmax of their normalised cost.
        "temperature" => temperature: Number [must(rules::FACTOR).written("0")],
    }

    /// How conversations stay on their pod.
    struct SessionAffinity {
        /// None; Soft prefers the pod of the last turn while it is eligible; Hard takes no other until
        /// that pod is gone.
        "mode" => mode: Text [must(rules::AN_AFFINITY_MODE).required()],
        /// The request header that names the session.
        "header" => header: Text [must(Must::Form(&values::HEADER)).assumed("x-session-id")],
        /// Time since the last turn after which a session is forgotten, such as 30s or 1h30m.
        "ttl" => ttl: Text [must(Must::Form(&values::DURATION)).assumed("5m")],
    }

    /// How the engines are told who prefills.
    struct Handoff {
        /// decodeFirst sends the request to the decode pod, which is told its prefill pod; prefillFirst
        /// the other way round.
        "dialect" => dialect: Text [must(rules::A_DIALECT).required()],
    }

    /// A candidate: a name or a file.
    struct Shadow [rules::of_shadow] {
        /// The policy of this name, in the same namespace.
        "name" => name: Text [must(Must::Form(&values::OBJECT_NAME))],
        /// The policy in this file, relative to the one that names it. For policies in files.
        "file" => file: Text [must(Must::Form(&values::PATH))],
    }
}

/// The description of a policy, from which the CRD is made.
pub(crate) fn policy() -> Section {
    match Policy::kind() {
        Kind::Section(section) => section,
        // A mirror describes itself as a section.
        _ => Section {
            doc: "",
            keys: Vec::new(),
            rules: Vec::new(),
        },
    }
}

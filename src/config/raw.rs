//! The files as they are written: every section, every key, in the order of the documentation.
//!
//! Lives here: the mirror of each section. The comments are what a key means to an operator.
//! Never here: defaults and ranges (see `parse`). Nothing outside `config` sees these types.
//! Invariant: a key that is not in this file is refused.

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
        /// Where the data plane puts what it tells the picker.
        "dataPlane" => data_plane: DataPlane,
    }

    /// Addresses, each `ip:port`.
    struct Listen {
        "extProc" => ext_proc: Text,
        "health" => health: Text,
        "admin" => admin: Text,
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

    /// `{file: pods.yaml}` or `{inline: […]}`.
    struct PodSource {
        "file" => file: Text,
        "inline" => inline: List<Pod>,
    }

    /// `{file: policy.yaml}` or `{inline: <spec of a policy>}`.
    struct PolicySource {
        "file" => file: Text,
        "inline" => inline: PolicySpec,
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
    }
}

mirror! {
    /// `kind: DisaggregationPolicy`.
    #[allow(dead_code)] // What is skipped is never read.
    struct Policy {
        "apiVersion" => api_version: Text,
        "kind" => kind: Text,
        "metadata" => metadata: ObjectMeta,
        "spec" => spec: PolicySpec,
        "status" => status: Skipped,
    }

    /// What an object of Kubernetes says of itself; all but the name is skipped.
    #[allow(dead_code)] // What is skipped is never read.
    struct ObjectMeta {
        "name" => name: Text,
        "namespace" => namespace: Skipped,
        "labels" => labels: Skipped,
        "annotations" => annotations: Skipped,
        "uid" => uid: Skipped,
        "generation" => generation: Skipped,
        "resourceVersion" => resource_version: Skipped,
        "creationTimestamp" => creation_timestamp: Skipped,
        "deletionTimestamp" => deletion_timestamp: Skipped,
        "deletionGracePeriodSeconds" => deletion_grace_period_seconds: Skipped,
        "finalizers" => finalizers: Skipped,
        "ownerReferences" => owner_references: Skipped,
        "managedFields" => managed_fields: Skipped,
        "generateName" => generate_name: Skipped,
        "selfLink" => self_link: Skipped,
    }

    /// The policy proper.
    struct PolicySpec {
        /// What it applies to; has no effect in a file.
        "targetRef" => target_ref: TargetRef,
        /// The first rule that matches a request applies.
        "rules" => rules: List<Rule>,
        /// How pods are compared.
        "scoring" => scoring: Scoring,
        /// How conversations stay on their pod.
        "sessionAffinity" => session_affinity: SessionAffinity,
        /// How the engines are told who prefills.
        "handoff" => handoff: Handoff,
        /// A candidate, evaluated and recorded, never obeyed.
        "shadow" => shadow: Shadow,
        /// Ignore or Honor.
        "clientPins" => client_pins: Text,
    }

    /// What a policy applies to.
    struct TargetRef {
        "group" => group: Text,
        "kind" => kind: Text,
        "name" => name: Text,
    }

    /// One rule.
    struct Rule {
        /// Absent: everything.
        "match" => matches: Match,
        /// When remote prefill is skipped.
        "bypass" => bypass: Bypass,
        /// Local or Fail.
        "onNoPrefill" => on_no_prefill: Text,
    }

    /// Whom a rule concerns; all keys must match, an absent one does.
    struct Match {
        /// Names; a trailing `*` matches any ending.
        "models" => models: List<Text>,
        "policyClasses" => policy_classes: List<Text>,
        "minPriority" => min_priority: Whole,
    }

    /// When remote prefill is skipped.
    struct Bypass {
        /// Never, Always, IslBounding, PrefillLoad or IslOrLoad.
        "type" => kind: Text,
        /// Bypass when fewer net-new tokens than this …
        "effectiveIslThreshold" => isl_threshold: Whole,
        /// … that are also a smaller share of the prompt than this.
        "effectiveIslRatioThreshold" => isl_ratio_threshold: Number,
        /// A prompt shorter than this bypasses whatever its share; 0: off.
        "coldBypassBelow" => cold_bypass_below: Whole,
        /// Full or Weighted: how cached blocks in slower tiers count in net-new tokens.
        "tierCredit" => tier_credit: Text,
        /// A prefill pod is busy above this many batches.
        "prefillBusyThreshold" => prefill_busy_threshold: Number,
        /// A decode pod is busy above this share of its KV blocks; absent: no gate.
        "decodeBusyThreshold" => decode_busy_threshold: Number,
        /// Sources of a capacity that the gate believes.
        "trustCapacity" => trust_capacity: List<Text>,
    }

    /// How pods are compared.
    struct Scoring {
        "overlapCredit" => overlap_credit: Number,
        "hostTier" => host_tier: Number,
        "diskTier" => disk_tier: Number,
        "prefillLoadScale" => prefill_load_scale: Number,
        "activeRequestWeight" => active_request_weight: Number,
        "temperature" => temperature: Number,
    }

    /// How conversations stay on their pod.
    struct SessionAffinity {
        /// Off, Soft or Hard.
        "mode" => mode: Text,
        /// The request header that names the session.
        "header" => header: Text,
        /// Time since the last turn after which it is forgotten.
        "ttl" => ttl: Text,
    }

    /// How the engines are told who prefills.
    struct Handoff {
        /// decodeFirst or prefillFirst.
        "dialect" => dialect: Text,
    }

    /// The candidate: `{name: …}` or `{file: …}`.
    struct Shadow {
        "name" => name: Text,
        "file" => file: Text,
    }
}

//! What a process is told once, at its start.
//!
//! Lives here: the valid types of `kind: SidestepConfig`.
//! Never here: YAML, defaults (see `parse::process`), the policy itself (`decide::policy`).
//! Invariant: a value of these types needs no further check; file names are absolute or relative to
//! the working directory, no longer to the file that named them.

use crate::fleet::kubernetes::Discovery;
use crate::names::ModelName;
use crate::units::{BlockSize, Ratio};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// A whole process configuration, apart from the policy, pods and models (see
/// [`Loaded`](crate::config::Loaded)).
#[derive(Clone, Debug, PartialEq)]
pub struct Process {
    /// Where to listen.
    pub listen: Listen,
    /// Who may look at decisions, and where their traces are.
    pub admin: Admin,
    /// How the external-processing port is secured.
    pub tls: Tls,
    /// Bounds on what is held at once.
    pub limits: Limits,
    /// Where the pods are listed.
    pub pods: PodSource,
    /// Where the policy is.
    pub policy: PolicySource,
    /// Bounds of the KV index.
    pub index: IndexLimits,
    /// Where spans go.
    pub telemetry: Telemetry,
    /// Where the data plane puts what it tells the picker.
    pub data_plane: DataPlane,
}

/// Where to listen. The three differ, unless a port is 0 (any free one).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listen {
    /// Envoy's external-processing stream (gRPC).
    pub ext_proc: SocketAddr,
    /// gRPC health.
    pub health: SocketAddr,
    /// Metrics, explain and the decision page (HTTP).
    pub admin: SocketAddr,
}

/// Who may look at decisions, and where their traces are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Admin {
    /// Who may look.
    pub access: AdminAccess,
    /// Where a trace can be looked at: an `http` or `https` address with `{trace_id}` in it.
    pub trace_link: Option<Arc<str>>,
    /// Whether requests are explained.
    pub explain: Explain,
}

/// Who may look at pods, policy and decisions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum AdminAccess {
    /// Whoever connects over loopback.
    #[default]
    Loopback,
    /// Whoever sends the token in this file.
    TokenFile(PathBuf),
}

/// How the external-processing port is secured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tls {
    /// TLS with a certificate made at the start.
    SelfSigned,
    /// No TLS.
    Plaintext,
    /// TLS with a certificate from files, in PEM form.
    Files {
        /// The certificate chain.
        cert: PathBuf,
        /// Its private key.
        key: PathBuf,
    },
}

/// Bounds on what is held at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The longest request body, in bytes.
    pub request_bytes: u64,
    /// Most requests between their first message and their end.
    pub in_flight: u32,
    /// Longest wait for the rest of a body.
    pub body_timeout: Duration,
    /// Longest time from a whole body to a decision.
    pub decision_timeout: Duration,
    /// Longest wait for running streams on shutdown.
    pub drain_timeout: Duration,
}

/// Where the pods are listed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PodSource {
    /// In the process config; changes with a restart.
    Inline,
    /// In this file, which is watched.
    File(PathBuf),
    /// In a cluster, which is watched.
    Kubernetes(Box<Discovery>),
}

/// Where the policy is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PolicySource {
    /// In the process config; changes with a restart.
    Inline,
    /// In this file, which is watched.
    File(PathBuf),
    /// In a cluster, which is watched; the policy loaded with the config is in force while the cluster
    /// has none.
    Kubernetes(PolicyObjects),
}

/// Which policies of a cluster apply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyObjects {
    /// Their namespace; `None` is the program's own.
    pub namespace: Option<Arc<str>>,
    /// The InferencePool they target.
    pub pool: Arc<str>,
    /// The Lease through which replicas agree who writes their status.
    pub lease: Arc<str>,
}

/// Bounds of the KV index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexLimits {
    /// Most blocks known over all pods, each counted once per pod that holds it.
    pub max_blocks: u64,
    /// Most blocks known of one pod.
    pub max_blocks_per_pod: u64,
}

/// Whether requests are explained without being sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Explain {
    /// No. An explanation says which prompts the pods hold, which not everybody should learn.
    #[default]
    Disabled,
    /// Yes: on the admin port, and as gRPC on the health port.
    Enabled,
}

/// Where spans go. What is absent here is taken from the standard `OTEL_*` variables.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Telemetry {
    /// An OTLP receiver, an `http://` or `https://` address.
    pub endpoint: Option<Arc<str>>,
    /// How it is spoken to.
    pub protocol: Option<Protocol>,
    /// `service.name`.
    pub service_name: Option<Arc<str>>,
    /// Share of requests without a sampled parent that are recorded, 0..=1.
    pub sample_ratio: Option<Ratio>,
    /// Further resource attributes, in the order of the file.
    pub resource: Vec<(Arc<str>, Arc<str>)>,
}

/// How spans are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// OTLP over gRPC.
    Grpc,
    /// OTLP over HTTP, in protobuf.
    HttpProtobuf,
}

/// Where the data plane puts what it tells the picker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataPlane {
    /// The endpoints it allows for a request.
    pub subset_hint: MetadataKey,
    /// The destination, as told to it.
    pub destination: MetadataKey,
    /// The endpoint that served, as told by it.
    pub served: MetadataKey,
    /// Whether conformance tests may steer.
    pub conformance: Conformance,
}

/// Whether a request may choose its endpoint, and its answer names the one that served, as the
/// conformance tests of the Gateway API Inference Extension want it. Not for production.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Conformance {
    /// No.
    Disabled,
    /// Yes.
    Enabled,
}

/// One key in Envoy's dynamic metadata.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetadataKey {
    /// The filter's namespace.
    pub namespace: Arc<str>,
    /// The key in it.
    pub key: Arc<str>,
}

/// One model that clients may name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelConfig {
    /// As engines call it.
    pub name: ModelName,
    /// As clients may call it too.
    pub aliases: Vec<ModelName>,
    /// Its adapters (LoRA), which clients name in place of a model.
    pub adapters: Vec<ModelName>,
    /// How its prompts are counted.
    pub tokenizer: Tokenizer,
    /// Tokens per KV block, expected until the first event says otherwise.
    pub block_size: Option<BlockSize>,
}

/// How prompts of a model are counted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tokenizer {
    /// Estimated from the number of bytes.
    ByteEstimate,
    /// By the small tokenizer and template shipped with the program.
    Builtin,
    /// By the model's own tokenizer.
    File {
        /// `tokenizer.json`.
        tokenizer: PathBuf,
        /// How messages become text.
        template: Template,
    },
}

/// Where a chat template is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Template {
    /// In this file.
    File(PathBuf),
    /// In `tokenizer_config.json` (or `chat_template.jinja`) beside the tokenizer, if there.
    BesideTokenizer,
}

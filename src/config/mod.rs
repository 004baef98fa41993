//! Files in, valid types out.
//!
//! Lives here: reading and checking the process config, the policy and the list of pods, and watching
//! them. Stage one (`node`, `shape`, `raw`) mirrors the file; stage two (`parse`) makes valid types.
//! Never here: what a policy means (`decide`), what a pod is (`fleet`), opening tokenizers (`prompt`).
//! Invariant: the answer is valid and complete, or it is the list of *all* faults of the files, each
//! with its place.

pub mod conditions;
pub mod convert;
pub mod crd;
mod diagnostic;
mod keys;
mod lint;
mod load;
mod node;
mod parse;
mod process;
mod raw;
mod rules;
mod shape;
pub mod watch;

pub use diagnostic::{Diagnostics, Finding, Position};
pub use lint::across;
pub use load::{
    Content, MAX_FILE_BYTES, check, load, load_pods, load_policy, parse_pods, parse_policy,
};
pub use process::{
    Admin, AdminAccess, Conformance, DataPlane, Explain, IndexLimits, Limits, Listen, MetadataKey,
    ModelConfig, PodSource, PolicyObjects, PolicySource, Process, Protocol, Telemetry, Template,
    Tls, Tokenizer,
};

use crate::decide::policy::Policy;
use crate::fleet::PodSpec;
use std::path::PathBuf;
use std::sync::Arc;

/// Everything a process starts from.
#[derive(Clone, Debug, PartialEq)]
pub struct Loaded {
    /// What it is told once.
    pub process: Process,
    /// The policy in force first.
    pub policy: Policy,
    /// How the engines are told who prefills.
    pub handoff: Handoff,
    /// The candidate that is to be tried beside the policy.
    pub shadow: Shadow,
    /// The pods known first.
    pub pods: Vec<PodSpec>,
    /// The models that clients may name.
    pub models: Vec<ModelConfig>,
    /// What is allowed and probably not meant, over all files.
    pub warnings: Vec<Finding>,
    /// The content of the policy file, for a watcher to start at.
    pub policy_content: Content,
    /// The content of the pods file, for a watcher to start at.
    pub pods_content: Content,
}

/// A policy with what belongs to it outside the kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct LoadedPolicy {
    /// What the kernel needs. Its generation is 1; whoever puts it in force counts on.
    pub policy: Policy,
    /// How the engines are told who prefills.
    pub handoff: Handoff,
    /// The candidate that is to be tried beside it.
    pub shadow: Shadow,
    /// What it applies to; has no effect when the policy comes from a file.
    pub target: Option<TargetRef>,
    /// What is allowed and probably not meant.
    pub warnings: Vec<Finding>,
    /// The content it was read from, for a watcher to start at.
    pub content: Content,
}

/// A list of pods.
#[derive(Clone, Debug, PartialEq)]
pub struct LoadedPods {
    /// The pods, in the order of the file.
    pub pods: Vec<PodSpec>,
    /// What is allowed and probably not meant.
    pub warnings: Vec<Finding>,
    /// The content it was read from, for a watcher to start at.
    pub content: Content,
}

/// How the engines are told who prefills and who decodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handoff {
    /// The request goes to the decode pod, which is told its prefill pod.
    DecodeFirst,
    /// The request goes to the prefill pod, which is told its decode pod.
    PrefillFirst,
}

/// A second policy, evaluated and recorded, never obeyed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Shadow {
    /// None.
    Off,
    /// The policy of this name.
    Named(Arc<str>),
    /// The policy in this file.
    File(PathBuf),
}

/// The Kubernetes object a policy applies to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetRef {
    /// API group.
    pub group: Arc<str>,
    /// Kind.
    pub kind: Arc<str>,
    /// Name, in the policy's own namespace.
    pub name: Arc<str>,
}

//! Objects of a cluster, as far as they are read.
//!
//! Lives here: the few fields of each kind that matter; everything else of an object is dropped while
//! it is read, so a watch holds no more than this.
//! Never here: what they mean (see `endpoints`).
//! Invariant: a field that a server may leave out has a default; an object is never refused for what it
//! has too much.
//!
//! Sources: <https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/>,
//! <https://gateway-api-inference-extension.sigs.k8s.io/reference/spec/> (InferencePool v1).

use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Our own annotations and labels begin with this; no other annotation is kept.
pub const ANNOTATIONS: &str = "sidestep.dev/";

/// What every object says of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Meta {
    /// Its name, unique in its namespace at any one time.
    pub name: Arc<str>,
    /// Tells it from others of the same name.
    pub uid: Arc<str>,
    /// The version of the whole cluster's state that it is from.
    pub resource_version: String,
    /// Counts the changes of its spec.
    pub generation: u64,
    /// When it was made, in RFC 3339.
    pub creation_timestamp: Option<Arc<str>>,
    /// Its labels.
    pub labels: BTreeMap<Arc<str>, Arc<str>>,
    /// Its annotations that begin with [`ANNOTATIONS`].
    #[serde(deserialize_with = "ours")]
    pub annotations: BTreeMap<Arc<str>, Arc<str>>,
    /// When it was asked to go, if it was.
    pub deletion_timestamp: Option<Arc<str>>,
}

fn ours<'de, D: serde::Deserializer<'de>>(
    reader: D,
) -> Result<BTreeMap<Arc<str>, Arc<str>>, D::Error> {
    let mut all = Option::<BTreeMap<Arc<str>, Arc<str>>>::deserialize(reader)?.unwrap_or_default();
    all.retain(|key, _| key.starts_with(ANNOTATIONS));
    Ok(all)
}

/// A pod of the cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct PodObject {
    /// What it says of itself.
    pub metadata: Meta,
    /// What is seen of it.
    pub status: PodState,
}

/// What is seen of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct PodState {
    /// `Pending`, `Running`, `Succeeded`, `Failed` or `Unknown`.
    pub phase: String,
    /// Its address; none before it has one, and none after an eviction.
    #[serde(rename = "podIP")]
    pub pod_ip: Option<String>,
    /// Among others, `Ready`.
    pub conditions: Vec<PodCondition>,
}

/// One condition of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct PodCondition {
    /// What it is about.
    #[serde(rename = "type")]
    pub kind: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
}

/// An InferencePool, `inference.networking.k8s.io/v1`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct PoolObject {
    /// What it says of itself.
    pub metadata: Meta,
    /// Which pods it is made of.
    pub spec: PoolSpec,
}

/// Which pods a pool is made of.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PoolSpec {
    /// The labels that its pods have.
    pub selector: Selector,
    /// The ports its engines listen on: one endpoint each.
    pub target_ports: Vec<TargetPort>,
}

/// Labels that pods must have.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Selector {
    /// All of these.
    pub match_labels: BTreeMap<Arc<str>, Arc<str>>,
}

/// One port of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct TargetPort {
    /// Its number.
    pub number: u32,
}

/// A DisaggregationPolicy, as it was sent: what it says is for others to read.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PolicyObject {
    /// What it says of itself.
    pub metadata: Meta,
    /// Its spec as a document of its own, in JSON.
    pub document: Arc<str>,
    /// Its `spec.targetRef.name`; `None` when it names no target.
    pub target: Option<Arc<str>>,
    /// Its status.
    pub status: Value,
}

impl<'de> Deserialize<'de> for PolicyObject {
    fn deserialize<D: serde::Deserializer<'de>>(reader: D) -> Result<Self, D::Error> {
        let mut object = Value::deserialize(reader)?;
        let metadata = Meta::deserialize(&object["metadata"]).map_err(serde::de::Error::custom)?;
        let target = object["spec"]["targetRef"]["name"].as_str().map(Arc::from);
        let status = object["status"].take();
        let mut document = serde_json::json!({
            "apiVersion": object["apiVersion"],
            "kind": object["kind"],
            "metadata": {"name": &*metadata.name},
        });
        // Items of a list do not say what they are.
        for (key, value) in [
            ("apiVersion", "sidestep.dev/v1alpha1"),
            ("kind", "DisaggregationPolicy"),
        ] {
            if document[key].is_null() {
                document[key] = Value::from(value);
            }
        }
        if !object["spec"].is_null() {
            document["spec"] = object["spec"].take();
        }
        Ok(PolicyObject {
            metadata,
            document: Arc::from(document.to_string()),
            target,
            status,
        })
    }
}

/// A Lease, as far as it is used.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct LeaseSpec {
    pub(super) holder_identity: Option<String>,
    pub(super) lease_duration_seconds: Option<u32>,
    pub(super) acquire_time: Option<String>,
    pub(super) renew_time: Option<String>,
    pub(super) lease_transitions: Option<u32>,
}

/// A Lease.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct LeaseObject {
    /// Kept as it was sent, to be sent back.
    pub(super) metadata: Value,
    pub(super) spec: LeaseSpec,
}

/// An object that can be followed.
pub trait Object: serde::de::DeserializeOwned + Clone + Send + Sync + 'static {
    /// What it says of itself.
    fn meta(&self) -> &Meta;
}

impl Object for PodObject {
    fn meta(&self) -> &Meta {
        &self.metadata
    }
}

impl Object for PolicyObject {
    fn meta(&self) -> &Meta {
        &self.metadata
    }
}

impl Object for PoolObject {
    fn meta(&self) -> &Meta {
        &self.metadata
    }
}

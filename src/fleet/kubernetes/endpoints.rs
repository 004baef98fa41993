//! From a pool and the pods of a cluster to endpoints. Pure.
//!
//! Lives here: [`endpoints`], and what an operator says about all pods of a pool ([`Discovery`]).
//! Never here: I/O; what is known of the cluster at a moment (see `picture`).
//! Invariant: the same pool and pods give the same list, whatever order they came in; nothing in an
//! object can make it fail.
//!
//! One pod gives one endpoint for each target port of its pool: engines with data parallelism listen on
//! one port per rank, in the order of the pool's list. A rank's KV events come from a port as many
//! above the first rank's.

use crate::decide::snapshot::{LocalPrefill, Role};
use crate::fleet::kubernetes::objects::{PodObject, PoolSpec};
use crate::fleet::pod::{KvEventsSpec, Listed, PodSpec, Probe};
use crate::names::{Endpoint, ModelName};
use crate::units::{BlockSize, Blocks, Tokens};
use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

/// The most target ports of a pool, as the InferencePool's definition has it.
pub const MOST_PORTS: usize = 8;

/// Which pods are looked for, and what is known about all of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Discovery {
    /// The namespace of pool and pods; `None` is the program's own.
    pub namespace: Option<Arc<str>>,
    /// The InferencePool that says which pods.
    pub pool: Arc<str>,
    /// How a pod's role is read.
    pub roles: RoleLabels,
    /// What holds for every pod whose annotations say nothing else.
    pub template: Template,
}

/// How a pod's role is read from its labels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoleLabels {
    /// The label.
    pub key: Arc<str>,
    /// What each of its values means.
    pub values: BTreeMap<Arc<str>, Role>,
    /// What a pod without the label is for.
    pub unlabelled: Unlabelled,
}

/// What a pod without a role label is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unlabelled {
    /// This.
    Role(Role),
    /// Nothing.
    Ignored,
}

impl Default for RoleLabels {
    /// The label and values of llm-d; a pod without the label decodes, as in llm-d's filters.
    fn default() -> Self {
        let values = [
            ("prefill", Role::Prefill),
            ("decode", Role::Decode),
            ("both", Role::Both),
            ("prefill-decode", Role::Both),
            ("encode-prefill", Role::Prefill),
            ("encode-prefill-decode", Role::Both),
        ];
        RoleLabels {
            key: Arc::from("llm-d.ai/role"),
            values: values
                .map(|(value, role)| (Arc::from(value), role))
                .into_iter()
                .collect(),
            unlabelled: Unlabelled::Role(Role::Decode),
        }
    }
}

/// What holds for every pod whose annotations say nothing else.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template {
    /// Where its engines publish KV events, if they do.
    pub kv_events: Option<KvPorts>,
    /// Models served; empty means every model. Annotation `sidestep.dev/models`, comma-separated.
    pub models: Vec<ModelName>,
    /// Adapters served. Annotation `sidestep.dev/adapters`, comma-separated.
    pub adapters: Vec<ModelName>,
    /// Whether a request may skip remote prefill. Annotation `sidestep.dev/local-prefill`.
    pub local_prefill: LocalPrefill,
    /// Tokens per KV block. Annotation `sidestep.dev/block-size`.
    pub block_size: Option<BlockSize>,
    /// KV blocks. Annotation `sidestep.dev/kv-blocks`.
    pub kv_blocks: Option<Blocks>,
    /// Prompt tokens in one prefill batch. Annotation `sidestep.dev/prefill-tokens`.
    pub prefill_batch_tokens: Option<Tokens>,
    /// How it is asked for its numbers.
    pub probe: Probe,
}

/// Where the engines of a pod publish KV events; rank `r` uses ports `r` higher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvPorts {
    /// The event stream of rank 0.
    pub events: u16,
    /// Where rank 0 can be asked for missed events.
    pub replay: Option<u16>,
    /// The topic to subscribe to; empty subscribes to everything.
    pub topic: Arc<str>,
}

/// What an object says that cannot be meant. Said once, not on every change.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
#[error("{object}: {what}: expected {expected}, found {found}")]
pub struct Warning {
    /// The object's name.
    pub object: Arc<str>,
    /// The label, annotation or field.
    pub what: Arc<str>,
    /// What would do.
    pub expected: Arc<str>,
    /// What is there.
    pub found: Found,
}

/// What is there: text of anybody who can label a pod, so it is shown quoted and short.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Found(Option<Arc<str>>);

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const LONGEST: usize = 80;
        match &self.0 {
            None => f.write_str("nothing"),
            Some(text) => {
                let short: String = text.chars().take(LONGEST).collect();
                let more = if short.len() < text.len() { "…" } else { "" };
                write!(f, "{short:?}{more}")
            }
        }
    }
}

/// What [`endpoints`] makes of a cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Endpoints {
    /// The endpoints; those that can be used come first, then in the order of names and ranks.
    pub pods: Vec<PodSpec>,
    /// What cannot be meant, in order, each once.
    pub warnings: Vec<Warning>,
}

/// Why a pool cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PoolFault {
    /// It would select every pod of the namespace.
    #[error("spec.selector.matchLabels: expected at least one label, found none")]
    EmptySelector,
    /// No endpoint, or more than there can be.
    #[error("spec.targetPorts: expected 1 to {MOST_PORTS} ports, found {0}")]
    Ports(usize),
    /// A port that cannot be, or twice the same.
    #[error("spec.targetPorts: expected different ports from 1 to 65535, found {0}")]
    Port(u32),
}

/// A pool that can be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pool {
    /// The labels its pods have; at least one.
    pub labels: BTreeMap<Arc<str>, Arc<str>>,
    /// The ports of its ranks, in order; at least one, all different.
    pub ports: Vec<u16>,
}

impl Pool {
    /// Reads a pool's spec.
    ///
    /// # Errors
    /// When no set of pods can follow from it.
    pub fn new(spec: &PoolSpec) -> Result<Pool, PoolFault> {
        if spec.selector.match_labels.is_empty() {
            return Err(PoolFault::EmptySelector);
        }
        if spec.target_ports.is_empty() || MOST_PORTS < spec.target_ports.len() {
            return Err(PoolFault::Ports(spec.target_ports.len()));
        }
        let mut ports = Vec::with_capacity(spec.target_ports.len());
        for port in &spec.target_ports {
            match u16::try_from(port.number) {
                Ok(number) if number != 0 && !ports.contains(&number) => ports.push(number),
                _ => return Err(PoolFault::Port(port.number)),
            }
        }
        Ok(Pool {
            labels: spec.selector.match_labels.clone(),
            ports,
        })
    }

    /// The selector in the form that a list or watch takes.
    #[must_use]
    pub fn selector(&self) -> String {
        let pairs: Vec<String> = self
            .labels
            .iter()
            .map(|(key, value)| format!("{key}={value}"))
            .collect();
        pairs.join(",")
    }
}

/// The endpoints of `pool` among `pods`.
///
/// Left out are pods that are over, that have no address yet or no more, and that have no role. Pods
/// that are not ready or on their way out are listed as such, so that what was promised to them stays
/// known.
pub fn endpoints<'a>(
    pool: &Pool,
    pods: impl IntoIterator<Item = &'a PodObject>,
    discovery: &Discovery,
) -> Endpoints {
    let mut found = Endpoints::default();
    for pod in pods {
        one_pod(pool, pod, discovery, &mut found);
    }
    // Two pods can have one address for a moment, when it is given out again: the usable one counts.
    found
        .pods
        .sort_by(|a, b| (a.listed, &a.name).cmp(&(b.listed, &b.name)));
    found.warnings.sort();
    found.warnings.dedup();
    found
}

fn one_pod(pool: &Pool, pod: &PodObject, discovery: &Discovery, found: &mut Endpoints) {
    let selected = |(key, value)| pod.metadata.labels.get(key) == Some(value);
    let over = matches!(&*pod.status.phase, "Failed" | "Succeeded");
    if over || !pool.labels.iter().all(selected) {
        return;
    }
    let Some(ip) = address(pod, &mut found.warnings) else {
        return;
    };
    let Some(role) = role(pod, &discovery.roles, &mut found.warnings) else {
        return;
    };
    let said = Said {
        pod,
        warnings: &mut found.warnings,
    };
    let template = said.over(&discovery.template);
    for (rank, port) in pool.ports.iter().enumerate() {
        found
            .pods
            .push(endpoint(pod, (ip, *port, rank), role, &template));
    }
}

fn endpoint(
    pod: &PodObject,
    (ip, port, rank): (IpAddr, u16, usize),
    role: Role,
    template: &Template,
) -> PodSpec {
    let name = match rank {
        0 => Arc::clone(&pod.metadata.name),
        // No pod's name holds a slash.
        _ => Arc::from(format!("{}/{rank}", pod.metadata.name)),
    };
    PodSpec {
        name,
        uid: Arc::clone(&pod.metadata.uid),
        endpoint: Endpoint(SocketAddr::new(ip, port)),
        role,
        models: template.models.clone(),
        adapters: template.adapters.clone(),
        local_prefill: template.local_prefill,
        kv_events: template
            .kv_events
            .as_ref()
            .and_then(|ports| kv_events(ports, ip, rank)),
        block_size: template.block_size,
        kv_blocks: template.kv_blocks,
        prefill_batch_tokens: template.prefill_batch_tokens,
        probe: template.probe.clone(),
        listed: listed(pod),
    }
}

fn kv_events(ports: &KvPorts, ip: IpAddr, rank: usize) -> Option<KvEventsSpec> {
    let rank = u16::try_from(rank).ok()?;
    let at = |port: u16| {
        let port = port.checked_add(rank)?;
        Some(format!("tcp://{}", SocketAddr::new(ip, port)))
    };
    Some(KvEventsSpec {
        events: at(ports.events)?,
        replay: ports.replay.and_then(at),
        topic: ports.topic.to_string(),
    })
}

fn listed(pod: &PodObject) -> Listed {
    let ready = |condition: &&_| {
        let condition: &crate::fleet::kubernetes::objects::PodCondition = condition;
        condition.kind == "Ready" && condition.status == "True"
    };
    if pod.metadata.deletion_timestamp.is_some() {
        Listed::Leaving
    } else if pod.status.conditions.iter().any(|one| ready(&one)) {
        Listed::Ready
    } else {
        Listed::NotReady
    }
}

fn address(pod: &PodObject, warnings: &mut Vec<Warning>) -> Option<IpAddr> {
    let text = pod.status.pod_ip.as_deref().filter(|ip| !ip.is_empty())?;
    match text.parse::<IpAddr>() {
        Ok(ip) if !ip.is_unspecified() => Some(ip.to_canonical()),
        _ => {
            warnings.push(warning(pod, "status.podIP", "an address", Some(text)));
            None
        }
    }
}

fn role(pod: &PodObject, labels: &RoleLabels, warnings: &mut Vec<Warning>) -> Option<Role> {
    let value = pod.metadata.labels.get(&labels.key);
    let role = match value {
        Some(value) => labels.values.get(value).copied(),
        None => match labels.unlabelled {
            Unlabelled::Role(role) => Some(role),
            Unlabelled::Ignored => None,
        },
    };
    if role.is_none() {
        let known: Vec<&str> = labels.values.keys().map(|value| &**value).collect();
        let expected = format!("one of {}", known.join(", "));
        let value = value.map(|value| &**value);
        warnings.push(warning(
            pod,
            &format!("label {}", labels.key),
            &expected,
            value,
        ));
    }
    role
}

fn warning(pod: &PodObject, what: &str, expected: &str, found: Option<&str>) -> Warning {
    Warning {
        object: Arc::from(format!("pod {}", pod.metadata.name)),
        what: Arc::from(what),
        expected: Arc::from(expected),
        found: Found(found.map(Arc::from)),
    }
}

/// What a pod's annotations say.
struct Said<'a> {
    pod: &'a PodObject,
    warnings: &'a mut Vec<Warning>,
}

impl Said<'_> {
    /// The template with what the annotations say in its place; what cannot be read is warned of and
    /// leaves the template as it is.
    fn over(mut self, template: &Template) -> Template {
        let mut template = template.clone();
        let most = 1_000_000_000;
        if let Some(models) = self.names("models") {
            template.models = models;
        }
        if let Some(adapters) = self.names("adapters") {
            template.adapters = adapters;
        }
        if let Some(local) = self.read("local-prefill", "able or unable", |text| match text {
            "able" => Some(LocalPrefill::Able),
            "unable" => Some(LocalPrefill::Unable),
            _ => None,
        }) {
            template.local_prefill = local;
        }
        if let Some(size) = self.whole("block-size", 1 << 16) {
            template.block_size = BlockSize::new(size);
        }
        if let Some(blocks) = self.whole("kv-blocks", u32::MAX) {
            template.kv_blocks = Some(Blocks(blocks));
        }
        if let Some(tokens) = self.whole("prefill-tokens", most) {
            template.prefill_batch_tokens = Some(Tokens(tokens.into()));
        }
        template
    }

    fn read<T>(
        &mut self,
        name: &str,
        expected: &str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Option<T> {
        let key = format!("{}{name}", crate::fleet::kubernetes::objects::ANNOTATIONS);
        let text = self.pod.metadata.annotations.get(&*key)?;
        let value = parse(text);
        if value.is_none() {
            let what = format!("annotation {key}");
            self.warnings
                .push(warning(self.pod, &what, expected, Some(text)));
        }
        value
    }

    fn whole(&mut self, name: &str, most: u32) -> Option<u32> {
        let expected = format!("a whole number from 1 to {most}");
        self.read(name, &expected, |text| {
            text.parse()
                .ok()
                .filter(|number| (1..=most).contains(number))
        })
    }

    fn names(&mut self, name: &str) -> Option<Vec<ModelName>> {
        self.read(name, "names with commas between them", |text| {
            let names: Vec<&str> = text.split(',').map(str::trim).collect();
            let fits = |name: &&str| {
                !name.is_empty() && name.len() <= 253 && !name.chars().any(char::is_control)
            };
            names
                .iter()
                .all(fits)
                .then(|| names.iter().map(|name| ModelName::from(*name)).collect())
        })
    }
}

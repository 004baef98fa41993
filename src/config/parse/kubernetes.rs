//! What a process config says about a cluster: `pods.kubernetes` and `policy.kubernetes`.
//!
//! Lives here: their defaults and ranges.
//! Never here: what an object of the cluster means (`fleet::kubernetes`), what a policy says (`policy`).
//! Invariant: pure; nothing is asked of a cluster to find a fault here.

use crate::config::diagnostic::Wrong;
use crate::config::parse::{Reading, pods as pod, policy as policies, values};
use crate::config::process::PolicyObjects;
use crate::config::raw;
use crate::config::shape::{Field, Spot, Text, TextMap, Whole};
use crate::decide::snapshot::Role;
use crate::fleet::kubernetes::{Discovery, KvPorts, RoleLabels, Template, Unlabelled};
use crate::names::ModelName;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The name of the policy in force while the cluster has none.
const DEFAULT_POLICY: &str = "default";
/// The most ranks of a pod, which all need a port.
const MOST_RANKS: i64 = crate::fleet::kubernetes::endpoints::MOST_PORTS as i64;

/// Reads `pods.kubernetes`.
pub(super) fn pods(raw: &raw::PodObjects, reading: &mut Reading<'_>) -> Option<Discovery> {
    let namespace = reading.optional(&raw.namespace, values::object_name);
    let expected = "the name of an InferencePool";
    let pool = reading.required(&raw.pool, (raw.at, "pool"), expected, values::object_name);
    let roles = roles(raw, reading);
    let model = |text: &Text| values::name(text).map(ModelName);
    let size = pod::capacity(&raw.capacity, reading);
    let template = Template {
        kv_events: kv_ports(&raw.kv_events, reading),
        models: reading.each(&raw.models, model),
        adapters: reading.each(&raw.adapters, model),
        local_prefill: pod::local_prefill(&raw.local_prefill, reading),
        block_size: size.block_size,
        kv_blocks: size.kv_blocks,
        prefill_batch_tokens: size.prefill_tokens,
        probe: pod::probe(&raw.probe, reading),
    };
    Some(Discovery {
        namespace,
        pool: pool?,
        roles,
        template,
    })
}

fn roles(raw: &raw::PodObjects, reading: &mut Reading<'_>) -> RoleLabels {
    let defaults = RoleLabels::default();
    let unlabelled = |text: &Text| {
        values::word(
            text,
            &[
                ("prefill", Unlabelled::Role(Role::Prefill)),
                ("decode", Unlabelled::Role(Role::Decode)),
                ("both", Unlabelled::Role(Role::Both)),
                ("none", Unlabelled::Ignored),
            ],
        )
    };
    RoleLabels {
        key: reading.or(&raw.role_label, defaults.key, values::label_key),
        values: role_values(&raw.roles, reading).unwrap_or(defaults.values),
        unlabelled: reading.or(&raw.unlabelled, defaults.unlabelled, unlabelled),
    }
}

fn role_values(
    field: &Field<TextMap>,
    reading: &mut Reading<'_>,
) -> Option<BTreeMap<Arc<str>, Role>> {
    let Spot { at, value: map } = field.given()?;
    let words = [Role::Prefill, Role::Decode, Role::Both].map(|role| (role.as_str(), role));
    let mut roles = BTreeMap::new();
    for (key, spot) in &map.0 {
        match (values::label_value(key), values::word(&spot.value, &words)) {
            (Ok(key), Ok(role)) => {
                roles.insert(key, role);
            }
            (Err(wrong), _) | (_, Err(wrong)) => reading.report.fault(spot.at, wrong),
        }
    }
    if !map.0.is_empty() && roles.len() == map.0.len() && !roles.values().any(|role| role.decodes())
    {
        let message = "no value means decode or both: only unlabelled pods can decode";
        reading.report.warn(*at, message);
    }
    if map.0.is_empty() {
        let wrong = Wrong::new("at least one value with its role", "none");
        reading.report.fault(*at, wrong);
    }
    Some(roles)
}

fn kv_ports(field: &Field<raw::KvPorts>, reading: &mut Reading<'_>) -> Option<KvPorts> {
    let Spot { at, value: raw } = field.given()?;
    let most = i64::from(u16::MAX) + 1 - MOST_RANKS;
    let port = |value: &Whole| values::whole::<u16>(value, 1, most);
    let expected = "a port, such as 5557";
    let events = reading.required(&raw.port, (*at, "port"), expected, port);
    let replay = reading.optional(&raw.replay_port, port);
    let topic = reading.or(&raw.topic, Arc::from(""), values::label);
    if let (Some(events), Some(replay), Some(spot)) = (events, replay, raw.replay_port.given())
        && events == replay
    {
        let wrong = Wrong::new("another port than that of the events", replay.to_string());
        reading.report.fault(spot.at, wrong);
    }
    Some(KvPorts {
        events: events?,
        replay,
        topic,
    })
}

/// What `pods` says of a cluster.
#[derive(Clone, Copy, Debug)]
pub(super) enum OfPods<'a> {
    /// They are those of a pool.
    Pool(&'a Discovery),
    /// They would be, if it had no faults.
    Faulty,
    /// They are not of a cluster.
    Elsewhere,
}

/// Reads `policy.kubernetes`; what it leaves out is as in `pods`.
pub(super) fn policy(
    raw: &raw::PolicyObjects,
    pods: OfPods<'_>,
    reading: &mut Reading<'_>,
) -> (Option<PolicyObjects>, policies::Spec) {
    let of_pods = match pods {
        OfPods::Pool(discovery) => Some(discovery),
        OfPods::Faulty | OfPods::Elsewhere => None,
    };
    let namespace = reading.optional(&raw.namespace, values::object_name);
    let pool = match of_pods {
        Some(discovery) => {
            let pool = Arc::clone(&discovery.pool);
            Some(reading.or(&raw.pool, pool, values::object_name))
        }
        // What is wrong with the pods has been reported.
        None if matches!(pods, OfPods::Faulty) => reading.optional(&raw.pool, values::object_name),
        None => {
            let expected = "the name of the InferencePool, because the pods are not of one";
            reading.required(&raw.pool, (raw.at, "pool"), expected, values::object_name)
        }
    };
    let name = Arc::from(DEFAULT_POLICY);
    let default = match raw.default.given() {
        Some(spot) => policies::spec(&spot.value, name, reading),
        None => policies::never(name),
    };
    let lease = reading.optional(&raw.lease, values::object_name);
    let objects = pool.map(|pool| PolicyObjects {
        // One per pool: pickers of different pools write of different policies.
        lease: lease.unwrap_or_else(|| Arc::from(format!("sidestep-{pool}"))),
        namespace: namespace.or_else(|| of_pods.and_then(|pods| pods.namespace.clone())),
        pool,
    });
    (objects, default)
}

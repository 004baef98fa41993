//! A cluster as the source of the policy.
//!
//! Lives here: the loop that puts the policy of a pool in force and writes the status of policies.
//! Never here: what a policy says (`config`), what a status looks like (`status`).
//! Invariant: a policy with faults never takes effect; what was in force stays while an object with
//! faults is all there is.

use crate::app::dialect;
use crate::app::kubernetes::PolicyKnown;
use crate::app::standing::readable;
use crate::app::status::{Said, status};
use crate::config::conditions::{Condition, Offered, Samples, Scope, World, conditions};
use crate::config::{Diagnostics, LoadedPolicy, ModelConfig, PolicyObjects, Shadow, TargetRef};
use crate::decide::reason::Because;
use crate::fleet::PodSpec;
use crate::fleet::kubernetes::objects::PolicyObject;
use crate::fleet::kubernetes::rights::POOL_GROUP;
use crate::fleet::kubernetes::{
    Cluster, Heard, Kind, LEASE_RENEW, Lease, Watches, Which, follow, now, write_policy_status,
};
use crate::pick::{InForce, InShadow, Picker};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, watch};
use tokio::time::{MissedTickBehavior, interval};

/// From one writing of counts to the next.
const COUNTS_EVERY: Duration = Duration::from_secs(30);
/// Samples of the counts: their window is as many times as long, less one.
const SAMPLES: usize = 11;

/// What the loop is made of.
pub(super) struct Source {
    pub(super) cluster: Cluster,
    pub(super) objects: PolicyObjects,
    pub(super) models: Vec<ModelConfig>,
    /// In force while the cluster has no policy for the pool.
    pub(super) default: InForce,
    pub(super) watches: Arc<Watches>,
    pub(super) picker: Weak<Picker>,
}

/// Puts the policies of a cluster in force, for as long as the picker exists.
pub(super) async fn policies(source: Source, known: watch::Sender<PolicyKnown>) {
    let namespace = source
        .objects
        .namespace
        .clone()
        .unwrap_or_else(|| Arc::clone(source.cluster.namespace()));
    let which = Which {
        namespace: namespace.to_string(),
        ..Which::default()
    };
    let (reports, mut heard) = mpsc::channel::<Heard<PolicyObject>>(64);
    let to = (Arc::clone(&source.watches), reports);
    let following = follow(source.cluster.clone(), Kind::Policies, which, to);
    let lease = Lease::new(
        source.cluster.clone(),
        Arc::clone(&source.watches),
        (&namespace, &source.objects.lease),
        identity(),
    );
    let mut desk = Desk {
        namespace,
        lease,
        shelf: Shelf::default(),
        samples: Samples::new(SAMPLES),
        counted: None,
        began: Instant::now(),
        shadow: None,
        source,
    };
    let work = async move {
        let mut ticks = interval(LEASE_RENEW);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                report = heard.recv() => {
                    let Some(report) = report else { return };
                    desk.shelf.take(report);
                    while let Ok(report) = heard.try_recv() {
                        desk.shelf.take(report);
                    }
                    if !desk.put_in_force() {
                        return;
                    }
                    known.send_replace(PolicyKnown::Yes);
                }
                _ = ticks.tick() => {
                    desk.lease.hold().await;
                }
            }
            desk.write().await;
        }
    };
    tokio::select! {
        () = following => {}
        () = work => {}
    }
}

/// Tells this replica from others: the pod's name, and a number for those that have none.
fn identity() -> String {
    let name = std::env::var("HOSTNAME").unwrap_or_else(|_| "sidestep".to_owned());
    let started = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |since| since.subsec_nanos());
    format!("{name}_{}_{started}", std::process::id())
}

/// The policies of a namespace.
#[derive(Default)]
struct Shelf {
    policies: BTreeMap<Arc<str>, Policy>,
}

/// One policy, read.
struct Policy {
    object: PolicyObject,
    read: Result<LoadedPolicy, Diagnostics>,
    /// Whether its faults were mentioned.
    mentioned: bool,
}

impl Shelf {
    fn take(&mut self, report: Heard<PolicyObject>) {
        match report {
            Heard::Listed(all) => {
                let mut old = std::mem::take(&mut self.policies);
                for object in all {
                    let before = old.remove(&object.metadata.name);
                    self.put(object, before);
                }
            }
            Heard::Applied(object) => {
                let before = self.policies.remove(&object.metadata.name);
                self.put(object, before);
            }
            Heard::Deleted(object) => {
                self.policies.remove(&object.metadata.name);
            }
        }
    }

    /// Reads an object, unless the same was read `before`: a changed status is no changed policy.
    fn put(&mut self, object: PolicyObject, before: Option<Policy>) {
        let name = Arc::clone(&object.metadata.name);
        let policy = match before {
            Some(before) if before.object.document == object.document => {
                Policy { object, ..before }
            }
            _ => {
                let origin = format!("disaggregationpolicy/{name}");
                let read = crate::config::parse_policy(&object.document, Path::new(&origin));
                Policy {
                    object,
                    read,
                    mentioned: false,
                }
            }
        };
        self.policies.insert(name, policy);
    }

    /// The conditions of the policies that concern `target`, by name.
    fn conditions(
        &self,
        target: &TargetRef,
        models: &[ModelConfig],
        pods: &[PodSpec],
    ) -> BTreeMap<Arc<str>, [Condition; 3]> {
        let ours = |policy: &&Policy| policy.object.target.as_deref() == Some(&*target.name);
        let mut judged = BTreeMap::new();
        // What has no target is everybody's and nobody's: all replicas of all pools say the same of it.
        let groups: [(Vec<&Policy>, &[ModelConfig], &[PodSpec]); 2] = [
            (self.policies.values().filter(ours).collect(), models, pods),
            (
                self.policies
                    .values()
                    .filter(|policy| policy.object.target.is_none())
                    .collect(),
                &[],
                &[],
            ),
        ];
        for (policies, models, pods) in groups {
            let offered: Vec<Offered<'_>> =
                policies.iter().map(|policy| policy.offered()).collect();
            let world = World {
                scope: Scope::Targets(std::slice::from_ref(target)),
                models,
                pods,
            };
            let all = conditions(&offered, &world);
            for (policy, conditions) in policies.iter().zip(all) {
                judged.insert(Arc::clone(&policy.object.metadata.name), conditions);
            }
        }
        judged
    }

    /// What `shadow` asks for.
    fn shadow(&self, shadow: &Shadow) -> InShadow {
        match shadow {
            Shadow::Off => InShadow::Nothing,
            Shadow::Named(name) => {
                let named = self.policies.get(name);
                match named.and_then(|policy| policy.read.as_ref().ok()) {
                    Some(read) => InShadow::Policy(read.policy.clone()),
                    None => InShadow::Unresolved(Arc::clone(name)),
                }
            }
            // A replica's files are not those of whoever wrote the object; its condition says so.
            Shadow::File(path) => InShadow::Unresolved(Arc::from(path.display().to_string())),
        }
    }

    /// The policy that applies to `target`: of those without fault the oldest, then the first by name.
    fn choose(&self, target: &TargetRef) -> Choice<'_> {
        let ours = || {
            self.policies
                .values()
                .filter(|policy| policy.object.target.as_deref() == Some(&*target.name))
        };
        let valid = ours().filter_map(|policy| {
            let read = policy.read.as_ref().ok()?;
            (read.target.as_ref() == Some(target)).then_some((policy, read))
        });
        let first = valid.min_by_key(|(policy, _)| {
            let offered = policy.offered();
            (offered.created, &policy.object.metadata.name)
        });
        match first {
            Some((_, read)) => Choice::This(read),
            None if ours().any(|policy| policy.read.is_err()) => Choice::Stay,
            None => Choice::Default,
        }
    }
}

/// Which policy applies.
#[derive(Debug, PartialEq)]
enum Choice<'a> {
    /// This one.
    This(&'a LoadedPolicy),
    /// Whatever is in force: there are only policies with faults.
    Stay,
    /// The one of the process config.
    Default,
}

impl Policy {
    fn offered(&self) -> Offered<'_> {
        let created = self.object.metadata.creation_timestamp.as_deref();
        let digits: String = created
            .unwrap_or_default()
            .chars()
            .filter(char::is_ascii_digit)
            .collect();
        Offered {
            name: &self.object.metadata.name,
            // Of RFC 3339 in UTC with seconds, the digits alone are in order.
            created: digits.parse().unwrap_or(i64::MAX),
            policy: self.read.as_ref(),
        }
    }
}

/// Where policies are judged, put in force and written about.
struct Desk {
    source: Source,
    namespace: Arc<str>,
    lease: Lease,
    shelf: Shelf,
    samples: Samples,
    counted: Option<Instant>,
    began: Instant,
    /// What was put in the shadow last; `None` is what the process config says.
    shadow: Option<InShadow>,
}

impl Desk {
    fn target(&self) -> TargetRef {
        TargetRef {
            group: Arc::from(POOL_GROUP),
            kind: Arc::from("InferencePool"),
            name: Arc::clone(&self.source.objects.pool),
        }
    }

    /// Puts the policy that applies in force. `false` when the picker is gone.
    fn put_in_force(&mut self) -> bool {
        let Some(picker) = self.source.picker.upgrade() else {
            return false;
        };
        let pool = Arc::clone(&self.source.objects.pool);
        for policy in self.shelf.policies.values_mut() {
            let ours = policy.object.target.as_deref() == Some(&*pool);
            if let (Err(faults), false, true) = (&policy.read, policy.mentioned, ours) {
                picker.metrics().reload_failed();
                tracing::error!(
                    "a policy was not put in force; what was in force stays:\n{faults}"
                );
                policy.mentioned = true;
            }
        }
        let target = self.target();
        let (chosen, shadow) = match self.shelf.choose(&target) {
            Choice::Stay => return true,
            Choice::Default => (self.source.default.clone(), InShadow::Nothing),
            Choice::This(read) => {
                let chosen = InForce {
                    policy: read.policy.clone(),
                    dialect: dialect(read.handoff),
                };
                (chosen, self.shelf.shadow(&read.shadow))
            }
        };
        if self.shadow.as_ref() != Some(&shadow) {
            picker.set_shadow(shadow.clone());
            self.shadow = Some(shadow);
        }
        let held = picker.in_force();
        let same = InForce {
            policy: crate::decide::policy::Policy {
                generation: held.policy.generation,
                ..chosen.policy.clone()
            },
            ..chosen.clone()
        } == *held;
        if !same {
            picker.set_policy(chosen);
            let held = picker.in_force();
            tracing::info!(policy = %held.policy.name, generation = held.policy.generation, "policy in force");
            self.samples = Samples::new(SAMPLES);
            self.counted = None;
        }
        true
    }

    /// Writes the status of policies, if it falls to this replica and says something new.
    async fn write(&mut self) {
        let Some(picker) = self.source.picker.upgrade() else {
            return;
        };
        let due = |last: Instant| COUNTS_EVERY <= last.elapsed();
        if self.counted.is_none_or(due) {
            self.counted = Some(Instant::now());
            let counts: BTreeMap<Because, u64> = picker.metrics().reasons().into_iter().collect();
            self.samples.take(self.began.elapsed(), counts);
        }
        let view = picker.observer().roster.view();
        let pods: Vec<PodSpec> = view.pods.iter().map(|pod| pod.spec.clone()).collect();
        let target = self.target();
        let judged = self.shelf.conditions(&target, &self.source.models, &pods);
        let in_force = picker.in_force();
        let obeyed = judged.get(&in_force.policy.name);
        picker.set_conditions(obeyed.into_iter().flatten().map(readable).collect());
        if !self.lease.is_held() {
            return;
        }
        let observed = self.samples.observed();
        for (name, conditions) in judged {
            let Some(policy) = self.shelf.policies.get_mut(&name) else {
                continue;
            };
            let obeyed = policy.object.target.is_some() && *in_force.policy.name == *name;
            let said = Said {
                conditions: &conditions,
                generation: policy.object.metadata.generation,
                observed: obeyed.then_some(&observed),
            };
            let Some(status) = status(&policy.object.status, &said, &now()) else {
                continue;
            };
            let written = write_policy_status(
                &self.source.cluster,
                &self.source.watches,
                (&self.namespace, &name),
                &status,
            )
            .await;
            match written {
                // The watch brings it back; until then it is not written again.
                Ok(()) => policy.object.status = status,
                Err(trouble) => tracing::debug!(%trouble, policy = %name, "status not written"),
            }
        }
    }
}

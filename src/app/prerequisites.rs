//! What the policy in force needs of its pods, said aloud when it is not there.
//!
//! Lives here: when to warn, and once.
//! Never here: what is needed (see `decide::prerequisite`).
//! Invariant: what a ready pod lacks is warned of once, within [`GRACE`] and two looks of its
//! becoming ready; a pod that gets it and loses it again is warned of again. However many pods there
//! are, one look writes a bounded number of lines.

use crate::decide::Prerequisite;
use crate::decide::policy::Policy;
use crate::decide::prerequisite::Needs;
use crate::decide::snapshot::Role;
use crate::names::PodId;
use crate::pick::{Picker, PodStatus};
use smallvec::SmallVec;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::time::Instant;

/// Time that a pod has, once ready, to say what it can and to have its events followed.
const GRACE: Duration = Duration::from_secs(15);
/// How often pods are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// Pods that are told of one by one. A new policy may concern all of a large fleet at once: of more, their
/// number is told, and who the first of them are.
const NAMED: usize = 8;

/// Something to say, once.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Notice {
    /// A pod lacks something.
    Missing(Arc<str>, Prerequisite),
    /// It has it now.
    Met(Arc<str>, Prerequisite),
    /// More than [`NAMED`] pods lack something.
    SeveralMissing(Vec<Arc<str>>, Prerequisite),
    /// As many have it now.
    SeveralMet(Vec<Arc<str>>, Prerequisite),
    /// No decode pod has KV events, and the policy compares net-new tokens.
    NoKvSource,
    /// Prefill pods are listed, and none is ready.
    NoPrefillPod,
    /// One is again.
    PrefillPod,
}

/// What has been said already.
#[derive(Debug, Default)]
struct Said {
    pods: HashMap<PodId, PodSaid>,
    /// The version of the policy for which the missing KV events of all pods were mentioned.
    no_kv_source: Option<u64>,
    no_prefill_pod: bool,
}

#[derive(Debug)]
struct PodSaid {
    ready_since: Instant,
    missing: SmallVec<[Prerequisite; 5]>,
}

impl Said {
    fn look(&mut self, pods: &[PodStatus], policy: &Policy, now: Instant) -> Vec<Notice> {
        let mut notices = Vec::new();
        self.fleet(pods, policy, &mut notices);
        let ready = |pod: &&PodStatus| pod.availability == "ready";
        let listed: HashSet<PodId> = pods.iter().filter(ready).map(|pod| pod.id).collect();
        self.pods.retain(|id, _| listed.contains(id));
        for pod in pods.iter().filter(ready) {
            let said = self.pods.entry(pod.id).or_insert_with(|| PodSaid {
                ready_since: now,
                missing: SmallVec::new(),
            });
            let met = |what: &Prerequisite| !pod.missing.contains(what);
            for what in said.missing.iter().copied().filter(met) {
                notices.push(Notice::Met(Arc::clone(&pod.name), what));
            }
            said.missing.retain(|what| pod.missing.contains(what));
            let waited = GRACE <= now.saturating_duration_since(said.ready_since);
            for what in &pod.missing {
                // What is not configured will not come by waiting.
                let hopeless = pod.kv_source == "absent" && *what == Prerequisite::KvEvents
                    || *what == Prerequisite::LocalPrefill;
                if (waited || hopeless) && !said.missing.contains(what) {
                    said.missing.push(*what);
                    notices.push(Notice::Missing(Arc::clone(&pod.name), *what));
                }
            }
        }
        notices
    }

    fn fleet(&mut self, pods: &[PodStatus], policy: &Policy, notices: &mut Vec<Notice>) {
        let mut decode = pods.iter().filter(|pod| pod.role.decodes()).peekable();
        let silent = decode.peek().is_some() && decode.all(|pod| pod.kv_source == "absent");
        if !(silent && Needs::of(policy).overlap) {
            self.no_kv_source = None;
        } else if self.no_kv_source != Some(policy.generation) {
            self.no_kv_source = Some(policy.generation);
            notices.push(Notice::NoKvSource);
        }
        let mut prefill = pods
            .iter()
            .filter(|pod| pod.role == Role::Prefill)
            .peekable();
        let none = prefill.peek().is_some() && prefill.all(|pod| pod.availability != "ready");
        if none != self.no_prefill_pod {
            self.no_prefill_pod = none;
            notices.push(match none {
                true => Notice::NoPrefillPod,
                false => Notice::PrefillPod,
            });
        }
    }
}

/// The same notices, those that concern many pods alike as one.
fn gathered(notices: Vec<Notice>) -> Vec<Notice> {
    let (mut missing, mut met) = (BTreeMap::new(), BTreeMap::new());
    let mut gathered = Vec::new();
    for notice in notices {
        let (of, pod, what) = match notice {
            Notice::Missing(pod, what) => (&mut missing, pod, what),
            Notice::Met(pod, what) => (&mut met, pod, what),
            other => {
                gathered.push(other);
                continue;
            }
        };
        let (_, pods) = of.entry(what.as_str()).or_insert((what, Vec::new()));
        pods.push(pod);
    }
    let mut add = |of: BTreeMap<_, (Prerequisite, Vec<Arc<str>>)>,
                   one: fn(Arc<str>, Prerequisite) -> Notice,
                   several: fn(Vec<Arc<str>>, Prerequisite) -> Notice| {
        for (what, pods) in of.into_values() {
            if NAMED < pods.len() {
                gathered.push(several(pods, what));
            } else {
                gathered.extend(pods.into_iter().map(|pod| one(pod, what)));
            }
        }
    };
    add(missing, Notice::Missing, Notice::SeveralMissing);
    add(met, Notice::Met, Notice::SeveralMet);
    gathered
}

/// Looks at the pods until the picker is gone.
pub(super) async fn watch(picker: Weak<Picker>) {
    let mut said = Said::default();
    let mut looks = tokio::time::interval(LOOK_EVERY);
    looks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        looks.tick().await;
        let Some(picker) = picker.upgrade() else {
            return;
        };
        let in_force = picker.in_force();
        let notices = said.look(&picker.pods(), &in_force.policy, Instant::now());
        for notice in gathered(notices) {
            say(&notice, &in_force.policy);
        }
    }
}

fn say(notice: &Notice, policy: &Policy) {
    let policy = &policy.name;
    match notice {
        Notice::Missing(pod, what) => tracing::warn!(
            %pod, what = what.as_str(), %policy,
            "the policy cannot have its effect on this pod, which serves all the same: {}",
            what.meaning()
        ),
        Notice::Met(pod, what) => tracing::info!(
            %pod, what = what.as_str(), %policy,
            "the policy can have its effect on this pod"
        ),
        Notice::SeveralMissing(pods, what) => tracing::warn!(
            pods = pods.len(), among = pods[..NAMED].join(", "), what = what.as_str(), %policy,
            "the policy cannot have its effect on several pods, which serve all the same: {}",
            what.meaning()
        ),
        Notice::SeveralMet(pods, what) => tracing::info!(
            pods = pods.len(), among = pods[..NAMED].join(", "), what = what.as_str(), %policy,
            "the policy can have its effect on several pods"
        ),
        Notice::NoKvSource => tracing::warn!(
            %policy,
            "THE POLICY COMPARES NET-NEW TOKENS, AND NO DECODE POD HAS KV EVENTS: no request will \
             bypass by that rule; configure kvEvents for the decode pods"
        ),
        Notice::NoPrefillPod => tracing::warn!(
            %policy,
            "no prefill pod is ready: until one is, requests are prefilled by their decode pod or \
             refused, as onNoPrefill says"
        ),
        Notice::PrefillPod => tracing::info!(%policy, "a prefill pod is ready again"),
    }
}

#[cfg(test)]
mod tests;

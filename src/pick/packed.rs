//! What decisions were made from, packed.
//!
//! Lives here: [`Remembered`], and [`Packed`], which keeps many of them in few bytes.
//! Never here: decisions, locks, how many are kept (see `recent`).
//! Invariant: what is unpacked equals what was put in.
//!
//! From one decision to the next few pods change. So decisions are kept in groups: the pods as they
//! stood at the first, then for each decision the pods that differ from the decision before. What a pod
//! is to one request alone (cached and shared blocks, whether it serves the model) is kept beside, for
//! the pods where there is something to say.

use crate::decide::snapshot::{Ask, Candidate, PodLoad, Serves, Snapshot, TierBlocks};
use crate::decide::{Decision, NoRoute, Policy, decide};
use crate::fleet::View;
use crate::observe::Observation;
use crate::pick::InForce;
use crate::telemetry::record::Record;
use crate::units::Blocks;
use std::collections::VecDeque;
use std::sync::Arc;

/// Decisions in one group: what has to be gone through at most to unpack one of them.
const MOST_STEPS: usize = 64;
/// What a decision takes beside its pods: its record, most of all.
const ALONE: usize = size_of::<Step>() + size_of::<Record>() + 1024;

/// One decision with all that it was made from.
#[derive(Debug)]
pub(super) struct Remembered {
    pub(super) record: Arc<Record>,
    pub(super) ask: Ask,
    pub(super) observation: Observation,
    pub(super) in_force: Arc<InForce>,
}

impl Remembered {
    /// How many pods it was made from.
    pub(super) fn size(&self) -> usize {
        self.observation.snapshot.candidates.len()
    }

    /// The same request among the same pods, under `policy`.
    pub(super) fn decide(&self, policy: &Policy) -> Result<Decision, NoRoute> {
        decide(&self.ask, &self.observation.snapshot, policy)
    }
}

/// The one place that knows how a snapshot is made of pods.
fn pods_of(snapshot: Snapshot) -> Vec<Candidate> {
    snapshot.candidates
}

/// Its reverse.
fn snapshot_of(pods: Vec<Candidate>) -> Snapshot {
    Snapshot { candidates: pods }
}

/// What a pod is to one request alone.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Own {
    place: u32,
    cached: TierBlocks,
    shared: Blocks,
    serves: Serves,
}

impl Own {
    /// Takes it out of `pod`, which is the same for all requests then; nothing where nothing is said.
    fn take(place: u32, pod: &mut Candidate) -> Option<Own> {
        let own = Own {
            place,
            cached: std::mem::take(&mut pod.cached),
            shared: std::mem::take(&mut pod.load.shared_blocks),
            serves: std::mem::replace(&mut pod.serves, Serves::Yes),
        };
        let silent = Own {
            place,
            cached: TierBlocks::default(),
            shared: PodLoad::default().shared_blocks,
            serves: Serves::Yes,
        };
        (own != silent).then_some(own)
    }

    fn put(&self, pods: &mut [Candidate]) {
        if let Some(pod) = pods.get_mut(self.place as usize) {
            pod.cached = self.cached;
            pod.load.shared_blocks = self.shared;
            pod.serves = self.serves;
        }
    }
}

/// Whether two pods are the same in every respect.
fn same(one: &Candidate, other: &Candidate) -> bool {
    // Taken apart, so that what is added to a pod cannot be forgotten here.
    let Candidate {
        pod,
        endpoint,
        role,
        availability,
        serves,
        local_prefill,
        block_size,
        cached,
        kv_source,
        load,
        prefill_capacity,
        kv_capacity,
        engine,
    } = one;
    *load == other.load
        && *engine == other.engine
        && *pod == other.pod
        && *endpoint == other.endpoint
        && *role == other.role
        && *availability == other.availability
        && *serves == other.serves
        && *local_prefill == other.local_prefill
        && *block_size == other.block_size
        && *cached == other.cached
        && *kv_source == other.kv_source
        && *prefill_capacity == other.prefill_capacity
        && *kv_capacity == other.kv_capacity
}

/// One decision of a group.
#[derive(Debug)]
struct Step {
    record: Arc<Record>,
    ask: Ask,
    view: Arc<View>,
    in_force: Arc<InForce>,
    /// Pods that differ from the step before, by their place.
    changed: Box<[(u32, Candidate)]>,
    own: Box<[Own]>,
}

impl Step {
    fn advance(&self, pods: &mut [Candidate]) {
        for (place, pod) in &self.changed {
            if let Some(known) = pods.get_mut(*place as usize) {
                *known = *pod;
            }
        }
    }

    fn unpack(&self, mut pods: Vec<Candidate>) -> Remembered {
        self.own.iter().for_each(|own| own.put(&mut pods));
        Remembered {
            record: Arc::clone(&self.record),
            ask: self.ask.clone(),
            observation: Observation {
                view: Arc::clone(&self.view),
                snapshot: snapshot_of(pods),
            },
            in_force: Arc::clone(&self.in_force),
        }
    }
}

/// Decisions one after another, and the pods before the first. Cheap to clone.
#[derive(Clone, Debug)]
struct Group {
    base: Arc<[Candidate]>,
    steps: Vec<Arc<Step>>,
    /// Pods that changed over all steps.
    changes: usize,
    bytes: usize,
}

impl Group {
    fn new(pods: &[Candidate]) -> Group {
        Group {
            base: pods.into(),
            steps: Vec::new(),
            changes: 0,
            bytes: size_of_val(pods),
        }
    }

    /// Whether it is better to begin anew than to add to it.
    fn full(&self) -> bool {
        self.steps.len() == MOST_STEPS || self.base.len() < self.changes
    }

    fn push(&mut self, step: Step) -> usize {
        self.changes += step.changed.len();
        let bytes = size_of_val(&*step.changed) + size_of_val(&*step.own) + ALONE;
        self.bytes += bytes;
        self.steps.push(Arc::new(step));
        bytes
    }
}

/// Decisions with all that they were made from, oldest first. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(super) struct Packed {
    groups: VecDeque<Group>,
    /// The pods after the last step.
    now: Vec<Candidate>,
    bytes: usize,
    decisions: usize,
}

impl Packed {
    /// Adds a decision.
    pub(super) fn push(&mut self, one: Remembered) {
        let Observation { view, snapshot } = one.observation;
        let mut pods = pods_of(snapshot);
        let own = pods.iter_mut().zip(0..);
        let own = own.filter_map(|(pod, place)| Own::take(place, pod));
        let own: Box<[Own]> = own.collect();
        let changed = self.changes(&pods);
        if changed.is_none() {
            let group = Group::new(&pods);
            self.bytes += group.bytes;
            self.groups.push_back(group);
        }
        self.now = pods;
        if let Some(group) = self.groups.back_mut() {
            self.bytes += group.push(Step {
                record: one.record,
                ask: one.ask,
                view,
                in_force: one.in_force,
                changed: changed.unwrap_or_default(),
                own,
            });
            self.decisions += 1;
        }
    }

    /// Which of `pods` differ from those before, when that is worth saying.
    fn changes(&self, pods: &[Candidate]) -> Option<Box<[(u32, Candidate)]>> {
        if pods.len() != self.now.len() || self.groups.back().is_none_or(Group::full) {
            return None;
        }
        let differ = self.now.iter().zip(pods).zip(0..);
        let differ = differ.filter(|((old, new), _)| !same(old, new));
        let changed: Box<[_]> = differ.map(|((_, new), place)| (place, *new)).collect();
        (2 * changed.len() <= pods.len()).then_some(changed)
    }

    /// Forgets the oldest group while there are more than `bytes` in all, or `decisions` without it.
    pub(super) fn trim(&mut self, bytes: usize, decisions: usize) {
        while let Some(oldest) = self.groups.front() {
            let rest = self.decisions - oldest.steps.len();
            if self.bytes <= bytes && rest < decisions {
                return;
            }
            self.bytes -= oldest.bytes;
            self.decisions = rest;
            self.groups.pop_front();
        }
    }

    /// How many decisions there are.
    pub(super) fn len(&self) -> usize {
        self.decisions
    }

    fn place(&self, id: &str) -> Option<(&Group, usize)> {
        self.groups.iter().rev().find_map(|group| {
            let place = group.steps.iter().rposition(|step| step.record.id == id)?;
            Some((group, place))
        })
    }

    /// The record of a decision.
    pub(super) fn record(&self, id: &str) -> Option<Arc<Record>> {
        let (group, place) = self.place(id)?;
        Some(Arc::clone(&group.steps.get(place)?.record))
    }

    /// A decision with all that it was made from.
    pub(super) fn find(&self, id: &str) -> Option<Remembered> {
        let (group, place) = self.place(id)?;
        let mut pods = group.base.to_vec();
        for step in group.steps.get(..=place)? {
            step.advance(&mut pods);
        }
        Some(group.steps.get(place)?.unpack(pods))
    }

    /// The last `most` decisions one after another, oldest first.
    pub(super) fn last(&self, most: usize, mut act: impl FnMut(&Remembered)) {
        let mut skip = self.decisions.saturating_sub(most);
        for group in &self.groups {
            if group.steps.len() <= skip {
                skip -= group.steps.len();
                continue;
            }
            let mut pods = group.base.to_vec();
            for (place, step) in group.steps.iter().enumerate() {
                step.advance(&mut pods);
                if skip <= place {
                    act(&step.unpack(pods.clone()));
                }
            }
            skip = 0;
        }
    }
}

#[cfg(test)]
mod tests;

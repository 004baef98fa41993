//! All pods: what was listed last, as a view that readers share.
//!
//! Lives here: [`Roster`] (the one writer's side), [`View`] (the readers' side), [`Changes`].
//! Never here: where the list came from, I/O.
//! Invariant: equal name, uid and endpoint mean the same incarnation and keep its
//! [`PodId`]; anything else is a new one, whose generation no pod of that slot has had before.

use crate::decide::snapshot::Serving;
use crate::fleet::kubernetes::Watches;
use crate::fleet::pod::{Pod, PodSpec};
use crate::fleet::serving::ByModel;
use crate::fleet::status::Changed;
use crate::names::{Endpoint, ModelName, PodId};
use arc_swap::ArcSwap;
use parking_lot::Mutex;
use rustc_hash::FxBuildHasher;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::sync::Arc;

/// The most pods a roster holds: slots are 16 bits wide.
pub const MAX_PODS: usize = 1 << 16;

/// All pods at one moment. Immutable.
#[derive(Debug, Default)]
pub struct View {
    /// The pods, by name.
    pub pods: Vec<Arc<Pod>>,
    by_slot: Vec<Option<Arc<Pod>>>,
    by_endpoint: HashMap<Endpoint, Arc<Pod>, FxBuildHasher>,
    serving: ByModel,
}

impl View {
    /// The pod with this id, unless that incarnation is gone.
    #[must_use]
    pub fn get(&self, id: PodId) -> Option<&Arc<Pod>> {
        self.by_slot
            .get(usize::from(id.slot))?
            .as_ref()
            .filter(|pod| pod.id == id)
    }

    /// The pod that listens here.
    #[must_use]
    pub fn at(&self, endpoint: Endpoint) -> Option<&Arc<Pod>> {
        self.by_endpoint.get(&endpoint)
    }

    /// Which pods serve a request that may be served under any of `names` (the model's own, its
    /// adapter's); all of them do when it names none.
    #[must_use]
    pub fn serving(&self, names: &[&ModelName]) -> Serving {
        self.serving.of(names)
    }

    /// Memory that it takes, without that of the pods.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.pods.len() * size_of::<Arc<Pod>>()
            + self.by_slot.len() * size_of::<Option<Arc<Pod>>>()
            + self.by_endpoint.capacity() * size_of::<(Endpoint, Arc<Pod>)>()
            + self.serving.bytes()
    }

    /// One more than the highest slot in use: the length of a dense per-pod array.
    #[must_use]
    pub fn slots(&self) -> usize {
        self.by_slot.len()
    }
}

/// What one [`Roster::apply`] changed.
#[derive(Debug, Default)]
pub struct Changes {
    /// New incarnations.
    pub added: Vec<Arc<Pod>>,
    /// Incarnations that are gone: whatever is kept under their ids can be forgotten.
    pub removed: Vec<Arc<Pod>>,
    /// The same incarnations under a changed spec.
    pub respecified: Vec<Arc<Pod>>,
    /// How many incarnations were there before and still are, respecified or not.
    pub kept: usize,
    /// Pods left out: the name or endpoint was listed before, or the roster is full.
    pub refused: Vec<PodSpec>,
}

impl Changes {
    /// Whether readers see the same as before.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.added.is_empty() && self.removed.is_empty() && self.respecified.is_empty()
    }
}

/// The set of pods, replaced as a whole whenever a new list arrives.
#[derive(Debug, Default)]
pub struct Roster {
    view: ArcSwap<View>,
    slots: Mutex<Slots>,
    watches: Arc<Watches>,
    changes: Changed,
}

impl Roster {
    /// No pods.
    #[must_use]
    pub fn new() -> Roster {
        Roster::default()
    }

    /// The pods now. Cheap; hold it for one decision, not for longer.
    #[must_use]
    pub fn view(&self) -> Arc<View> {
        self.view.load_full()
    }

    /// Grows with every change of the pods and of whether they can take requests.
    #[must_use]
    pub fn revision(&self) -> u64 {
        self.changes.pods.get()
    }

    /// Grows with every report of an engine.
    #[must_use]
    pub fn reports(&self) -> u64 {
        self.changes.reports.get()
    }

    /// How well the cluster that the pods come from is followed; empty without one.
    #[must_use]
    pub fn watches(&self) -> &Arc<Watches> {
        &self.watches
    }

    /// Replaces the set of pods by `specs`.
    ///
    /// The first of two specs with the same name or endpoint wins; the other is refused.
    pub fn apply(&self, specs: Vec<PodSpec>) -> Changes {
        // Held throughout: two lists applied at once would each diff against the same past.
        let mut slots = self.slots.lock();
        let before = self.view.load_full();
        let (specs, refused) = distinct(specs);
        let mut changes = Changes {
            refused,
            ..Changes::default()
        };
        let old: HashMap<&str, &Arc<Pod>> = before
            .pods
            .iter()
            .map(|pod| (&*pod.spec.name, pod))
            .collect();

        let mut pods = Vec::with_capacity(specs.len());
        let mut fresh = Vec::new();
        for spec in specs {
            match old.get(&*spec.name) {
                Some(pod) if same_incarnation(&pod.spec, &spec) => {
                    changes.kept += 1;
                    pods.push(if pod.spec == spec {
                        Arc::clone(pod)
                    } else {
                        let pod = Arc::new(pod.respecified(spec));
                        changes.respecified.push(Arc::clone(&pod));
                        pod
                    });
                }
                _ => fresh.push(spec),
            }
        }
        let staying: std::collections::HashSet<PodId, FxBuildHasher> =
            pods.iter().map(|pod| pod.id).collect();
        for pod in &before.pods {
            if !staying.contains(&pod.id) {
                slots.release(pod.id);
                changes.removed.push(Arc::clone(pod));
            }
        }
        for spec in fresh {
            match slots.take() {
                Some(id) => {
                    let pod = Arc::new(Pod::new(id, spec, self.changes.clone()));
                    changes.added.push(Arc::clone(&pod));
                    pods.push(pod);
                }
                None => changes.refused.push(spec),
            }
        }
        if !changes.is_empty() {
            self.view.store(Arc::new(view(pods)));
            self.changes.pods.bump();
        }
        changes
    }
}

/// Splits off the specs whose name or endpoint an earlier one has.
fn distinct(specs: Vec<PodSpec>) -> (Vec<PodSpec>, Vec<PodSpec>) {
    let mut names = std::collections::HashSet::new();
    let mut endpoints = std::collections::HashSet::new();
    specs.into_iter().partition(|spec| {
        if names.contains(&spec.name) || endpoints.contains(&spec.endpoint) {
            return false;
        }
        names.insert(Arc::clone(&spec.name));
        endpoints.insert(spec.endpoint);
        true
    })
}

fn same_incarnation(old: &PodSpec, new: &PodSpec) -> bool {
    old.name == new.name && old.uid == new.uid && old.endpoint == new.endpoint
}

fn view(mut pods: Vec<Arc<Pod>>) -> View {
    pods.sort_by(|a, b| a.spec.name.cmp(&b.spec.name));
    let slots = pods
        .iter()
        .map(|pod| usize::from(pod.id.slot) + 1)
        .max()
        .unwrap_or(0);
    let mut by_slot = vec![None; slots];
    let mut by_endpoint = HashMap::with_capacity_and_hasher(pods.len(), FxBuildHasher);
    for pod in &pods {
        by_slot[usize::from(pod.id.slot)] = Some(Arc::clone(pod));
        by_endpoint.insert(pod.spec.endpoint, Arc::clone(pod));
    }
    View {
        serving: ByModel::new(&pods),
        pods,
        by_slot,
        by_endpoint,
    }
}

/// Which slots are free, and the generation each would be given next.
#[derive(Debug, Default)]
struct Slots {
    /// Next generation per slot ever used.
    generations: Vec<u32>,
    /// Free slots, lowest first, so that dense arrays stay short.
    free: BinaryHeap<Reverse<u16>>,
}

impl Slots {
    fn take(&mut self) -> Option<PodId> {
        if let Some(Reverse(slot)) = self.free.pop() {
            let generation = *self.generations.get(usize::from(slot))?;
            return Some(PodId { slot, generation });
        }
        let slot = u16::try_from(self.generations.len()).ok()?;
        self.generations.push(0);
        Some(PodId {
            slot,
            generation: 0,
        })
    }

    fn release(&mut self, id: PodId) {
        // A slot whose generations are used up stays taken: an id is never reused.
        if let (Some(next), Some(generation)) = (
            id.generation.checked_add(1),
            self.generations.get_mut(usize::from(id.slot)),
        ) {
            *generation = next;
            self.free.push(Reverse(id.slot));
        }
    }
}

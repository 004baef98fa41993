//! Which pods serve which model.
//!
//! Lives here: [`ByModel`], worked out once per list of pods.
//! Never here: what a model is to the tokenizer (`prompt`).
//! Invariant: a pod that lists no models serves every model; one that lists some serves those and
//! its adapters.

use crate::decide::snapshot::{Serves, Serving};
use crate::fleet::pod::Pod;
use crate::names::ModelName;
use rustc_hash::FxBuildHasher;
use std::collections::HashMap;
use std::sync::Arc;

/// Per name that a pod lists, who serves it, in the order of the pods.
#[derive(Debug, Default)]
pub(super) struct ByModel {
    /// For a name that nobody lists.
    unlisted: Serving,
    listed: HashMap<ModelName, Arc<[Serves]>, FxBuildHasher>,
}

impl ByModel {
    pub(super) fn new(pods: &[Arc<Pod>]) -> ByModel {
        let choosy = |pod: &Arc<Pod>| !pod.spec.models.is_empty();
        if !pods.iter().any(choosy) {
            return ByModel::default();
        }
        let everything = |pod: &Arc<Pod>| {
            if choosy(pod) {
                Serves::NotThisModel
            } else {
                Serves::Yes
            }
        };
        let unlisted: Arc<[Serves]> = pods.iter().map(everything).collect();
        let mut listed: HashMap<ModelName, Vec<Serves>, FxBuildHasher> = HashMap::default();
        for (position, pod) in pods.iter().enumerate() {
            for name in pod.spec.models.iter().chain(&pod.spec.adapters) {
                let list = listed.entry(name.clone());
                list.or_insert_with(|| unlisted.to_vec())[position] = Serves::Yes;
            }
        }
        ByModel {
            unlisted: Serving::Each(unlisted),
            listed: listed
                .into_iter()
                .map(|(name, list)| (name, list.into()))
                .collect(),
        }
    }

    /// Who serves a request that may be served under any of `names`; everybody when it names none.
    pub(super) fn of(&self, names: &[&ModelName]) -> Serving {
        if names.is_empty() {
            return Serving::All;
        }
        let mut lists = names.iter().filter_map(|name| self.listed.get(*name));
        let Some(first) = lists.next() else {
            return self.unlisted.clone();
        };
        let mut all = Arc::clone(first);
        for other in lists {
            let both = all.iter().zip(&**other);
            all = both
                .map(|(one, other)| if *one == Serves::Yes { *one } else { *other })
                .collect();
        }
        Serving::Each(all)
    }
}

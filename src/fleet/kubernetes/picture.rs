//! What is known of a pool and its pods at a moment. Pure.
//!
//! Lives here: [`Picture`]: reports of a pool and of pods in, a list of endpoints out.
//! Never here: I/O, time, what an object means (see `endpoints`).
//! Invariant: what is given out is of one pool as a whole: pods that were listed completely under its
//! selector, with its ports. While that is not known yet, what was given out last stays.

use crate::fleet::kubernetes::endpoints::{
    Discovery, Endpoints, Pool, PoolFault, Warning, endpoints,
};
use crate::fleet::kubernetes::objects::{PodObject, PoolObject};
use crate::fleet::pod::PodSpec;
use std::collections::BTreeMap;
use std::sync::Arc;

/// What an API server reports of one kind of object.
#[derive(Clone, Debug, PartialEq)]
pub enum Heard<T> {
    /// All objects there are, and no other.
    Listed(Vec<T>),
    /// One object is there, as it is now.
    Applied(T),
    /// One object is gone, as it was last.
    Deleted(T),
}

/// What is to be done about pods that are to be followed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Follow {
    /// Go on as before.
    Same,
    /// Follow the pods of this selector from now on; reports of others are no longer wanted.
    Selector(String),
    /// Follow none.
    Nothing,
}

/// What is known of a pool and its pods.
#[derive(Debug)]
pub struct Picture {
    discovery: Discovery,
    pool: Known,
    pods: Listing,
    warned: Vec<Warning>,
}

#[derive(Debug)]
enum Known {
    /// The first list has not come.
    Unheard,
    /// There is none.
    Absent,
    /// There is one.
    There(Pool),
}

#[derive(Debug)]
enum Listing {
    /// Of the selector that is followed now, no complete list has come.
    Pending,
    /// All pods of the selector that is followed now, by name.
    Complete(BTreeMap<Arc<str>, PodObject>),
}

/// What follows from a report.
#[derive(Debug)]
pub struct Step {
    /// What to follow.
    pub follow: Follow,
    /// What the pool cannot be used for, if it was refused. What was known before stays.
    pub fault: Option<PoolFault>,
}

impl Picture {
    /// Nothing is known.
    #[must_use]
    pub fn new(discovery: Discovery) -> Picture {
        Picture {
            discovery,
            pool: Known::Unheard,
            pods: Listing::Pending,
            warned: Vec::new(),
        }
    }

    /// Takes a report of the pool. Reports of other pools change nothing.
    pub fn pool(&mut self, heard: Heard<PoolObject>) -> Step {
        let ours = |pool: &PoolObject| pool.metadata.name == self.discovery.pool;
        let pool = match heard {
            Heard::Listed(pools) => pools.into_iter().find(ours),
            Heard::Applied(pool) if ours(&pool) => Some(pool),
            Heard::Deleted(pool) if ours(&pool) => None,
            Heard::Applied(_) | Heard::Deleted(_) => return Step::same(),
        };
        let Some(pool) = pool else {
            self.pool = Known::Absent;
            self.pods = Listing::Pending;
            return Step {
                follow: Follow::Nothing,
                fault: None,
            };
        };
        let pool = match Pool::new(&pool.spec) {
            Ok(pool) => pool,
            Err(fault) => {
                return Step {
                    follow: Follow::Same,
                    fault: Some(fault),
                };
            }
        };
        let same = matches!(&self.pool, Known::There(before) if before.labels == pool.labels);
        let follow = if same {
            Follow::Same
        } else {
            self.pods = Listing::Pending;
            Follow::Selector(pool.selector())
        };
        self.pool = Known::There(pool);
        Step {
            follow,
            fault: None,
        }
    }

    /// Takes a report of the pods of the selector that is followed now.
    pub fn pods(&mut self, heard: Heard<PodObject>) {
        match (heard, &mut self.pods) {
            (Heard::Listed(pods), _) => {
                let named = pods
                    .into_iter()
                    .map(|pod| (Arc::clone(&pod.metadata.name), pod));
                self.pods = Listing::Complete(named.collect());
            }
            (Heard::Applied(pod), Listing::Complete(pods)) => {
                pods.insert(Arc::clone(&pod.metadata.name), pod);
            }
            (Heard::Deleted(pod), Listing::Complete(pods)) => {
                // Another pod may have the name by now.
                if pods
                    .get(&pod.metadata.name)
                    .is_some_and(|known| known.metadata.uid == pod.metadata.uid)
                {
                    pods.remove(&pod.metadata.name);
                }
            }
            // A change before the list it changes: the list, when it comes, is newer.
            (Heard::Applied(_) | Heard::Deleted(_), Listing::Pending) => {}
        }
    }

    /// The endpoints, and what is to be warned of now and was not before. `None` while what was given
    /// out last is still the best that is known.
    pub fn endpoints(&mut self) -> Option<(Vec<PodSpec>, Vec<Warning>)> {
        let Endpoints { pods, warnings } = match (&self.pool, &self.pods) {
            (Known::Unheard, _) | (Known::There(_), Listing::Pending) => return None,
            (Known::Absent, _) => Endpoints::default(),
            (Known::There(pool), Listing::Complete(pods)) => {
                endpoints(pool, pods.values(), &self.discovery)
            }
        };
        let new = warnings
            .iter()
            .filter(|warning| self.warned.binary_search(warning).is_err())
            .cloned()
            .collect();
        self.warned = warnings;
        Some((pods, new))
    }

    /// Whether it is known that the pool is not there.
    #[must_use]
    pub fn pool_is_absent(&self) -> bool {
        matches!(self.pool, Known::Absent)
    }
}

impl Step {
    fn same() -> Step {
        Step {
            follow: Follow::Same,
            fault: None,
        }
    }
}

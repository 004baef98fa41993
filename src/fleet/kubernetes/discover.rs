//! The loop that turns the objects of a cluster into pods.
//!
//! Lives here: [`discover`].
//! Never here: what an object means (`endpoints`), what is known when (`picture`).
//! Invariant: reports of a selector that is no longer wanted are never heard: they have a channel of
//! their own, which is dropped with it.

use crate::fleet::kubernetes::client::Cluster;
use crate::fleet::kubernetes::endpoints::Discovery;
use crate::fleet::kubernetes::follow::{Kind, Watches, Which, follow};
use crate::fleet::kubernetes::objects::{PodObject, PoolObject};
use crate::fleet::kubernetes::picture::{Follow, Heard, Picture};
use crate::fleet::pod::PodSpec;
use std::sync::Arc;
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinSet};

/// Reports that may wait.
const WAITING: usize = 256;

/// Sends the set of pods whenever it changes, until the receiver is gone.
pub async fn discover(
    cluster: Cluster,
    discovery: Discovery,
    watches: Arc<Watches>,
    found: mpsc::Sender<Vec<PodSpec>>,
) {
    let namespace = discovery
        .namespace
        .clone()
        .unwrap_or_else(|| Arc::clone(cluster.namespace()));
    tracing::info!(%namespace, pool = %discovery.pool, "looking for pods in the cluster");
    let mut tasks = JoinSet::new();
    let (reports, mut pools) = mpsc::channel::<Heard<PoolObject>>(WAITING);
    let which = Which {
        namespace: namespace.to_string(),
        labels: None,
        // Rights can then be given for this one pool alone.
        fields: Some(format!("metadata.name={}", discovery.pool)),
    };
    let to = (Arc::clone(&watches), reports);
    tasks.spawn(follow(cluster.clone(), Kind::Pools, which, to));

    let pool = Arc::clone(&discovery.pool);
    let mut picture = Picture::new(discovery);
    let mut pods = Following::none();
    let mut last = None;
    loop {
        tokio::select! {
            // A pool first: under a new selector, what comes of the old one is not wanted.
            biased;
            () = found.closed() => return,
            Some(heard) = pools.recv() => {
                let step = picture.pool(heard);
                if let Some(fault) = &step.fault {
                    tracing::error!(%pool, "the pool cannot be used, what was known before stays: {fault}");
                }
                let fault = match (step.fault, picture.pool_is_absent()) {
                    (Some(fault), _) => Some(format!("InferencePool {pool}: {fault}")),
                    (None, true) => Some(format!("InferencePool {pool}: expected to be there, found nothing")),
                    (None, false) => None,
                };
                watches.object(Kind::Pools, fault);
                match step.follow {
                    Follow::Same => {}
                    Follow::Nothing => {
                        tracing::warn!(%pool, "there is no such pool: every request is refused");
                        pods = Following::none();
                    }
                    Follow::Selector(labels) => {
                        tracing::info!(%pool, %labels, "following the pods of the pool");
                        let (reports, receiver) = mpsc::channel(WAITING);
                        let which = Which {
                            namespace: namespace.to_string(),
                            labels: Some(labels),
                            fields: None,
                        };
                        let to = (Arc::clone(&watches), reports);
                        let task = follow::<PodObject>(cluster.clone(), Kind::Pods, which, to);
                        pods = Following { reports: receiver, task: Some(tasks.spawn(task)) };
                    }
                }
            }
            Some(heard) = pods.reports.recv(), if pods.task.is_some() => {
                picture.pods(heard);
                // What has come meanwhile goes into the same set: one pod's change may be a thousand's.
                while let Ok(heard) = pods.reports.try_recv() {
                    picture.pods(heard);
                }
            }
        }
        while tasks.try_join_next().is_some() {}
        let Some((specs, warnings)) = picture.endpoints() else {
            continue;
        };
        for warning in warnings {
            tracing::warn!("{warning}");
        }
        if last.as_ref() == Some(&specs) {
            continue;
        }
        last = Some(specs.clone());
        if found.send(specs).await.is_err() {
            return;
        }
    }
}

/// The pods that are followed now; dropping it ends that.
struct Following {
    reports: mpsc::Receiver<Heard<PodObject>>,
    task: Option<AbortHandle>,
}

impl Following {
    fn none() -> Following {
        Following {
            reports: mpsc::channel(1).1,
            task: None,
        }
    }
}

impl Drop for Following {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

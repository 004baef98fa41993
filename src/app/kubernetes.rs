//! A cluster as the source of pods and policies.
//!
//! Lives here: the loops that carry what the cluster says to whom it concerns.
//! Never here: what an object means (`fleet::kubernetes`, `config`).
//! Invariant: what the cluster does not say changes nothing.

use crate::app::attend::Attendant;
use crate::fleet::kubernetes::{Cluster, Discovery, discover};
use std::sync::Arc;
use tokio::sync::mpsc;

/// Applies the pods of a cluster as they change.
pub(super) async fn pods(cluster: Cluster, discovery: Discovery, mut attendant: Attendant) {
    let (found, mut sets) = mpsc::channel(1);
    let watches = Arc::clone(attendant.roster().watches());
    let apply = async {
        while let Some(set) = sets.recv().await {
            attendant.apply(set);
        }
    };
    tokio::join!(discover(cluster, discovery, watches, found), apply);
}

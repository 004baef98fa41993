//! A cluster as the source of pods.
//!
//! Lives here: the loop that carries what the cluster says of pods to whom it concerns, and the metrics
//! of how well it is followed.
//! Never here: what an object means (`fleet::kubernetes`), policies (see `policies`).
//! Invariant: what the cluster does not say changes nothing.

use crate::app::attend::Attendant;
use crate::app::standing::Standing;
use crate::fleet::kubernetes::{Cluster, Discovery, Kind, Watches, discover};
use crate::fleet::{PodSpec, Roster};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use std::fmt::Error;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::{sleep, timeout};

/// Longest wait for the first list of policies before pods are used without it.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often it is looked whether that list has failed.
const LOOK: Duration = Duration::from_millis(50);

/// Applies the pods of a cluster as they change, once it is known which policy is in force first. A policy that is
/// not of the cluster has a standing, which depends on them.
pub(super) async fn pods(
    cluster: Cluster,
    discovery: Discovery,
    (mut attendant, standing): (Attendant, Option<Standing>),
    mut policy: watch::Receiver<PolicyKnown>,
) {
    let (found, mut sets) = mpsc::channel::<Vec<PodSpec>>(1);
    let watches = Arc::clone(attendant.roster().watches());
    let following = Arc::clone(&watches);
    let apply = async move {
        let known = policy.wait_for(|known| *known == PolicyKnown::Yes);
        let failed = async {
            while !watches.is_troubled(Kind::Policies) {
                sleep(LOOK).await;
            }
        };
        let first = async {
            tokio::select! {
                _ = known => {}
                () = failed => {}
            }
        };
        if timeout(PATIENCE, first).await.is_err() {
            tracing::warn!(
                "the policies of the cluster are not known yet; the default is in force"
            );
        }
        while let Some(set) = sets.recv().await {
            match &standing {
                Some(standing) => {
                    attendant.apply(set.clone());
                    standing.pods(set);
                }
                None => attendant.apply(set),
            }
        }
    };
    tokio::join!(discover(cluster, discovery, following, found), apply);
}

/// Whether it is known which policy is in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PolicyKnown {
    /// It is, or it does not come from a cluster.
    Yes,
    /// The cluster has not been heard.
    NotYet,
}

/// Metrics of how well a cluster is followed.
#[derive(Debug)]
pub(super) struct Following(pub(super) Arc<Roster>);

impl Following {
    fn watches(&self) -> &Arc<Watches> {
        self.0.watches()
    }
}

impl Collector for Following {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), Error> {
        let all = self.watches().all();
        if all.is_empty() {
            return Ok(());
        }
        let help =
            "Seconds since the API server last confirmed what is known; up to 30 while all is well";
        let mut family =
            encoder.encode_descriptor("watch_stale_seconds", help, None, MetricType::Gauge)?;
        for (kind, stale, _) in all.iter().filter(|(kind, ..)| kind.is_followed()) {
            let labels = [("resource", kind.resource())];
            ConstGauge::new(*stale).encode(family.encode_family(&labels)?)?;
        }
        let help = "Lists asked of the API server";
        let mut family =
            encoder.encode_descriptor("watch_lists", help, None, MetricType::Counter)?;
        for (kind, _, watched) in all.iter().filter(|(kind, ..)| kind.is_followed()) {
            let labels = [("resource", kind.resource())];
            ConstCounter::new(watched.lists).encode(family.encode_family(&labels)?)?;
        }
        let help = "Requests to the API server that failed: `forbidden` is a missing right";
        let mut family = encoder.encode_descriptor(
            "cluster_requests_failed",
            help,
            None,
            MetricType::Counter,
        )?;
        for (kind, _, watched) in &all {
            for ((verb, trouble), count) in &watched.failures {
                let labels = [
                    ("resource", kind.resource()),
                    ("verb", *verb),
                    ("trouble", *trouble),
                ];
                ConstCounter::new(*count).encode(family.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}

//! Watched files put in force while the program runs.
//!
//! Lives here: one loop per file.
//! Never here: what a valid file is (see `config`).
//! Invariant: a file with faults changes nothing but a counter, a log line and the conditions.

use crate::app::attend::Attendant;
use crate::app::dialect;
use crate::app::standing::Standing;
use crate::config::watch::Watch;
use crate::config::{Diagnostics, LoadedPods, LoadedPolicy, Shadow};
use crate::pick::{InForce, Picker};
use crate::telemetry::metrics::Metrics;
use std::sync::Weak;
use tokio::sync::watch;

/// Applies new lists of pods.
pub(super) async fn pods(
    mut watch: Watch<LoadedPods>,
    mut attendant: Attendant,
    metrics: Metrics,
    standing: Standing,
) {
    while let Some(update) = watch.next().await {
        match update {
            Ok(loaded) => {
                for warning in &loaded.warnings {
                    tracing::warn!("{warning}");
                }
                attendant.apply(loaded.pods.clone());
                standing.pods(loaded.pods);
            }
            Err(faults) => refused(&faults, &metrics),
        }
    }
    // The watcher ended; the pods stay as they are for as long as the program runs.
    attendant.stay().await;
}

/// Puts new policies in force; how they stand and what they ask of their shadow is told on.
pub(super) async fn policy(
    mut watch: Watch<LoadedPolicy>,
    picker: Weak<Picker>,
    metrics: Metrics,
    (standing, shadow): (Standing, watch::Sender<Shadow>),
) {
    while let Some(update) = watch.next().await {
        let Some(picker) = picker.upgrade() else {
            return;
        };
        match update {
            Ok(loaded) => {
                for warning in &loaded.warnings {
                    tracing::warn!("{warning}");
                }
                picker.set_policy(InForce {
                    policy: loaded.policy.clone(),
                    dialect: dialect(loaded.handoff),
                });
                shadow.send_if_modified(|asked| {
                    let changed = *asked != loaded.shadow;
                    asked.clone_from(&loaded.shadow);
                    changed
                });
                tracing::info!(
                    generation = picker.in_force().policy.generation,
                    "policy in force"
                );
                standing.policy(loaded);
            }
            Err(faults) => {
                refused(&faults, &metrics);
                standing.refused(faults);
            }
        }
    }
}

pub(super) fn refused(faults: &Diagnostics, metrics: &Metrics) {
    metrics.reload_failed();
    tracing::error!("a changed file was not put in force; what was in force stays:\n{faults}");
}

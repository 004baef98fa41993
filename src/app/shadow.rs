//! The policy in the shadow of the one in force: found, watched, replaced.
//!
//! Lives here: what `spec.shadow` of the policy in force asks for, made so.
//! Never here: its opinions (see `decide::shadow`).
//! Invariant: whatever is wrong with a shadow, the policy in force stays as it is.

use crate::app::WATCH_EVERY;
use crate::app::reload::refused;
use crate::config::watch::Watch;
use crate::config::{LoadedPolicy, Shadow, load_policy};
use crate::pick::{InShadow, Picker};
use crate::telemetry::metrics::Metrics;
use std::sync::{Arc, Weak};
use tokio::sync::watch;

/// Puts what `shadow` asks for in the shadow of the policy in force. A file is watched from then on;
/// one that cannot be used leaves nothing there until it is mended.
pub(super) fn put(
    shadow: &Shadow,
    picker: &Picker,
    metrics: &Metrics,
) -> Option<Watch<LoadedPolicy>> {
    match shadow {
        Shadow::Off => {
            picker.set_shadow(InShadow::Nothing);
            None
        }
        Shadow::Named(name) => {
            tracing::warn!(
                shadow = %name,
                "the policy names a shadow, and policies that come from files are not known by name: \
                 no shadow is evaluated; name a file"
            );
            picker.set_shadow(InShadow::Unresolved(Arc::clone(name)));
            None
        }
        Shadow::File(path) => {
            let content = match load_policy(path) {
                Ok(loaded) => {
                    let content = loaded.content;
                    take(loaded, picker);
                    content
                }
                Err(faults) => {
                    refused(&faults, metrics);
                    let name = path.display().to_string();
                    picker.set_shadow(InShadow::Unresolved(Arc::from(name)));
                    Default::default()
                }
            };
            let watch = crate::config::watch::policy(path.clone(), WATCH_EVERY, content);
            Some(watch)
        }
    }
}

fn take(loaded: LoadedPolicy, picker: &Picker) {
    for warning in &loaded.warnings {
        tracing::warn!("{warning}");
    }
    tracing::info!(shadow = %loaded.policy.name, "policy in shadow");
    picker.set_shadow(InShadow::Policy(loaded.policy));
}

/// Follows what the policy in force asks for, and the file it names. `file` is what [`put`] returned
/// for the first.
pub(super) async fn follow(
    mut asked: watch::Receiver<Shadow>,
    mut file: Option<Watch<LoadedPolicy>>,
    picker: Weak<Picker>,
    metrics: Metrics,
) {
    loop {
        let update = tokio::select! {
            changed = asked.changed() => {
                if changed.is_err() {
                    break;
                }
                None
            }
            update = next(&mut file) => Some(update),
        };
        let Some(picker) = picker.upgrade() else {
            return;
        };
        match update {
            None => {
                let shadow = asked.borrow_and_update().clone();
                file = put(&shadow, &picker, &metrics);
            }
            Some(update) => apply(update, &picker, &metrics),
        }
    }
    // The policy in force does not change any more; its shadow's file may.
    while file.is_some() {
        let update = next(&mut file).await;
        let Some(picker) = picker.upgrade() else {
            return;
        };
        apply(update, &picker, &metrics);
    }
}

type Update = Result<LoadedPolicy, crate::config::Diagnostics>;

fn apply(update: Update, picker: &Picker, metrics: &Metrics) {
    match update {
        Ok(loaded) => take(loaded, picker),
        Err(faults) => refused(&faults, metrics),
    }
}

/// The next content of the file; never, when there is none.
async fn next(file: &mut Option<Watch<LoadedPolicy>>) -> Update {
    if let Some(watch) = file
        && let Some(update) = watch.next().await
    {
        return update;
    }
    std::future::pending().await
}

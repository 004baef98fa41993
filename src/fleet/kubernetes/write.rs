//! What is written to a cluster: the status of policies.
//!
//! Lives here: [`write_policy_status`], by server-side apply.
//! Never here: what a status says, who may write it (see `lease`).
//! Invariant: only the status is written, and always as the same field manager, so that whichever
//! replica writes next owns what the last one wrote.
//!
//! Protocol: <https://kubernetes.io/docs/reference/using-api/server-side-apply/>.

use crate::fleet::kubernetes::client::{Call, Cluster, Trouble};
use crate::fleet::kubernetes::follow::{Kind, Watches};
use kube::core::Request;
use kube::core::params::{Patch, PatchParams};
use serde_json::{Value, json};

/// The field manager of all that is written.
const MANAGER: &str = "sidestep";

/// Writes the `status` of the policy `name`.
///
/// # Errors
/// When the server refuses or is away; this is noted in `watches` too.
pub async fn write_policy_status(
    cluster: &Cluster,
    watches: &Watches,
    (namespace, name): (&str, &str),
    status: &Value,
) -> Result<(), Trouble> {
    let call = Call {
        verb: "patch",
        resource: Kind::PolicyStatus.resource(),
    };
    let object = json!({
        "apiVersion": "sidestep.dev/v1alpha1",
        "kind": "DisaggregationPolicy",
        "metadata": {"name": name},
        "status": status,
    });
    let request = Request::new(Kind::PolicyStatus.path(namespace)).patch_subresource(
        "status",
        name,
        &PatchParams::apply(MANAGER).force(),
        &Patch::Apply(object),
    );
    match cluster.ask::<Value>(call, request).await {
        Ok(_) => {
            watches.heard(Kind::PolicyStatus);
            Ok(())
        }
        // The policy is gone meanwhile, which is no fault of the cluster's.
        Err(trouble @ Trouble::NotFound { .. }) => Err(trouble),
        Err(trouble) => {
            watches.failed(Kind::PolicyStatus, &trouble);
            Err(trouble)
        }
    }
}

/// The time now, in RFC 3339 with seconds, as conditions have it.
#[must_use]
pub fn now() -> String {
    k8s_openapi::jiff::Timestamp::now()
        .strftime("%Y-%m-%dT%H:%M:%SZ")
        .to_string()
}

/// The time now, with microseconds, as Leases have it.
pub(super) fn now_micros() -> String {
    k8s_openapi::jiff::Timestamp::now()
        .strftime("%Y-%m-%dT%H:%M:%S.%6fZ")
        .to_string()
}

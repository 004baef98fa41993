//! `sidestep rights`: the rights that the picker uses in a cluster.
//!
//! Lives here: the table of rights as a Role, in JSON, which `kubectl apply -f -` takes.
//! Never here: the table itself (`fleet::kubernetes::rights`).
//! Invariant: nothing is printed that the program does not use.

use crate::app::rights::{RIGHTS, Use};
use serde_json::json;
use std::process::ExitCode;

/// Arguments of `sidestep rights`.
#[derive(Debug, clap::Args)]
pub struct RightsArgs {
    /// The Role's name.
    #[arg(long, default_value = "sidestep", value_name = "NAME")]
    name: String,
    /// The policy does not come from the cluster: leave its rights out.
    #[arg(long)]
    pods_only: bool,
}

/// Prints the Role.
///
/// # Errors
/// When the output is closed.
pub fn run(args: &RightsArgs) -> anyhow::Result<ExitCode> {
    let wanted = RIGHTS
        .iter()
        .filter(|right| !args.pods_only || right.used_for == Use::Pods);
    let rules: Vec<_> = wanted
        .map(|right| {
            json!({
                "apiGroups": [right.group],
                "resources": [right.resource],
                "verbs": right.verbs,
            })
        })
        .collect();
    let role = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": args.name},
        "rules": rules,
    });
    println!("{role:#}");
    Ok(ExitCode::SUCCESS)
}

//! The rights that the program uses in a cluster: all of them, and no other.
//!
//! Lives here: [`RIGHTS`], the one table. The chart's Role is held against it by a test, and another
//! test takes each right away in turn and shows what breaks.
//! Never here: the calls themselves.
//! Invariant: every request to an API server is covered by a row, and every row by a request.

/// A right to do some things with one kind of object, in one namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Right {
    /// API group; empty for the core group.
    pub group: &'static str,
    /// The resource, with its subresource after a `/`.
    pub resource: &'static str,
    /// What is done.
    pub verbs: &'static [&'static str],
    /// What needs it.
    pub used_for: Use,
}

/// What needs a right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// `pods.kubernetes`: without it no pod is known.
    Pods,
    /// `policy.kubernetes`: without it the default policy stays in force.
    Policy,
    /// `policy.kubernetes`: without it the policies' status is not written.
    Status,
}

/// Group of the InferencePool.
pub const POOL_GROUP: &str = "inference.networking.k8s.io";
/// Group of the DisaggregationPolicy.
pub const POLICY_GROUP: &str = "sidestep.dev";
/// Group of the Lease.
pub const LEASE_GROUP: &str = "coordination.k8s.io";

/// Every right that is used.
pub const RIGHTS: &[Right] = &[
    Right {
        group: "",
        resource: "pods",
        verbs: &["list", "watch"],
        used_for: Use::Pods,
    },
    Right {
        group: POOL_GROUP,
        resource: "inferencepools",
        verbs: &["list", "watch"],
        used_for: Use::Pods,
    },
    Right {
        group: POLICY_GROUP,
        resource: "disaggregationpolicies",
        verbs: &["list", "watch"],
        used_for: Use::Policy,
    },
    Right {
        group: POLICY_GROUP,
        resource: "disaggregationpolicies/status",
        verbs: &["patch"],
        used_for: Use::Status,
    },
    Right {
        group: LEASE_GROUP,
        resource: "leases",
        verbs: &["create", "get", "update"],
        used_for: Use::Status,
    },
];

//! Which pods a cluster says exist.
//!
//! Lives here: everything that talks to a Kubernetes API server. Pure: what objects mean
//! ([`endpoints`]), what is known of them at a moment ([`picture`]), the rights that all this needs
//! ([`rights`]). I/O: one loop per kind of object ([`follow`]), and the loop that turns objects into
//! pods ([`discover`]).
//! Never here: what a policy means (`config`), who is told of pods (`app`).
//! Invariant: what was known last is served until something newer is known as a whole; an API server
//! that is away, slow or refuses takes no pod away.

mod client;
mod discover;
pub mod endpoints;
mod follow;
mod lease;
pub mod objects;
pub mod picture;
pub mod rights;
mod write;

pub use client::{Cluster, ConnectError, Trouble};
pub use discover::discover;
pub use endpoints::{Discovery, KvPorts, RoleLabels, Template, Unlabelled};
pub use follow::{Heard, Kind, WATCH_SECONDS, Watches, Which, follow};
pub use lease::{Lease, RENEW as LEASE_RENEW};
pub use write::{now, write_policy_status};

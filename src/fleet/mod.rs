//! Which pods exist, and what is known about each of them.
//!
//! Lives here: the pod ([`Pod`], [`PodSpec`]), the roster of all pods ([`Roster`], [`View`]), and how
//! an engine is asked for its own numbers ([`exposition`], [`scrape`]), and how a cluster is asked
//! which pods there are ([`kubernetes`]).
//! Never here: what a pod holds (`kv`), what it was promised (`load`), which one is chosen (`decide`),
//! the format of the file that lists them (`config`).
//! Invariant: a reader sees one immutable [`View`]; a pod that is replaced gets a new
//! [`PodId`](crate::names::PodId), so nothing said about the old one reaches the new one.

pub mod exposition;
pub mod kubernetes;
mod pod;
mod roster;
pub mod scrape;
mod serving;
mod status;

pub use pod::{ASSUMED_PREFILL_BATCH, KvEventsSpec, Listed, Pod, PodSpec, Probe};
pub use roster::{Changes, MAX_PODS, Roster, View};
pub use status::{Reported, Status};

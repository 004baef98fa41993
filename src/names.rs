//! Names of things: pods, endpoints, models, sessions, tenants.
//!
//! Lives here: identities that every layer shares.
//! Never here: what a pod is (`fleet`), what it holds (`kv`), what it carries (`load`).
//! Invariant: a [`PodId`] names one incarnation of one pod and is never reused; a pod that goes and
//! comes back has another id, so that late events and late releases cannot touch its successor.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

/// One incarnation of a pod: a dense slot, and the generation that tells its users apart.
///
/// Slots are reused (so that per-pod state can live in arrays), generations are not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodId {
    /// Index into dense per-pod arrays.
    pub slot: u16,
    /// How many pods have held this slot before.
    pub generation: u32,
}

impl fmt::Display for PodId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.slot, self.generation)
    }
}

/// Where an engine listens. Displays as `ip:port`, IPv6 in brackets.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
#[serde(transparent)]
pub struct Endpoint(pub SocketAddr);

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

macro_rules! name {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub Arc<str>);

        impl $name {
            /// The text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl From<&str> for $name {
            fn from(text: &str) -> Self {
                $name(Arc::from(text))
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

name!(
    /// A model as clients and engines call it; an adapter (LoRA) has a name of the same kind.
    ModelName
);
name!(
    /// A conversation, as the client names it.
    SessionId
);
name!(
    /// Whose cache a request may share; engines know it as `cache_salt`.
    Tenant
);

//! Who of several replicas writes.
//!
//! Lives here: [`Lease`], held by one replica at a time.
//! Never here: what is written. Picking needs no lease: every replica picks.
//! Invariant: no two replicas hold it at once as long as their clocks run equally fast; what their
//! clocks show does not matter.
//!
//! A holder renews it well within its duration. Another replica takes it over when it has seen no
//! renewal for that duration, by its own clock. Each write names the version that it is based on, so of
//! two that take over at once one succeeds. Form:
//! <https://kubernetes.io/docs/concepts/architecture/leases/>.

use crate::fleet::kubernetes::client::{Call, Cluster, Trouble};
use crate::fleet::kubernetes::follow::{Kind, Watches};
use crate::fleet::kubernetes::objects::{LeaseObject, LeaseSpec};
use crate::fleet::kubernetes::write::now_micros;
use kube::core::Request;
use kube::core::params::{GetParams, PostParams};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// How long a lease lasts without renewal.
const DURATION: Duration = Duration::from_secs(15);
/// How often whoever wants it should call [`Lease::hold`].
pub const RENEW: Duration = Duration::from_secs(5);

/// A lease, wanted or held.
#[derive(Debug)]
pub struct Lease {
    cluster: Cluster,
    watches: Arc<Watches>,
    request: Request,
    name: String,
    identity: String,
    /// The last renewal by another holder, and when it was first seen here.
    seen: Option<(LeaseSpec, Instant)>,
    held_until: Option<Instant>,
    /// What was last said of it in the log.
    said: bool,
}

impl Lease {
    /// The lease `name` in `namespace`, wanted by `identity`, which no other replica has.
    #[must_use]
    pub fn new(
        cluster: Cluster,
        watches: Arc<Watches>,
        (namespace, name): (&str, &str),
        identity: String,
    ) -> Lease {
        Lease {
            cluster,
            watches,
            request: Request::new(Kind::Leases.path(namespace)),
            name: name.to_owned(),
            identity,
            seen: None,
            held_until: None,
            said: false,
        }
    }

    /// Whether it is held now.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.held_until.is_some_and(|until| Instant::now() < until)
    }

    /// Renews it, or takes it if it is free; says whether it is held.
    pub async fn hold(&mut self) -> bool {
        // The time before the request counts, not the one after it.
        let asked = Instant::now();
        match self.attempt(asked).await {
            Ok(true) => self.held_until = Some(asked + DURATION),
            Ok(false) => self.held_until = None,
            Err(trouble) => self.watches.failed(Kind::Leases, &trouble),
        }
        let now = self.is_held();
        if self.said != now {
            self.said = now;
            let lease = &self.name;
            tracing::info!(lease, identity = self.identity, held = now, "lease");
        }
        now
    }

    async fn attempt(&mut self, asked: Instant) -> Result<bool, Trouble> {
        let get = self.request.get(&self.name, &GetParams::default());
        let held: LeaseObject = match self.cluster.ask(call("get"), get).await {
            Ok(held) => held,
            Err(Trouble::NotFound { .. }) => return self.create().await,
            Err(trouble) => return Err(trouble),
        };
        self.watches.heard(Kind::Leases);
        let holder = held.spec.holder_identity.as_deref().unwrap_or_default();
        let ours = holder == self.identity;
        if !ours && !holder.is_empty() && !self.expired(&held.spec, asked) {
            return Ok(false);
        }
        let now = now_micros();
        let spec = LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: u32::try_from(DURATION.as_secs()).ok(),
            acquire_time: match held.spec.acquire_time {
                Some(acquired) if ours => Some(acquired),
                _ => Some(now.clone()),
            },
            renew_time: Some(now),
            lease_transitions: Some(held.spec.lease_transitions.unwrap_or(0) + u32::from(!ours)),
        };
        let body = object(&held.metadata, &spec);
        let params = PostParams::default();
        let put = self.request.replace(&self.name, &params, body);
        self.written(call("update"), put).await
    }

    async fn create(&self) -> Result<bool, Trouble> {
        let now = now_micros();
        let spec = LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: u32::try_from(DURATION.as_secs()).ok(),
            acquire_time: Some(now.clone()),
            renew_time: Some(now),
            lease_transitions: Some(0),
        };
        let body = object(&json!({"name": self.name}), &spec);
        let post = self.request.create(&PostParams::default(), body);
        self.written(call("create"), post).await
    }

    async fn written(
        &self,
        call: Call,
        request: Result<http::Request<Vec<u8>>, kube::core::request::Error>,
    ) -> Result<bool, Trouble> {
        match self.cluster.ask::<Value>(call, request).await {
            Ok(_) => {
                self.watches.heard(Kind::Leases);
                Ok(true)
            }
            // Another replica was faster.
            Err(Trouble::Outdated { .. }) => Ok(false),
            Err(trouble) => Err(trouble),
        }
    }

    /// Whether the holder has not renewed it for as long as it lasts.
    fn expired(&mut self, spec: &LeaseSpec, now: Instant) -> bool {
        let lasts = spec
            .lease_duration_seconds
            .map_or(DURATION, |seconds| Duration::from_secs(seconds.into()));
        match &self.seen {
            Some((seen, since)) if seen == spec => lasts <= now.duration_since(*since),
            _ => {
                self.seen = Some((spec.clone(), now));
                false
            }
        }
    }
}

fn call(verb: &'static str) -> Call {
    Call {
        verb,
        resource: Kind::Leases.resource(),
    }
}

fn object(metadata: &Value, spec: &LeaseSpec) -> Vec<u8> {
    let object = json!({
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": metadata,
        "spec": spec,
    });
    object.to_string().into_bytes()
}

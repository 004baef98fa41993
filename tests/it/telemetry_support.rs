//! What the telemetry tests share: a picker without a gateway, and spans as a receiver decodes them.

use crate::decide_fixture;
use bytes::Bytes;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use prost::Message;
use sidestep::decide::policy::{Bypass, IslBound, Policy, SessionAffinity, SessionKey};
use sidestep::decide::snapshot::{LocalPrefill, Role};
use sidestep::fleet::{PodSpec, Probe, Roster};
use sidestep::kv::index::Index;
use sidestep::load::Ledger;
use sidestep::names::{Endpoint, ModelName};
use sidestep::observe::{Observer, Sources};
use sidestep::pick::{Head, InForce, Parts, Picker};
use sidestep::prompt::{Encoder, Profile, Profiles};
use sidestep::route::Dialect;
use sidestep::telemetry::journal::Journal;
use sidestep::telemetry::metrics::Metrics;
use sidestep::telemetry::trace::Tracing;
use sidestep::units::{BlockSize, Tokens};
use std::sync::Arc;
use std::time::Duration;

pub(crate) type Span = opentelemetry_proto::tonic::trace::v1::Span;

const SESSION: &str = "x-session";

/// Bypasses prompts below 1,000 tokens; conversations stay on their pod.
pub(crate) fn policy() -> Policy {
    let bound = IslBound {
        cold_bypass_below: Tokens(1000),
        ..decide_fixture::bound(2048, 0.7)
    };
    Policy {
        session_affinity: SessionAffinity::Soft(SessionKey {
            header: Arc::from(SESSION),
            ttl: Duration::from_secs(60),
        }),
        ..decide_fixture::policy([decide_fixture::rule(Bypass::IslBounding(bound))])
    }
}

/// Always prefills remotely.
pub(crate) fn remote_policy() -> Policy {
    decide_fixture::policy([decide_fixture::rule(Bypass::Never)])
}

pub(crate) fn pod(name: &str, endpoint: &str, role: Role) -> PodSpec {
    PodSpec {
        name: name.into(),
        uid: name.into(),
        endpoint: Endpoint(endpoint.parse().unwrap()),
        role,
        models: Vec::new(),
        adapters: Vec::new(),
        local_prefill: LocalPrefill::Able,
        kv_events: None,
        block_size: BlockSize::new(16),
        kv_blocks: None,
        prefill_batch_tokens: None,
        probe: Probe::Off,
        listed: sidestep::fleet::Listed::Ready,
    }
}

/// One decode pod, one prefill pod, model `m`.
pub(crate) fn picker(policy: Policy, tracing: &Tracing) -> Arc<Picker> {
    let pods = vec![
        pod("d1", "127.0.0.11:8000", Role::Decode),
        pod("p1", "127.0.0.21:8000", Role::Prefill),
    ];
    rig(policy, tracing, pods)
}

pub(crate) fn rig(policy: Policy, tracing: &Tracing, pods: Vec<PodSpec>) -> Arc<Picker> {
    let roster = Arc::new(Roster::new());
    roster.apply(pods);
    let model = Profile::byte_estimate(ModelName::from("m"), Vec::new());
    Arc::new(Picker::new(Parts {
        encoder: Encoder::new(Profiles::new(vec![model]).unwrap(), 1 << 20),
        observer: Observer::new(
            roster,
            Arc::new(Index::new(Default::default())),
            Arc::new(Sources::default()),
            BlockSize::new(16).unwrap(),
        ),
        ledger: Ledger::default(),
        in_force: InForce {
            policy,
            dialect: Dialect::DecodeFirst,
        },
        metrics: Metrics::new(),
        tracing: tracing.clone(),
        journal: Journal::new(64),
    }))
}

pub(crate) fn head(trace_parent: Option<&str>, session: Option<&str>) -> Head {
    let mut head = Head {
        method: "POST".into(),
        path: "/v1/completions".into(),
        trace_parent: trace_parent.map(Into::into),
        ..Head::default()
    };
    if let Some(session) = session {
        head.headers.push(SESSION, session.to_owned());
    }
    head
}

pub(crate) fn completion(prompt: &str) -> Option<Bytes> {
    named("m", prompt)
}

pub(crate) fn named(model: &str, prompt: &str) -> Option<Bytes> {
    let body = serde_json::json!({"model": model, "prompt": prompt});
    Some(Bytes::from(body.to_string()))
}

/// The spans of an export.
pub(crate) fn decode(bytes: &[u8]) -> Vec<Span> {
    let request = ExportTraceServiceRequest::decode(bytes).unwrap();
    let resources = request.resource_spans.into_iter();
    resources
        .flat_map(|resource| resource.scope_spans)
        .flat_map(|scope| scope.spans)
        .collect()
}

/// The value of an attribute, as text.
pub(crate) fn attribute(attributes: &[KeyValue], key: &str) -> Option<String> {
    let pair = attributes.iter().find(|pair| pair.key == key)?;
    Some(match pair.value.as_ref()?.value.as_ref()? {
        Value::StringValue(text) => text.clone(),
        Value::IntValue(value) => value.to_string(),
        Value::BoolValue(value) => value.to_string(),
        Value::DoubleValue(value) => value.to_string(),
        other => format!("{other:?}"),
    })
}

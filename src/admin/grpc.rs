//! Explanations over gRPC: `sidestep.v1.Explainer`.
//!
//! Lives here: the service, and how an [`Explanation`] is written as its messages.
//! Never here: what is explained (see `pick`), the port (see `app`).
//! Invariant: the same bounds as on the admin port; both share one [`Explainer`].

use crate::pick::{Explainer, Head, Refusal};
use crate::telemetry::explanation::{
    CapacityLine, CheckLine, Explanation, PodLine, PodName, PolicyName, RequestLine, Standing,
    Verdict,
};
use bytes::Bytes;
use std::sync::Arc;
use tonic::{Code, Request, Response, Status};

/// The messages and the service of `proto/sidestep/v1`.
#[allow(missing_docs, unreachable_pub, clippy::all, reason = "generated")]
pub mod pb {
    tonic::include_proto!("sidestep.v1");
}

use pb::explainer_server::{Explainer as Explains, ExplainerServer};

/// Bytes of a message beyond the body in it.
const MESSAGE_SLACK: usize = 64 << 10;

/// The service.
#[must_use]
pub fn service(explainer: Arc<Explainer>) -> ExplainerServer<Service> {
    let largest = explainer.limits().body.saturating_add(MESSAGE_SLACK);
    ExplainerServer::new(Service(explainer)).max_decoding_message_size(largest)
}

/// Explains through an [`Explainer`].
#[derive(Debug)]
pub struct Service(Arc<Explainer>);

#[tonic::async_trait]
impl Explains for Service {
    async fn explain(
        &self,
        request: Request<pb::ExplainRequest>,
    ) -> Result<Response<pb::ExplainResponse>, Status> {
        let turn = self.0.turn().map_err(status)?;
        let pb::ExplainRequest {
            path,
            headers,
            body,
        } = request.into_inner();
        let mut head = Head {
            method: "POST".to_owned(),
            path: match path.as_str() {
                "" => super::explain::DEFAULT_PATH.to_owned(),
                _ => path,
            },
            ..Head::default()
        };
        for header in headers {
            head.headers.push(&header.name, header.value);
        }
        let body = Some(Bytes::from(body));
        let explanation = self.0.explain(turn, head, body).await.map_err(status)?;
        Ok(Response::new(message(explanation)))
    }

    async fn explain_decision(
        &self,
        request: Request<pb::ExplainDecisionRequest>,
    ) -> Result<Response<pb::ExplainResponse>, Status> {
        let id = &request.get_ref().decision;
        let explanation = self
            .0
            .decision(id)
            .ok_or_else(|| Status::not_found("no decision with this id among the last ones"))?;
        Ok(Response::new(message(explanation)))
    }
}

fn status(refusal: Refusal) -> Status {
    let code = match refusal.status {
        429 => Code::ResourceExhausted,
        400..=499 => Code::InvalidArgument,
        _ => Code::Unavailable,
    };
    Status::new(code, refusal.message)
}

fn message(explanation: Explanation) -> pb::ExplainResponse {
    let shadow = explanation.shadow.map(|shadow| pb::Shadow {
        policy: Some(policy(shadow.policy)),
        agrees: shadow.agrees,
        verdict: Some(verdict(shadow.verdict)),
    });
    pb::ExplainResponse {
        decision: explanation.decision.unwrap_or_default(),
        policy: Some(policy(explanation.policy)),
        request: Some(request(explanation.request)),
        verdict: Some(verdict(explanation.verdict)),
        shadow,
        pods: explanation.pods.into_iter().map(pod).collect(),
        pods_left_out: explanation.pods_left_out as u64,
    }
}

fn policy(policy: PolicyName) -> pb::PolicyName {
    pb::PolicyName {
        name: policy.name,
        generation: policy.generation,
    }
}

fn request(request: RequestLine) -> pb::RequestFacts {
    pb::RequestFacts {
        operation: request.operation.unwrap_or_default(),
        model: request.model.unwrap_or_default(),
        prompt_tokens: request.prompt_tokens,
        counted: request.counted,
        encode_trouble: request.encode_trouble.unwrap_or_default(),
        session: request.session,
    }
}

fn verdict(verdict: Verdict) -> pb::Verdict {
    pb::Verdict {
        route: verdict.route,
        because: verdict.because,
        meaning: verdict.meaning,
        bypass: verdict.bypass,
        rule: u32::try_from(verdict.rule).unwrap_or(u32::MAX),
        decode: verdict.decode.map(name),
        prefill: verdict.prefill.map(name),
        checks: verdict.checks.into_iter().map(check).collect(),
        flip: verdict.flip.unwrap_or_default(),
    }
}

fn name(name: PodName) -> pb::PodName {
    pb::PodName {
        name: name.name.unwrap_or_default(),
        endpoint: name.endpoint,
    }
}

fn check(check: CheckLine) -> pb::Check {
    pb::Check {
        what: check.what,
        value: check.value,
        operator: check.operator,
        threshold: check.threshold,
        allows_bypass: check.allows_bypass,
    }
}

fn pod(pod: PodLine) -> pb::Pod {
    pb::Pod {
        name: pod.name.unwrap_or_default(),
        endpoint: pod.endpoint,
        role: pod.role,
        availability: pod.availability,
        kv_source: pod.kv_source,
        local_prefill: pod.local_prefill,
        block_size: pod.block_size,
        cached: Some(pb::Cached {
            device: pod.cached.device,
            host: pod.cached.host,
            disk: pod.cached.disk,
        }),
        load: Some(pb::Load {
            requests: pod.load.requests,
            prefill_tokens: pod.load.prefill_tokens,
            decode_blocks: pod.load.decode_blocks,
            shared_blocks: pod.load.shared_blocks,
        }),
        prefill_capacity: Some(capacity(pod.prefill_capacity)),
        kv_capacity: Some(capacity(pod.kv_capacity)),
        engine: pod.engine.map(|engine| pb::Engine {
            waiting: engine.waiting,
            running: engine.running,
            kv_usage: engine.kv_usage,
        }),
        local: Some(standing(pod.local)),
        prefill: Some(standing(pod.prefill)),
        decode: Some(standing(pod.decode)),
    }
}

fn capacity(capacity: CapacityLine) -> pb::Capacity {
    pb::Capacity {
        value: capacity.value,
        source: capacity.source.unwrap_or_default(),
    }
}

fn standing(standing: Standing) -> pb::Standing {
    pb::Standing {
        selected: standing.selected,
        cost: standing.cost.map(|cost| pb::Cost {
            prefill: cost.prefill,
            credit: cost.credit,
            decode: cost.decode,
            requests: cost.requests,
            total: cost.total,
        }),
        ineligible: standing.ineligible.unwrap_or_default(),
    }
}

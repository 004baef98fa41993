//! What a decision says in its span.
//!
//! Lives here: one function per part of a decision.
//! Never here: names (see `telemetry::fields`), choices.
//! Invariant: no prompt text, no session name, and of client text only a configured model's name.

use crate::decide::reason::{Check, Checked};
use crate::decide::{Considered, Decision, Pick};
use crate::telemetry::explanation::flip_sentence;
use crate::telemetry::fields;
use crate::telemetry::record::{Facts, check_line};
use crate::telemetry::shadow::ShadowFacts;
use crate::telemetry::trace::wire::SpanBytes;

/// Writes a decision.
pub(super) fn decision(span: &mut SpanBytes, decision: &Decision, facts: &Facts) {
    request(span, decision, facts);
    outcome(span, decision, facts);
    considered(span, &decision.considered);
    if let Some(flip) = &facts.flip {
        span.text(fields::FLIP, &flip_sentence(flip));
    }
    if !decision.checks.is_empty() {
        let lines: Vec<String> = decision.checks.iter().map(check_line).collect();
        span.texts(fields::CHECKS, &lines);
        for check in &decision.checks {
            check_numbers(span, check);
        }
    }
}

/// Writes what the shadow says of it.
pub(super) fn shadow(span: &mut SpanBytes, shadow: &ShadowFacts) {
    span.text(fields::SHADOW_POLICY, &shadow.policy);
    span.text(fields::SHADOW_ROUTE, shadow.words.route);
    span.text(fields::SHADOW_BECAUSE, shadow.words.because);
    span.flag(fields::SHADOW_BYPASS, shadow.words.bypass);
    span.flag(fields::SHADOW_AGREES, shadow.agrees);
}

fn request(span: &mut SpanBytes, decision: &Decision, facts: &Facts) {
    if let Some(operation) = facts.operation {
        span.text(fields::OPERATION, operation);
    }
    if let Some(model) = &facts.model {
        span.text(fields::MODEL, model);
    }
    if let Some(most) = facts.max_tokens {
        span.int(fields::MAX_TOKENS, u64::from(most));
    }
    span.flag(fields::STREAM, facts.stream);
    span.int(fields::PROMPT_TOKENS, decision.prompt_tokens.0);
    span.text(fields::COUNTED, facts.counted);
    if let Some(trouble) = facts.encode_trouble {
        span.text(fields::ENCODE_TROUBLE, trouble);
    }
    span.text(fields::SESSION, facts.session.as_str());
    span.int(fields::CANDIDATES, facts.candidates as u64);
}

fn outcome(span: &mut SpanBytes, decision: &Decision, facts: &Facts) {
    let route = &decision.route;
    let decode = route.decode();
    let destination = decode.candidate.endpoint.0;
    span.text(fields::DECISION_ID, &facts.decision_id);
    span.text(fields::ROUTE, route.as_str());
    span.text(fields::BECAUSE, decision.because.as_str());
    span.flag(fields::BYPASS, decision.because.is_bypass());
    span.text(fields::POLICY, &facts.policy);
    span.int(fields::GENERATION, facts.generation);
    span.int(fields::RULE, decision.rule as u64);
    span.display(fields::SERVER_ADDRESS, destination.ip());
    span.int(fields::SERVER_PORT, u64::from(destination.port()));
    span.display(fields::DECODE_ENDPOINT, decode.candidate.endpoint);
    span.text(fields::DECODE_POD, &facts.decode_pod);
    span.text(
        fields::DECODE_KV_SOURCE,
        decode.candidate.kv_source.as_str(),
    );
    if let (Some(prefill), Some(name)) = (route.prefill(), &facts.prefill_pod) {
        span.display(fields::PREFILL_ENDPOINT, prefill.candidate.endpoint);
        span.text(fields::PREFILL_POD, name);
        span.text(
            fields::PREFILL_KV_SOURCE,
            prefill.candidate.kv_source.as_str(),
        );
    }
}

fn considered(span: &mut SpanBytes, considered: &Considered) {
    if let Some(local) = &considered.local {
        span.int(fields::CACHED_TOKENS, local.cached_tokens.0);
        span.int(fields::NET_NEW_TOKENS, local.net_new_tokens.0);
        let leg = Leg {
            endpoint: fields::LOCAL_POD,
            cost: fields::LOCAL_COST,
            device: fields::LOCAL_DEVICE,
            host: fields::LOCAL_HOST,
            disk: fields::LOCAL_DISK,
        };
        leg.put(span, local);
        let candidate = &local.candidate;
        span.text(fields::LOCAL_KV_SOURCE, candidate.kv_source.as_str());
        span.int(
            fields::LOCAL_PREFILL_TOKENS,
            candidate.load.prefill_tokens.0,
        );
        span.int(
            fields::LOCAL_DECODE_BLOCKS,
            u64::from(candidate.load.decode_blocks.0),
        );
    }
    if let Some(prefill) = &considered.prefill {
        let leg = Leg {
            endpoint: fields::REMOTE_PREFILL,
            cost: fields::REMOTE_PREFILL_COST,
            device: fields::REMOTE_PREFILL_DEVICE,
            host: fields::REMOTE_PREFILL_HOST,
            disk: fields::REMOTE_PREFILL_DISK,
        };
        leg.put(span, prefill);
        span.int(fields::REMOTE_PREFILL_CACHED, prefill.cached_tokens.0);
        span.int(
            fields::REMOTE_PREFILL_TOKENS,
            prefill.candidate.load.prefill_tokens.0,
        );
    }
    if let Some(decode) = &considered.decode {
        span.display(fields::REMOTE_DECODE, decode.candidate.endpoint);
        span.float(fields::REMOTE_DECODE_COST, decode.cost.total);
        span.int(
            fields::REMOTE_DECODE_BLOCKS,
            u64::from(decode.candidate.load.decode_blocks.0),
        );
    }
}

/// The names under which one selection is written.
struct Leg {
    endpoint: &'static str,
    cost: &'static str,
    device: &'static str,
    host: &'static str,
    disk: &'static str,
}

impl Leg {
    fn put(&self, span: &mut SpanBytes, pick: &Pick) {
        let cached = &pick.candidate.cached;
        span.display(self.endpoint, pick.candidate.endpoint);
        span.float(self.cost, pick.cost.total);
        span.int(self.device, u64::from(cached.device.0));
        span.int(self.host, u64::from(cached.host.0));
        span.int(self.disk, u64::from(cached.disk.0));
    }
}

fn check_numbers(span: &mut SpanBytes, check: &Check) {
    let (value, threshold) = match check.what {
        Checked::NetNewTokens => (fields::NET_NEW_VALUE, fields::NET_NEW_THRESHOLD),
        Checked::NetNewShare => (fields::RATIO_VALUE, fields::RATIO_THRESHOLD),
        Checked::PromptTokens => (fields::PROMPT_VALUE, fields::PROMPT_THRESHOLD),
        Checked::PrefillBusy => (fields::PREFILL_BUSY_VALUE, fields::PREFILL_BUSY_THRESHOLD),
        Checked::DecodeBusy => (fields::DECODE_BUSY_VALUE, fields::DECODE_BUSY_THRESHOLD),
    };
    span.float(value, check.value);
    span.float(threshold, check.threshold);
}

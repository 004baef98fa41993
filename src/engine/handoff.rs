//! Who prefills and who decodes: the headers and `kv_transfer_params` of a split request.
//!
//! Lives here: reading both ([`Handoff`], [`Transfer`]), writing the prefill leg, the client side of
//! engine-to-engine calls ([`Peers`]).
//! Never here: scheduling, answers to clients.
//! Invariant: a split request names exactly one other engine, or it is refused.
//!
//! The decode-first contract is llm-d's sidecar merged into the engine; the wire shapes are those of
//! vLLM's NixlConnector: the prefill leg is the same body with `stream: false`, `max_tokens: 1` and
//! `do_remote_decode`, its answer carries `kv_transfer_params` at the top level.

use super::config::Role;
use super::fields::Fields;
use super::refusal::Refusal;
use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use serde_json::{Map, Value, json};
use std::net::SocketAddr;
use std::time::Duration;

/// Names the prefill engine, to a decode engine.
pub(super) const PREFILLER: &str = "x-prefiller-host-port";
/// Names the decode engine, to a prefill engine.
pub(super) const DECODER: &str = "x-decoder-host-port";
/// Headers that follow a request to the other engine.
const FORWARDED: [&str; 6] = [
    "authorization",
    "baggage",
    "traceparent",
    "tracestate",
    "x-request-id",
    "x-sidestep-decision",
];
/// Where a decode engine asks for blocks kept for it, and says that it has them.
pub(super) const KV_OPEN: &str = "/sim/kv/open";
/// See [`KV_OPEN`].
pub(super) const KV_DONE: &str = "/sim/kv/done";
/// How long to wait for a connection; vLLM's handshake gives up after as long.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long an unused connection is kept; shorter than any engine's own limit.
const IDLE_TIMEOUT: Duration = Duration::from_secs(4);
/// Largest answer read from another engine; a prompt of a million tokens lists its blocks in less.
const MAX_PEER_ANSWER: usize = 8 << 20;

/// The other engine a request's headers name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Handoff {
    /// None: the request is served here.
    Here,
    /// Another engine prefills, this one decodes.
    PrefillAt(SocketAddr),
    /// This engine prefills, another one decodes.
    DecodeAt(SocketAddr),
}

/// Reads the routing headers.
pub(super) fn handoff(headers: &HeaderMap, role: Role) -> Result<Handoff, Refusal> {
    match (single(headers, PREFILLER)?, single(headers, DECODER)?) {
        (None, None) => Ok(Handoff::Here),
        (Some(_), Some(_)) => Err(Refusal::bad_request(format!(
            "headers: expected one of {PREFILLER} and {DECODER}, found both"
        ))),
        (Some(_), None) if role == Role::Prefill => Err(misplaced(PREFILLER, "decode", role)),
        (None, Some(_)) if role == Role::Decode => Err(misplaced(DECODER, "prefill", role)),
        (Some(address), None) => Ok(Handoff::PrefillAt(address)),
        (None, Some(address)) => Ok(Handoff::DecodeAt(address)),
    }
}

fn misplaced(header: &str, expected: &str, role: Role) -> Refusal {
    let found = role.as_str();
    Refusal::bad_request(format!(
        "{header}: expected at a {expected} engine, found at a {found} engine"
    ))
}

fn single(headers: &HeaderMap, name: &str) -> Result<Option<SocketAddr>, Refusal> {
    let mut values = headers.get_all(name).iter();
    let Some(value) = values.next() else {
        return Ok(None);
    };
    let address = value.to_str().ok().and_then(|text| text.parse().ok());
    match (address, values.next()) {
        (Some(address), None) => Ok(Some(address)),
        (_, Some(_)) => Err(Refusal::bad_request(format!(
            "{name}: expected exactly one value, found several"
        ))),
        (None, None) => Err(Refusal::bad_request(format!(
            "{name}: expected one ip:port, found something else"
        ))),
    }
}

/// What `kv_transfer_params` asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Transfer {
    /// Nothing.
    None,
    /// Prefill, and keep the blocks for a decode engine.
    RemoteDecode,
    /// Fetch the prompt from a prefill engine.
    RemotePrefill(Remote),
}

/// Blocks kept on another engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Remote {
    pub(super) address: SocketAddr,
    pub(super) engine_id: String,
    pub(super) request_id: String,
    /// What the prefill engine found in its own cache, in tokens.
    pub(super) cached: u64,
}

/// Reads a request's `kv_transfer_params`.
pub(super) fn transfer(
    params: Option<&Map<String, Value>>,
    role: Role,
) -> Result<Transfer, Refusal> {
    const FIELD: &str = "kv_transfer_params";
    let Some(params) = params else {
        return Ok(Transfer::None);
    };
    let flag = |name: &str| match params.get(name) {
        None | Some(Value::Null) => Ok(false),
        Some(Value::Bool(flag)) => Ok(*flag),
        Some(_) => Err(Refusal::bad_field(
            FIELD,
            format!("{FIELD}.{name}: expected a boolean, found something else"),
        )),
    };
    let decode = flag("do_remote_decode")?;
    let prefill = flag("do_remote_prefill")?;
    let refuse = |expected: &str, found: &str| {
        let message = format!("{FIELD}: expected {expected}, found {found}");
        Err(Refusal::bad_field(FIELD, message))
    };
    match (decode, prefill, role) {
        (true, true, _) => refuse("one of do_remote_decode and do_remote_prefill", "both"),
        (false, _, Role::Prefill) => refuse("do_remote_decode at a prefill engine", "none"),
        (true, _, Role::Decode) => refuse("no do_remote_decode at a decode engine", "one"),
        (true, false, _) => Ok(Transfer::RemoteDecode),
        (false, false, _) => Ok(Transfer::None),
        (false, true, _) => match remote(params) {
            Some(remote) => Ok(Transfer::RemotePrefill(remote)),
            None => refuse(
                "remote_host, remote_port, remote_engine_id and remote_request_id",
                "not all of them",
            ),
        },
    }
}

fn remote(params: &Map<String, Value>) -> Option<Remote> {
    let text = |name: &str| params.get(name).and_then(Value::as_str);
    let host = text("remote_host")?.parse().ok()?;
    let port = params.get("remote_port").and_then(Value::as_u64)?;
    Some(Remote {
        address: SocketAddr::new(host, u16::try_from(port).ok()?),
        engine_id: text("remote_engine_id")?.to_owned(),
        request_id: text("remote_request_id")?.to_owned(),
        cached: params
            .get("remote_prefill_cached_tokens")
            .and_then(Value::as_u64)
            .unwrap_or(0),
    })
}

/// Blocks a prefill engine keeps, as it tells the decode engine.
pub(super) struct Kept<'a> {
    pub(super) blocks: &'a [u32],
    pub(super) engine_id: &'a str,
    pub(super) request_id: &'a str,
    pub(super) address: SocketAddr,
    pub(super) tokens: u64,
    pub(super) cached: u64,
}

impl Kept<'_> {
    /// The `kv_transfer_params` of a prefill answer (vLLM 0.32, NixlConnector).
    pub(super) fn params(&self) -> Value {
        json!({
            "do_remote_prefill": true,
            "do_remote_decode": false,
            "remote_block_ids": [self.blocks],
            "remote_engine_id": self.engine_id,
            "remote_request_id": self.request_id,
            "remote_host": self.address.ip().to_string(),
            "remote_port": self.address.port(),
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": self.tokens,
            "remote_blocks_expiry_time": null,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": self.cached,
        })
    }
}

/// The body of the prefill leg.
pub(super) fn prefill_body(fields: &Fields<'_>) -> Vec<u8> {
    let params = json!({
        "do_remote_decode": true,
        "do_remote_prefill": false,
        "remote_engine_id": null,
        "remote_block_ids": null,
        "remote_host": null,
        "remote_port": null,
    });
    let removed = ["stream_options", "min_tokens", "max_completion_tokens"];
    let added = [
        ("stream", Value::Bool(false)),
        ("max_tokens", Value::from(1)),
        ("kv_transfer_params", params),
    ];
    fields.rewrite(&removed, &added)
}

/// The body of the decode leg: the client's, with what the prefill engine keeps.
pub(super) fn decode_body(fields: &Fields<'_>, params: Value) -> Vec<u8> {
    fields.rewrite(&[], &[("kv_transfer_params", params)])
}

/// Why another engine gave no usable answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum PeerError {
    /// No connection, or it broke.
    #[error("peer engine {address}: expected an answer, found {fault}")]
    Unreachable {
        address: SocketAddr,
        fault: &'static str,
    },
    /// It answered with an error.
    #[error("peer engine {address}: expected success, found status {status}")]
    Refused {
        address: SocketAddr,
        status: StatusCode,
        body: Bytes,
    },
}

/// Calls to other engines.
pub(super) struct Peers {
    client: Client<HttpConnector, Full<Bytes>>,
    timeout: Duration,
}

impl Peers {
    /// A client that waits for an answer at most so long.
    pub(super) fn new(timeout: Duration) -> Peers {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
        connector.set_nodelay(true);
        Peers {
            client: Client::builder(TokioExecutor::new())
                .pool_timer(TokioTimer::new())
                .pool_idle_timeout(IDLE_TIMEOUT)
                .build(connector),
            timeout,
        }
    }

    /// Sends a body and waits for the head of the answer.
    pub(super) async fn send(
        &self,
        address: SocketAddr,
        path: &str,
        from: &HeaderMap,
        body: Vec<u8>,
    ) -> Result<Response<Incoming>, PeerError> {
        let fault = |fault| PeerError::Unreachable { address, fault };
        let mut request = Request::builder()
            .method(Method::POST)
            .uri(format!("http://{address}{path}"))
            .body(Full::from(body))
            .map_err(|_| fault("no valid address"))?;
        let headers = request.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        for name in FORWARDED {
            if let Some(value) = from.get(name) {
                headers.insert(name, value.clone());
            }
        }
        match tokio::time::timeout(self.timeout, self.client.request(request)).await {
            Ok(Ok(response)) => Ok(response),
            Ok(Err(_)) => Err(fault("no connection")),
            Err(_) => Err(fault("a timeout")),
        }
    }

    /// Sends a body and reads the whole answer, which must be a success.
    pub(super) async fn call(
        &self,
        address: SocketAddr,
        path: &str,
        from: &HeaderMap,
        body: Vec<u8>,
    ) -> Result<Bytes, PeerError> {
        let (head, answer) = self.send(address, path, from, body).await?.into_parts();
        let answer = tokio::time::timeout(
            self.timeout,
            Limited::new(answer, MAX_PEER_ANSWER).collect(),
        );
        let body = match answer.await {
            Ok(Ok(collected)) => collected.to_bytes(),
            Ok(Err(_)) | Err(_) => {
                let fault = "a broken answer";
                return Err(PeerError::Unreachable { address, fault });
            }
        };
        if head.status.is_success() {
            return Ok(body);
        }
        Err(PeerError::Refused {
            address,
            status: head.status,
            body,
        })
    }
}

#[cfg(test)]
mod tests;

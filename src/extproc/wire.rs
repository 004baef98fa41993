//! Envoy's messages, read and written.
//!
//! Lives here: `ProcessingRequest` → [`Incoming`], [`Outgoing`] → `ProcessingResponse`.
//! Never here: order, state, deadlines (see `session`).
//! Invariant: every header that is set carries the explicit action overwrite-or-add and its value
//! as raw bytes; a destination is written as header and as metadata from the same value.
//!
//! Wire format: `envoy/service/ext_proc/v3/external_processor.proto`.

use crate::decide::ask::{Subset, SubsetEntry};
use crate::extproc::conformance::SERVED_ECHO;
use crate::extproc::message::{BodyMode, BodyReply, Incoming, Modes, Outgoing};
use crate::names::Endpoint;
use crate::pick::{Head, Headers, Refusal};
use crate::route::names::{
    DECISION, DESTINATION, METADATA_NAMESPACE, SERVED, SUBSET, SUBSET_NAMESPACE,
};
use crate::route::{HeaderEdit, Plan};
use bytes::Bytes;
use envoy_types::pb::envoy::config::core::v3::header_value_option::HeaderAppendAction;
use envoy_types::pb::envoy::config::core::v3::{
    HeaderMap, HeaderValue, HeaderValueOption, Metadata,
};
use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::processing_mode::BodySendMode;
use envoy_types::pb::envoy::service::ext_proc::v3::body_mutation::Mutation;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    BodyMutation, BodyResponse, CommonResponse, HeaderMutation, HeadersResponse, HttpHeaders,
    ImmediateResponse, ProcessingRequest, ProcessingResponse, ProtocolConfiguration,
    StreamedBodyResponse, TrailersResponse,
};
use envoy_types::pb::envoy::r#type::v3::{HttpStatus, StatusCode};
use envoy_types::pb::google::protobuf::value::Kind;
use envoy_types::pb::google::protobuf::{Struct, Value};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

/// One key in the gateway's dynamic metadata.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetadataKey {
    /// The namespace it is in.
    pub namespace: Arc<str>,
    /// The key.
    pub key: Arc<str>,
}

impl MetadataKey {
    fn new(namespace: &str, key: &str) -> MetadataKey {
        MetadataKey {
            namespace: namespace.into(),
            key: key.into(),
        }
    }

    fn value<'a>(&self, metadata: Option<&'a Metadata>) -> Option<&'a Value> {
        let namespace = metadata?.filter_metadata.get(&*self.namespace)?;
        namespace.fields.get(&*self.key)
    }
}

/// Where dynamic metadata holds what; the default is what the endpoint picker protocol says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetadataKeys {
    /// The endpoints that the gateway allows.
    pub subset_hint: MetadataKey,
    /// The chosen destination.
    pub destination: MetadataKey,
    /// The endpoint that the gateway reached.
    pub served: MetadataKey,
}

impl Default for MetadataKeys {
    fn default() -> Self {
        MetadataKeys {
            subset_hint: MetadataKey::new(SUBSET_NAMESPACE, SUBSET),
            destination: MetadataKey::new(METADATA_NAMESPACE, DESTINATION),
            served: MetadataKey::new(METADATA_NAMESPACE, SERVED),
        }
    }
}

/// W3C trace context as the gateway sent it in the stream's own metadata.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GatewayTrace {
    /// `traceparent`, when the gateway traces.
    pub parent: Option<Arc<str>>,
    /// `tracestate`.
    pub state: Option<Arc<str>>,
}

/// A gateway's message: what it announces, and what it says.
#[must_use]
pub fn read(
    message: ProcessingRequest,
    keys: &MetadataKeys,
    trace: &GatewayTrace,
) -> (Option<Modes>, Incoming) {
    let modes = message.protocol_config.as_ref().map(modes);
    let metadata = message.metadata_context;
    if message.observability_mode {
        return (modes, Incoming::Shown);
    }
    let incoming = match message.request {
        None => Incoming::Other,
        Some(Request::RequestHeaders(headers)) => Incoming::RequestHeaders {
            end: headers.end_of_stream,
            head: Box::new(head(headers, subset(metadata.as_ref(), keys), trace)),
        },
        Some(Request::RequestBody(body)) => Incoming::RequestBody {
            bytes: body.body.into(),
            end: body.end_of_stream,
        },
        Some(Request::RequestTrailers(_)) => Incoming::RequestTrailers,
        Some(Request::ResponseHeaders(headers)) => Incoming::ResponseHeaders {
            status: status(&headers),
            served: served(metadata.as_ref(), keys),
            end: headers.end_of_stream,
        },
        Some(Request::ResponseBody(body)) => Incoming::ResponseBody {
            bytes: body.body.into(),
            end: body.end_of_stream,
        },
        Some(Request::ResponseTrailers(_)) => Incoming::ResponseTrailers,
    };
    (modes, incoming)
}

fn modes(config: &ProtocolConfiguration) -> Modes {
    Modes {
        request: body_mode(config.request_body_mode),
        response: body_mode(config.response_body_mode),
    }
}

fn body_mode(mode: i32) -> BodyMode {
    match BodySendMode::try_from(mode) {
        Ok(BodySendMode::None) => BodyMode::None,
        Ok(BodySendMode::Streamed) => BodyMode::Streamed,
        Ok(BodySendMode::Buffered) => BodyMode::Buffered,
        Ok(BodySendMode::BufferedPartial) => BodyMode::BufferedPartial,
        Ok(BodySendMode::FullDuplexStreamed) => BodyMode::FullDuplex,
        Ok(BodySendMode::Grpc) | Err(_) => BodyMode::Unsupported,
    }
}

fn head(headers: HttpHeaders, subset: Subset, trace: &GatewayTrace) -> Head {
    let mut head = Head {
        subset,
        ..Head::default()
    };
    for header in headers.headers.unwrap_or_default().headers {
        let value = value_of(header.value, header.raw_value);
        match header.key.as_str() {
            ":method" => head.method = text(&value).to_ascii_uppercase(),
            ":path" => head.path = text(&value),
            name => head.headers.push(name, value),
        }
    }
    take_trace(&mut head, trace);
    head
}

fn take_trace(head: &mut Head, trace: &GatewayTrace) {
    head.gateway_traces = trace.parent.is_some();
    if head.gateway_traces {
        head.trace_parent = trace.parent.clone();
        head.trace_state = trace.state.clone();
    } else {
        let header = |headers: &Headers, name| headers.get(name).map(Arc::from);
        head.trace_parent = header(&head.headers, "traceparent");
        head.trace_state = header(&head.headers, "tracestate");
    }
}

/// Gateways fill one of the two; the raw one can hold every byte.
fn value_of(value: String, raw: Vec<u8>) -> Bytes {
    if raw.is_empty() {
        value.into()
    } else {
        raw.into()
    }
}

fn text(value: &Bytes) -> String {
    String::from_utf8_lossy(value).into_owned()
}

fn status(headers: &HttpHeaders) -> Option<u16> {
    let HeaderMap { headers } = headers.headers.as_ref()?;
    let status = headers.iter().find(|header| header.key == ":status")?;
    let digits = if status.raw_value.is_empty() {
        status.value.as_str()
    } else {
        std::str::from_utf8(&status.raw_value).ok()?
    };
    digits.trim().parse().ok()
}

/// The last of a list is the one that answered; those before it were tried.
fn served(metadata: Option<&Metadata>, keys: &MetadataKeys) -> Option<Endpoint> {
    let value = keys.served.value(metadata)?;
    let mut named = Vec::new();
    strings(value, &mut named);
    let last = named.last()?.rsplit(',').next()?;
    last.trim().parse().ok().map(Endpoint)
}

/// A hint that is present allows only what it names, even if that is nothing.
fn subset(metadata: Option<&Metadata>, keys: &MetadataKeys) -> Subset {
    let Some(value) = keys.subset_hint.value(metadata) else {
        return Subset::Any;
    };
    let mut named = Vec::new();
    strings(value, &mut named);
    Subset::Only(
        named
            .iter()
            .flat_map(|text| text.split(','))
            .filter_map(|entry| subset_entry(entry.trim()))
            .collect(),
    )
}

/// The strings of a value: itself, or the elements of a list.
fn strings<'a>(value: &'a Value, out: &mut Vec<&'a str>) {
    match &value.kind {
        Some(Kind::StringValue(text)) => out.push(text),
        Some(Kind::ListValue(list)) => {
            out.extend(list.values.iter().filter_map(|value| match &value.kind {
                Some(Kind::StringValue(text)) => Some(text.as_str()),
                _ => None,
            }));
        }
        _ => {}
    }
}

fn subset_entry(text: &str) -> Option<SubsetEntry> {
    if let Ok(endpoint) = text.parse::<SocketAddr>() {
        return Some(SubsetEntry::Endpoint(Endpoint(endpoint)));
    }
    let bare = text
        .strip_prefix('[')
        .and_then(|text| text.strip_suffix(']'))
        .unwrap_or(text);
    bare.parse::<IpAddr>().ok().map(SubsetEntry::Ip)
}

/// The message for an answer.
#[must_use]
pub fn write(outgoing: Outgoing, keys: &MetadataKeys) -> ProcessingResponse {
    let mut metadata = None;
    let response = match outgoing {
        Outgoing::RequestHeaders(plan) => {
            metadata = plan.as_deref().map(|plan| destination(plan, keys));
            Response::RequestHeaders(HeadersResponse {
                response: Some(common(plan.as_deref().map(mutation))),
            })
        }
        Outgoing::RequestBody(reply) => {
            if let BodyReply::Continue(Some(plan)) = &reply {
                metadata = Some(destination(plan, keys));
            }
            Response::RequestBody(body_response(reply))
        }
        Outgoing::RequestTrailers => Response::RequestTrailers(TrailersResponse::default()),
        Outgoing::ResponseHeaders { decision, echo } => {
            let decision = decision.map(|id| set(DECISION, id.to_string()));
            let echo = echo.map(|pod| set(SERVED_ECHO, pod.to_string()));
            let set_headers: Vec<_> = decision.into_iter().chain(echo).collect();
            let mutation = (!set_headers.is_empty()).then(|| HeaderMutation {
                set_headers,
                ..HeaderMutation::default()
            });
            Response::ResponseHeaders(HeadersResponse {
                response: Some(common(mutation)),
            })
        }
        Outgoing::ResponseBody(reply) => Response::ResponseBody(body_response(reply)),
        Outgoing::ResponseTrailers => Response::ResponseTrailers(TrailersResponse::default()),
        Outgoing::Immediate(refusal) => Response::ImmediateResponse(immediate(&refusal)),
    };
    ProcessingResponse {
        dynamic_metadata: metadata,
        response: Some(response),
        ..ProcessingResponse::default()
    }
}

/// Status is CONTINUE, the default.
fn common(header_mutation: Option<HeaderMutation>) -> CommonResponse {
    CommonResponse {
        header_mutation,
        ..CommonResponse::default()
    }
}

fn body_response(reply: BodyReply) -> BodyResponse {
    let response = match reply {
        BodyReply::Continue(plan) => common(plan.as_deref().map(mutation)),
        BodyReply::Bytes { bytes, end } => CommonResponse {
            body_mutation: Some(BodyMutation {
                mutation: Some(Mutation::StreamedResponse(StreamedBodyResponse {
                    body: bytes.into(),
                    end_of_stream: end,
                    ..StreamedBodyResponse::default()
                })),
            }),
            ..CommonResponse::default()
        },
    };
    BodyResponse {
        response: Some(response),
    }
}

fn mutation(plan: &Plan) -> HeaderMutation {
    let mut mutation = HeaderMutation::default();
    for edit in plan.header_edits() {
        match edit {
            HeaderEdit::Set(name, value) => mutation.set_headers.push(set(name, value)),
            HeaderEdit::Remove(name) => mutation.remove_headers.push(name.to_owned()),
        }
    }
    mutation
}

fn set(name: &str, value: String) -> HeaderValueOption {
    HeaderValueOption {
        header: Some(HeaderValue {
            key: name.to_owned(),
            raw_value: value.into_bytes(),
            ..HeaderValue::default()
        }),
        append_action: HeaderAppendAction::OverwriteIfExistsOrAdd.into(),
        ..HeaderValueOption::default()
    }
}

fn destination(plan: &Plan, keys: &MetadataKeys) -> Struct {
    let field = |key: &str, kind| (key.to_owned(), Value { kind: Some(kind) });
    let inner = Struct {
        fields: [field(
            &keys.destination.key,
            Kind::StringValue(plan.destination.to_string()),
        )]
        .into(),
    };
    Struct {
        fields: [field(&keys.destination.namespace, Kind::StructValue(inner))].into(),
    }
}

fn immediate(refusal: &Refusal) -> ImmediateResponse {
    let mut set_headers = vec![set("content-type", "application/json".to_owned())];
    if let Some(after) = refusal.retry_after {
        // Whole seconds, rounded up: zero would mean at once.
        let seconds = after.as_secs() + u64::from(0 < after.subsec_nanos());
        set_headers.push(set("retry-after", seconds.max(1).to_string()));
    }
    let known = StatusCode::try_from(i32::from(refusal.status));
    let code = match known {
        Ok(StatusCode::Empty) | Err(_) => StatusCode::InternalServerError,
        Ok(code) => code,
    };
    ImmediateResponse {
        status: Some(HttpStatus { code: code.into() }),
        headers: Some(HeaderMutation {
            set_headers,
            ..HeaderMutation::default()
        }),
        body: refusal.to_json().into_bytes(),
        details: refusal.code.to_owned(),
        ..ImmediateResponse::default()
    }
}

#[cfg(test)]
mod tests;

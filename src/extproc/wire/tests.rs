//! Envoy's messages in every form gateways send them, and the exact form of ours.
use super::*;
use crate::route::DecisionId;
use envoy_types::pb::envoy::service::ext_proc::v3::{HttpBody, HttpTrailers};
use envoy_types::pb::google::protobuf::ListValue;
use std::time::Duration;

fn string(text: &str) -> Value {
    Value {
        kind: Some(Kind::StringValue(text.to_owned())),
    }
}

fn list(values: Vec<Value>) -> Value {
    Value {
        kind: Some(Kind::ListValue(ListValue { values })),
    }
}

fn metadata(namespace: &str, key: &str, value: Value) -> Metadata {
    let fields = [(key.to_owned(), value)].into();
    Metadata {
        filter_metadata: [(namespace.to_owned(), Struct { fields })].into(),
        ..Metadata::default()
    }
}

fn header(key: &str, value: &str, raw: &[u8]) -> HeaderValue {
    HeaderValue {
        key: key.to_owned(),
        value: value.to_owned(),
        raw_value: raw.to_vec(),
    }
}

fn headers(headers: Vec<HeaderValue>, end_of_stream: bool) -> HttpHeaders {
    HttpHeaders {
        headers: Some(HeaderMap { headers }),
        end_of_stream,
        ..HttpHeaders::default()
    }
}

fn message(request: Request) -> ProcessingRequest {
    ProcessingRequest {
        request: Some(request),
        ..ProcessingRequest::default()
    }
}

fn read_head(message: ProcessingRequest, trace: &GatewayTrace) -> Head {
    match read(message, &MetadataKeys::default(), trace).1 {
        Incoming::RequestHeaders { head, .. } => *head,
        other => panic!("{other:?}"),
    }
}

fn subset_of(value: Option<Value>) -> Subset {
    let mut message = message(Request::RequestHeaders(headers(vec![], true)));
    message.metadata_context = value.map(|value| metadata(SUBSET_NAMESPACE, SUBSET, value));
    read_head(message, &GatewayTrace::default()).subset
}

fn endpoint(text: &str) -> SubsetEntry {
    SubsetEntry::Endpoint(Endpoint(text.parse().unwrap()))
}

fn ip(text: &str) -> SubsetEntry {
    SubsetEntry::Ip(text.parse().unwrap())
}

fn only(entries: &[SubsetEntry]) -> Subset {
    Subset::Only(entries.to_vec().into())
}

fn plan() -> Plan {
    Plan {
        destination: Endpoint("[fd00::1]:8000".parse().unwrap()),
        edits: vec![
            HeaderEdit::Set("x-prefiller-host-port", "10.0.0.2:8000".into()),
            HeaderEdit::Remove("x-decoder-host-port"),
        ],
        decision_id: DecisionId::from_raw(7),
    }
}

fn mutation_of(response: &ProcessingResponse) -> &HeaderMutation {
    let common = match response.response.as_ref().unwrap() {
        Response::RequestHeaders(reply) | Response::ResponseHeaders(reply) => &reply.response,
        Response::RequestBody(reply) | Response::ResponseBody(reply) => &reply.response,
        other => panic!("{other:?}"),
    };
    common.as_ref().unwrap().header_mutation.as_ref().unwrap()
}

/// What a gateway makes of a mutation: `append` says what it takes an unset action for.
fn apply(
    mutation: &HeaderMutation,
    request: &[(&str, &str)],
    append: bool,
) -> Vec<(String, String)> {
    let mut out: Vec<(String, String)> = request
        .iter()
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
        .collect();
    for name in &mutation.remove_headers {
        out.retain(|(key, _)| key != name);
    }
    for option in &mutation.set_headers {
        let header = option.header.as_ref().unwrap();
        let overwrite = option.append_action
            == i32::from(HeaderAppendAction::OverwriteIfExistsOrAdd)
            || (option.append_action == 0 && !append);
        if overwrite {
            out.retain(|(key, _)| *key != header.key);
        }
        out.push((
            header.key.clone(),
            String::from_utf8(header.raw_value.clone()).unwrap(),
        ));
    }
    out
}

fn values<'a>(headers: &'a [(String, String)], name: &str) -> Vec<&'a str> {
    headers
        .iter()
        .filter(|(key, _)| key == name)
        .map(|(_, value)| value.as_str())
        .collect()
}

#[test]
fn the_subset_hint_is_read_in_all_its_forms() {
    let two = only(&[endpoint("10.0.0.1:8000"), endpoint("10.0.0.2:8000")]);
    let forms = [
        string("10.0.0.1:8000,10.0.0.2:8000"),
        string(" 10.0.0.1:8000 , 10.0.0.2:8000 ,"),
        list(vec![string("10.0.0.1:8000"), string("10.0.0.2:8000")]),
        list(vec![string("10.0.0.1:8000, 10.0.0.2:8000")]),
    ];
    for form in forms {
        assert_eq!(subset_of(Some(form.clone())), two, "{form:?}");
    }
    assert_eq!(subset_of(None), Subset::Any);
    assert_eq!(
        subset_of(Some(string("10.0.0.1,fd00::1,[fd00::2],[fd00::3]:80"))),
        only(&[
            ip("10.0.0.1"),
            ip("fd00::1"),
            ip("fd00::2"),
            endpoint("[fd00::3]:80")
        ])
    );
}

#[test]
fn a_subset_hint_that_names_nothing_usable_allows_nothing() {
    for value in [
        string(""),
        string(","),
        list(vec![]),
        string("pod-a"),
        Value { kind: None },
        Value {
            kind: Some(Kind::NumberValue(1.0)),
        },
    ] {
        assert_eq!(subset_of(Some(value.clone())), only(&[]), "{value:?}");
    }
}

#[test]
fn a_subset_in_another_namespace_is_no_hint() {
    let mut message = message(Request::RequestHeaders(headers(vec![], true)));
    message.metadata_context = Some(metadata("envoy.lb", SUBSET, string("10.0.0.1")));
    let head = read_head(message, &GatewayTrace::default());
    assert_eq!(head.subset, Subset::Any);
}

#[test]
fn headers_prefer_the_raw_value_and_pseudo_headers_become_method_and_path() {
    let request = headers(
        vec![
            header(":method", "post", b""),
            header(":path", "ignored", b"/v1/completions?x=1"),
            header("X-Session-Id", "old", b"new"),
            header("x-plain", "plain", b""),
            header("x-twice", "a", b""),
            header("x-twice", "b", b""),
        ],
        false,
    );
    let head = read_head(
        message(Request::RequestHeaders(request)),
        &GatewayTrace::default(),
    );
    assert_eq!(
        (head.method.as_str(), head.path.as_str()),
        ("POST", "/v1/completions?x=1")
    );
    assert_eq!(head.headers.get("x-session-id"), Some("new"));
    assert_eq!(head.headers.get("x-plain"), Some("plain"));
    assert_eq!(
        head.headers.get_all("x-twice").collect::<Vec<_>>(),
        ["a", "b"]
    );
}

#[test]
fn the_gateways_own_trace_beats_the_clients_header() {
    let request = || {
        message(Request::RequestHeaders(headers(
            vec![
                header("traceparent", "00-client", b""),
                header("tracestate", "c=1", b""),
            ],
            true,
        )))
    };
    let head = read_head(request(), &GatewayTrace::default());
    assert_eq!(head.trace_parent.as_deref(), Some("00-client"));
    assert_eq!(head.trace_state.as_deref(), Some("c=1"));
    assert!(!head.gateway_traces);

    let trace = GatewayTrace {
        parent: Some("00-gateway".into()),
        state: None,
    };
    let head = read_head(request(), &trace);
    assert_eq!(head.trace_parent.as_deref(), Some("00-gateway"));
    assert_eq!(head.trace_state, None, "not mixed with the client's");
    assert!(head.gateway_traces);
}

#[test]
fn body_modes_are_read_and_new_ones_are_not_taken_for_known_ones() {
    let announced = |mode: i32| {
        let mut message = message(Request::RequestTrailers(HttpTrailers::default()));
        message.protocol_config = Some(ProtocolConfiguration {
            request_body_mode: mode,
            ..ProtocolConfiguration::default()
        });
        read(message, &MetadataKeys::default(), &GatewayTrace::default()).0
    };
    for (number, mode) in [
        (0, BodyMode::None),
        (1, BodyMode::Streamed),
        (2, BodyMode::Buffered),
        (3, BodyMode::BufferedPartial),
        (4, BodyMode::FullDuplex),
        (5, BodyMode::Unsupported),
        (77, BodyMode::Unsupported),
        (-1, BodyMode::Unsupported),
    ] {
        assert_eq!(announced(number).unwrap().request, mode);
    }
    let silent = message(Request::RequestTrailers(HttpTrailers::default()));
    assert_eq!(
        read(silent, &MetadataKeys::default(), &GatewayTrace::default()).0,
        None
    );
}

#[test]
fn the_served_endpoint_is_the_last_one_tried() {
    let read_served = |value| {
        let mut message = message(Request::ResponseHeaders(headers(
            vec![header(":status", "", b"200")],
            false,
        )));
        message.metadata_context = Some(metadata("envoy.lb", SERVED, value));
        match read(message, &MetadataKeys::default(), &GatewayTrace::default()).1 {
            Incoming::ResponseHeaders {
                status: Some(200),
                served,
                end: false,
            } => served.map(|endpoint| endpoint.to_string()),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(
        read_served(string("10.0.0.1:1, 10.0.0.2:2")).as_deref(),
        Some("10.0.0.2:2")
    );
    assert_eq!(
        read_served(list(vec![string("10.0.0.3:3")])).as_deref(),
        Some("10.0.0.3:3")
    );
    assert_eq!(read_served(string("pod-a")), None);
}

#[test]
fn a_status_that_is_no_number_and_messages_without_content_are_harmless() {
    for raw in [&b"2xx"[..], b"\xff", b"99999999"] {
        let message = message(Request::ResponseHeaders(headers(
            vec![header(":status", "", raw)],
            false,
        )));
        let (_, incoming) = read(message, &MetadataKeys::default(), &GatewayTrace::default());
        assert!(matches!(
            incoming,
            Incoming::ResponseHeaders { status: None, .. }
        ));
    }
    let empty = message(Request::RequestHeaders(HttpHeaders::default()));
    read_head(empty, &GatewayTrace::default());
    let (_, other) = read(
        ProcessingRequest::default(),
        &MetadataKeys::default(),
        &GatewayTrace::default(),
    );
    assert!(matches!(other, Incoming::Other));
    let body = message(Request::RequestBody(HttpBody::default()));
    let (_, body) = read(body, &MetadataKeys::default(), &GatewayTrace::default());
    assert!(matches!(body, Incoming::RequestBody { end: false, .. }));
}

#[test]
fn a_plan_sets_header_and_metadata_to_the_same_value_with_an_explicit_overwrite() {
    let keys = MetadataKeys {
        destination: MetadataKey::new("my.lb", "picked"),
        ..MetadataKeys::default()
    };
    for outgoing in [
        Outgoing::RequestHeaders(Some(Box::new(plan()))),
        Outgoing::RequestBody(BodyReply::Continue(Some(Box::new(plan())))),
    ] {
        let response = write(outgoing, &keys);
        let metadata = response.dynamic_metadata.as_ref().unwrap();
        let Some(Kind::StructValue(inner)) = &metadata.fields["my.lb"].kind else {
            panic!("{metadata:?}");
        };
        assert_eq!(inner.fields["picked"], string("[fd00::1]:8000"));
        let mutation = mutation_of(&response);
        assert!(mutation.set_headers.iter().all(|option| {
            let header = option.header.as_ref().unwrap();
            option.append_action() == HeaderAppendAction::OverwriteIfExistsOrAdd
                && header.value.is_empty()
                && !header.raw_value.is_empty()
        }));
        assert!(
            !mutation
                .set_headers
                .iter()
                .any(|option| { option.header.as_ref().unwrap().key == "content-length" })
        );
    }
}

#[test]
fn the_pod_sees_our_headers_once_whatever_a_gateway_takes_an_unset_action_for() {
    let response = write(
        Outgoing::RequestHeaders(Some(Box::new(plan()))),
        &MetadataKeys::default(),
    );
    let request = [
        (DESTINATION, "10.9.9.9:1"),
        ("x-prefiller-host-port", "169.254.169.254:80"),
        ("x-decoder-host-port", "169.254.169.254:80"),
        ("x-request-id", "a"),
        ("x-request-id", "b"),
    ];
    for append in [true, false] {
        let seen = apply(mutation_of(&response), &request, append);
        assert_eq!(values(&seen, DESTINATION), ["[fd00::1]:8000"]);
        assert_eq!(values(&seen, "x-prefiller-host-port"), ["10.0.0.2:8000"]);
        assert!(values(&seen, "x-decoder-host-port").is_empty());
        assert_eq!(values(&seen, "x-request-id"), ["a", "b"]);
    }
}

#[test]
fn no_name_is_both_set_and_removed() {
    let response = write(
        Outgoing::RequestHeaders(Some(Box::new(plan()))),
        &MetadataKeys::default(),
    );
    let mutation = mutation_of(&response);
    for option in &mutation.set_headers {
        let key = &option.header.as_ref().unwrap().key;
        assert!(!mutation.remove_headers.contains(key), "{key}");
    }
}

#[test]
fn full_duplex_chunks_are_streamed_responses_and_buffered_replies_have_no_body() {
    let reply = BodyReply::Bytes {
        bytes: Bytes::from_static(b"abc"),
        end: true,
    };
    let response = write(Outgoing::RequestBody(reply), &MetadataKeys::default());
    let Some(Response::RequestBody(body)) = response.response else {
        panic!()
    };
    let Some(Mutation::StreamedResponse(streamed)) =
        body.response.unwrap().body_mutation.unwrap().mutation
    else {
        panic!()
    };
    assert_eq!(
        (&streamed.body[..], streamed.end_of_stream),
        (&b"abc"[..], true)
    );

    let reply = BodyReply::Continue(Some(Box::new(plan())));
    let response = write(Outgoing::RequestBody(reply), &MetadataKeys::default());
    let Some(Response::RequestBody(body)) = response.response else {
        panic!()
    };
    assert_eq!(body.response.unwrap().body_mutation, None);
}

#[test]
fn an_immediate_response_is_openai_json_with_retry_after_and_details() {
    let refusal = Refusal::new(503, "no_decode_pod", "no ready decode pod")
        .retry_after(Duration::from_millis(1_200));
    let response = write(Outgoing::Immediate(refusal), &MetadataKeys::default());
    assert_eq!(response.dynamic_metadata, None);
    let Some(Response::ImmediateResponse(immediate)) = response.response else {
        panic!()
    };
    assert_eq!(immediate.status.unwrap().code, 503);
    assert_eq!(immediate.details, "no_decode_pod");
    let seen = apply(immediate.headers.as_ref().unwrap(), &[], true);
    assert_eq!(values(&seen, "content-type"), ["application/json"]);
    assert_eq!(values(&seen, "retry-after"), ["2"]);
    let json: serde_json::Value = serde_json::from_slice(&immediate.body).unwrap();
    assert_eq!(json["error"]["code"], "no_decode_pod");
    assert_eq!(json["error"]["type"], "server_error");
}

#[test]
fn every_status_we_refuse_with_is_one_that_envoy_accepts() {
    let code = |status| {
        let refusal = Refusal::new(status, "x", "x");
        match write(Outgoing::Immediate(refusal), &MetadataKeys::default()).response {
            Some(Response::ImmediateResponse(immediate)) => immediate.status.unwrap().code,
            other => panic!("{other:?}"),
        }
    };
    for status in [400, 404, 408, 413, 415, 429, 500, 502, 503, 504] {
        assert_eq!(code(status), i32::from(status));
    }
    assert_eq!(code(0), 500);
    assert_eq!(code(799), 500);
}

#[test]
fn the_client_is_told_the_decision_id() {
    let response = write(
        Outgoing::ResponseHeaders {
            decision: Some(DecisionId::from_raw(0xab)),
            echo: Some("10.0.0.1:3000".parse().map(Endpoint).unwrap()),
        },
        &MetadataKeys::default(),
    );
    let seen = apply(mutation_of(&response), &[(DECISION, "forged")], true);
    assert_eq!(values(&seen, DECISION), ["00000000000000ab"]);
    assert_eq!(values(&seen, SERVED_ECHO), ["10.0.0.1:3000"]);
}

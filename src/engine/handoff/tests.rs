use super::*;

fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in pairs {
        headers.append(*name, HeaderValue::from_static(value));
    }
    headers
}

fn params(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        other => panic!("expected an object, found {other}"),
    }
}

#[test]
fn one_address_names_the_other_engine() {
    let address: SocketAddr = "10.0.0.1:8000".parse().expect("an address");
    let prefiller = headers(&[(PREFILLER, "10.0.0.1:8000")]);
    let decoder = headers(&[(DECODER, "10.0.0.1:8000")]);
    let here = handoff(&HeaderMap::new(), Role::Decode);
    assert_eq!(here, Ok(Handoff::Here));
    let remote = handoff(&prefiller, Role::Decode);
    assert_eq!(remote, Ok(Handoff::PrefillAt(address)));
    assert_eq!(
        handoff(&decoder, Role::Prefill),
        Ok(Handoff::DecodeAt(address))
    );
    let v6 = headers(&[(PREFILLER, "[fd00::1]:8000")]);
    assert!(matches!(
        handoff(&v6, Role::Both),
        Ok(Handoff::PrefillAt(_))
    ));
}

#[test]
fn anything_but_exactly_one_address_is_refused() {
    for bad in [
        headers(&[(PREFILLER, "10.0.0.1:8000"), (PREFILLER, "10.0.0.2:8000")]),
        headers(&[(PREFILLER, "10.0.0.1:8000,10.0.0.2:8000")]),
        headers(&[(PREFILLER, "")]),
        headers(&[(PREFILLER, "10.0.0.1")]),
        headers(&[(PREFILLER, "http://10.0.0.1:8000")]),
        headers(&[(PREFILLER, "10.0.0.1:8000"), (DECODER, "10.0.0.1:8000")]),
    ] {
        let refusal = handoff(&bad, Role::Both).expect_err("it must be refused");
        assert_eq!(refusal.status, StatusCode::BAD_REQUEST, "{bad:?}");
    }
}

#[test]
fn an_engine_of_the_other_role_refuses_the_header() {
    let prefiller = headers(&[(PREFILLER, "10.0.0.1:8000")]);
    let decoder = headers(&[(DECODER, "10.0.0.1:8000")]);
    assert!(handoff(&prefiller, Role::Prefill).is_err());
    assert!(handoff(&decoder, Role::Decode).is_err());
}

#[test]
fn transfer_params_must_fit_the_role() {
    let decode = params(json!({"do_remote_decode": true, "do_remote_prefill": false}));
    let neither = params(json!({"do_remote_decode": false, "do_remote_prefill": false}));
    let both = params(json!({"do_remote_decode": true, "do_remote_prefill": true}));
    let odd = params(json!({"do_remote_decode": 1}));
    let ask = |map: &Map<String, Value>, role| transfer(Some(map), role);
    assert_eq!(ask(&decode, Role::Prefill), Ok(Transfer::RemoteDecode));
    assert_eq!(ask(&neither, Role::Decode), Ok(Transfer::None));
    assert_eq!(transfer(None, Role::Prefill), Ok(Transfer::None));
    assert!(ask(&decode, Role::Decode).is_err());
    assert!(ask(&neither, Role::Prefill).is_err());
    assert!(ask(&both, Role::Both).is_err());
    assert!(ask(&odd, Role::Both).is_err());
}

#[test]
fn what_a_prefill_engine_keeps_is_what_a_decode_engine_reads() {
    let address: SocketAddr = "10.0.0.1:8000".parse().expect("an address");
    let kept = Kept {
        blocks: &[1, 2],
        engine_id: "e",
        request_id: "r",
        address,
        tokens: 40,
        cached: 32,
    };
    let read = transfer(Some(&params(kept.params())), Role::Decode);
    let expected = Remote {
        address,
        engine_id: "e".into(),
        request_id: "r".into(),
        cached: 32,
    };
    assert_eq!(read, Ok(Transfer::RemotePrefill(expected)));
}

#[test]
fn incomplete_transfer_params_are_refused() {
    for missing in ["remote_host", "remote_port", "remote_engine_id"] {
        let kept = Kept {
            blocks: &[],
            engine_id: "e",
            request_id: "r",
            address: "10.0.0.1:8000".parse().expect("an address"),
            tokens: 1,
            cached: 0,
        };
        let mut map = params(kept.params());
        map.remove(missing);
        assert!(transfer(Some(&map), Role::Decode).is_err(), "{missing}");
    }
}

#[test]
fn the_prefill_leg_is_the_same_prompt_with_one_token_and_no_stream() {
    let body = br#"{"model":"m","prompt":"x","stream":true,"stream_options":{"include_usage":true},"max_tokens":90,"min_tokens":4}"#;
    let fields = Fields::read(body).expect("an object");
    let leg: Value = serde_json::from_slice(&prefill_body(&fields)).expect("json");
    assert_eq!(leg["prompt"], "x");
    assert_eq!(leg["stream"], false);
    assert_eq!(leg["max_tokens"], 1);
    assert_eq!(leg["kv_transfer_params"]["do_remote_decode"], true);
    assert!(leg.get("stream_options").is_none() && leg.get("min_tokens").is_none());
}

//! What a real engine refuses, refused; and nothing of the prompt in the refusal.

use super::*;
use sidestep::engine::EngineError;

async fn refused(engine: &Running, path: &str, body: &str) -> (u16, Value) {
    let (status, _, text) = engine.text("POST", path, &[], body.to_owned()).await;
    let answer: Value = serde_json::from_str(&text).expect("an error object");
    assert!(answer["error"]["message"].is_string(), "{text}");
    assert_eq!(answer["error"]["code"], status.as_u16());
    assert!(!text.contains("secret"), "{text}");
    (status.as_u16(), answer)
}

#[tokio::test]
async fn bodies_no_engine_accepts_are_400() {
    let engine = start(config(Role::Both)).await;
    let chats = [
        r#"{"model":"small","messages":[{"role":"user","content":"secret"}"#,
        r#"[1, "secret"]"#,
        r#"{"model":"small"}"#,
        r#"{"messages":[{"role":"user","content":"secret"}]}"#,
        r#"{"model":"small","messages":[]}"#,
        r#"{"model":"small","messages":"secret"}"#,
        r#"{"model":7,"messages":[{"role":"user","content":"secret"}]}"#,
        r#"{"model":"small","messages":[{"role":"user","content":"secret"}],"max_tokens":"secret"}"#,
        r#"{"model":"small","messages":[{"role":"user","content":"secret"}],"max_tokens":0}"#,
        r#"{"model":"small","messages":[{"role":"user","content":"secret"}],"max_tokens":-1}"#,
        r#"{"model":"small","messages":[{"role":"user","content":"secret"}],"max_tokens":1.5}"#,
        r#"{"model":"small","messages":[{"role":"user","content":"secret"}],"stream":"secret"}"#,
        r#"{"model":"small","messages":[{"role":"user","content":"secret"}],"n":0}"#,
        r#"{"model":"small","messages":[{"role":"user","content":"secret"}],"n":1000}"#,
        r#"{"model":"small","messages":[{"role":"user","content":"secret"}],"temperature":-1}"#,
        r#"{"model":"small","messages":[{"role":"user","content":"secret"}],"top_p":0}"#,
        r#"{"model":"small","messages":[{"role":"user","content":"secret"}],"stream_options":{"include_usage":true}}"#,
        r#"{"model":"small","messages":[{"role":"user","content":"secret"}],"max_tokens":2,"min_tokens":3}"#,
        r#"{"model":"small","messages":[{"role":"user","content":"secret"}],"kv_transfer_params":[1]}"#,
        r#"{"model":"small","messages":[{"role":"user","content":"secret"}],"max_tokens":9000}"#,
    ];
    for body in chats {
        let (status, _) = refused(&engine, "/v1/chat/completions", body).await;
        assert_eq!(status, 400, "{body}");
    }
    let completions = [
        "",
        r#"{"model":"small"}"#,
        r#"{"model":"small","prompt":[]}"#,
        r#"{"model":"small","prompt":{"secret":1}}"#,
        r#"{"model":"small","prompt":[[]]}"#,
        r#"{"model":"small","prompt":[-1]}"#,
        r#"{"model":"small","prompt":"secret","echo":true}"#,
    ];
    for body in completions {
        let (status, _) = refused(&engine, "/v1/completions", body).await;
        assert_eq!(status, 400, "{body}");
    }
    assert_eq!(engine.metric("vllm:kv_cache_usage_perc", "").await, 0.0);
}

#[tokio::test]
async fn an_unknown_model_and_an_unknown_path_are_404() {
    let engine = start(config(Role::Both)).await;
    let body = r#"{"model":"large","messages":[{"role":"user","content":"secret"}]}"#;
    let (status, answer) = refused(&engine, "/v1/chat/completions", body).await;
    assert_eq!(status, 404);
    assert_eq!(answer["error"]["type"], "NotFoundError");
    assert_eq!(answer["error"]["param"], "model");
    assert_eq!(refused(&engine, "/v1/embeddings", body).await.0, 404);
}

#[tokio::test]
async fn a_prompt_that_does_not_fit_the_model_is_400() {
    let engine = start(EngineConfig {
        max_model_len: Tokens(200),
        ..config(Role::Both)
    })
    .await;
    let long = chat(&[("user", &essay("rivers"))], 1).to_string();
    let (status, answer) = refused(&engine, "/v1/chat/completions", &long).await;
    assert_eq!(
        (status, &answer["error"]["param"]),
        (400, &json!("max_tokens"))
    );
    // Without a limit, a chat may go on to the end of the context, and does.
    let mut open = chat(&[("user", "Hello there")], 1);
    open.as_object_mut()
        .expect("an object")
        .remove("max_tokens");
    let answer = engine.chat(&open).await;
    assert_eq!(answer["usage"]["total_tokens"], 200);
}

#[tokio::test]
async fn headers_that_do_not_name_exactly_one_engine_are_400() {
    let engine = start(config(Role::Both)).await;
    let body = chat(&[("user", "Hello there")], 1).to_string();
    for headers in [
        vec![("x-prefiller-host-port", "127.0.0.1:1,127.0.0.1:2")],
        vec![
            ("x-prefiller-host-port", "127.0.0.1:1"),
            ("x-prefiller-host-port", "127.0.0.1:2"),
        ],
        vec![("x-prefiller-host-port", "prefill")],
        vec![("x-prefiller-host-port", "")],
        vec![
            ("x-prefiller-host-port", "127.0.0.1:1"),
            ("x-decoder-host-port", "127.0.0.1:2"),
        ],
    ] {
        let path = "/v1/chat/completions";
        let (status, _, text) = engine.text("POST", path, &headers, body.clone()).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{headers:?} {text}");
    }
}

#[tokio::test]
async fn each_role_refuses_the_other_roles_work() {
    let prefill = start(config(Role::Prefill)).await;
    let decode = start(config(Role::Decode)).await;
    let path = "/v1/chat/completions";
    let with = |params: Value| {
        let mut body = chat(&[("user", "Hello there")], 1);
        body["kv_transfer_params"] = params;
        body.to_string()
    };
    let neither = with(json!({"do_remote_decode": false, "do_remote_prefill": false}));
    let produce = with(json!({"do_remote_decode": true, "do_remote_prefill": false}));
    let empty = with(json!({"do_remote_prefill": true}));
    assert_eq!(refused(&prefill, path, &neither).await.0, 400);
    assert_eq!(refused(&prefill, path, &empty).await.0, 400);
    assert_eq!(refused(&decode, path, &produce).await.0, 400);
    assert_eq!(refused(&decode, path, &empty).await.0, 400);
    // At a decode engine, both flags false is a bypass.
    let (status, _, text) = decode.text("POST", path, &[], neither).await;
    assert_eq!(status, StatusCode::OK, "{text}");
    // Without any parameters, a prefill engine serves like any other.
    let plain = chat(&[("user", "Hello there")], 5);
    assert_eq!(prefill.chat(&plain).await["usage"]["completion_tokens"], 5);
}

#[tokio::test]
async fn a_handoff_of_several_sequences_is_400() {
    let engine = start(config(Role::Both)).await;
    let body = json!({"model": MODEL, "prompt": ["one", "two"], "max_tokens": 1});
    let headers = [("x-prefiller-host-port", "127.0.0.1:1")];
    let (status, _) = engine.post_with("/v1/completions", &headers, &body).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn a_body_beyond_the_limit_is_413() {
    let engine = start(EngineConfig {
        max_body_bytes: 1_000,
        ..config(Role::Both)
    })
    .await;
    let body = chat(&[("user", &essay("rivers"))], 1).to_string();
    assert_eq!(refused(&engine, "/v1/chat/completions", &body).await.0, 413);
}

#[tokio::test]
async fn a_full_queue_is_503() {
    let engine = start(EngineConfig {
        waiting: 3,
        ..config(Role::Both)
    })
    .await;
    let body = json!({"model": MODEL, "prompt": ["a", "b", "c", "d"], "max_tokens": 1});
    let (status, _) = refused(&engine, "/v1/completions", &body.to_string()).await;
    assert_eq!(status, 503);
}

#[tokio::test]
async fn sizes_that_contradict_each_other_do_not_start() {
    let free = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let small = EngineConfig {
        blocks: Blocks(10),
        ..config(Role::Both)
    };
    let none = EngineConfig {
        sequences: 0,
        ..config(Role::Both)
    };
    let unknown = EngineConfig {
        model: "another".into(),
        ..config(Role::Both)
    };
    for config in [small, none, unknown] {
        let listeners = Listeners {
            http: TcpListener::bind(free).await.expect("a free port"),
            events: free,
            replay: free,
        };
        let refused = Engine::bind(config, listeners).await;
        assert!(matches!(refused.err(), Some(EngineError::Config(_))));
    }
}

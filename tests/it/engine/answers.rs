//! What clients see: answers, usage, metrics, and what happens when they leave.

use super::*;

#[tokio::test]
async fn a_chat_is_answered_with_words_and_usage() {
    let engine = start(config(Role::Both)).await;
    let answer = engine.chat(&chat(&[("user", "Hello there")], 12)).await;
    assert_eq!(answer["object"], "chat.completion");
    assert_eq!(answer["model"], MODEL);
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(choice["message"]["role"], "assistant");
    assert_eq!(text_of(&answer).split_whitespace().count(), 12);
    assert_eq!(answer["usage"]["completion_tokens"], 12);
    assert_eq!(
        answer["usage"]["total_tokens"].as_u64(),
        Some(prompt_tokens(&answer) + 12)
    );
    assert_eq!(cached(&answer), 0);
}

#[tokio::test]
async fn an_answer_ends_by_itself_unless_told_to_go_on() {
    let engine = start(EngineConfig {
        answer_tokens: 5,
        ..config(Role::Both)
    })
    .await;
    let mut body = chat(&[("user", "Hello there")], 50);
    body["ignore_eos"] = json!(false);
    let answer = engine.chat(&body).await;
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    // Five words and the end-of-turn token, which vLLM counts too.
    assert_eq!(answer["usage"]["completion_tokens"], 6);
    body["min_tokens"] = json!(9);
    assert_eq!(engine.chat(&body).await["usage"]["completion_tokens"], 10);
}

#[tokio::test]
async fn a_stream_says_the_same_words_as_a_whole_answer() {
    let engine = start(config(Role::Both)).await;
    let mut body = chat(&[("user", "Tell me about blocks")], 20);
    let whole = engine.chat(&body).await;
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    let (status, headers, stream) = engine
        .text("POST", "/v1/chat/completions", &[], body.to_string())
        .await;
    assert_eq!(status, StatusCode::OK);
    assert!(
        headers["content-type"]
            .to_str()
            .expect("ascii")
            .starts_with("text/event-stream")
    );
    let chunks = chunks(&stream);
    assert_eq!(chunks[0]["choices"][0]["delta"]["role"], "assistant");
    let said: String = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str())
        .collect();
    assert_eq!(said, text_of(&whole));
    let last = chunks.last().expect("chunks");
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"]["completion_tokens"], 20);
    let finished = &chunks[chunks.len() - 2];
    assert_eq!(finished["choices"][0]["finish_reason"], "length");
    assert!(
        chunks[..chunks.len() - 1]
            .iter()
            .all(|chunk| chunk.get("usage").is_none())
    );
}

#[tokio::test]
async fn completions_take_texts_lists_and_token_ids() {
    let engine = start(config(Role::Both)).await;
    let ask = |prompt: Value| json!({"model": MODEL, "prompt": prompt, "max_tokens": 3});
    for (prompt, choices) in [
        (json!("one text"), 1),
        (json!(["one", "two"]), 2),
        (json!([5, 6, 7, 8]), 1),
        (json!([[5, 6], [7, 8], [9]]), 3),
    ] {
        let (status, answer) = engine.post("/v1/completions", &ask(prompt)).await;
        assert_eq!(status, StatusCode::OK, "{answer}");
        let list = answer["choices"].as_array().expect("choices");
        assert_eq!(list.len(), choices);
        for (at, choice) in list.iter().enumerate() {
            assert_eq!(choice["index"], at);
            assert!(choice["text"].as_str().expect("text").starts_with(' '));
        }
        assert_eq!(answer["usage"]["completion_tokens"], 3 * choices);
    }
}

#[tokio::test]
async fn several_choices_differ_and_stream_side_by_side() {
    let engine = start(config(Role::Both)).await;
    let mut body = chat(&[("user", "Hello there")], 8);
    body["n"] = json!(2);
    body["stream"] = json!(true);
    let (_, _, stream) = engine
        .text("POST", "/v1/chat/completions", &[], body.to_string())
        .await;
    let mut said = [String::new(), String::new()];
    for chunk in chunks(&stream) {
        let choice = &chunk["choices"][0];
        let index = choice["index"].as_u64().expect("an index") as usize;
        said[index].push_str(choice["delta"]["content"].as_str().unwrap_or_default());
    }
    assert_eq!(said[0].split_whitespace().count(), 8);
    assert_ne!(said[0], said[1]);
}

#[tokio::test]
async fn turn_two_finds_the_prompt_and_the_answer_of_turn_one() {
    let engine = start(config(Role::Both)).await;
    let question = essay("rivers");
    let first = engine.chat(&chat(&[("user", &question)], 70)).await;
    let held = prompt_tokens(&first) + 70 - 1;
    let said = text_of(&first).to_owned();
    let turns = [
        ("user", question.as_str()),
        ("assistant", said.as_str()),
        ("user", "And now?"),
    ];
    let second = engine.chat(&chat(&turns, 4)).await;
    assert_eq!(cached(&second), held / BLOCK * BLOCK);
    assert!(prompt_tokens(&first) + 3 * BLOCK < cached(&second));
    assert_eq!(
        engine.source("local_cache_hit").await,
        cached(&second) as f64
    );
    let computed = prompt_tokens(&first) + prompt_tokens(&second) - cached(&second);
    assert_eq!(engine.source("local_compute").await, computed as f64);
}

#[tokio::test]
async fn a_salt_and_an_adapter_each_have_a_cache_of_their_own() {
    let engine = start(config(Role::Both)).await;
    let plain = chat(&[("user", &essay("lakes"))], 1);
    let mut salted = plain.clone();
    salted["cache_salt"] = json!("tenant-a");
    let mut adapted = plain.clone();
    adapted["model"] = json!(ADAPTER);
    for body in [&plain, &salted, &adapted] {
        assert_eq!(cached(&engine.chat(body).await), 0);
        assert!(0 < cached(&engine.chat(body).await));
    }
}

#[tokio::test]
async fn models_health_version_and_tokenize_are_served() {
    let engine = start(config(Role::Both)).await;
    let models: Value = serde_json::from_str(&engine.get("/v1/models").await).expect("json");
    assert_eq!(models["data"][0]["id"], MODEL);
    assert_eq!(models["data"][0]["max_model_len"], 8_192);
    assert_eq!(models["data"][1]["id"], ADAPTER);
    assert_eq!(models["data"][1]["parent"], MODEL);
    assert_eq!(engine.get("/health").await, "");
    assert!(engine.get("/version").await.contains("version"));
    let body = chat(&[("user", "Hello there")], 1);
    let tokens = engine.tokens(&body).await;
    let answer = engine.chat(&body).await;
    assert_eq!(tokens.len() as u64, prompt_tokens(&answer));
}

#[tokio::test]
async fn metrics_carry_vllm_names_and_follow_the_cache() {
    let engine = start(config(Role::Both)).await;
    assert_eq!(engine.metric("vllm:kv_cache_usage_perc", "").await, 0.0);
    assert_eq!(
        engine
            .metric("vllm:cache_config_info", "num_gpu_blocks=\"1024\"")
            .await,
        1.0
    );
    let body = chat(&[("user", &essay("hills"))], 3);
    let first = engine.chat(&body).await;
    let second = engine.chat(&body).await;
    assert_eq!(
        engine.metric("vllm:prefix_cache_queries_total", "").await,
        (prompt_tokens(&first) * 2) as f64
    );
    assert_eq!(
        engine.metric("vllm:prefix_cache_hits_total", "").await,
        cached(&second) as f64
    );
    assert_eq!(engine.metric("vllm:generation_tokens_total", "").await, 6.0);
    let page = engine.get("/metrics").await;
    let mut families = std::collections::HashSet::new();
    for line in page.lines() {
        if let Some(family) = line.strip_prefix("# TYPE ") {
            assert!(families.insert(family.to_owned()), "{family} twice");
        } else if !line.starts_with('#') {
            let (_, value) = line.rsplit_once(' ').expect("a value");
            value.parse::<f64>().expect("a number");
        }
    }
    assert!(families.contains("vllm:num_requests_running gauge"));
    assert!(families.contains("vllm:num_requests_waiting gauge"));
}

/// An engine whose passes take so long that a request can be caught in the middle.
fn slow(role: Role) -> EngineConfig {
    EngineConfig {
        pace: Pace(Ratio::new(100_000.0).expect("a ratio")),
        ..config(role)
    }
}

#[tokio::test]
async fn a_client_that_leaves_a_stream_frees_its_blocks() {
    let engine = start(slow(Role::Both)).await;
    let mut body = chat(&[("user", &essay("seas"))], 100);
    body["stream"] = json!(true);
    let stream = engine
        .send("POST", "/v1/chat/completions", &[], body.to_string())
        .await;
    engine.until("vllm:num_requests_running", 1.0).await;
    assert!(0.0 < engine.metric("vllm:kv_cache_usage_perc", "").await);
    drop(stream);
    engine.until("vllm:num_requests_running", 0.0).await;
    assert_eq!(engine.metric("vllm:kv_cache_usage_perc", "").await, 0.0);
    let aborted = "finished_reason=\"abort\"";
    assert_eq!(
        engine.metric("vllm:request_success_total", aborted).await,
        1.0
    );
}

#[tokio::test]
async fn a_client_that_leaves_before_a_whole_answer_frees_its_blocks() {
    let engine = Arc::new(start(slow(Role::Both)).await);
    let caller = engine.clone();
    let call = tokio::spawn(async move {
        caller.chat(&chat(&[("user", &essay("seas"))], 100)).await;
    });
    engine.until("vllm:num_requests_running", 1.0).await;
    call.abort();
    engine.until("vllm:num_requests_running", 0.0).await;
    assert_eq!(engine.metric("vllm:kv_cache_usage_perc", "").await, 0.0);
}

#[tokio::test]
async fn requests_are_recorded_only_when_asked_for() {
    let quiet = start(config(Role::Both)).await;
    let (status, ..) = quiet.text("GET", "/sim/requests", &[], "").await;
    assert_eq!(status, StatusCode::NOT_FOUND);

    let engine = start(EngineConfig {
        record_requests: 2,
        ..config(Role::Both)
    })
    .await;
    let body = chat(&[("user", "a secret")], 1);
    for id in ["1", "2", "3"] {
        let headers = [("x-request-id", id), ("traceparent", "00-ab-cd-01")];
        engine
            .post_with("/v1/chat/completions", &headers, &body)
            .await;
    }
    let page = engine.get("/sim/requests").await;
    assert!(!page.contains("secret"));
    let records: Value = serde_json::from_str(&page).expect("json");
    let last = &records["requests"][1];
    assert!(
        last["headers"]
            .as_array()
            .expect("headers")
            .contains(&json!(["x-request-id", "3"]))
    );
    assert!(page.contains("00-ab-cd-01"));
    let bytes = body.to_string();
    let hash = xxhash_rust::xxh3::xxh3_128(bytes.as_bytes());
    assert_eq!(last["body_bytes"], bytes.len());
    assert_eq!(last["body_xxh3"], format!("{hash:032x}"));
}

#[tokio::test]
async fn an_engine_that_stops_closes_its_ports() {
    let free = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let listeners = Listeners {
        http: TcpListener::bind(free).await.expect("a free port"),
        events: free,
        replay: free,
    };
    let engine = Engine::bind(config(Role::Both), listeners)
        .await
        .expect("an engine");
    let addresses = engine.addresses();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let task = tokio::spawn(engine.serve(async { drop(stopped.await) }));
    stop.send(()).expect("it listens");
    task.await.expect("no panic");
    for address in [addresses.http, addresses.events, addresses.replay] {
        let closed = async { while tokio::net::TcpStream::connect(address).await.is_ok() {} };
        tokio::time::timeout(PATIENCE, closed)
            .await
            .expect("the port closes");
    }
}

//! Two engines, one request: who computes, who holds, who pays.

use super::*;
use sidestep::engine::LocalPrefill;
use sidestep::kv::event::EngineHash;

struct Pair {
    prefill: Running,
    decode: Running,
}

async fn pair() -> Pair {
    Pair {
        prefill: start(config(Role::Prefill)).await,
        decode: start(config(Role::Decode)).await,
    }
}

impl Pair {
    /// A remote prefill, decode first; must succeed.
    async fn remote(&self, body: &Value) -> Value {
        let prefiller = self.prefill.addresses.http.to_string();
        let headers = [("x-prefiller-host-port", &*prefiller)];
        let (status, answer) = self
            .decode
            .post_with("/v1/chat/completions", &headers, body)
            .await;
        assert_eq!(status, StatusCode::OK, "{answer}");
        answer
    }
}

async fn hashes(engine: &Running) -> Vec<EngineHash> {
    let events = engine.events().await;
    let stored = events.iter().filter_map(|event| match event {
        Event::Stored(stored) => Some(stored.hashes.clone()),
        Event::Removed(_) | Event::Cleared => None,
    });
    stored.flatten().collect()
}

#[tokio::test]
async fn the_prefill_engine_computes_and_the_decode_engine_holds() {
    let pair = pair().await;
    let answer = pair.remote(&chat(&[("user", &essay("rivers"))], 40)).await;
    let prompt = prompt_tokens(&answer);
    assert_eq!(answer["usage"]["completion_tokens"], 40);
    assert_eq!(pair.prefill.source("local_compute").await, prompt as f64);
    assert_eq!(pair.decode.source("local_compute").await, 0.0);
    let fetched = pair.decode.source("external_kv_transfer").await;
    assert_eq!(fetched, prompt as f64);
    let at_prefill = hashes(&pair.prefill).await;
    let at_decode = hashes(&pair.decode).await;
    assert_eq!(at_prefill.len() as u64, prompt / BLOCK);
    assert_eq!(at_decode.len() as u64, (prompt + 39) / BLOCK);
    assert_eq!(
        at_decode[..at_prefill.len()],
        at_prefill,
        "same content, same names"
    );
}

#[tokio::test]
async fn the_answer_is_the_same_wherever_the_prompt_is_computed() {
    let pair = pair().await;
    let body = chat(&[("user", &essay("bridges"))], 30);
    let remote = pair.remote(&body).await;
    let alone = start(config(Role::Both)).await.chat(&body).await;
    assert_eq!(text_of(&remote), text_of(&alone));
}

#[tokio::test]
async fn a_bypassed_second_turn_finds_fetched_and_decoded_blocks() {
    let pair = pair().await;
    let question = essay("clouds");
    let first = pair.remote(&chat(&[("user", &question)], 60)).await;
    let said = text_of(&first).to_owned();
    let turns = [
        ("user", &*question),
        ("assistant", &*said),
        ("user", "Go on"),
    ];
    let second = pair.decode.chat(&chat(&turns, 2)).await;
    let held = (prompt_tokens(&first) + 59) / BLOCK * BLOCK;
    assert_eq!(cached(&second), held);
    let computed = pair.decode.source("local_compute").await;
    assert_eq!(computed, (prompt_tokens(&second) - held) as f64);
}

#[tokio::test]
async fn a_remote_second_turn_fetches_only_what_is_missing() {
    let pair = pair().await;
    let question = essay("stone");
    let first = pair.remote(&chat(&[("user", &question)], 60)).await;
    let fetched = pair.decode.source("external_kv_transfer").await;
    let said = text_of(&first).to_owned();
    let more = essay("more stone");
    let turns = [
        ("user", &*question),
        ("assistant", &*said),
        ("user", &*more),
    ];
    let second = pair.remote(&chat(&turns, 2)).await;
    let held = (prompt_tokens(&first) + 59) / BLOCK * BLOCK;
    let missing = (prompt_tokens(&second) - held) as f64;
    assert_eq!(
        pair.decode.source("external_kv_transfer").await,
        fetched + missing
    );
    // As with vLLM, the usage of a fetched prompt shows the prefill engine's hits.
    assert_eq!(cached(&second), prompt_tokens(&first) / BLOCK * BLOCK);
}

#[tokio::test]
async fn the_prefill_engine_frees_the_blocks_once_they_are_fetched() {
    let pair = pair().await;
    pair.remote(&chat(&[("user", &essay("grass"))], 3)).await;
    pair.prefill.until("vllm:kv_cache_usage_perc", 0.0).await;
}

#[tokio::test]
async fn a_remote_prefill_streams_like_any_other_answer() {
    let pair = pair().await;
    let mut body = chat(&[("user", &essay("snow"))], 12);
    let whole = pair.remote(&body).await;
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    let prefiller = pair.prefill.addresses.http.to_string();
    let headers = [("x-prefiller-host-port", &*prefiller)];
    let (status, _, stream) = pair
        .decode
        .text("POST", "/v1/chat/completions", &headers, body.to_string())
        .await;
    assert_eq!(status, StatusCode::OK);
    let said: String = chunks(&stream)
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str())
        .collect();
    assert_eq!(said, text_of(&whole));
}

#[tokio::test]
async fn the_two_legs_can_be_driven_from_outside() {
    let pair = pair().await;
    let mut leg = chat(&[("user", &essay("coal"))], 1);
    leg["kv_transfer_params"] = json!({"do_remote_decode": true, "do_remote_prefill": false});
    let answer = pair.prefill.chat(&leg).await;
    let params = answer["kv_transfer_params"].clone();
    let prompt = prompt_tokens(&answer);
    assert_eq!(params["do_remote_prefill"], true);
    assert_eq!(params["remote_num_tokens"], prompt);
    let blocks = params["remote_block_ids"][0].as_array().expect("blocks");
    assert_eq!(blocks.len() as u64, prompt.div_ceil(BLOCK));
    assert!(0.0 < pair.prefill.metric("vllm:kv_cache_usage_perc", "").await);

    let mut body = chat(&[("user", &essay("coal"))], 5);
    body["kv_transfer_params"] = params;
    let answer = pair.decode.chat(&body).await;
    assert_eq!(answer["kv_transfer_params"], Value::Null);
    assert_eq!(
        pair.decode.source("external_kv_transfer").await,
        prompt as f64
    );

    pair.prefill.until("vllm:kv_cache_usage_perc", 0.0).await;
    let (status, answer) = pair.decode.post("/v1/chat/completions", &body).await;
    assert_eq!(
        status,
        StatusCode::INTERNAL_SERVER_ERROR,
        "blocks are fetched once"
    );
    assert_eq!(answer["error"]["type"], "InternalServerError");
}

#[tokio::test]
async fn blocks_that_nobody_fetches_are_freed_when_the_lease_ends() {
    let prefill = start(EngineConfig {
        lease: Duration::from_millis(50),
        ..config(Role::Prefill)
    })
    .await;
    let mut leg = chat(&[("user", &essay("iron"))], 1);
    leg["kv_transfer_params"] = json!({"do_remote_decode": true});
    prefill.chat(&leg).await;
    prefill.until("vllm:kv_cache_usage_perc", 0.0).await;
    assert_eq!(
        prefill
            .metric("vllm:nixl_num_kv_expired_reqs_total", "")
            .await,
        1.0
    );
}

#[tokio::test]
async fn a_dead_prefill_engine_is_a_500_and_the_decode_engine_lives_on() {
    let pair = pair().await;
    let dead = {
        let free = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        free.local_addr().expect("an address").to_string()
    };
    let body = chat(&[("user", &essay("ash"))], 3);
    let headers = [("x-prefiller-host-port", &*dead)];
    let (status, answer) = pair
        .decode
        .post_with("/v1/chat/completions", &headers, &body)
        .await;
    assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(answer["error"]["message"], "Internal server error");
    assert_eq!(answer["error"]["code"], 500);
    let retried = pair.decode.chat(&body).await;
    assert_eq!(
        retried["usage"]["completion_tokens"], 3,
        "bypass works at once"
    );
}

#[tokio::test]
async fn a_prefill_engine_restarted_between_the_legs_is_a_500() {
    let decode = start(config(Role::Decode)).await;
    let prefill = start(config(Role::Prefill)).await;
    let mut leg = chat(&[("user", &essay("salt"))], 1);
    leg["kv_transfer_params"] = json!({"do_remote_decode": true});
    let mut params = prefill.chat(&leg).await["kv_transfer_params"].clone();
    params["remote_engine_id"] = json!("an earlier incarnation");
    let mut body = chat(&[("user", &essay("salt"))], 3);
    body["kv_transfer_params"] = params;
    let (status, _) = decode.post("/v1/chat/completions", &body).await;
    assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
}

#[tokio::test]
async fn an_error_of_the_prefill_engine_reaches_the_client_word_for_word() {
    let prefill = start(EngineConfig {
        max_model_len: Tokens(100),
        ..config(Role::Prefill)
    })
    .await;
    let decode = start(config(Role::Decode)).await;
    let pair = Pair { prefill, decode };
    let body = chat(&[("user", &essay("mud"))], 3);
    let direct = pair.prefill.post("/v1/chat/completions", &body).await;
    let prefiller = pair.prefill.addresses.http.to_string();
    let headers = [("x-prefiller-host-port", &*prefiller)];
    let (status, answer) = pair
        .decode
        .post_with("/v1/chat/completions", &headers, &body)
        .await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert_eq!(answer["error"]["type"], direct.1["error"]["type"]);
    assert_eq!(answer["error"]["param"], direct.1["error"]["param"]);
}

#[tokio::test]
async fn prefill_first_forwards_to_the_decode_engine_and_relays_its_stream() {
    let pair = pair().await;
    let mut body = chat(&[("user", &essay("moss"))], 20);
    let alone = start(config(Role::Both)).await.chat(&body).await;
    body["stream"] = json!(true);
    let decoder = pair.decode.addresses.http.to_string();
    let headers = [("x-decoder-host-port", &*decoder)];
    let (status, head, stream) = pair
        .prefill
        .text("POST", "/v1/chat/completions", &headers, body.to_string())
        .await;
    assert_eq!(status, StatusCode::OK);
    assert!(
        head["content-type"]
            .to_str()
            .expect("ascii")
            .starts_with("text/event-stream")
    );
    let said: String = chunks(&stream)
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str())
        .collect();
    assert_eq!(said, text_of(&alone));
    let prompt = prompt_tokens(&alone) as f64;
    assert_eq!(pair.prefill.source("local_compute").await, prompt);
    assert_eq!(pair.decode.source("external_kv_transfer").await, prompt);
    pair.prefill.until("vllm:kv_cache_usage_perc", 0.0).await;
}

#[tokio::test]
async fn prefill_first_with_a_dead_decode_engine_is_a_503_and_keeps_nothing() {
    let pair = pair().await;
    let dead = {
        let free = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        free.local_addr().expect("an address").to_string()
    };
    let headers = [("x-decoder-host-port", &*dead)];
    let body = chat(&[("user", &essay("peat"))], 3);
    let (status, _) = pair
        .prefill
        .post_with("/v1/chat/completions", &headers, &body)
        .await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    pair.prefill.until("vllm:kv_cache_usage_perc", 0.0).await;
}

#[tokio::test]
async fn an_engine_that_cannot_prefill_refuses_the_bypass_and_takes_the_handoff() {
    let decode = start(EngineConfig {
        local_prefill: LocalPrefill::Unable,
        ..config(Role::Decode)
    })
    .await;
    let body = chat(&[("user", &essay("reed"))], 3);
    let (status, _) = decode.post("/v1/chat/completions", &body).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    let prefill = start(config(Role::Prefill)).await;
    Pair { prefill, decode }.remote(&body).await;
}

#[tokio::test]
async fn a_client_that_leaves_frees_both_engines() {
    let slow = |role| EngineConfig {
        pace: Pace(Ratio::new(100_000.0).expect("a ratio")),
        ..config(role)
    };
    let prefill = start(slow(Role::Prefill)).await;
    let decode = Arc::new(start(config(Role::Decode)).await);
    let prefiller = prefill.addresses.http.to_string();
    let caller = decode.clone();
    let call = tokio::spawn(async move {
        let headers = [("x-prefiller-host-port", &*prefiller)];
        let body = chat(&[("user", &essay("fern"))], 3);
        let path = "/v1/chat/completions";
        caller.post_with(path, &headers, &body).await
    });
    prefill.until("vllm:num_requests_running", 1.0).await;
    call.abort();
    prefill.until("vllm:num_requests_running", 0.0).await;
    assert_eq!(prefill.metric("vllm:kv_cache_usage_perc", "").await, 0.0);
}

#[tokio::test]
async fn traces_and_ids_follow_the_request_to_the_prefill_engine() {
    let prefill = start(EngineConfig {
        record_requests: 1,
        ..config(Role::Prefill)
    })
    .await;
    let decode = start(config(Role::Decode)).await;
    let prefiller = prefill.addresses.http.to_string();
    let headers = [
        ("x-prefiller-host-port", &*prefiller),
        ("x-request-id", "req-1"),
        ("traceparent", "00-ab-cd-01"),
    ];
    let body = chat(&[("user", "Hello there")], 3);
    decode
        .post_with("/v1/chat/completions", &headers, &body)
        .await;
    let page = prefill.get("/sim/requests").await;
    assert!(
        page.contains("00-ab-cd-01") && page.contains("req-1"),
        "{page}"
    );
    assert!(
        !page.contains("x-prefiller-host-port"),
        "the header stops at the decode engine"
    );
}

//! Bounds of the picker as a client meets them through Envoy.

use crate::recorder::{Answer, Recorder};
use crate::routing::text;
use crate::stack::{Setup, Stack, eventually, recorded};
use http::{Request, StatusCode, header};
use http_body_util::BodyExt as _;
use serde_json::{Value, json};
use sidestep::cli::demo::gateway::RequestBody;
use sidestep::cli::demo::picker::MODEL;
use tokio::io::AsyncReadExt as _;

fn chat(stack: &Stack) -> http::request::Builder {
    Request::post(stack.url("/v1/chat/completions"))
        .header(header::CONTENT_TYPE, "application/json")
}

fn body() -> String {
    json!({"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "stream": true})
        .to_string()
}

fn code(answer: &[u8]) -> String {
    let error: Value = serde_json::from_slice(answer).unwrap();
    assert!(error["error"]["message"].is_string(), "{error}");
    error["error"]["code"]
        .as_str()
        .unwrap_or_default()
        .to_owned()
}

#[tokio::test]
async fn a_body_beyond_the_limit_is_refused_with_413_in_both_modes() {
    for mode in [RequestBody::FullDuplexStreamed, RequestBody::Buffered] {
        let mut pod = Recorder::start(Answer::Json).await;
        let setup =
            Setup::new(vec![recorded("decode", "decode", &pod)]).limit("requestBytes", "4Ki");
        let stack = Stack::start(setup.gateway(move |config| config.request_body = mode)).await;
        for path in ["/v1/chat/completions", "/v1/embeddings"] {
            let (status, answer) = stack
                .ask(Request::post(stack.url(path)), "x".repeat(5000))
                .await;
            assert_eq!(status, StatusCode::PAYLOAD_TOO_LARGE, "{mode:?} {path}");
            code(&answer);
        }
        assert!(pod.arrived().is_none());
        let (status, _) = stack.ask(chat(&stack), body()).await;
        assert_eq!(status, StatusCode::OK, "the next request is served");
        stack.wait_for_in_flight(0).await;
    }
}

#[tokio::test]
async fn a_body_that_never_ends_is_refused_with_408() {
    let mut pod = Recorder::start(Answer::Json).await;
    let setup = Setup::new(vec![recorded("decode", "decode", &pod)]).limit("bodyTimeout", "300ms");
    let stack = Stack::start(setup).await;
    let mut connection = stack.unfinished().await;
    let mut answer = Vec::new();
    while !answer.windows(2).any(|pair| pair == b"}}") {
        let more = connection.read_buf(&mut answer).await.unwrap();
        assert_ne!(more, 0, "{}", String::from_utf8_lossy(&answer));
    }
    let answer = String::from_utf8_lossy(&answer).into_owned();
    assert!(answer.starts_with("HTTP/1.1 408 "), "{answer}");
    assert!(pod.arrived().is_none());
}

#[tokio::test]
async fn a_decision_that_takes_too_long_is_refused_with_504() {
    for mode in [RequestBody::FullDuplexStreamed, RequestBody::Buffered] {
        let mut pod = Recorder::start(Answer::Json).await;
        let setup = Setup::new(vec![recorded("decode", "decode", &pod)]);
        let setup = setup
            .limit("decisionTimeout", "1ms")
            .gateway(move |config| {
                config.request_body = mode;
                config.buffer_limit_bytes = 16 * 1024 * 1024;
            });
        let stack = Stack::start(setup).await;
        // Tokenizing this takes longer than a millisecond on any machine.
        let prompt = text("slow", 300_000);
        let body = json!({"model": MODEL, "messages": [{"role": "user", "content": prompt}]});
        let (status, answer) = stack.ask(chat(&stack), body.to_string()).await;
        assert_eq!(status, StatusCode::GATEWAY_TIMEOUT, "{mode:?}");
        assert_eq!(code(&answer), "decision_timeout");
        assert!(pod.arrived().is_none());
        stack.wait_for_in_flight(0).await;
    }
}

#[tokio::test]
async fn a_request_beyond_the_in_flight_limit_is_refused_with_503_and_a_time_to_retry() {
    let pod = Recorder::start(Answer::Json).await;
    let setup = Setup::new(vec![recorded("decode", "decode", &pod)]).limit("inFlight", "1");
    let stack = Stack::start(setup.limit("bodyTimeout", "60s")).await;
    let held = stack.unfinished().await;
    let refused = stack.send(chat(&stack), body()).await;
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    let retry_after = refused
        .headers()
        .get("retry-after")
        .expect("a time to retry");
    assert!(0 < retry_after.to_str().unwrap().parse::<u64>().unwrap());
    code(&refused.into_body().collect().await.unwrap().to_bytes());
    drop(held);
    eventually("there is room again", async || {
        let (status, _) = stack.ask(chat(&stack), body()).await;
        (status == StatusCode::OK).then_some(())
    })
    .await;
}

//! Clients, pods and the picker go away at the worst moment.

use crate::recorder::{Answer, Recorder};
use crate::routing::text;
use crate::stack::{Setup, Stack, engine, eventually, recorded};
use http::{Request, StatusCode, header};
use http_body_util::BodyExt as _;
use serde_json::json;
use sidestep::cli::demo::gateway::RequestBody;
use sidestep::cli::demo::picker::MODEL;
use sidestep::cli::demo::process::free_addresses;
use std::time::{Duration, Instant};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

fn chat(stack: &Stack) -> http::request::Builder {
    Request::post(stack.url("/v1/chat/completions"))
        .header(header::CONTENT_TYPE, "application/json")
}

fn body() -> String {
    json!({"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "stream": true})
        .to_string()
}

async fn with_one_pod(answer: Answer) -> (Stack, Recorder) {
    let pod = Recorder::start(answer).await;
    let stack = Stack::start(Setup::new(vec![recorded("decode", "decode", &pod)])).await;
    (stack, pod)
}

#[tokio::test]
async fn a_client_that_leaves_in_the_middle_of_the_answer_releases_its_booking() {
    for mode in [RequestBody::FullDuplexStreamed, RequestBody::Buffered] {
        let mut pod = Recorder::start(Answer::Stream).await;
        let setup = Setup::new(vec![recorded("decode", "decode", &pod)]);
        let stack = Stack::start(setup.gateway(move |config| config.request_body = mode)).await;
        let mut response = stack.send(chat(&stack), body()).await;
        let held = pod.next().await;
        held.say("first").await;
        response.body_mut().frame().await.unwrap().unwrap();
        stack.wait_for_in_flight(1).await;
        drop(response);
        held.abandoned().await;
        stack.wait_for_in_flight(0).await;
        assert_eq!(stack.last_decision().await["end"], "aborted");
    }
}

#[tokio::test]
async fn a_client_that_leaves_before_the_answer_begins_releases_its_booking() {
    let (stack, mut pod) = with_one_pod(Answer::Silence).await;
    let mut connection = TcpStream::connect(stack.gateway).await.unwrap();
    let body = body();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    connection.write_all(head.as_bytes()).await.unwrap();
    let held = pod.next().await;
    stack.wait_for_in_flight(1).await;
    drop(connection);
    held.abandoned().await;
    stack.wait_for_in_flight(0).await;
}

#[tokio::test]
async fn a_client_that_leaves_in_the_middle_of_its_body_leaves_nothing_behind() {
    let mut pod = Recorder::start(Answer::Json).await;
    let setup = Setup::new(vec![recorded("decode", "decode", &pod)]).limit("inFlight", "1");
    let stack = Stack::start(setup.limit("bodyTimeout", "60s")).await;
    let connection = stack.unfinished().await;
    // The one place is taken while the body is awaited …
    let (status, _) = stack.ask(chat(&stack), body()).await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    drop(connection);
    // … and free once its client is gone, long before the picker's own deadline.
    eventually("the place is free", async || {
        let (status, _) = stack.ask(chat(&stack), body()).await;
        (status == StatusCode::OK).then_some(())
    })
    .await;
    pod.next().await;
    stack.wait_for_in_flight(0).await;
}

#[tokio::test]
async fn a_pod_that_cuts_its_answer_releases_the_booking_and_the_client_sees_the_cut() {
    let (stack, mut pod) = with_one_pod(Answer::Stream).await;
    let mut response = stack.send(chat(&stack), body()).await;
    let held = pod.next().await;
    held.say("first").await;
    response.body_mut().frame().await.unwrap().unwrap();
    held.reset().await;
    let rest = response.into_body().collect().await;
    assert!(
        rest.is_err(),
        "an answer that was cut must not look complete"
    );
    stack.wait_for_in_flight(0).await;
}

#[tokio::test]
async fn a_booking_follows_its_request_to_the_pod_that_served_it() {
    let mut alive = Recorder::start(Answer::Stream).await;
    let [nobody] = free_addresses().unwrap();
    let mut dead = recorded("dead", "decode", &alive);
    dead.address = nobody;
    // Neither is asked for its health, so the picker believes in both; Envoy finds out.
    let pods = vec![recorded("alive", "decode", &alive), dead];
    let stack = Stack::start(Setup::new(pods)).await;
    let (response, held) = eventually("a request is picked for the dead pod", async || {
        let response = stack.send(chat(&stack), body()).await;
        if response.status() != StatusCode::OK {
            return None;
        }
        let held = alive.next().await;
        held.say("first").await;
        if stack.last_decision().await["decode"] == nobody.to_string() {
            return Some((response, held));
        }
        held.finish().await;
        response.into_body().collect().await.unwrap();
        None
    })
    .await;
    eventually("the booking is on the pod that serves", async || {
        let pods = stack.pods().await?;
        let booked = |name: &str| {
            let pod = pods.iter().find(|pod| pod["name"] == name)?;
            pod["requests"].as_u64()
        };
        (booked("alive") == Some(1) && booked("dead") == Some(0)).then_some(())
    })
    .await;
    assert!(
        1.0 <= stack
            .metric("sidestep_served_elsewhere_total")
            .await
            .unwrap()
    );
    held.finish().await;
    response.into_body().collect().await.unwrap();
    stack.wait_for_in_flight(0).await;
}

#[tokio::test]
async fn while_the_picker_is_gone_requests_fail_and_afterwards_they_succeed() {
    let pods = vec![engine("prefill", "prefill"), engine("decode", "decode")];
    let mut stack = Stack::start(Setup::new(pods)).await;
    let messages = json!([{"role": "user", "content": text("restart", 300)}]);
    assert_eq!(stack.chat(&messages).await.status, 200);
    stack.kill_picker().await;
    for _ in 0..3 {
        let answer = stack.chat(&messages).await;
        assert!((500..600).contains(&answer.status), "{answer:?}");
    }
    stack.restart_picker();
    stack.wait_until_ready().await;
    let answer = stack.chat(&messages).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    assert!(answer.complete);
    // What the engines hold is known again: by replay of their events, not by luck.
    let decision = stack.decision(&answer).await;
    assert_eq!(
        decision["because"], "net_new_below_thresholds",
        "{decision}"
    );
}

#[tokio::test]
async fn a_picker_that_is_told_to_end_lets_open_streams_finish() {
    let (mut stack, mut pod) = with_one_pod(Answer::Stream).await;
    let mut response = stack.send(chat(&stack), body()).await;
    let held = pod.next().await;
    held.say("before").await;
    response.body_mut().frame().await.unwrap().unwrap();
    stack.picker().terminate();
    eventually("the picker is draining", async || {
        stack.picker_log().contains("draining").then_some(())
    })
    .await;
    let ready = format!("http://{}/readyz", stack.admin);
    let (status, _) = stack.client.get(&ready).await.unwrap();
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    held.say("after").await;
    held.finish().await;
    let rest = response
        .into_body()
        .collect()
        .await
        .expect("the stream ends as it should")
        .to_bytes();
    let rest = String::from_utf8_lossy(&rest).into_owned();
    assert!(rest.contains("after") && rest.contains("[DONE]"), "{rest}");
    let ended = tokio::time::timeout(Duration::from_secs(20), stack.picker().wait()).await;
    let status = ended
        .expect("the picker ends once its streams have")
        .unwrap();
    assert_eq!(status.code(), Some(0));
}

#[tokio::test]
async fn a_picker_that_is_told_to_end_twice_ends_at_once() {
    let (mut stack, mut pod) = with_one_pod(Answer::Stream).await;
    let mut response = stack.send(chat(&stack), body()).await;
    let held = pod.next().await;
    held.say("before").await;
    response.body_mut().frame().await.unwrap().unwrap();
    stack.picker().terminate();
    eventually("the picker is draining", async || {
        stack.picker_log().contains("draining").then_some(())
    })
    .await;
    assert!(stack.picker().ended().is_none(), "a stream runs");
    let again = Instant::now();
    stack.picker().terminate();
    let ended = tokio::time::timeout(Duration::from_secs(20), stack.picker().wait()).await;
    assert_eq!(ended.expect("it ends").unwrap().code(), Some(1));
    // The time to drain is 30 s.
    assert!(again.elapsed() < Duration::from_secs(5));
    assert!(stack.picker_log().contains("second signal"));
}

#[tokio::test]
async fn a_pod_that_dies_is_not_picked_any_more() {
    let pods = vec![
        engine("prefill", "prefill"),
        engine("decode-1", "decode"),
        engine("decode-2", "decode"),
    ];
    let names = pods.clone();
    let mut stack = Stack::start(Setup::new(pods)).await;
    let messages = json!([{"role": "user", "content": text("dead", 300)}]);
    let decode = stack.decision(&stack.chat(&messages).await).await["decode"]
        .as_str()
        .unwrap()
        .to_owned();
    let dead = names
        .iter()
        .find(|pod| pod.address.to_string() == decode)
        .unwrap();
    stack.kill_engine(&dead.name).await;
    let killed = Instant::now();
    eventually("the dead pod is unreachable to the picker", async || {
        let pods = stack.pods().await?;
        pods.iter()
            .find(|pod| pod["endpoint"] == decode.as_str() && pod["availability"] == "unreachable")
            .map(|_| ())
    })
    .await;
    assert!(
        killed.elapsed() < Duration::from_secs(2),
        "noticed after {:?}",
        killed.elapsed()
    );
    for _ in 0..5 {
        let asked = Instant::now();
        let answer = stack.chat(&messages).await;
        assert!(answer.status == 200 && answer.complete, "{answer:?}");
        assert_ne!(stack.decision(&answer).await["decode"], decode.as_str());
        assert!(asked.elapsed() < Duration::from_secs(5), "no request hangs");
    }
    stack.wait_for_in_flight(0).await;
}

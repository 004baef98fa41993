//! Requests of every body mode reach the right pods, and come back.

use crate::recorder::{Answer, Recorder};
use crate::stack::{Setup, Stack, any_address, engine, eventually, recorded};
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use serde_json::json;
use sidestep::cli::demo::gateway::{GatewayConfig, RequestBody, ResponseBody, Transport};
use tokio::task::JoinSet;

/// Text of about that many tokens, another for each `salt`.
pub(crate) fn text(salt: &str, words: usize) -> String {
    let words: Vec<String> = (0..words)
        .map(|index| format!("{salt} {}", index * 7919 % 1000))
        .collect();
    words.join(" ")
}

/// A conversation through one prefill and two decode engines: remote first, then a bypass.
async fn converse(change: impl Fn(&mut GatewayConfig) + Send + 'static) {
    let pods = vec![
        engine("prefill", "prefill"),
        engine("decode-1", "decode"),
        engine("decode-2", "decode"),
    ];
    let prefill = pods[0].address.to_string();
    let stack = Stack::start(Setup::new(pods).gateway(change)).await;

    let mut messages = json!([{"role": "user", "content": text("alpha", 300)}]);
    let answer = stack.chat(&messages).await;
    assert_eq!(answer.status, 200, "{:?}", answer.error);
    assert!(answer.complete && !answer.text.is_empty());
    let first = stack.decision(&answer).await;
    assert_eq!(first["route"], "remote", "{first}");
    assert_eq!(first["prefill"], prefill.as_str());

    let decode = first["decode"].as_str().unwrap();
    eventually("the picker knows what the decode pod holds", async || {
        let pods = stack.pods().await?;
        pods.iter()
            .find(|pod| pod["endpoint"] == decode && pod["kv_blocks"] != 0)
            .map(|_| ())
    })
    .await;
    let turns = messages.as_array_mut().unwrap();
    turns.push(json!({"role": "assistant", "content": answer.text}));
    turns.push(json!({"role": "user", "content": "and then?"}));
    let answer = stack.chat(&messages).await;
    assert!(answer.status == 200 && answer.complete);
    let second = stack.decision(&answer).await;
    assert_eq!(second["route"], "local", "{second}");
    assert_eq!(second["because"], "net_new_below_thresholds");
    assert_eq!(second["decode"], decode);
    assert_eq!(second["prefill"], json!(null));
    stack.wait_for_in_flight(0).await;
}

#[tokio::test]
async fn full_duplex_bodies_route_and_stream() {
    converse(|_| ()).await;
}

#[tokio::test]
async fn buffered_bodies_route_and_stream() {
    converse(|config| config.request_body = RequestBody::Buffered).await;
}

#[tokio::test]
async fn full_duplex_both_ways_to_any_address_routes_and_streams() {
    converse(|config| {
        config.response_body = ResponseBody::FullDuplexStreamed;
        any_address(config);
    })
    .await;
}

#[tokio::test]
async fn buffered_bodies_to_any_address_without_tls_route_and_stream() {
    converse(|config| {
        config.request_body = RequestBody::Buffered;
        config.transport = Transport::Plaintext;
        any_address(config);
    })
    .await;
}

#[tokio::test]
async fn later_turns_go_to_the_pod_that_holds_their_prefix() {
    let mut pods = vec![engine("prefill", "prefill")];
    pods.extend((1..=3).map(|number| engine(&format!("decode-{number}"), "decode")));
    let stack = Stack::start(Setup::new(pods)).await;
    // Three conversations, interleaved: what each pod holds decides, not who was asked last.
    let mut conversations = Vec::new();
    for salt in ["red", "green", "blue"] {
        let messages = vec![json!({"role": "user", "content": text(salt, 400)})];
        let answer = stack.chat(&json!(messages)).await;
        let decision = stack.decision(&answer).await;
        assert_eq!(decision["route"], "remote", "{decision}");
        conversations.push((messages, answer.text, decision["decode"].clone()));
    }
    for turn in 2..=4 {
        for (messages, said, pod) in &mut conversations {
            messages.push(json!({"role": "assistant", "content": said.clone()}));
            messages.push(json!({"role": "user", "content": format!("question {turn}")}));
            let answer = eventually("the events of the last turn have arrived", async || {
                let answer = stack.chat(&json!(messages)).await;
                let decision = stack.decision(&answer).await;
                (decision["route"] == "local").then_some((answer, decision))
            })
            .await;
            let (answer, decision) = answer;
            assert_eq!(decision["decode"], *pod, "turn {turn}: {decision}");
            let (cached, prompt) = (&decision["cached_tokens"], &decision["prompt_tokens"]);
            assert!(cached.as_u64() < prompt.as_u64() && 0 < cached.as_u64().unwrap());
            *said = answer.text;
        }
    }
}

#[tokio::test]
async fn requests_without_a_body_go_to_a_decode_pod_at_once() {
    let mut prefill = Recorder::start(Answer::Json).await;
    let mut decode = Recorder::start(Answer::Json).await;
    let pods = vec![
        recorded("prefill", "prefill", &prefill),
        recorded("decode", "decode", &decode),
    ];
    // Any address: were the prefill pod picked, Envoy would go there.
    let stack = Stack::start(Setup::new(pods).gateway(any_address)).await;
    for method in [Method::GET, Method::HEAD, Method::OPTIONS, Method::POST] {
        let request = Request::builder()
            .method(method.clone())
            .uri(stack.url("/v1/models"));
        let (status, _) = stack.ask(request, "").await;
        assert_eq!(status, StatusCode::OK, "{method}");
        let seen = decode.next().await;
        assert_eq!((seen.method, seen.path.as_str()), (method, "/v1/models"));
    }
    assert!(prefill.arrived().is_none());
}

#[tokio::test]
async fn an_upgrade_is_answered_without_waiting_for_a_body() {
    let mut decode = Recorder::start(Answer::Json).await;
    let stack = Stack::start(Setup::new(vec![recorded("decode", "decode", &decode)])).await;
    let request = Request::get(stack.url("/v1/realtime"))
        .header("connection", "upgrade")
        .header("upgrade", "websocket");
    // This Envoy allows no upgrades and says so itself; what matters is that nothing hangs.
    let (status, _) = stack.ask(request, "").await;
    assert_eq!(status, StatusCode::FORBIDDEN);
    assert!(decode.arrived().is_none());
}

/// A filter of Envoy's that shows each request to the picker and takes no answer.
const SHOWS: &str = r#"          - name: shows
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor
              grpc_service: {envoy_grpc: {cluster_name: picker}}
              observability_mode: true
              processing_mode: {request_body_mode: STREAMED, response_body_mode: STREAMED}
"#;

#[tokio::test]
async fn a_gateway_that_also_shows_its_requests_is_served_and_nothing_is_booked_twice() {
    let mut pod = Recorder::start(Answer::Stream).await;
    let mut setup = Setup::new(vec![recorded("decode", "decode", &pod)]);
    setup.filters = SHOWS.into();
    let stack = Stack::start(setup).await;
    let body = json!({"model": "m", "messages": [], "stream": true}).to_string();
    let request = Request::post(stack.url("/v1/chat/completions"));
    let response = stack.send(request, body).await;
    assert_eq!(response.status(), StatusCode::OK);
    let held = pod.next().await;
    stack.wait_for_in_flight(1).await;
    assert_eq!(stack.metric("sidestep_only_shown_total").await, Some(1.0));
    let log = stack.picker_log();
    assert!(log.contains("observability_mode"), "{log}");
    held.finish().await;
    let rest = response.into_body().collect().await;
    rest.expect("the answer ends as it should");
    stack.wait_for_in_flight(0).await;
    assert_eq!(stack.metric("sidestep_streams_total").await, Some(2.0));
}

/// Report 21: no pod is better than another, and none of the burst has ended when the rest is placed.
#[tokio::test]
async fn a_burst_on_equal_pods_reaches_them_evenly() {
    const PODS: usize = 8;
    const REQUESTS: usize = 400;
    let mut pods = Vec::new();
    for _ in 0..PODS {
        pods.push(Recorder::start(Answer::Silence).await);
    }
    let listed = pods.iter().enumerate();
    let listed = listed.map(|(at, pod)| recorded(&format!("decode-{at}"), "decode", pod));
    let stack = Stack::start(Setup::new(listed.collect())).await;
    let url = stack.url("/v1/completions");
    let mut burst = JoinSet::new();
    for _ in 0..REQUESTS {
        let client = stack.client.clone();
        let body = json!({"model": "m", "prompt": text("burst", 80)}).to_string();
        let request = Request::post(&url).body(Full::new(body.into())).unwrap();
        burst.spawn(async move { client.send(request).await.map(drop) });
    }
    stack.wait_for_in_flight(REQUESTS as u64).await;
    let mut reached = 0;
    for pod in &mut pods {
        let mut here = 0;
        eventually("the burst has reached the pod", async || {
            here += std::iter::from_fn(|| pod.arrived()).count();
            (45 <= here).then_some(())
        })
        .await;
        assert!(
            here <= 55,
            "{here} of {REQUESTS} requests on one pod of {PODS}"
        );
        reached += here;
    }
    assert!(reached <= REQUESTS);
    drop(burst);
    stack.wait_for_in_flight(0).await;
}

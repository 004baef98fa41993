//! What clients write into routing headers never reaches a pod and never chooses one.

use crate::recorder::{Answer, Recorder};
use crate::stack::{Setup, Stack, any_address, engine, eventually, recorded};
use http::{Method, Request, StatusCode};
use serde_json::{Value, json};
use sidestep::cli::demo::gateway::{ClientHeaders, GatewayConfig};
use sidestep::cli::demo::picker::MODEL;
use sidestep::route::names::CLIENT_MAY_NOT_SEND;

const FORGED: &str = "169.254.169.254:80";

/// Nothing but the picker stands between a forged destination and that destination.
fn undefended(config: &mut GatewayConfig) {
    any_address(config);
    config.client_headers = ClientHeaders::LeftToPicker;
}

fn policy(bypass: &str) -> String {
    format!(
        "apiVersion: sidestep.dev/v1alpha1\nkind: DisaggregationPolicy\nmetadata: {{name: test}}\nspec:\n  rules:\n  - bypass: {{type: {bypass}}}\n"
    )
}

/// Every routing header, forged, twice where that could matter.
fn forged(method: Method, url: String, destination: &str) -> http::request::Builder {
    let mut request = Request::builder()
        .method(method)
        .uri(url)
        .header("content-type", "application/json");
    for name in CLIENT_MAY_NOT_SEND {
        let value = if *name == "x-gateway-destination-endpoint" {
            destination
        } else {
            FORGED
        };
        request = request.header(*name, value).header(*name, value);
    }
    request
}

fn chat() -> String {
    json!({"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}).to_string()
}

struct Forged {
    stack: Stack,
    prefill: Recorder,
    decode: Recorder,
    victim: Recorder,
}

impl Forged {
    async fn start(bypass: &str) -> Forged {
        Forged::start_with(&policy(bypass)).await
    }

    async fn start_with(policy: &str) -> Forged {
        let prefill = Recorder::start(Answer::Json).await;
        let decode = Recorder::start(Answer::Json).await;
        let victim = Recorder::start(Answer::Json).await;
        let pods = vec![
            recorded("prefill", "prefill", &prefill),
            recorded("decode", "decode", &decode),
        ];
        let stack = Stack::start(Setup::new(pods).policy(policy).gateway(undefended)).await;
        Forged {
            stack,
            prefill,
            decode,
            victim,
        }
    }

    fn request(&self, method: Method, path: &str) -> http::request::Builder {
        forged(
            method,
            self.stack.url(path),
            &self.victim.address.to_string(),
        )
    }

    fn nobody_else_was_called(&mut self) {
        assert!(
            self.victim.arrived().is_none(),
            "the forged destination was called"
        );
        assert!(
            self.prefill.arrived().is_none(),
            "the gateway called the prefill pod"
        );
    }
}

#[tokio::test]
async fn on_a_bypass_no_prefill_pod_is_named() {
    let mut forged = Forged::start("Always").await;
    let (status, _) = forged
        .stack
        .ask(forged.request(Method::POST, "/v1/chat/completions"), chat())
        .await;
    assert_eq!(status, StatusCode::OK);
    let seen = forged.decode.next().await;
    assert!(seen.all("x-prefiller-host-port").is_empty());
    assert_eq!(seen.only("x-sidestep-bypass"), "policy_always");
    assert_eq!(forged.stack.last_decision().await["route"], "local");
    for name in CLIENT_MAY_NOT_SEND {
        assert!(
            !seen.all(name).iter().any(|value| value == FORGED),
            "{name}"
        );
    }
    forged.nobody_else_was_called();
}

#[tokio::test]
async fn on_the_remote_route_exactly_our_prefill_pod_is_named() {
    let mut forged = Forged::start("Never").await;
    let (status, _) = forged
        .stack
        .ask(forged.request(Method::POST, "/v1/chat/completions"), chat())
        .await;
    assert_eq!(status, StatusCode::OK);
    let seen = forged.decode.next().await;
    assert_eq!(
        seen.only("x-prefiller-host-port"),
        forged.prefill.address.to_string()
    );
    assert_eq!(
        seen.only("x-gateway-destination-endpoint"),
        forged.decode.address.to_string()
    );
    for name in CLIENT_MAY_NOT_SEND {
        assert!(
            !seen.all(name).iter().any(|value| value == FORGED),
            "{name}"
        );
    }
    forged.nobody_else_was_called();
}

#[tokio::test]
async fn prefill_first_the_prefill_pod_gets_the_request_and_exactly_our_decode_pod_is_named() {
    let policy = policy("Never") + "  handoff: {dialect: prefillFirst}\n";
    let mut forged = Forged::start_with(&policy).await;
    let request = forged.request(Method::POST, "/v1/chat/completions");
    let (status, _) = forged.stack.ask(request, chat()).await;
    assert_eq!(status, StatusCode::OK);
    let seen = forged.prefill.next().await;
    assert_eq!(
        seen.only("x-decoder-host-port"),
        forged.decode.address.to_string()
    );
    assert_eq!(
        seen.only("x-gateway-destination-endpoint"),
        forged.prefill.address.to_string()
    );
    for name in CLIENT_MAY_NOT_SEND {
        assert!(
            !seen.all(name).iter().any(|value| value == FORGED),
            "{name}"
        );
    }
    assert!(
        forged.decode.arrived().is_none(),
        "the gateway called the decode pod"
    );
    assert!(
        forged.victim.arrived().is_none(),
        "the forged destination was called"
    );
}

#[tokio::test]
async fn requests_that_are_no_generation_are_cleaned_too() {
    let mut forged = Forged::start("Never").await;
    let requests = [
        (Method::GET, "/v1/models", ""),
        (Method::HEAD, "/v1/models", ""),
        (Method::DELETE, "/v1/files/1", ""),
        (Method::POST, "/v1/embeddings", "{\"input\": \"hello\"}"),
        (Method::POST, "/v1/chat/completions", ""),
    ];
    for (method, path, body) in requests {
        let (status, _) = forged
            .stack
            .ask(forged.request(method.clone(), path), body)
            .await;
        if body.is_empty() && method == Method::POST {
            // No prompt at all may be refused or passed on; what matters is where it goes.
            assert!(status.as_u16() < 500, "{status}");
            if !status.is_success() {
                continue;
            }
        } else {
            assert_eq!(status, StatusCode::OK, "{method} {path}");
        }
        let seen = forged.decode.next().await;
        for name in CLIENT_MAY_NOT_SEND {
            assert!(
                !seen.all(name).iter().any(|value| value == FORGED),
                "{method} {path}: {name}"
            );
        }
        assert_eq!(
            seen.only("x-gateway-destination-endpoint"),
            forged.decode.address.to_string()
        );
    }
    forged.nobody_else_was_called();
}

#[tokio::test]
async fn without_a_pod_the_answer_is_503_and_the_clients_destination_is_not_used() {
    let mut victim = Recorder::start(Answer::Json).await;
    let setup = Setup::new(vec![engine("decode", "decode")]);
    let mut stack = Stack::start(setup.gateway(undefended)).await;
    stack.kill_engine("decode").await;
    eventually("the picker knows that the pod is gone", async || {
        let pods = stack.pods().await?;
        (pods[0]["availability"] == "unreachable").then_some(())
    })
    .await;
    for (method, path, body) in [
        (Method::POST, "/v1/chat/completions", chat()),
        (Method::GET, "/v1/models", String::new()),
    ] {
        let request = forged(method, stack.url(path), &victim.address.to_string());
        let (status, answer) = stack.ask(request, body).await;
        assert_eq!(
            status,
            StatusCode::SERVICE_UNAVAILABLE,
            "{}",
            String::from_utf8_lossy(&answer)
        );
    }
    assert!(
        victim.arrived().is_none(),
        "the forged destination was called"
    );
}

#[tokio::test]
async fn a_body_that_is_no_json_is_refused_without_repeating_it() {
    let mut pod = Recorder::start(Answer::Json).await;
    let stack = Stack::start(Setup::new(vec![recorded("decode", "decode", &pod)])).await;
    let request =
        Request::post(stack.url("/v1/chat/completions")).header("content-type", "application/json");
    let (status, answer) = stack
        .ask(request, r#"{"model":"m","prompt":"SECRET-4711","#)
        .await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    let error: Value = serde_json::from_slice(&answer).unwrap();
    assert_eq!(error["error"]["type"], "invalid_request_error", "{error}");
    assert!(!error.to_string().contains("SECRET"));
    assert!(!stack.picker_log().contains("SECRET"));
    assert!(pod.arrived().is_none());
}

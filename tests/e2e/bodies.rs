//! Bodies reach the pod as the client sent them, byte for byte.

use crate::recorder::{Answer, Recorder};
use crate::routing::text;
use crate::stack::{Setup, Stack, recorded};
use bytes::Bytes;
use http::{Request, StatusCode, header};
use serde_json::json;
use sidestep::cli::demo::gateway::{GatewayConfig, RequestBody};
use sidestep::cli::demo::picker::MODEL;
use std::io::Write as _;

const TEN_MEGABYTES: usize = 10 * 1024 * 1024;

/// A chat completion of `size` bytes, odd ones among them, most of it in a field that nobody reads.
fn large_body(size: usize) -> Bytes {
    let head =
        json!({"model": MODEL, "messages": [{"role": "user", "content": "\u{0}é\u{1F600} hello"}]})
            .to_string();
    let mut body = head.into_bytes();
    body.pop();
    body.extend_from_slice(b" ,\t\"padding\" : \"");
    let mut state: u32 = 1;
    while body.len() < size - 2 {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        body.push(b' ' + (state >> 24) as u8 % 90);
        if matches!(body.last(), Some(b'"' | b'\\')) {
            body.pop();
        }
    }
    body.extend_from_slice(b"\"}");
    assert!(serde_json::from_slice::<serde_json::Value>(&body).is_ok());
    body.into()
}

async fn arrives_unchanged(change: impl Fn(&mut GatewayConfig) + Send + 'static) {
    let mut pod = Recorder::start(Answer::Json).await;
    let setup = Setup::new(vec![recorded("decode", "decode", &pod)]).limit("requestBytes", "16Mi");
    let stack = Stack::start(setup.gateway(change)).await;
    let body = large_body(TEN_MEGABYTES);
    assert_eq!(body.len(), TEN_MEGABYTES);
    for size in [TEN_MEGABYTES, 1024 * 1024, 62_000, 62_001, 1] {
        let path = if size == TEN_MEGABYTES {
            "/v1/chat/completions"
        } else {
            "/v1/embeddings"
        };
        let sent = body.slice(..size);
        let request =
            Request::post(stack.url(path)).header(header::CONTENT_TYPE, "application/json");
        let (status, answer) = stack.ask(request, sent.clone()).await;
        assert_eq!(
            status,
            StatusCode::OK,
            "{}",
            String::from_utf8_lossy(&answer)
        );
        let seen = pod.next().await;
        assert_eq!(seen.body.len(), sent.len());
        assert!(seen.body == sent, "{size} bytes are not the same bytes");
    }
}

#[tokio::test]
async fn ten_megabytes_arrive_unchanged_full_duplex() {
    arrives_unchanged(|_| ()).await;
}

#[tokio::test]
async fn ten_megabytes_arrive_unchanged_in_small_chunks() {
    // The default of Envoy Gateway.
    arrives_unchanged(|config| config.buffer_limit_bytes = 32 * 1024).await;
}

#[tokio::test]
async fn ten_megabytes_arrive_unchanged_buffered() {
    arrives_unchanged(|config| {
        config.request_body = RequestBody::Buffered;
        config.buffer_limit_bytes = 64 * 1024 * 1024;
    })
    .await;
}

#[tokio::test]
async fn a_compressed_body_is_understood_and_passed_on_compressed() {
    let mut pod = Recorder::start(Answer::Json).await;
    let stack = Stack::start(Setup::new(vec![recorded("decode", "decode", &pod)])).await;
    let plain =
        json!({"model": MODEL, "messages": [{"role": "user", "content": text("zip", 200)}]})
            .to_string();
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(plain.as_bytes()).unwrap();
    let packed = encoder.finish().unwrap();

    let mut counted = Vec::new();
    for (encoding, body) in [("identity", plain.into_bytes()), ("gzip", packed)] {
        let request = Request::post(stack.url("/v1/chat/completions"))
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::CONTENT_ENCODING, encoding);
        let (status, answer) = stack.ask(request, body.clone()).await;
        assert_eq!(
            status,
            StatusCode::OK,
            "{}",
            String::from_utf8_lossy(&answer)
        );
        let seen = pod.next().await;
        assert_eq!(seen.only("content-encoding"), encoding);
        assert!(seen.body == body);
        counted.push(
            stack.last_decision().await["prompt_tokens"]
                .as_u64()
                .unwrap(),
        );
    }
    assert!(200 < counted[0]);
    assert_eq!(counted[0], counted[1]);
}

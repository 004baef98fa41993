//! The demo's client: HTTP requests and streamed chat completions, timed.
//!
//! Lives here: [`Client`], the reading of server-sent events.
//! Never here: what is asked (see `workload`), what is shown (see `report`).
//! Invariant: time to first token runs from sending the request to the first event with content.

use anyhow::Context as _;
use bytes::Bytes;
use http::{Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use std::time::{Duration, Instant};

/// The response header that carries the id of the picker's decision.
const DECISION: &str = "x-sidestep-decision";

/// An HTTP client. Cheap to clone; connections are shared.
#[derive(Clone, Debug)]
pub struct Client(hyper_util::client::legacy::Client<HttpConnector, Full<Bytes>>);

/// One answered chat completion.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    /// HTTP status.
    pub status: u16,
    /// The id of the picker's decision, when it made one.
    pub decision: Option<String>,
    /// From sending to the first content; `None` when there was none.
    pub first_token: Option<Duration>,
    /// What the model said.
    pub text: String,
    /// Whether the stream ended as it should (`[DONE]`).
    pub complete: bool,
    /// The body of an answer that is not a success.
    pub error: Option<String>,
}

impl Default for Client {
    fn default() -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        Client(hyper_util::client::legacy::Client::builder(TokioExecutor::new()).build(connector))
    }
}

impl Client {
    /// Sends one request.
    ///
    /// # Errors
    /// When no answer came.
    pub async fn send(&self, request: Request<Full<Bytes>>) -> anyhow::Result<Response<Incoming>> {
        self.0.request(request).await.context("no answer")
    }

    /// `GET url`, the whole answer.
    ///
    /// # Errors
    /// When the URL is none, or the answer did not come or not to its end.
    pub async fn get(&self, url: &str) -> anyhow::Result<(StatusCode, Bytes)> {
        let request = Request::get(url).body(Full::default()).context("request")?;
        let response = self.send(request).await.with_context(|| url.to_owned())?;
        let status = response.status();
        let body = response
            .into_body()
            .collect()
            .await
            .with_context(|| url.to_owned())?;
        Ok((status, body.to_bytes()))
    }

    /// `POST url`: a streamed chat completion of the conversation `session`, read to its end.
    ///
    /// # Errors
    /// When no answer came, or it broke off.
    pub async fn chat(
        &self,
        url: &str,
        session: &str,
        body: &serde_json::Value,
    ) -> anyhow::Result<Answer> {
        let request = Request::post(url)
            .header(header::CONTENT_TYPE, "application/json")
            .header("x-session-id", session)
            .body(Full::from(body.to_string()))
            .context("request")?;
        let sent = Instant::now();
        let response = self.send(request).await?;
        let mut answer = Answer {
            status: response.status().as_u16(),
            decision: response
                .headers()
                .get(DECISION)
                .and_then(|value| value.to_str().ok())
                .map(str::to_owned),
            ..Answer::default()
        };
        let mut body = response.into_body();
        if answer.status != 200 {
            let bytes = body
                .collect()
                .await
                .context("reading the answer")?
                .to_bytes();
            answer.error = Some(String::from_utf8_lossy(&bytes).into_owned());
            return Ok(answer);
        }
        let mut events = Events::default();
        while let Some(frame) = body.frame().await {
            let frame = frame.context("the stream broke off")?;
            let Some(data) = frame.data_ref() else {
                continue;
            };
            for event in events.push(data) {
                if event == "[DONE]" {
                    answer.complete = true;
                    continue;
                }
                let content = content(&event);
                if !content.is_empty() {
                    answer.first_token.get_or_insert_with(|| sent.elapsed());
                    answer.text.push_str(&content);
                }
            }
        }
        Ok(answer)
    }
}

/// The text that one chunk of a chat completion adds.
fn content(event: &str) -> String {
    let chunk: serde_json::Value = serde_json::from_str(event).unwrap_or_default();
    chunk["choices"][0]["delta"]["content"]
        .as_str()
        .unwrap_or_default()
        .to_owned()
}

/// Cuts a stream of server-sent events into the data of each, however it was chunked.
#[derive(Debug, Default)]
pub struct Events {
    line: Vec<u8>,
}

impl Events {
    /// The events that `bytes` complete.
    pub fn push(&mut self, bytes: &[u8]) -> Vec<String> {
        let mut events = Vec::new();
        for &byte in bytes {
            if byte != b'\n' {
                self.line.push(byte);
                continue;
            }
            let line = String::from_utf8_lossy(&self.line);
            if let Some(data) = line.trim_end_matches('\r').strip_prefix("data:") {
                events.push(data.trim_start_matches(' ').to_owned());
            }
            self.line.clear();
        }
        events
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_out_whole_however_they_are_cut() {
        let stream = "data: {\"a\":\"é\"}\n\n: comment\r\ndata:[DONE]\r\n\r\n".as_bytes();
        for size in 1..stream.len() {
            let mut events = Events::default();
            let found: Vec<String> = stream
                .chunks(size)
                .flat_map(|cut| events.push(cut))
                .collect();
            assert_eq!(found, ["{\"a\":\"é\"}", "[DONE]"], "chunks of {size} bytes");
        }
    }

    #[test]
    fn only_content_counts_as_a_token() {
        assert_eq!(
            content(r#"{"choices":[{"delta":{"role":"assistant","content":""}}]}"#),
            ""
        );
        assert_eq!(content(r#"{"choices":[{"delta":{"content":"hi"}}]}"#), "hi");
        assert_eq!(content(r#"{"choices":[],"usage":{"prompt_tokens":3}}"#), "");
        assert_eq!(content("not json"), "");
    }
}

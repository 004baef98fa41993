//! `sidestep explain`: ask a running picker why a request would go where it would go.
//!
//! Lives here: arguments, the question to the admin port.
//! Never here: what the answer looks like (see `render`), any decision of its own.
//! Invariant: exit code 0 is an explanation; 2 that body or id is at fault; 1 that no answer came.

mod render;

pub use render::render;

use crate::telemetry::explanation::Explanation;
use anyhow::Context as _;
use bytes::Bytes;
use http::{HeaderName, HeaderValue, Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// Longest wait for an answer.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Arguments of `sidestep explain`.
#[derive(Debug, clap::Args)]
pub struct ExplainArgs {
    /// A file with an OpenAI request body (`-`: standard input), or the id of a decision.
    #[arg(value_name = "BODY.json|DECISION")]
    what: String,
    /// The admin address of the picker.
    #[arg(long, default_value = "http://127.0.0.1:9090", value_name = "URL")]
    url: String,
    /// The path that the body would be sent to.
    #[arg(long, default_value = "/v1/chat/completions", value_name = "PATH")]
    path: String,
    /// A request header, `name: value`; may be given several times.
    #[arg(long, value_name = "HEADER")]
    header: Vec<String>,
    /// Print the answer as JSON.
    #[arg(long)]
    json: bool,
}

/// Asks, and prints the answer.
///
/// # Errors
/// When the input cannot be read, or no answer came that can be read.
pub async fn run(args: ExplainArgs) -> anyhow::Result<ExitCode> {
    let request = question(&args)?;
    let client = Client::builder(TokioExecutor::new()).build_http::<Full<Bytes>>();
    let ask = async {
        let answer = client.request(request).await?;
        let status = answer.status();
        let body = answer.into_body().collect().await?.to_bytes();
        anyhow::Ok((status, body))
    };
    let (status, body) = tokio::time::timeout(TIMEOUT, ask)
        .await
        .context("no answer in time")?
        .with_context(|| format!("no answer from {}", args.url))?;
    if status != StatusCode::OK {
        eprintln!("sidestep: {}", fault(status, &body));
        let at_fault = status.is_client_error() && status != StatusCode::TOO_MANY_REQUESTS;
        return Ok(ExitCode::from(if at_fault { 2 } else { 1 }));
    }
    if args.json {
        println!("{}", String::from_utf8_lossy(&body));
    } else {
        let explanation: Explanation =
            serde_json::from_slice(&body).context("the answer is no explanation")?;
        print!("{}", render(&explanation));
    }
    Ok(ExitCode::SUCCESS)
}

fn question(args: &ExplainArgs) -> anyhow::Result<Request<Full<Bytes>>> {
    let url = args.url.trim_end_matches('/');
    let Some(body) = body(&args.what)? else {
        let id = &args.what;
        return Request::get(format!("{url}/v1/explain/{id}"))
            .body(Full::default())
            .with_context(|| format!("{id:?} is neither a file nor the id of a decision"));
    };
    let mut request = Request::post(format!("{url}/v1/explain?path={}", escaped(&args.path)))
        .header(http::header::CONTENT_TYPE, "application/json")
        .body(Full::from(body))
        .with_context(|| format!("--url: expected http://host:port, found {url:?}"))?;
    for header in &args.header {
        let (name, value) = header
            .split_once(':')
            .with_context(|| format!("--header: expected name: value, found {header:?}"))?;
        let name: HeaderName = name.trim().parse().context("--header: name")?;
        let value: HeaderValue = value.trim().parse().context("--header: value")?;
        request.headers_mut().append(name, value);
    }
    Ok(request)
}

/// The body in the file called `what`; `None` when there is no such file and `what` may be an id.
fn body(what: &str) -> anyhow::Result<Option<Vec<u8>>> {
    if what == "-" {
        let mut body = Vec::new();
        std::io::stdin().read_to_end(&mut body)?;
        return Ok(Some(body));
    }
    let is_path = what.contains(['/', '.']) || Path::new(what).exists();
    if !is_path {
        return Ok(None);
    }
    let path = PathBuf::from(what);
    let body = std::fs::read(&path).with_context(|| path.display().to_string())?;
    Ok(Some(body))
}

/// `text` as part of a query.
fn escaped(text: &str) -> String {
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"/-_.~".contains(byte);
    text.bytes()
        .map(|byte| match plain(&byte) {
            true => char::from(byte).to_string(),
            false => format!("%{byte:02X}"),
        })
        .collect()
}

/// What an answer says that is no explanation.
fn fault(status: StatusCode, body: &[u8]) -> String {
    let message = serde_json::from_slice::<serde_json::Value>(body)
        .ok()
        .and_then(|body| Some(body.get("error")?.get("message")?.as_str()?.to_owned()));
    message.unwrap_or_else(|| format!("the picker answered {status}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_survives_the_query() {
        assert_eq!(escaped("/v1/completions"), "/v1/completions");
        assert_eq!(escaped("/a b?c&d=é"), "/a%20b%3Fc%26d%3D%C3%A9");
    }

    #[test]
    fn what_the_picker_says_is_passed_on() {
        let body = br#"{"error": {"message": "too many explanations"}}"#;
        assert_eq!(
            fault(StatusCode::TOO_MANY_REQUESTS, body),
            "too many explanations"
        );
        let none = fault(StatusCode::BAD_GATEWAY, b"<html>");
        assert_eq!(none, "the picker answered 502 Bad Gateway");
    }
}

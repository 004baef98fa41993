//! Sending spans to a receiver.
//!
//! Lives here: the exporter's task and its HTTP client, which speaks OTLP over gRPC and over HTTP.
//! Never here: anything a request waits for.
//! Invariant: a receiver that is gone, slow or unwilling costs spans, which are counted, and nothing else.
//!
//! OTLP over gRPC is one unary call, so it needs no more than an HTTP/2 request with a five-byte
//! prefix and a status in the trailers (gRPC over HTTP/2, "Protocol").

use crate::telemetry::trace::queue::{Batch, Queue};
use crate::telemetry::trace::settings::{Protocol, TraceSettings};
use crate::telemetry::trace::wire;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, StatusCode, Uri, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// Most bytes read of an answer.
const ANSWER_BYTES: usize = 64 << 10;
/// Bytes before a message in gRPC: a flag and the length.
const GRPC_PREFIX: usize = 5;
/// Times a batch is sent before it is given up.
const ATTEMPTS: u32 = 4;
/// Wait before the second attempt; doubled for each further one.
const BACKOFF: Duration = Duration::from_millis(500);
/// Longest time the last spans may take when the program stops.
const FLUSH: Duration = Duration::from_secs(5);

/// Where and how spans are sent.
#[derive(Debug)]
pub(super) struct Sender {
    client: HttpClient,
    url: Uri,
    protocol: Protocol,
    headers: HeaderMap,
    timeout: Duration,
    /// An encoded `Resource`.
    resource: Vec<u8>,
}

#[derive(Debug)]
enum HttpClient {
    Plain(Client<HttpConnector, Full<Bytes>>),
    Tls(Client<HttpsConnector<HttpConnector>, Full<Bytes>>),
}

/// An export that failed.
#[derive(Debug, thiserror::Error)]
enum SendError {
    #[error("{0}")]
    Connection(String),
    #[error("no answer within {0:?}")]
    Timeout(Duration),
    #[error("the receiver answered with HTTP status {0}")]
    Http(StatusCode),
    #[error("the receiver answered with gRPC status {0}")]
    Grpc(u16),
}

impl SendError {
    /// Whether a further attempt may succeed (OTLP specification, "Failures").
    fn passes(&self) -> bool {
        match self {
            SendError::Connection(_) | SendError::Timeout(_) => true,
            SendError::Http(status) => matches!(status.as_u16(), 429 | 502 | 503 | 504),
            SendError::Grpc(code) => matches!(code, 1 | 4 | 8 | 10 | 11 | 14 | 15),
        }
    }
}

impl Sender {
    /// A sender; connects with the first batch.
    ///
    /// # Errors
    /// When the address is `https` and the certificates of this system cannot be read.
    pub(super) fn new(settings: &TraceSettings) -> std::io::Result<Sender> {
        let mut builder = Client::builder(TokioExecutor::new());
        builder
            .timer(TokioTimer::new())
            .pool_idle_timeout(Duration::from_secs(90))
            .http2_only(settings.protocol == Protocol::Grpc);
        let client = if settings.url.scheme_str() == Some("https") {
            let connector = hyper_rustls::HttpsConnectorBuilder::new()
                .with_native_roots()?
                .https_only();
            let connector = match settings.protocol {
                Protocol::Grpc => connector.enable_http2().build(),
                Protocol::HttpProtobuf => connector.enable_http1().build(),
            };
            HttpClient::Tls(builder.build(connector))
        } else {
            HttpClient::Plain(builder.build(HttpConnector::new()))
        };
        Ok(Sender {
            client,
            url: settings.url.clone(),
            protocol: settings.protocol,
            headers: settings.headers.clone(),
            timeout: settings.timeout,
            resource: wire::resource(&settings.resource),
        })
    }

    fn request(&self, batch: &Batch) -> Request<Full<Bytes>> {
        let (body, content_type) = match self.protocol {
            Protocol::HttpProtobuf => (batch.request(&self.resource, 0), "application/x-protobuf"),
            Protocol::Grpc => {
                // Not compressed (0), and the length of the message.
                let mut framed = batch.request(&self.resource, GRPC_PREFIX);
                let length = u32::try_from(framed.len() - GRPC_PREFIX).unwrap_or(u32::MAX);
                framed[1..GRPC_PREFIX].copy_from_slice(&length.to_be_bytes());
                (framed, "application/grpc")
            }
        };
        let body = Bytes::from(body);
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = http::Method::POST;
        *request.uri_mut() = self.url.clone();
        let headers = request.headers_mut();
        headers.clone_from(&self.headers);
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
        let agent = concat!("sidestep/", env!("CARGO_PKG_VERSION"));
        headers.insert(header::USER_AGENT, HeaderValue::from_static(agent));
        if self.protocol == Protocol::Grpc {
            headers.insert(header::TE, HeaderValue::from_static("trailers"));
        }
        request
    }

    async fn send(&self, batch: &Batch) -> Result<(), SendError> {
        let exchange = async {
            let request = self.request(batch);
            let response = match &self.client {
                HttpClient::Plain(client) => client.request(request).await,
                HttpClient::Tls(client) => client.request(request).await,
            }
            .map_err(|error| SendError::Connection(chain(&error)))?;
            let (head, body) = response.into_parts();
            let body = Limited::new(body, ANSWER_BYTES)
                .collect()
                .await
                .map_err(|error| SendError::Connection(error.to_string()))?;
            if !head.status.is_success() {
                return Err(SendError::Http(head.status));
            }
            if self.protocol == Protocol::HttpProtobuf {
                return Ok(());
            }
            let status = |headers: &HeaderMap| {
                let status = headers.get("grpc-status")?;
                status.to_str().ok()?.parse::<u16>().ok()
            };
            match body
                .trailers()
                .and_then(status)
                .or_else(|| status(&head.headers))
            {
                Some(0) => Ok(()),
                Some(code) => Err(SendError::Grpc(code)),
                None => Err(SendError::Connection("the answer is not gRPC".to_owned())),
            }
        };
        tokio::time::timeout(self.timeout, exchange)
            .await
            .unwrap_or(Err(SendError::Timeout(self.timeout)))
    }
}

/// An error and its causes.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

/// Sends what waits in `queue` until `stop` is raised, then what is left, within a bound.
pub(super) async fn run(queue: Arc<Queue>, sender: Sender, mut stop: watch::Receiver<bool>) {
    loop {
        let stopped = tokio::select! {
            () = wait(&queue) => false,
            () = raised(&mut stop) => true,
        };
        if stopped {
            break;
        }
        while let Some(batch) = queue.take() {
            tokio::select! {
                () = deliver(&queue, &sender, &batch) => {}
                () = raised(&mut stop) => {
                    // The batch may have been sent in part; a span sent twice is better than one lost.
                    let _ = tokio::time::timeout(FLUSH, flush(&queue, &sender, Some(batch))).await;
                    return;
                }
            }
            if !queue.holds_batch() {
                break;
            }
        }
    }
    let _ = tokio::time::timeout(FLUSH, flush(&queue, &sender, None)).await;
}

/// Until `stop` is raised, or whoever could raise it is gone.
async fn raised(stop: &mut watch::Receiver<bool>) {
    let _ = stop.wait_for(|stop| *stop).await;
}

/// Until a batch is full or the delay is over.
async fn wait(queue: &Queue) {
    if !queue.holds_batch() {
        let _ = tokio::time::timeout(queue.delay(), queue.full.notified()).await;
    }
}

/// Sends a batch, again if that may help.
async fn deliver(queue: &Queue, sender: &Sender, batch: &Batch) {
    let mut pause = BACKOFF;
    for attempt in 1..=ATTEMPTS {
        match sender.send(batch).await {
            Ok(()) => return queue.exported(batch.spans),
            Err(error) => {
                let last = attempt == ATTEMPTS || !error.passes();
                trouble(queue, sender, &error);
                if last {
                    return queue.failed(batch.spans);
                }
            }
        }
        tokio::time::sleep(pause).await;
        pause *= 2;
    }
}

/// Sends what is left, each batch once.
async fn flush(queue: &Queue, sender: &Sender, first: Option<Batch>) {
    let mut next = first.or_else(|| queue.take());
    while let Some(batch) = next {
        match sender.send(&batch).await {
            Ok(()) => queue.exported(batch.spans),
            Err(error) => {
                queue.failed(batch.spans);
                return trouble(queue, sender, &error);
            }
        }
        next = queue.take();
    }
}

fn trouble(queue: &Queue, sender: &Sender, error: &SendError) {
    let stats = queue.stats();
    tracing::warn!(
        receiver = %sender.url.authority().map_or("", |authority| authority.as_str()),
        protocol = sender.protocol.as_str(),
        %error,
        dropped = stats.dropped_queue_full + stats.dropped_export_failed,
        "spans could not be sent; check that an OTLP receiver for this protocol listens there"
    );
}

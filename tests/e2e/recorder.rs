//! Pods that record what reaches them and answer as a test says.
//!
//! Lives here: [`Recorder`], one HTTP server in this process, and [`Seen`], one request it got.
//! Never here: Envoy, the picker, any understanding of the body.
//! Invariant: a request is recorded before it is answered, byte for byte.

use bytes::Bytes;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderMap};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

/// How a recorder answers.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Answer {
    /// With a short JSON object, at once.
    Json,
    /// With a stream of events that the test writes through [`Seen`].
    Stream,
    /// Not at all.
    Silence,
}

/// An HTTP server on a loopback port. Ends when dropped.
pub(crate) struct Recorder {
    /// Where it listens.
    pub(crate) address: SocketAddr,
    seen: mpsc::UnboundedReceiver<Seen>,
    _server: JoinSet<()>,
}

/// One request that reached a recorder.
pub(crate) struct Seen {
    pub(crate) method: Method,
    pub(crate) path: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    /// What is written here is streamed to the client; an error cuts the connection.
    answer: mpsc::Sender<Result<Bytes, std::io::Error>>,
}

impl Seen {
    /// All values of a header.
    pub(crate) fn all(&self, name: &str) -> Vec<String> {
        let values = self.headers.get_all(name).iter();
        values
            .map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned())
            .collect()
    }

    /// The only value of a header.
    pub(crate) fn only(&self, name: &str) -> String {
        let mut values = self.all(name);
        assert_eq!(values.len(), 1, "{name}: {values:?}");
        values.remove(0)
    }

    /// Streams one event with this text as content.
    pub(crate) async fn say(&self, text: &str) {
        let chunk = serde_json::json!({"choices": [{"index": 0, "delta": {"content": text}}]});
        self.write(format!("data: {chunk}\n\n")).await;
    }

    /// Ends the stream as an engine does.
    pub(crate) async fn finish(self) {
        self.write("data: [DONE]\n\n".into()).await;
    }

    /// Cuts the connection in the middle of the answer.
    pub(crate) async fn reset(self) {
        self.answer
            .send(Err(std::io::Error::other("reset by the test")))
            .await
            .ok();
    }

    /// Waits until the client is gone.
    pub(crate) async fn abandoned(&self) {
        let gone = tokio::time::timeout(Duration::from_secs(20), self.answer.closed()).await;
        gone.expect("the pod's connection is closed when its client has gone");
    }

    async fn write(&self, text: String) {
        self.answer
            .send(Ok(Bytes::from(text)))
            .await
            .expect("the client is still there");
    }
}

impl Recorder {
    pub(crate) async fn start(answer: Answer) -> Recorder {
        Recorder::start_at(Ipv4Addr::LOCALHOST, answer).await
    }

    /// One that listens on another loopback address.
    pub(crate) async fn start_at(ip: Ipv4Addr, answer: Answer) -> Recorder {
        let listener = TcpListener::bind((ip, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (record, seen) = mpsc::unbounded_channel();
        let mut server = JoinSet::new();
        server.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let record = record.clone();
                connections.spawn(async move {
                    let service =
                        service_fn(move |request| respond(request, answer, record.clone()));
                    // A connection that the test cuts ends with an error, on purpose.
                    http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service)
                        .await
                        .ok();
                });
            }
        });
        Recorder {
            address,
            seen,
            _server: server,
        }
    }

    /// The next request; fails the test when none comes.
    pub(crate) async fn next(&mut self) -> Seen {
        let next = tokio::time::timeout(Duration::from_secs(20), self.seen.recv()).await;
        next.expect("a request reaches the pod")
            .expect("the server runs")
    }

    /// A request that has arrived already, if any.
    pub(crate) fn arrived(&mut self) -> Option<Seen> {
        self.seen.try_recv().ok()
    }
}

async fn respond(
    request: Request<Incoming>,
    answer: Answer,
    record: mpsc::UnboundedSender<Seen>,
) -> Result<Response<BoxBody<Bytes, std::io::Error>>, hyper::Error> {
    let (head, body) = request.into_parts();
    let body = body.collect().await?.to_bytes();
    let (write, read) = mpsc::channel(16);
    let path = head
        .uri
        .path_and_query()
        .map_or(String::new(), ToString::to_string);
    let seen = Seen {
        method: head.method,
        path,
        headers: head.headers,
        body,
        answer: write,
    };
    record.send(seen).ok();
    let mut response = match answer {
        Answer::Json => {
            let body = Full::new(Bytes::from_static(b"{\"object\":\"recorded\"}"));
            Response::new(body.map_err(|never| match never {}).boxed())
        }
        Answer::Stream => {
            let stream = tokio_stream::wrappers::ReceiverStream::new(read);
            let frames = tokio_stream::StreamExt::map(stream, |chunk| chunk.map(Frame::data));
            Response::new(StreamBody::new(frames).boxed())
        }
        // Dropped with this future when the client leaves, which the test sees.
        Answer::Silence => {
            let _until_then = read;
            std::future::pending().await
        }
    };
    let kind = match answer {
        Answer::Json => "application/json",
        Answer::Stream | Answer::Silence => "text/event-stream",
    };
    response
        .headers_mut()
        .insert(CONTENT_TYPE, kind.parse().unwrap());
    Ok(response)
}

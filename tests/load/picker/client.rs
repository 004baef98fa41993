//! Streams as a gateway has them, and what may become of each.

use super::conversation::Conversation;
use super::gateway::{http_body, http_headers, streamed};
use super::tally::Tally;
use super::world::{ESTIMATED, EXACT, HASTY, PODS, STALL, address};
use envoy_types::pb::envoy::config::core::v3::Metadata;
use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::processing_mode::BodySendMode;
use envoy_types::pb::envoy::service::ext_proc::v3::external_processor_client::ExternalProcessorClient;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request as Ask;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response as Answer;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    HeadersResponse, ProcessingRequest, ProcessingResponse, ProtocolConfiguration,
};
use envoy_types::pb::google::protobuf::value::Kind;
use envoy_types::pb::google::protobuf::{Struct, Value};
use flate2::Compression;
use flate2::write::GzEncoder;
use parking_lot::Mutex;
use std::io::Write;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::Streaming;
use tonic::transport::Channel;

/// For any one answer.
const PATIENCE: Duration = Duration::from_secs(20);
const DESTINATION: &str = "x-gateway-destination-endpoint";
const PIECE: usize = 16 << 10;
const USAGE: &[u8] = br#"{"choices":[],"usage":{"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":4}}}"#;

/// What becomes of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// A request and its whole answer.
    Whole,
    /// The same, compressed.
    Gzip,
    /// The same, for a model whose prompts are estimated.
    Estimated,
    /// The same, for one pod, which may be away.
    Subset,
    /// The same, answered by another pod than the one chosen.
    Elsewhere,
    /// Without a body.
    Listing,
    /// The gateway does not show the answer.
    Unseen,
    /// No JSON.
    Malformed,
    /// No gzip, although it says so.
    Garbled,
    /// A model that nobody serves.
    Unknown,
    /// More than may be held.
    TooLong,
    /// The client leaves in the middle of its body.
    LeavesInBody,
    /// The client leaves while a pod is being chosen.
    LeavesAtOnce,
    /// The client leaves once a pod is chosen.
    LeavesAnswered,
    /// The client leaves in the middle of the answer.
    LeavesInAnswer,
    /// The body never ends.
    Stalls,
}

/// How often each, in a hundred.
const FATES: [(Fate, u64); 14] = [
    (Fate::Whole, 45),
    (Fate::Gzip, 10),
    (Fate::Estimated, 5),
    (Fate::Subset, 5),
    (Fate::Elsewhere, 5),
    (Fate::Listing, 4),
    (Fate::Malformed, 4),
    (Fate::Garbled, 2),
    (Fate::Unknown, 2),
    (Fate::TooLong, 1),
    (Fate::LeavesInBody, 5),
    (Fate::LeavesAtOnce, 4),
    (Fate::LeavesAnswered, 4),
    (Fate::LeavesInAnswer, 4),
];

impl Fate {
    pub(super) fn draw(number: u64) -> Fate {
        let mut left = number % 100;
        for (fate, share) in FATES {
            if left < share {
                return fate;
            }
            left -= share;
        }
        Fate::Whole
    }

    fn model(self) -> &'static str {
        match self {
            Fate::Estimated => ESTIMATED,
            Fate::LeavesAtOnce => HASTY,
            Fate::Unknown => "nobody's",
            _ => EXACT,
        }
    }

    /// The refusal that it must get; none: a plan.
    fn refusal(self) -> Option<(&'static str, i32)> {
        match self {
            Fate::Malformed => Some(("invalid_body", 400)),
            Fate::Garbled => Some(("malformed_content_encoding", 400)),
            Fate::Unknown => Some(("unknown_model", 404)),
            Fate::TooLong => Some(("body_too_large", 413)),
            Fate::Stalls => Some(("body_timeout", 408)),
            _ => None,
        }
    }
}

/// How long a connection is used. The client's HTTP/2 library gives one up once answers to 1,024 streams
/// that it had reset and forgotten have come.
const CONNECTION: Duration = Duration::from_secs(10);

/// The gateway: one connection at a time.
#[derive(Clone)]
pub(super) struct Client {
    server: SocketAddr,
    connection: Arc<Mutex<(Channel, Instant)>>,
    /// Of all pods.
    pub(super) port: u16,
    pub(super) tally: Arc<Tally>,
}

/// What a stream is told first.
enum First {
    Planned(String),
    Refused(String, i32),
}

impl Client {
    pub(super) fn new(server: SocketAddr, port: u16) -> Client {
        Client {
            server,
            connection: Arc::new(Mutex::new((connection(server), Instant::now()))),
            port,
            tally: Arc::default(),
        }
    }

    pub(super) fn channel(&self) -> Channel {
        let mut kept = self.connection.lock();
        if CONNECTION < kept.1.elapsed() {
            *kept = (connection(self.server), Instant::now());
        }
        kept.0.clone()
    }

    /// One stream from its beginning to its end.
    pub(super) async fn stream(&self, fate: Fate, conversation: &mut Conversation, draw: u64) {
        self.tally.begun(fate);
        if let Err(fault) = self.follow(fate, conversation, draw).await {
            self.tally.fault(format!("{fate:?}: {fault}"));
        }
    }

    async fn follow(
        &self,
        fate: Fate,
        conversation: &mut Conversation,
        draw: u64,
    ) -> Result<(), String> {
        let mut stream = Stream::open(&self.channel(), fate == Fate::Unseen).await?;
        let only = address((draw % PODS as u64) as usize, self.port).to_string();
        if fate == Fate::Subset {
            stream.metadata(
                "envoy.lb.subset_hint",
                "x-gateway-destination-endpoint-subset",
                &only,
            );
        }
        let body = match fate {
            Fate::Malformed => br#"{"model": "exact", "messages": [}"#.to_vec(),
            Fate::Garbled => b"\x1f\x8b no gzip".to_vec(),
            Fate::TooLong => vec![b' '; 200 << 10],
            Fate::Gzip => zipped(&conversation.body(fate.model())),
            _ => conversation.body(fate.model()),
        };
        let encoding = match fate {
            Fate::Gzip | Fate::Garbled => "gzip",
            _ => "identity",
        };
        let (method, path) = match fate {
            Fate::Listing => ("GET", "/v1/models"),
            _ => ("POST", "/v1/chat/completions"),
        };
        let head = [
            (":method", method),
            (":path", path),
            ("content-type", "application/json"),
            ("content-encoding", encoding),
            ("x-session-id", conversation.session()),
        ];
        let listing = fate == Fate::Listing;
        stream.tell(Ask::RequestHeaders(http_headers(&head, listing)));
        let cut = matches!(fate, Fate::LeavesInBody | Fate::Stalls);
        let body = if cut {
            body[..body.len() / 2].to_vec()
        } else {
            body
        };
        if !listing {
            stream.body(&body, !cut);
        }
        let sent = Instant::now();
        if matches!(fate, Fate::LeavesInBody | Fate::LeavesAtOnce) {
            // Some time before a pod is chosen, or while it is.
            sleep(Duration::from_micros(draw % 3000)).await;
            return Ok(());
        }
        let first = stream.first().await?;
        let waited = sent.elapsed();
        let planned = match (first, fate.refusal()) {
            (First::Planned(pod), None) => pod,
            (First::Refused(code, status), expected) => {
                let away = fate == Fate::Subset && (&*code, status) == ("no_pod_in_subset", 503);
                if !away && expected != Some((&*code, status)) {
                    return Err(format!("refused: {code} {status}"));
                }
                if fate == Fate::Stalls && waited < STALL {
                    return Err(format!("given up after {waited:?}"));
                }
                self.tally.refused(code);
                return stream.ends().await;
            }
            (First::Planned(_), Some(_)) => return Err("got a pod".to_owned()),
        };
        self.tally.planned(fate, waited);
        let pod = planned
            .parse()
            .map_err(|_| format!("no address: {planned}"))?;
        let known = (0..PODS).any(|number| address(number, self.port) == pod);
        if !known || (fate == Fate::Subset && planned != only) {
            return Err(format!("sent to {planned}"));
        }
        if !listing {
            stream.returned(&body).await?;
        }
        conversation.answered();
        match fate {
            Fate::LeavesAnswered => Ok(()),
            Fate::Unseen => stream.ends().await,
            _ => stream.answer(fate, &only, draw).await,
        }
    }
}

fn connection(server: SocketAddr) -> Channel {
    Channel::from_shared(format!("http://{server}"))
        .unwrap()
        .connect_lazy()
}

fn zipped(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// One stream of messages.
pub(super) struct Stream {
    send: Option<mpsc::UnboundedSender<ProcessingRequest>>,
    answers: Streaming<ProcessingResponse>,
    response_mode: BodySendMode,
    metadata: Option<Metadata>,
}

impl Stream {
    pub(super) async fn open(channel: &Channel, unseen: bool) -> Result<Stream, String> {
        let (send, receive) = mpsc::unbounded_channel();
        let mut client = ExternalProcessorClient::new(channel.clone());
        let opened = timeout(
            PATIENCE,
            client.process(UnboundedReceiverStream::new(receive)),
        )
        .await;
        let opened = opened.map_err(|_| "not opened in time")?;
        Ok(Stream {
            send: Some(send),
            answers: opened
                .map_err(|status| format!("gRPC: {status}"))?
                .into_inner(),
            response_mode: match unseen {
                true => BodySendMode::None,
                false => BodySendMode::Streamed,
            },
            metadata: None,
        })
    }

    fn metadata(&mut self, namespace: &str, key: &str, value: &str) {
        let kind = Some(Kind::StringValue(value.to_owned()));
        let fields = [(key.to_owned(), Value { kind })].into();
        self.metadata = Some(Metadata {
            filter_metadata: [(namespace.to_owned(), Struct { fields })].into(),
            ..Metadata::default()
        });
    }

    pub(super) fn tell(&self, ask: Ask) {
        let message = ProcessingRequest {
            protocol_config: Some(ProtocolConfiguration {
                request_body_mode: BodySendMode::FullDuplexStreamed.into(),
                response_body_mode: self.response_mode.into(),
                send_body_without_waiting_for_header_response: false,
            }),
            metadata_context: self.metadata.clone(),
            request: Some(ask),
            ..ProcessingRequest::default()
        };
        if let Some(send) = &self.send {
            // A server that has given its answer no longer reads.
            let _ = send.send(message);
        }
    }

    pub(super) fn body(&self, bytes: &[u8], end: bool) {
        let mut pieces = bytes.chunks(PIECE).peekable();
        while let Some(piece) = pieces.next() {
            let last = end && pieces.peek().is_none();
            self.tell(Ask::RequestBody(http_body(piece, last)));
        }
    }

    async fn message(&mut self) -> Result<Option<Answer>, String> {
        let next = timeout(PATIENCE, self.answers.message()).await;
        let next = next.map_err(|_| "no answer in time")?;
        let message = next.map_err(|status| format!("gRPC: {status}"))?;
        message
            .map(|message| message.response.ok_or_else(|| "an empty answer".to_owned()))
            .transpose()
    }

    async fn first(&mut self) -> Result<First, String> {
        match self.message().await? {
            Some(Answer::RequestHeaders(answer)) => Ok(First::Planned(destination(answer)?)),
            Some(Answer::ImmediateResponse(refusal)) => {
                let status = refusal.status.map_or(0, |status| status.code);
                Ok(First::Refused(refusal.details, status))
            }
            other => Err(format!("answered {}", kind(other.as_ref()))),
        }
    }

    /// The first answer is a refusal with `code`; or else a plan.
    pub(super) async fn refusal(&mut self) -> Result<Option<String>, String> {
        Ok(match self.first().await? {
            First::Refused(code, _) => Some(code),
            First::Planned(_) => None,
        })
    }

    /// The body comes back as it was sent.
    pub(super) async fn returned(&mut self, body: &[u8]) -> Result<(), String> {
        let mut back = Vec::with_capacity(body.len());
        loop {
            match self.message().await? {
                Some(answer @ Answer::RequestBody(_)) => {
                    let (piece, end) = streamed(answer);
                    back.extend_from_slice(&piece);
                    if end {
                        break;
                    }
                }
                other => return Err(format!("instead of body: {}", kind(other.as_ref()))),
            }
        }
        (back == body)
            .then_some(())
            .ok_or("another body".to_owned())
    }

    /// The answer of a pod passes, or half of it.
    async fn answer(mut self, fate: Fate, other: &str, draw: u64) -> Result<(), String> {
        if fate == Fate::Elsewhere {
            self.metadata("envoy.lb", "x-gateway-destination-endpoint-served", other);
        }
        self.tell(Ask::ResponseHeaders(http_headers(
            &[(":status", "200")],
            false,
        )));
        match self.message().await? {
            Some(Answer::ResponseHeaders(_)) => {}
            other => return Err(format!("to headers: {}", kind(other.as_ref()))),
        }
        let pieces = 1 + draw % 4;
        for piece in 0..pieces {
            let last = piece + 1 == pieces;
            let bytes = if last { USAGE } else { b"data: {}\n\n" };
            if last && fate == Fate::LeavesInAnswer {
                return Ok(());
            }
            self.tell(Ask::ResponseBody(http_body(bytes, last)));
            match self.message().await? {
                Some(Answer::ResponseBody(_)) => {}
                other => return Err(format!("to a body: {}", kind(other.as_ref()))),
            }
        }
        match draw % 2 {
            // As Envoy does when it is done.
            0 => Ok(()),
            _ => self.ends().await,
        }
    }

    /// Nothing else is said, and the stream ends well.
    async fn ends(&mut self) -> Result<(), String> {
        self.send = None;
        match self.message().await? {
            None => Ok(()),
            Some(answer) => Err(format!("one more: {}", kind(Some(&answer)))),
        }
    }
}

fn destination(answer: HeadersResponse) -> Result<String, String> {
    let mutation = answer.response.and_then(|common| common.header_mutation);
    let set = mutation
        .map(|mutation| mutation.set_headers)
        .unwrap_or_default();
    let mut values = set
        .into_iter()
        .filter_map(|option| option.header)
        .filter(|header| header.key == DESTINATION);
    match (values.next(), values.next()) {
        (Some(header), None) => Ok(String::from_utf8_lossy(&header.raw_value).into_owned()),
        _ => Err("a plan without one destination".to_owned()),
    }
}

fn kind(answer: Option<&Answer>) -> &'static str {
    match answer {
        None => "the end",
        Some(Answer::RequestHeaders(_)) => "request headers",
        Some(Answer::RequestBody(_)) => "a request body",
        Some(Answer::ResponseHeaders(_)) => "response headers",
        Some(Answer::ResponseBody(_)) => "a response body",
        Some(Answer::ImmediateResponse(_)) => "a refusal",
        Some(_) => "something else",
    }
}

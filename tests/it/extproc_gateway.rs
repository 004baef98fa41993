//! A scripted gateway: one external-processing stream at a time, any message order.

use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue, Metadata};
use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::processing_mode::BodySendMode;
use envoy_types::pb::envoy::service::ext_proc::v3::body_mutation::Mutation;
use envoy_types::pb::envoy::service::ext_proc::v3::external_processor_client::ExternalProcessorClient;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request as Ask;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response as Answer;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    BodyResponse, CommonResponse, HttpBody, HttpHeaders, ImmediateResponse, ProcessingRequest,
    ProcessingResponse, ProtocolConfiguration,
};
use envoy_types::pb::google::protobuf::value::Kind;
use envoy_types::pb::google::protobuf::{Struct, Value};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::transport::Channel;
use tonic::{Status, Streaming};

/// How long a test waits for what must happen.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// Waits for `condition`.
pub(crate) async fn until(what: &str, condition: impl Fn() -> bool) {
    let waited = tokio::time::timeout(PATIENCE, async {
        while !condition() {
            tokio::task::yield_now().await;
        }
    });
    assert!(waited.await.is_ok(), "{what}");
}

/// One stream of a scripted gateway.
pub(crate) struct Gateway {
    send: mpsc::UnboundedSender<ProcessingRequest>,
    pub(crate) answers: Streaming<ProcessingResponse>,
    modes: (BodySendMode, BodySendMode),
    metadata: Option<Metadata>,
    /// `send_body_without_waiting_for_header_response`.
    pub(crate) does_not_wait: bool,
    /// `observability_mode`.
    pub(crate) only_shows: bool,
}

impl Gateway {
    pub(crate) async fn open(channel: &Channel, modes: (BodySendMode, BodySendMode)) -> Gateway {
        Gateway::with_trace(channel, modes, None).await
    }

    pub(crate) async fn duplex(channel: &Channel) -> Gateway {
        let modes = (BodySendMode::FullDuplexStreamed, BodySendMode::Streamed);
        Gateway::open(channel, modes).await
    }

    pub(crate) async fn with_trace(
        channel: &Channel,
        modes: (BodySendMode, BodySendMode),
        trace: Option<&'static str>,
    ) -> Gateway {
        let (send, receive) = mpsc::unbounded_channel();
        let mut request = tonic::Request::new(UnboundedReceiverStream::new(receive));
        if let Some(trace) = trace {
            request
                .metadata_mut()
                .insert("traceparent", trace.parse().unwrap());
        }
        let answers = ExternalProcessorClient::new(channel.clone())
            .max_decoding_message_size(64 << 20)
            .process(request)
            .await
            .unwrap()
            .into_inner();
        Gateway {
            send,
            answers,
            modes,
            metadata: None,
            does_not_wait: false,
            only_shows: false,
        }
    }

    /// Sends `value` as dynamic metadata with every further message.
    pub(crate) fn metadata(&mut self, namespace: &str, key: &str, value: &str) {
        let kind = Some(Kind::StringValue(value.to_owned()));
        let fields = [(key.to_owned(), Value { kind })].into();
        self.metadata = Some(Metadata {
            filter_metadata: [(namespace.to_owned(), Struct { fields })].into(),
            ..Metadata::default()
        });
    }

    /// The whole message, metadata included.
    pub(crate) async fn message(&mut self) -> ProcessingResponse {
        let next = tokio::time::timeout(PATIENCE, self.answers.message());
        next.await.unwrap().unwrap().unwrap()
    }

    pub(crate) fn tell(&self, ask: Ask) {
        let message = ProcessingRequest {
            protocol_config: Some(ProtocolConfiguration {
                request_body_mode: self.modes.0.into(),
                response_body_mode: self.modes.1.into(),
                send_body_without_waiting_for_header_response: self.does_not_wait,
            }),
            metadata_context: self.metadata.clone(),
            observability_mode: self.only_shows,
            request: Some(ask),
            ..ProcessingRequest::default()
        };
        // A server that has its answer no longer reads.
        let _ = self.send.send(message);
    }

    pub(crate) fn headers(&self, method: &str, path: &str, end: bool) {
        self.tell(Ask::RequestHeaders(http_headers(
            &[(":method", method), (":path", path)],
            end,
        )));
    }

    pub(crate) fn body(&self, bytes: &[u8], end: bool) {
        self.tell(Ask::RequestBody(http_body(bytes, end)));
    }

    pub(crate) async fn answer(&mut self) -> Answer {
        self.message().await.response.unwrap()
    }

    pub(crate) async fn refusal(&mut self) -> ImmediateResponse {
        match self.answer().await {
            Answer::ImmediateResponse(immediate) => immediate,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) async fn status(&mut self) -> Status {
        let next = tokio::time::timeout(PATIENCE, self.answers.message());
        next.await.unwrap().unwrap_err()
    }

    pub(crate) async fn planned(&mut self) {
        self.headers("POST", "/v1/chat/completions", false);
        self.body(b"{}", true);
        assert!(matches!(self.answer().await, Answer::RequestHeaders(_)));
        assert!(matches!(self.answer().await, Answer::RequestBody(_)));
    }

    pub(crate) fn respond(&self) {
        self.tell(Ask::ResponseHeaders(http_headers(
            &[(":status", "200")],
            false,
        )));
    }
}

pub(crate) fn http_headers(headers: &[(&str, &str)], end_of_stream: bool) -> HttpHeaders {
    let headers = headers
        .iter()
        .map(|(key, value)| HeaderValue {
            key: (*key).to_owned(),
            raw_value: value.as_bytes().to_vec(),
            ..HeaderValue::default()
        })
        .collect();
    HttpHeaders {
        headers: Some(HeaderMap { headers }),
        end_of_stream,
        ..HttpHeaders::default()
    }
}

pub(crate) fn http_body(bytes: &[u8], end_of_stream: bool) -> HttpBody {
    HttpBody {
        body: bytes.to_vec(),
        end_of_stream,
        ..HttpBody::default()
    }
}

pub(crate) fn streamed(answer: Answer) -> (Vec<u8>, bool) {
    match answer {
        Answer::RequestBody(BodyResponse {
            response:
                Some(CommonResponse {
                    body_mutation: Some(mutation),
                    ..
                }),
        }) => match mutation.mutation {
            Some(Mutation::StreamedResponse(piece)) => (piece.body, piece.end_of_stream),
            other => panic!("{other:?}"),
        },
        other => panic!("{other:?}"),
    }
}

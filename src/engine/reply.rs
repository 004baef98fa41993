//! Tokens as OpenAI answers: one JSON object, or server-sent events.
//!
//! Lives here: [`Speech`] (the choices of one answer and what they share), [`Sse`] (the streaming
//! body).
//! Never here: HTTP heads, scheduling.
//! Invariant: chunks are written in the order tokens come; dropping the body cancels what is left.

use super::answer::Answer;
use super::driver::Ticket;
use super::scheduler::{Finish, Output, PromptSource, SequenceId};
use crate::names::ModelName;
use crate::prompt::Api;
use bytes::Bytes;
use hyper::body::Frame;
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::pin::Pin;

use std::task::{Context, Poll};
use std::time::{SystemTime, UNIX_EPOCH};

/// What `usage.prompt_tokens_details.cached_tokens` shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CachedTokens {
    /// What this engine found in its own cache.
    Own,
    /// What the prefill engine found in its cache, as vLLM shows for a fetched prompt.
    Reported(u64),
}

/// Whether the last chunk of a stream reports usage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StreamUsage {
    /// `stream_options.include_usage`.
    Report,
    /// Not asked for.
    Omit,
}

/// One choice on its way.
struct Choice {
    ticket: Ticket,
    answer: Answer,
    said: u32,
    finished: bool,
}

/// Called once, with the first token of the answer.
pub(super) type OnFirst = Box<dyn FnOnce() + Send + Sync>;

/// An answer on its way.
pub(super) struct Speech {
    pub(super) id: String,
    pub(super) api: Api,
    model: ModelName,
    created: u64,
    prompt_tokens: u64,
    cached: CachedTokens,
    source: PromptSource,
    choices: Vec<Choice>,
    on_first: Option<OnFirst>,
    /// The last token's output of a prefill leg, which lists the kept blocks.
    kept: Vec<u32>,
}

/// The name and prompt of an answer.
pub(super) struct About {
    pub(super) id: String,
    pub(super) api: Api,
    pub(super) model: ModelName,
    pub(super) prompt_tokens: u64,
    pub(super) cached: CachedTokens,
}

impl Speech {
    /// An answer whose choices are `tickets`, saying `answers`.
    pub(super) fn new(
        about: About,
        choices: Vec<(Ticket, Answer)>,
        on_first: Option<OnFirst>,
    ) -> Speech {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let choices = choices.into_iter().map(|(ticket, answer)| Choice {
            ticket,
            answer,
            said: 0,
            finished: false,
        });
        Speech {
            id: about.id,
            api: about.api,
            model: about.model,
            created: since.unwrap_or_default().as_secs(),
            prompt_tokens: about.prompt_tokens,
            cached: about.cached,
            source: PromptSource::default(),
            choices: choices.collect(),
            on_first,
            kept: Vec::new(),
        }
    }

    /// The sequence of the first choice.
    pub(super) fn first_sequence(&self) -> Option<SequenceId> {
        self.choices.first().map(|choice| choice.ticket.id())
    }

    /// Takes note of one token of a choice; its text, and whether it was the last.
    fn hear(&mut self, at: usize, output: Output) -> Option<(String, Option<Finish>)> {
        if let Some(source) = output.first {
            self.source.add(source);
            if let Some(on_first) = self.on_first.take() {
                on_first();
            }
        }
        self.kept
            .extend(output.kept.iter().map(|block| block.number()));
        let choice = self.choices.get_mut(at)?;
        let text = choice.answer.token(choice.said).text().to_owned();
        choice.said += 1;
        choice.finished = output.finish.is_some();
        Some((text, output.finish))
    }

    /// The whole answer, once all is said; `None` when the engine stopped before.
    pub(super) async fn whole(mut self) -> Option<Told> {
        let mut texts = Vec::with_capacity(self.choices.len());
        for at in 0..self.choices.len() {
            let mut text = String::new();
            let finish = loop {
                let output = self.choices.get_mut(at)?.ticket.next().await?;
                let (word, finish) = self.hear(at, output)?;
                text.push_str(&word);
                if let Some(finish) = finish {
                    break finish;
                }
            };
            texts.push(self.finished_choice(at, &text, finish));
        }
        let usage = self.usage();
        Some(Told {
            body: json!({
                "id": self.id,
                "object": match self.api {
                    Api::ChatCompletions => "chat.completion",
                    Api::Completions => "text_completion",
                },
                "created": self.created,
                "model": self.model.as_str(),
                "choices": texts,
                "usage": usage,
                "kv_transfer_params": null,
            }),
            prompt_tokens: self.prompt_tokens,
            cached: self.source.cached.0,
            kept: self.kept,
        })
    }

    fn finished_choice(&self, index: usize, text: &str, finish: Finish) -> Value {
        match self.api {
            Api::ChatCompletions => json!({
                "index": index,
                "message": {"role": "assistant", "content": text, "refusal": null},
                "logprobs": null,
                "finish_reason": finish.as_str(),
                "stop_reason": null,
            }),
            Api::Completions => json!({
                "index": index,
                "text": text,
                "logprobs": null,
                "finish_reason": finish.as_str(),
                "stop_reason": null,
            }),
        }
    }

    fn usage(&self) -> Value {
        let said: u64 = self
            .choices
            .iter()
            .map(|choice| u64::from(choice.said))
            .sum();
        let cached = match self.cached {
            CachedTokens::Own => self.source.cached.0,
            CachedTokens::Reported(tokens) => tokens,
        };
        json!({
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + said,
            "completion_tokens": said,
            "prompt_tokens_details": {"cached_tokens": cached},
        })
    }

    fn chunk(&self, choices: Value, usage: Option<Value>) -> Bytes {
        let mut chunk = json!({
            "id": self.id,
            "object": match self.api {
                Api::ChatCompletions => "chat.completion.chunk",
                Api::Completions => "text_completion",
            },
            "created": self.created,
            "model": self.model.as_str(),
            "choices": choices,
        });
        if let (Some(usage), Some(fields)) = (usage, chunk.as_object_mut()) {
            fields.insert("usage".into(), usage);
        }
        Bytes::from(format!("data: {chunk}\n\n"))
    }

    fn piece(&self, index: usize, text: &str, finish: Option<Finish>) -> Value {
        let reason = finish.map(Finish::as_str);
        match self.api {
            Api::ChatCompletions => json!([{
                "index": index,
                "delta": {"content": text},
                "logprobs": null,
                "finish_reason": reason,
            }]),
            Api::Completions => json!([{
                "index": index,
                "text": text,
                "logprobs": null,
                "finish_reason": reason,
            }]),
        }
    }
}

/// A finished answer.
pub(super) struct Told {
    pub(super) body: Value,
    pub(super) prompt_tokens: u64,
    /// What this engine found in its own cache.
    pub(super) cached: u64,
    /// Blocks kept for a decode engine.
    pub(super) kept: Vec<u32>,
}

/// The streaming body.
pub(super) struct Sse {
    speech: Speech,
    usage: StreamUsage,
    ready: VecDeque<Bytes>,
    ended: bool,
}

impl Sse {
    /// Streams `speech`.
    pub(super) fn new(speech: Speech, usage: StreamUsage) -> Sse {
        Sse {
            speech,
            usage,
            ready: VecDeque::new(),
            ended: false,
        }
    }

    /// Makes chunks of the tokens that are there.
    fn advance(&mut self, context: &mut Context<'_>) {
        for at in 0..self.speech.choices.len() {
            while let Some(choice) = self.speech.choices.get_mut(at) {
                if choice.finished {
                    break;
                }
                match choice.ticket.poll_next(context) {
                    Poll::Pending => break,
                    Poll::Ready(Some(output)) => self.push(at, output),
                    Poll::Ready(None) => {
                        // The engine is shutting down; the stream breaks off without [DONE].
                        self.ended = true;
                        return;
                    }
                }
            }
        }
        if self.speech.choices.iter().all(|choice| choice.finished) {
            if self.usage == StreamUsage::Report {
                let usage = self.speech.usage();
                let chunk = self.speech.chunk(json!([]), Some(usage));
                self.ready.push_back(chunk);
            }
            self.ready
                .push_back(Bytes::from_static(b"data: [DONE]\n\n"));
            self.ended = true;
        }
    }

    fn push(&mut self, at: usize, output: Output) {
        let first = output.first.is_some();
        let Some((text, finish)) = self.speech.hear(at, output) else {
            return;
        };
        if first && self.speech.api == Api::ChatCompletions {
            let opening = json!([{
                "index": at,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": null,
                "finish_reason": null,
            }]);
            self.ready.push_back(self.speech.chunk(opening, None));
        }
        let piece = self.speech.piece(at, &text, finish);
        self.ready.push_back(self.speech.chunk(piece, None));
    }

    /// The next piece of the body.
    pub(super) fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Frame<Bytes>>> {
        if self.ready.is_empty() && !self.ended {
            self.advance(context);
        }
        match self.ready.pop_front() {
            Some(chunk) => Poll::Ready(Some(Frame::data(chunk))),
            None if self.ended => Poll::Ready(None),
            None => Poll::Pending,
        }
    }
}

/// The body of any answer.
pub(super) enum Payload {
    /// Known as a whole; sent once.
    Whole(Option<Bytes>),
    /// Server-sent events.
    Stream(Box<Sse>),
    /// Another engine's answer, passed through.
    Relay(hyper::body::Incoming),
}

impl hyper::body::Body for Payload {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        match self.get_mut() {
            Payload::Whole(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Payload::Stream(sse) => sse.poll(context).map(|frame| frame.map(Ok)),
            Payload::Relay(incoming) => Pin::new(incoming).poll_frame(context),
        }
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        match self {
            Payload::Whole(bytes) => {
                hyper::body::SizeHint::with_exact(bytes.as_ref().map_or(0, Bytes::len) as u64)
            }
            Payload::Stream(_) => hyper::body::SizeHint::default(),
            Payload::Relay(incoming) => hyper::body::Body::size_hint(incoming),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Payload::Whole(bytes) => bytes.is_none(),
            Payload::Stream(_) => false,
            Payload::Relay(incoming) => hyper::body::Body::is_end_stream(incoming),
        }
    }
}

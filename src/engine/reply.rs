//! Tokens as OpenAI answers: one JSON object, or the chunks of a stream.
//!
//! Lives here: [`Speech`]: the choices of one answer and what they share.
//! Never here: HTTP (`stream`, `http`), scheduling.
//! Invariant: usage counts exactly the tokens that were heard; dropping a speech cancels what is left.

use super::answer::Answer;
use super::driver::Ticket;
use super::scheduler::{Finish, Output, PromptSource, SequenceId};
use crate::names::ModelName;
use crate::prompt::Api;
use bytes::Bytes;
use serde_json::{Value, json};

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

    /// Takes note of one token of a choice.
    fn hear(&mut self, index: usize, output: Output) -> Option<Piece> {
        if let Some(source) = output.first {
            self.source.add(source);
            if let Some(on_first) = self.on_first.take() {
                on_first();
            }
        }
        self.kept
            .extend(output.kept.iter().map(|block| block.number()));
        let choice = self.choices.get_mut(index)?;
        let text = choice.answer.token(choice.said).text().to_owned();
        choice.said += 1;
        choice.finished = output.finish.is_some();
        Some(Piece {
            index,
            first: output.first.is_some(),
            text,
            finish: output.finish,
        })
    }

    /// The next token of any choice.
    pub(super) fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Heard> {
        let mut finished = true;
        for index in 0..self.choices.len() {
            let Some(choice) = self
                .choices
                .get_mut(index)
                .filter(|choice| !choice.finished)
            else {
                continue;
            };
            finished = false;
            match choice.ticket.poll_next(context) {
                Poll::Pending => {}
                Poll::Ready(None) => return Poll::Ready(Heard::Stopped),
                Poll::Ready(Some(output)) => {
                    let piece = self.hear(index, output);
                    return Poll::Ready(piece.map_or(Heard::Stopped, Heard::Piece));
                }
            }
        }
        match finished {
            true => Poll::Ready(Heard::End),
            false => Poll::Pending,
        }
    }

    /// The whole answer, once all is said; `None` when the engine stopped before.
    pub(super) async fn whole(mut self) -> Option<Told> {
        let mut texts = Vec::with_capacity(self.choices.len());
        for at in 0..self.choices.len() {
            let mut text = String::new();
            let finish = loop {
                let output = self.choices.get_mut(at)?.ticket.next().await?;
                let piece = self.hear(at, output)?;
                text.push_str(&piece.text);
                if let Some(finish) = piece.finish {
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

    /// A chat's first chunk names the role.
    pub(super) fn opening_chunk(&self, piece: &Piece) -> Option<Bytes> {
        let opening = json!([{
            "index": piece.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": null,
            "finish_reason": null,
        }]);
        let chat = piece.first && self.api == Api::ChatCompletions;
        chat.then(|| self.chunk(opening, None))
    }

    /// The chunk of one token.
    pub(super) fn piece_chunk(&self, piece: &Piece) -> Bytes {
        let reason = piece.finish.map(Finish::as_str);
        let choices = match self.api {
            Api::ChatCompletions => json!([{
                "index": piece.index,
                "delta": {"content": piece.text},
                "logprobs": null,
                "finish_reason": reason,
            }]),
            Api::Completions => json!([{
                "index": piece.index,
                "text": piece.text,
                "logprobs": null,
                "finish_reason": reason,
            }]),
        };
        self.chunk(choices, None)
    }

    /// The chunk after the last token.
    pub(super) fn usage_chunk(&self) -> Bytes {
        self.chunk(json!([]), Some(self.usage()))
    }
}

/// One token of one choice.
pub(super) struct Piece {
    index: usize,
    first: bool,
    text: String,
    finish: Option<Finish>,
}

/// What comes next of an answer.
pub(super) enum Heard {
    /// A token.
    Piece(Piece),
    /// Nothing: all is said.
    End,
    /// Nothing: the engine has stopped.
    Stopped,
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

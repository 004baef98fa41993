//! A request body as the engine understands it, with everything a real engine would refuse refused.
//!
//! Lives here: [`Ask`] and its checks.
//! Never here: the handoff headers (`handoff`), answers (`reply`).
//! Invariant: an accepted request has at least one prompt, no empty prompt, and fits the model.

use super::answer::Opening;
use super::cache::Space;
use super::config::EngineConfig;
use super::fields::{Fields, Least};
use super::handoff::{self, Transfer};
use super::refusal::Refusal;
use super::reply::StreamUsage;
use crate::names::ModelName;
use crate::prompt::{Api, EncodeTrouble, Encoder, Input, Request};
use std::sync::Arc;

/// Most choices one request may ask for.
const MAX_CHOICES: usize = 128;
/// vLLM's default for completions; chats go on to the end of the model's context.
const COMPLETION_TOKENS: u32 = 16;

/// How the answer is delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Delivery {
    /// As one JSON object.
    Whole,
    /// As server-sent events.
    Stream(StreamUsage),
}

/// When an answer ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// By itself, or at the limit.
    Natural,
    /// At the limit only (`ignore_eos`).
    AtLimit,
}

/// A request that can be served.
#[derive(Clone, Debug)]
pub(super) struct Ask {
    pub(super) api: Api,
    pub(super) model: ModelName,
    pub(super) space: Arc<Space>,
    /// One list of tokens per prompt.
    pub(super) prompts: Vec<Vec<u32>>,
    /// Choices per prompt.
    pub(super) copies: usize,
    pub(super) opening: Opening,
    pub(super) delivery: Delivery,
    pub(super) max_tokens: u32,
    /// Tokens before the answer may end by itself.
    pub(super) min_tokens: u32,
    pub(super) ending: Ending,
    pub(super) transfer: Transfer,
}

/// The options of a body, without its prompt.
struct Options {
    copies: usize,
    delivery: Delivery,
    max_tokens: Option<u32>,
    min_tokens: u32,
    ending: Ending,
    transfer: Transfer,
}

/// Reads `body`, which must be small enough to be tokenized where this is called.
pub(super) fn read(api: Api, body: &[u8], config: &EngineConfig) -> Result<Ask, Refusal> {
    let encoder = &*config.encoder;
    let request = parse(api, body)?;
    let space = space(&request, config)?;
    let fields = Fields::read(body)
        .ok_or_else(|| Refusal::bad_request("request body: expected an object, found none"))?;
    let options = options(api, &fields, config)?;
    let prompts = tokens(&request, encoder)?;
    let choices = prompts.len().saturating_mul(options.copies);
    if MAX_CHOICES < choices {
        return Err(Refusal::bad_field(
            "n",
            format!("n: expected at most {MAX_CHOICES} choices, found {choices}"),
        ));
    }
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
    let max_tokens = limit(api, options.max_tokens, longest, config)?;
    if max_tokens < options.min_tokens {
        return Err(Refusal::bad_field(
            "min_tokens",
            "min_tokens: expected at most max_tokens, found more",
        ));
    }
    Ok(Ask {
        api,
        model: request.model,
        space: Arc::new(space),
        prompts,
        opening: match &request.prompt {
            Input::Chat(chat) if !chat.continue_final_message => Opening::Message,
            _ => Opening::Continuation,
        },
        copies: options.copies,
        delivery: options.delivery,
        max_tokens,
        min_tokens: options.min_tokens,
        ending: options.ending,
        transfer: options.transfer,
    })
}

fn parse(api: Api, body: &[u8]) -> Result<Request, Refusal> {
    crate::prompt::parse(api, body).map_err(|error| Refusal {
        param: error.param(),
        ..Refusal::bad_request(error.to_string())
    })
}

/// The tokens of a `/tokenize` body: `{model, prompt}` or `{model, messages}`.
pub(super) fn tokenize(body: &[u8], config: &EngineConfig) -> Result<Vec<u32>, Refusal> {
    let chat = Fields::read(body).is_some_and(|fields| fields.has("messages"));
    let api = match chat {
        true => Api::ChatCompletions,
        false => Api::Completions,
    };
    let request = parse(api, body)?;
    space(&request, config)?;
    let mut prompts = tokens(&request, &config.encoder)?;
    Ok(prompts.swap_remove(0))
}

fn space(request: &Request, config: &EngineConfig) -> Result<Space, Refusal> {
    let resolved = (config.encoder.profiles())
        .resolve(&request.model)
        .filter(|resolved| *resolved.profile.name() == config.model)
        .ok_or_else(Refusal::unknown_model)?;
    Ok(Space {
        adapter: resolved.adapter,
        salt: request.tenant.clone(),
    })
}

fn options(api: Api, fields: &Fields<'_>, config: &EngineConfig) -> Result<Options, Refusal> {
    let stream = fields.flag("stream")?.unwrap_or(false);
    let usage = fields.object("stream_options")?;
    if usage.is_some() && !stream {
        return Err(Refusal::bad_field(
            "stream_options",
            "stream_options: expected with stream = true only, found without",
        ));
    }
    let include = usage.is_some_and(|options| options.get("include_usage") == Some(&true.into()));
    let delivery = match (stream, include) {
        (false, _) => Delivery::Whole,
        (true, true) => Delivery::Stream(StreamUsage::Report),
        (true, false) => Delivery::Stream(StreamUsage::Omit),
    };
    fields.check_number("temperature", "a number of at least 0", 0.0..=f64::MAX)?;
    fields.check_number("top_p", "a number above 0, at most 1", 1e-9..=1.0)?;
    if fields.flag("echo")? == Some(true) {
        return Err(Refusal::bad_field(
            "echo",
            "echo: expected false on a simulated engine, found true",
        ));
    }
    let chat_limit = match api {
        Api::ChatCompletions => fields.count("max_completion_tokens", Least::One)?,
        Api::Completions => None,
    };
    let plain_limit = fields.count("max_tokens", Least::One)?;
    Ok(Options {
        copies: fields.count("n", Least::One)?.unwrap_or(1) as usize,
        delivery,
        max_tokens: chat_limit.or(plain_limit),
        min_tokens: fields.count("min_tokens", Least::Zero)?.unwrap_or(0),
        ending: match fields.flag("ignore_eos")? {
            Some(true) => Ending::AtLimit,
            Some(false) | None => Ending::Natural,
        },
        transfer: handoff::transfer(fields.object("kv_transfer_params")?.as_ref(), config.role)?,
    })
}

/// The prompts' tokens; at least one prompt, none of them empty.
fn tokens(request: &Request, encoder: &Encoder) -> Result<Vec<Vec<u32>>, Refusal> {
    let param = match request.api {
        Api::ChatCompletions => "messages",
        Api::Completions => "prompt",
    };
    if let Input::Chat(chat) = &request.prompt
        && chat.messages.is_empty()
    {
        return Err(Refusal::bad_field(
            param,
            "messages: expected at least one message, found none",
        ));
    }
    let prompts = encoder.token_ids(request).map_err(|trouble| {
        let message = match trouble {
            EncodeTrouble::Multimodal => "expected text or token ids, found other media",
            EncodeTrouble::Template => {
                "expected a conversation the chat template accepts, found another"
            }
            EncodeTrouble::NoTemplate => "expected a model with a chat template, found none",
            EncodeTrouble::UnknownModel | EncodeTrouble::Tokenizer | EncodeTrouble::TooComplex => {
                "expected a prompt that can be tokenized, found another"
            }
        };
        Refusal::bad_field(param, format!("{param}: {message}"))
    })?;
    if prompts.is_empty() || prompts.iter().any(Vec::is_empty) {
        return Err(Refusal::bad_field(
            param,
            format!("{param}: expected at least one token, found none"),
        ));
    }
    Ok(prompts)
}

/// The most tokens each choice may get.
fn limit(
    api: Api,
    asked: Option<u32>,
    prompt: usize,
    config: &EngineConfig,
) -> Result<u32, Refusal> {
    let model = config.max_model_len.0;
    let room = model.saturating_sub(prompt as u64);
    let default = match api {
        Api::ChatCompletions => u32::try_from(room).unwrap_or(u32::MAX),
        Api::Completions => {
            u32::try_from(room).map_or(COMPLETION_TOKENS, |room| COMPLETION_TOKENS.min(room))
        }
    };
    let wanted = asked.unwrap_or(default);
    if room == 0 || room < u64::from(wanted) {
        let total = prompt as u64 + u64::from(wanted);
        return Err(Refusal::bad_field(
            "max_tokens",
            format!(
                "max_tokens: expected prompt and answer to fit {model} tokens, found {total} \
                 ({prompt} in the prompt)"
            ),
        ));
    }
    Ok(wanted)
}

//! OpenAI-style request bodies: bytes to a [`Request`].
//!
//! Lives here: the fields routing needs, one file per API (`chat`, `completions`), and the
//! errors a client sees.
//! Never here: templates, tokens, headers. The body's bytes are never changed.
//! Invariant: of a key that is repeated, the last value counts, at every depth, as in the JSON
//! readers of the engines; so what is routed is what the engine will serve. Unknown fields are
//! skipped whatever they hold. Memory is bounded by a constant times the body's length.

mod chat;
mod completions;
mod error;
mod fields;
mod json;
mod scalar;

pub use chat::ChatInput;
pub use error::{BodyError, JsonType};
pub(crate) use json::value_from_str;

use super::Api;
use crate::names::{ModelName, SessionId, Tenant};
use fields::Fields;
use std::fmt;

/// Most JSON values (objects, lists and scalars) kept of a conversation. What is beyond is read over,
/// and the prompt's length estimated. Two bytes of JSON can become 24 of memory, hence a limit.
pub const MAX_VALUES: usize = 1 << 20;

/// Longest session name that is kept as it is; a longer one is replaced by its hash.
const MAX_SESSION_BYTES: usize = 128;

/// What the picker needs from a body.
#[derive(Clone, Debug)]
pub struct Request {
    /// The API that was called.
    pub api: Api,
    /// `model`, as the client spelt it; may name an adapter.
    pub model: ModelName,
    /// The prompt.
    pub prompt: Input,
    /// `stream`: whether the answer comes in pieces.
    pub stream: bool,
    /// `session_id` (vLLM's name), else `prompt_cache_key` (OpenAI's). `user` is a person, not a
    /// conversation, and is not looked at.
    pub session: Option<SessionId>,
    /// `cache_salt`, unless empty.
    pub tenant: Option<Tenant>,
    /// `priority`, clamped to 32 bits; lower is served earlier by vLLM.
    pub priority: Option<i32>,
    /// How many sequences the engine will run for it.
    pub sequences: Sequences,
    /// `max_completion_tokens`, else `max_tokens`: the most the answer may hold.
    pub max_tokens: Option<u32>,
    /// `add_special_tokens`.
    pub special_tokens: SpecialTokens,
    /// `truncate_prompt_tokens`: keep only that many tokens.
    pub truncation: Truncation,
}

/// How many sequences an engine runs for one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Sequences {
    /// One prompt, one answer.
    One,
    /// Several prompts in one body, or several answers to one (`n`, `best_of`).
    Several,
}

/// Whether the tokenizer adds its own tokens (a begin-of-sequence token, for most models).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SpecialTokens {
    /// The body does not say: added to plain prompts, not to chats, whose template writes them.
    ByApi,
    /// The body asks for them.
    Add,
    /// The body declines them.
    Skip,
}

/// Whether the engine cuts the prompt before it uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Truncation {
    /// The whole prompt is used. Also stands for `-1` (the model's own maximum, which is not known
    /// here and hardly ever reached).
    Off,
    /// The last `n` tokens are kept.
    KeepLast(u32),
    /// The first `n` tokens are kept (`truncation_side: "right"`).
    KeepFirst(u32),
}

/// A prompt in one of the forms the APIs allow.
#[derive(Clone)]
pub enum Input {
    /// A conversation.
    Chat(Box<ChatInput>),
    /// Plain texts; more than one is a batch, none is left for the engine to judge.
    Text(Vec<String>),
    /// Token ids; more than one list is a batch.
    TokenIds(Vec<Vec<u32>>),
    /// Prompt embeddings instead of text; only the engine knows their length.
    Embeddings,
}

/// Sizes only: a prompt must not reach a log by way of `{:?}`.
impl fmt::Debug for Input {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Input::Chat(chat) => chat.fmt(f),
            Input::Text(texts) => {
                let bytes: usize = texts.iter().map(String::len).sum();
                write!(f, "Text({} prompts, {bytes} bytes)", texts.len())
            }
            Input::TokenIds(lists) => {
                let tokens: usize = lists.iter().map(Vec::len).sum();
                write!(f, "TokenIds({} prompts, {tokens} tokens)", lists.len())
            }
            Input::Embeddings => f.write_str("Embeddings"),
        }
    }
}

/// Reads a body of `api`.
///
/// # Errors
/// When the body is not one JSON object, nests more than 128 deep, has no string `model`, or its
/// `messages` or `prompt` has a shape no engine accepts. The error names places and JSON types,
/// never text of the body.
pub fn parse(api: Api, body: &[u8]) -> Result<Request, BodyError> {
    // Engines written in Python accept a byte-order mark.
    let body = body.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(body);
    let mut fields = Fields::read(api, body)?;
    let model = fields.model.require(body, "model", "a string")?;
    let prompt = match api {
        Api::ChatCompletions => chat::input(&mut fields, body)?,
        Api::Completions => completions::input(&mut fields, body)?,
    };
    let sequences = sequences(&mut fields, &prompt);
    Ok(Request {
        api,
        sequences,
        model: ModelName::from(model.as_str()),
        prompt,
        stream: fields.stream.found().unwrap_or(false),
        session: (fields.session_id.found())
            .filter(|name| !name.is_empty())
            .or_else(|| {
                fields
                    .prompt_cache_key
                    .found()
                    .filter(|key| !key.is_empty())
            })
            .map(session),
        tenant: (fields.cache_salt.found())
            .filter(|salt| !salt.is_empty())
            .map(|salt| Tenant::from(salt.as_str())),
        priority: fields.priority.found().map(clamp_i32),
        max_tokens: (fields.max_completion_tokens.found())
            .or_else(|| fields.max_tokens.found())
            .and_then(clamp_u32),
        special_tokens: match fields.add_special_tokens.found() {
            None => SpecialTokens::ByApi,
            Some(true) => SpecialTokens::Add,
            Some(false) => SpecialTokens::Skip,
        },
        truncation: truncation(&mut fields),
    })
}

fn sequences(fields: &mut Fields, prompt: &Input) -> Sequences {
    let prompts = match prompt {
        Input::Chat(_) | Input::Embeddings => 1,
        Input::Text(texts) => texts.len(),
        Input::TokenIds(lists) => lists.len(),
    };
    let answers = (fields.n.found()).max(fields.best_of.found());
    if 1 < prompts || answers.is_some_and(|answers| 1 < answers) {
        Sequences::Several
    } else {
        Sequences::One
    }
}

fn truncation(fields: &mut Fields) -> Truncation {
    let keep = (fields.truncate_prompt_tokens.found()).and_then(clamp_u32);
    let side = fields.truncation_side.found();
    match (keep, side.as_deref()) {
        (None | Some(0), _) => Truncation::Off,
        (Some(keep), Some("right")) => Truncation::KeepFirst(keep),
        (Some(keep), _) => Truncation::KeepLast(keep),
    }
}

/// A session under a name of bounded length.
fn session(name: String) -> SessionId {
    if name.len() <= MAX_SESSION_BYTES {
        SessionId::from(name.as_str())
    } else {
        let hash = xxhash_rust::xxh3::xxh3_128(name.as_bytes());
        SessionId::from(format!("xxh3:{hash:032x}").as_str())
    }
}

fn clamp_i32(value: i64) -> i32 {
    i32::try_from(value).unwrap_or(if value < 0 { i32::MIN } else { i32::MAX })
}

/// `None` for a negative number, which means "no limit" where engines accept it at all.
fn clamp_u32(value: i64) -> Option<u32> {
    (0 <= value).then(|| u32::try_from(value).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests;

//! A [`Request`] to a [`Prompt`]: render, tokenize, chain.
//!
//! Lives here: [`Encoder`], and the estimate for prompts that cannot be counted.
//! Never here: threads. Encoding is CPU-bound and synchronous; the caller keeps it off I/O threads.
//! Invariant: the answer is the same with and without the memo.

use super::memo::{Growing, Memo, MemoStats, marks};
use super::openai::{ChatInput, Input, Request, SpecialTokens, Truncation};
use super::profile::{ClientTemplate, DeclinedTools, Exact, Profiles, Resolved};
use super::template::{Template, arguments};
use super::tokenizer::{EncodeFailed, Tokenizer};
use super::{Api, Counted, EncodeTrouble, Prompt};
use crate::blocks::{BlockChain, KeySpace};
use crate::units::{BlockSize, Tokens};
use minijinja::Value;
use minijinja::value::ValueKind;
use smallvec::SmallVec;

/// UTF-8 bytes per token where nothing better is known; near 4 for English, less for most else.
pub const BYTES_PER_TOKEN: u64 = 4;

/// Counts prompts and computes their block keys, for every model of a fleet.
#[derive(Debug)]
pub struct Encoder {
    profiles: Profiles,
    memo: Memo,
}

impl Encoder {
    /// An encoder that remembers prefixes in up to `memo_bytes` of memory (0: none).
    #[must_use]
    pub fn new(profiles: Profiles, memo_bytes: usize) -> Encoder {
        Encoder {
            profiles,
            memo: Memo::new(memo_bytes),
        }
    }

    /// The models.
    #[must_use]
    pub fn profiles(&self) -> &Profiles {
        &self.profiles
    }

    /// What the memo holds and how often it helped.
    #[must_use]
    pub fn memo(&self) -> MemoStats {
        self.memo.stats()
    }

    /// Counts `request`'s prompt and chains its blocks once per size in `sizes`.
    ///
    /// Never fails: what cannot be counted is estimated, with the reason in [`Prompt::trouble`].
    #[must_use]
    pub fn encode(&self, request: &Request, sizes: &[BlockSize]) -> Prompt {
        let Some(resolved) = self.profiles.resolve(&request.model) else {
            return estimate(request, Some(EncodeTrouble::UnknownModel));
        };
        let spaces = spaces(request, &resolved, sizes);
        if let Input::TokenIds(lists) = &request.prompt {
            return exact(
                lists.iter().map(|ids| cut(ids, request.truncation)),
                &spaces,
            );
        }
        let Some(model) = resolved.profile.exact() else {
            return estimate(request, None);
        };
        match texts(request, model) {
            Ok(texts) => self
                .encode_texts(&texts, request, model, &spaces)
                .unwrap_or_else(|trouble| estimate(request, Some(trouble))),
            Err(trouble) => estimate(request, Some(trouble)),
        }
    }

    fn encode_texts(
        &self,
        texts: &Texts,
        request: &Request,
        model: &Exact,
        spaces: &[KeySpace],
    ) -> Result<Prompt, EncodeTrouble> {
        let Some((first, others)) = texts.as_slice().split_first() else {
            return Ok(exact(std::iter::empty(), spaces));
        };
        let (special, truncation) = (special_tokens(request), request.truncation);
        let mut grown = if truncation == Truncation::Off && self.memo.wants(first.len()) {
            self.encode_long(first, special, model, spaces)?
        } else {
            let mut grown = Growing::new(spaces);
            grown.push(&encode(&model.tokenizer, first, special, truncation)?);
            grown
        };
        for text in others {
            grown.tokens += encode(&model.tokenizer, text, special, truncation)?.len() as u64;
        }
        Ok(Prompt {
            tokens: Tokens(grown.tokens),
            counted: Counted::Exact,
            chains: grown.finish(),
            trouble: None,
        })
    }

    /// Like [`encode`], beginning with the longest prefix of `text` that is remembered.
    fn encode_long(
        &self,
        text: &str,
        special: bool,
        model: &Exact,
        spaces: &[KeySpace],
    ) -> Result<Growing, EncodeTrouble> {
        let tokenizer = &model.tokenizer;
        let marks = marks(text, tokenizer.cuts(text), (model.id, special, spaces));
        let (known, mut grown) = match self.memo.longest(&marks) {
            Some((mark, prefix)) => (mark.at, Growing::clone(&prefix)),
            None => {
                let mut grown = Growing::new(spaces);
                grown.push(if special { tokenizer.prefix() } else { &[] });
                (0, grown)
            }
        };
        let mut ids = Vec::new();
        let mut begun = known;
        if let Some(mark) = marks.last().filter(|mark| known < mark.at) {
            tokenizer.encode_into(&text[known..mark.at], &mut ids)?;
            grown.push(&ids);
            ids.clear();
            self.memo.remember(*mark, grown.clone());
            begun = mark.at;
        }
        tokenizer.encode_into(&text[begun..], &mut ids)?;
        grown.push(&ids);
        grown.push(if special { tokenizer.suffix() } else { &[] });
        Ok(grown)
    }

    /// The token ids of each of `request`'s prompts, computed from scratch; what an engine does.
    ///
    /// # Errors
    /// When the prompt cannot be counted exactly; a model without a tokenizer says
    /// [`EncodeTrouble::Tokenizer`].
    pub fn token_ids(&self, request: &Request) -> Result<Vec<Vec<u32>>, EncodeTrouble> {
        let resolved =
            (self.profiles.resolve(&request.model)).ok_or(EncodeTrouble::UnknownModel)?;
        if let Input::TokenIds(lists) = &request.prompt {
            let cut = lists
                .iter()
                .map(|ids| cut(ids, request.truncation).to_vec());
            return Ok(cut.collect());
        }
        let model = resolved.profile.exact().ok_or(EncodeTrouble::Tokenizer)?;
        let (texts, special) = (texts(request, model)?, special_tokens(request));
        (texts.as_slice().iter())
            .map(|text| encode(&model.tokenizer, text, special, request.truncation))
            .collect()
    }
}

impl From<EncodeFailed> for EncodeTrouble {
    fn from(_: EncodeFailed) -> EncodeTrouble {
        EncodeTrouble::Tokenizer
    }
}

/// One key space per block size.
fn spaces(request: &Request, resolved: &Resolved, sizes: &[BlockSize]) -> SmallVec<[KeySpace; 2]> {
    (sizes.iter())
        .map(|&block_size| KeySpace {
            block_size,
            adapter: resolved.adapter.clone(),
            tenant: request.tenant.clone(),
        })
        .collect()
}

/// Of a batch, the first prompt makes the chains and all of them the length.
fn exact<'a>(prompts: impl Iterator<Item = &'a [u32]> + Clone, spaces: &[KeySpace]) -> Prompt {
    let first = prompts.clone().next().unwrap_or_default();
    Prompt {
        tokens: Tokens(prompts.map(|ids| ids.len() as u64).sum()),
        counted: Counted::Exact,
        chains: (spaces.iter())
            .map(|space| BlockChain::new(space, first))
            .collect(),
        trouble: None,
    }
}

/// The texts the engine tokenizes.
enum Texts<'r> {
    Rendered(String),
    Given(&'r [String]),
}

impl Texts<'_> {
    fn as_slice(&self) -> &[String] {
        match self {
            Texts::Rendered(text) => std::slice::from_ref(text),
            Texts::Given(texts) => texts,
        }
    }
}

fn texts<'r>(request: &'r Request, model: &Exact) -> Result<Texts<'r>, EncodeTrouble> {
    match &request.prompt {
        Input::Text(texts) => Ok(Texts::Given(texts)),
        Input::Chat(chat) => render(chat, model).map(Texts::Rendered),
        Input::TokenIds(_) | Input::Embeddings => Err(EncodeTrouble::Multimodal),
    }
}

fn render(chat: &ChatInput, model: &Exact) -> Result<String, EncodeTrouble> {
    if chat.too_complex {
        return Err(EncodeTrouble::TooComplex);
    }
    let hidden = chat.tools_declined && model.declined_tools == DeclinedTools::Hidden;
    let without_tools = hidden.then(|| ChatInput {
        tools: None,
        ..chat.clone()
    });
    let chat = without_tools.as_ref().unwrap_or(chat);
    let client = (chat.template.as_deref())
        .filter(|_| model.client_template == ClientTemplate::Trusted)
        .map(Template::compile)
        .transpose()
        .map_err(|_| EncodeTrouble::Template)?;
    let template = (client.as_ref())
        .or_else(|| model.template(chat.tools.is_some()))
        .ok_or(EncodeTrouble::NoTemplate)?;
    let arguments = arguments(chat, template.format(), &model.variables)
        .map_err(|_| EncodeTrouble::Multimodal)?;
    let rendered = template.render(&arguments.values);
    (rendered.ok())
        .and_then(|rendered| arguments.cut(rendered))
        .ok_or(EncodeTrouble::Template)
}

/// Whether the tokenizer adds its own tokens to this request's texts.
fn special_tokens(request: &Request) -> bool {
    match request.special_tokens {
        SpecialTokens::Add => true,
        SpecialTokens::Skip => false,
        SpecialTokens::ByApi => request.api == Api::Completions,
    }
}

fn encode(
    tokenizer: &Tokenizer,
    text: &str,
    special: bool,
    truncation: Truncation,
) -> Result<Vec<u32>, EncodeTrouble> {
    let ids = tokenizer.encode(text, special)?;
    if truncation == Truncation::Off {
        return Ok(ids);
    }
    if !special {
        return Ok(cut(&ids, truncation).to_vec());
    }
    // The tokenizer's own tokens stay, and count.
    let (prefix, suffix) = (tokenizer.prefix(), tokenizer.suffix());
    let text = ids.get(prefix.len()..ids.len() - suffix.len());
    let own = u32::try_from(prefix.len() + suffix.len()).unwrap_or(u32::MAX);
    let room = match truncation {
        Truncation::Off => Truncation::Off,
        Truncation::KeepLast(keep) => Truncation::KeepLast(keep.saturating_sub(own)),
        Truncation::KeepFirst(keep) => Truncation::KeepFirst(keep.saturating_sub(own)),
    };
    let text = cut(text.unwrap_or_default(), room);
    Ok([prefix, text, suffix].concat())
}

fn cut(ids: &[u32], truncation: Truncation) -> &[u32] {
    match truncation {
        Truncation::Off => ids,
        Truncation::KeepLast(keep) => &ids[ids.len().saturating_sub(keep as usize)..],
        Truncation::KeepFirst(keep) => &ids[..ids.len().min(keep as usize)],
    }
}

/// Length from bytes: a quarter, rounded up.
fn estimate(request: &Request, trouble: Option<EncodeTrouble>) -> Prompt {
    let tokens = match &request.prompt {
        Input::Chat(chat) => (chat_bytes(chat)).div_ceil(BYTES_PER_TOKEN),
        Input::Text(texts) => texts
            .iter()
            .map(|text| (text.len() as u64).div_ceil(BYTES_PER_TOKEN))
            .sum(),
        Input::TokenIds(lists) => lists.iter().map(|ids| ids.len() as u64).sum(),
        // Not one token of it is known, yet it is not empty.
        Input::Embeddings => 1,
    };
    Prompt {
        tokens: Tokens(tokens),
        counted: match request.prompt {
            Input::TokenIds(_) => Counted::Exact,
            _ => Counted::EstimatedFromBytes,
        },
        chains: SmallVec::new(),
        trouble,
    }
}

/// Text bytes of a conversation: what a template would print, without its own words.
fn chat_bytes(chat: &ChatInput) -> u64 {
    let messages: u64 = chat.messages.iter().map(text_bytes).sum();
    messages + chat.tools.as_ref().map_or(0, text_bytes)
}

/// Bytes of all strings in `value`, keys left out. The payload of an image is not text, so strings
/// under `…_url` and the like are not looked into: only objects without a non-text `type` are.
fn text_bytes(value: &Value) -> u64 {
    match value.kind() {
        ValueKind::String => value.as_str().map_or(0, |text| text.len() as u64),
        ValueKind::Seq => {
            let items = value.try_iter().into_iter().flatten();
            items.map(|item| text_bytes(&item)).sum()
        }
        ValueKind::Map => {
            let keys = value.try_iter().into_iter().flatten();
            keys.filter(|key| !key.as_str().is_some_and(is_payload))
                .map(|key| text_bytes(&value.get_item(&key).unwrap_or_default()))
                .sum()
        }
        _ => 0,
    }
}

/// Keys of content parts that hold an encoded file or its address.
fn is_payload(key: &str) -> bool {
    const PAYLOADS: [&str; 8] = [
        "image_url",
        "image_pil",
        "image_embeds",
        "audio_url",
        "audio_embeds",
        "input_audio",
        "video_url",
        "file",
    ];
    PAYLOADS.contains(&key)
}

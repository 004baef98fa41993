//! Text to token ids, as the engines' `tokenizers` library does it.
//!
//! Lives here: [`Tokenizer`], read from the bytes of a Hugging Face `tokenizer.json`.
//! Never here: files (the caller reads them), templates.
//! Invariant: special tokens inside a text are parsed as special tokens, because engines do; padding
//! and truncation settings of the file are ignored, because engines do.

use super::guarded;
use std::fmt;
use tokenizers::pipeline::{
    EncodeOptions, Override, PipelinePatternMatcher, PipelineToken, PipelineTokenizer,
};

/// A model's tokenizer. Cheap to share: encoding takes `&self` and runs on any number of threads.
pub struct Tokenizer {
    pipeline: PipelineTokenizer,
    options: EncodeOptions,
    /// Tokens put before and after every text when special tokens are asked for.
    prefix: Box<[u32]>,
    suffix: Box<[u32]>,
    /// Ids, sorted, of the added tokens before which a text may be cut: see [`Tokenizer::cuts`].
    plain: Box<[u32]>,
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("prefix", &self.prefix)
            .field("suffix", &self.suffix)
            .finish_non_exhaustive()
    }
}

/// A `tokenizer.json` that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenizerError {
    /// The file is not text.
    #[error("tokenizer.json: expected UTF-8, found a bad byte at {0}")]
    NotUtf8(usize),
    /// The library does not read the file.
    #[error("tokenizer.json: expected a tokenizer, found a fault: {0}")]
    Unreadable(String),
}

/// The tokenizer failed on a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("tokenizer: expected token ids, found a failure")]
pub struct EncodeFailed;

impl Tokenizer {
    /// Reads a `tokenizer.json` of any version.
    ///
    /// # Errors
    /// When the file is damaged, or uses a part that this build does not have.
    pub fn from_json(bytes: &[u8]) -> Result<Tokenizer, TokenizerError> {
        let text = std::str::from_utf8(bytes)
            .map_err(|error| TokenizerError::NotUtf8(error.valid_up_to()))?;
        let pipeline = guarded(|| tokenizers::from_json(text).or_else(|_| from_older(text)))
            .unwrap_or_else(|| Err("the reader panicked".to_owned()))
            .map_err(TokenizerError::Unreadable)?;
        let template = &pipeline.get_post_processor().single;
        let ids = |run: &[(PipelineToken, u8)]| run.iter().map(|(token, _)| token.id()).collect();
        let (prefix, suffix) = (ids(&template.prefix), ids(&template.suffix));
        let mut plain: Vec<u32> = (pipeline.get_added_vocabulary())
            .get_added_tokens_decoder()
            .into_iter()
            .filter(|(_, token)| {
                let strips = token.lstrip || token.rstrip || token.single_word;
                let first = token.content.chars().next().unwrap_or(' ');
                let word = first.is_alphanumeric() || first.is_whitespace() || first == '_';
                !strips && !token.normalized && !word
            })
            .map(|(id, _)| id)
            .collect();
        plain.sort_unstable();
        Ok(Tokenizer {
            pipeline,
            options: EncodeOptions {
                // Ours to add, so that a cut text gets them once.
                add_special_tokens: false,
                encode_special_tokens: false,
                padding: Override::Off,
                truncation: Override::Off,
            },
            prefix,
            suffix,
            plain: plain.into(),
        })
    }

    /// Appends the ids of `text` to `ids`, without the tokens of [`prefix`](Self::prefix) and
    /// [`suffix`](Self::suffix).
    ///
    /// # Errors
    /// When the library fails, which no known text makes it do.
    pub fn encode_into(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), EncodeFailed> {
        if text.is_empty() {
            return Ok(());
        }
        let mut tokens = Vec::with_capacity(text.len() / 3);
        guarded(|| (self.pipeline).encode_into(text, &self.options, &mut tokens))
            .and_then(Result::ok)
            .ok_or(EncodeFailed)?;
        ids.extend_from_slice(PipelineToken::cast_slice(&tokens));
        Ok(())
    }

    /// The ids of `text`, with the tokenizer's own tokens around it if `special_tokens`.
    ///
    /// # Errors
    /// As [`encode_into`](Self::encode_into).
    pub fn encode(&self, text: &str, special_tokens: bool) -> Result<Vec<u32>, EncodeFailed> {
        let mut ids = Vec::new();
        if special_tokens {
            ids.extend_from_slice(&self.prefix);
        }
        self.encode_into(text, &mut ids)?;
        if special_tokens {
            ids.extend_from_slice(&self.suffix);
        }
        Ok(ids)
    }

    /// The text of `ids`; unknown ids are left out, and bytes that are not UTF-8 are replaced.
    ///
    /// # Errors
    /// When the library fails.
    pub fn decode(&self, ids: &[u32]) -> Result<String, EncodeFailed> {
        guarded(|| self.pipeline.decode(ids, false))
            .and_then(Result::ok)
            .ok_or(EncodeFailed)
    }

    /// What stands before a text when special tokens are asked for; often a begin-of-sequence token.
    #[must_use]
    pub fn prefix(&self) -> &[u32] {
        &self.prefix
    }

    /// What stands after a text when special tokens are asked for.
    #[must_use]
    pub fn suffix(&self) -> &[u32] {
        &self.suffix
    }

    /// The id of the special or added token spelt `token`.
    #[must_use]
    pub fn added_token(&self, token: &str) -> Option<u32> {
        self.pipeline.get_added_vocabulary().token_to_id(token)
    }

    /// Byte offsets at which `text` can be cut so that the ids of both halves, put together, are the
    /// ids of the whole: just before an added token that neither strips white space nor asks what its
    /// neighbours are. Ascending; 0 is left out.
    ///
    /// Such a token ends the text segment before it, and segments are encoded independently. The cut
    /// is before it, not after, because its match may depend on what follows, and because the first
    /// segment of a text may be treated specially.
    pub fn cuts(&self, text: &str) -> impl Iterator<Item = usize> {
        let added = self.pipeline.get_added_vocabulary();
        let mut offset = 0;
        std::iter::from_fn(move || {
            loop {
                let ((start, end), id) =
                    added.extract_next(text.as_bytes(), offset, false, false)?;
                // The library never returns an empty match; a loop on one would not end.
                offset = end.max(offset + 1);
                if start != 0 && self.plain.binary_search(&id).is_ok() {
                    return Some(start);
                }
            }
        })
    }
}

/// Older files carry the same tokenizer in other words.
fn from_older(text: &str) -> Result<PipelineTokenizer, String> {
    let current = tokenizers::canonicalize_str(text).map_err(|error| error.to_string())?;
    tokenizers::from_json(&current).map_err(|error| error.to_string())
}

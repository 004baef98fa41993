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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::sync::LazyLock;

    const JSON: &[u8] = include_bytes!("builtin/tokenizer.json");
    static BUILTIN: LazyLock<Tokenizer> = LazyLock::new(|| Tokenizer::from_json(JSON).unwrap());

    #[derive(serde::Deserialize)]
    struct Golden {
        text: String,
        plain: Vec<u32>,
        special: Vec<u32>,
    }

    /// `tests/tools/train_tokenizer.py` made the reference, with the Python library.
    #[test]
    fn ids_are_those_of_the_python_library() {
        let golden = include_bytes!("../../tests/data/prompt/tokens.golden.json");
        let golden: Vec<Golden> = serde_json::from_slice(golden).unwrap();
        assert!(20 < golden.len());
        for Golden {
            text,
            plain,
            special,
        } in golden
        {
            assert_eq!(BUILTIN.encode(&text, false).unwrap(), plain, "{text:?}");
            assert_eq!(BUILTIN.encode(&text, true).unwrap(), special, "{text:?}");
            assert_eq!(BUILTIN.decode(&plain).unwrap(), text);
        }
    }

    #[test]
    fn a_damaged_file_is_an_error() {
        let half = &JSON[..JSON.len() / 2];
        for (bytes, expected) in [
            (&b"\xff"[..], "expected UTF-8"),
            (b"", "expected a tokenizer"),
            (b"{}", "expected a tokenizer"),
            (b"[1]", "expected a tokenizer"),
            (half, "expected a tokenizer"),
        ] {
            let error = Tokenizer::from_json(bytes).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn a_text_may_be_cut_only_before_a_token_that_stands_alone() {
        let cuts = |text| BUILTIN.cuts(text).collect::<Vec<_>>();
        assert!(cuts("").is_empty());
        assert_eq!(cuts("<|turn|>a<|end|>\n<|turn|><|end|>"), [9, 17, 25]);
        assert!(cuts("a<|end|").is_empty());

        // White space around a token, its neighbours, a normalizer: all reasons not to cut there.
        let odd = |token: &str, flag: &str| {
            let text = std::str::from_utf8(JSON).unwrap();
            let entry = format!(
                r#""content":"{token}","single_word":false,"lstrip":false,"rstrip":false,"normalized":false"#
            );
            let (before, after) = text.split_once(&entry).unwrap();
            let changed =
                entry.replace(&format!(r#""{flag}":false"#), &format!(r#""{flag}":true"#));
            let text = format!("{before}{changed}{after}");
            Tokenizer::from_json(text.as_bytes()).unwrap()
        };
        for flag in ["lstrip", "rstrip", "single_word", "normalized"] {
            let tokenizer = odd("<|turn|>", flag);
            let cuts: Vec<_> = tokenizer.cuts("a <|turn|> b<|end|>c").collect();
            assert_eq!(cuts, [12], "{flag}");
        }
    }

    proptest! {
        #[test]
        fn a_cut_text_has_the_ids_of_the_whole(
            pieces in prop::collection::vec(prop_oneof![
                prop::sample::select(vec!["<|end|>", "<|turn|>", "<|en", "d|>", "<", "|", " ", "\n", "x"])
                    .prop_map(str::to_owned),
                any::<String>(),
            ], 0..20),
        ) {
            let text = pieces.concat();
            let whole = BUILTIN.encode(&text, false).unwrap();
            for cut in BUILTIN.cuts(&text) {
                let mut halves = BUILTIN.encode(&text[..cut], false).unwrap();
                BUILTIN.encode_into(&text[cut..], &mut halves).unwrap();
                prop_assert_eq!(&halves, &whole);
            }
        }
    }
}

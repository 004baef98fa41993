//! The words of a tokenizer that an engine can say.
//!
//! Lives here: [`vocabulary`], and the list of candidates.
//! Never here: which word comes when (`answer`).
//! Invariant: the words it gives tokenize, one after another in any order, to exactly their own
//! tokens; this is checked on a text that holds them all.

use super::answer::{Vocabulary, Word};
use crate::prompt::tokenizer::Tokenizer;

/// Fewest words worth speaking with.
const FEWEST: usize = 8;
/// Tokens that end a turn in common chat formats, most specific first.
const ENDS: [&str; 6] = [
    "<|end|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<|eos|>",
    "</s>",
];
/// Plain English that most tokenizers hold as single tokens.
const CANDIDATES: &str = "the of and to a in is that it for as with on be at by this from or one \
     had not but what all were when we there can an your which their if do will each about how up \
     out them then many some so these would other into has more two see could no than first been \
     who its now people my made over did down only way find use may long little very after words \
     just where most know get through back much before right any same tell time want show new here \
     things read need different move try kind page should study still learn answer cache block \
     token prompt request engine model prefill decode pod route load key value key-value tier \
     policy session number name point small large used work part take place against under last";

/// Why a tokenizer cannot be spoken with.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VocabularyError {
    /// Too few candidate words are single tokens.
    #[error("tokenizer: expected at least {FEWEST} common words as single tokens, found {found}")]
    TooFewWords {
        /// How many are.
        found: usize,
    },
    /// Words change their tokens beside other words.
    #[error("tokenizer: expected words to keep their tokens in a sentence, found others")]
    Unstable,
    /// No end-of-turn token.
    #[error("tokenizer: expected an end-of-turn token such as <|im_end|>, found none")]
    NoEnd,
}

/// The words of `tokenizer`.
pub(super) fn vocabulary(tokenizer: &Tokenizer) -> Result<Vocabulary, VocabularyError> {
    let end = ENDS
        .iter()
        .find_map(|token| tokenizer.added_token(token))
        .ok_or(VocabularyError::NoEnd)?;
    let words = |prefix: &str, capital: bool| -> Vec<Word> {
        let spelled = CANDIDATES.split_whitespace().map(|word| match capital {
            true => format!("{prefix}{}", capitalized(word)),
            false => format!("{prefix}{word}"),
        });
        spelled.filter_map(|text| word(tokenizer, text)).collect()
    };
    let following = words(" ", false);
    let mut opening = words("", true);
    if opening.is_empty() {
        opening = words("", false);
    }
    if following.len() < FEWEST || opening.is_empty() {
        let found = following.len().min(opening.len());
        return Err(VocabularyError::TooFewWords { found });
    }
    let vocabulary = Vocabulary {
        opening,
        following,
        end,
    };
    match stable(tokenizer, &vocabulary) {
        true => Ok(vocabulary),
        false => Err(VocabularyError::Unstable),
    }
}

fn word(tokenizer: &Tokenizer, text: String) -> Option<Word> {
    match tokenizer.encode(&text, false).ok()?.as_slice() {
        [id] => Some(Word {
            id: *id,
            text: text.into(),
        }),
        _ => None,
    }
}

fn capitalized(word: &str) -> String {
    let mut letters = word.chars();
    let first = letters.next().map(|letter| letter.to_ascii_uppercase());
    first.into_iter().chain(letters).collect()
}

fn stable(tokenizer: &Tokenizer, vocabulary: &Vocabulary) -> bool {
    vocabulary.opening.iter().all(|opening| {
        let words = || std::iter::once(opening).chain(&vocabulary.following);
        let text: String = words().map(|word| &*word.text).collect();
        let ids: Vec<u32> = words().map(|word| word.id).collect();
        tokenizer.encode(&text, false).is_ok_and(|got| got == ids)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::answer::{Answer, Opening};
    use crate::prompt::Profile;
    use std::sync::Arc;

    #[test]
    fn the_builtin_model_has_many_words_and_answers_keep_their_tokens() {
        let profile = Profile::builtin().expect("the built-in model loads");
        let tokenizer = profile.tokenizer().expect("it has a tokenizer");
        let vocabulary = Arc::new(vocabulary(tokenizer).expect("it has words"));
        assert!(40 <= vocabulary.following.len());
        for seed in 0..50 {
            for opening in [Opening::Message, Opening::Continuation] {
                let answer = Answer {
                    vocabulary: vocabulary.clone(),
                    seed,
                    opening,
                    length: u32::MAX,
                };
                let said = || (0..100).map(|index| answer.token(index));
                let text: String = said().map(|word| word.text().to_owned()).collect();
                let ids: Vec<u32> = said().map(|word| word.id()).collect();
                assert_eq!(tokenizer.encode(&text, false).as_ref(), Ok(&ids));
            }
        }
    }
}

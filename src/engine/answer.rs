//! What a simulated engine says: deterministic words that tokenize back to the tokens they came from.
//!
//! Lives here: [`Vocabulary`] (the words) and [`Answer`] (one generated text).
//! Never here: how a text is tokenized (`text`), when a token is due (`scheduler`).
//! Invariant: every word is exactly one token, so the text of an answer, rendered into the next
//! turn's prompt, gives the very tokens whose KV the engine holds. That is what makes turn two hit
//! the decoded blocks, as it does on a real engine.

use std::sync::Arc;

/// One word and its token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Word {
    /// The token.
    pub id: u32,
    /// Its text, leading space included where it has one.
    pub text: Box<str>,
}

/// The words an engine knows.
#[derive(Clone, Debug)]
pub struct Vocabulary {
    /// Words that can stand right after the prompt's last character in a chat (no leading space).
    pub opening: Vec<Word>,
    /// Words with a leading space; never empty.
    pub following: Vec<Word>,
    /// The token that ends a turn; it has no text.
    pub end: u32,
}

/// How an answer begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opening {
    /// A new message: templates trim it, so it must not begin with a space.
    Message,
    /// The middle of a text: a space must separate it from what is there.
    Continuation,
}

/// One deterministic answer. The same prompt gets the same answer from every engine, as with
/// greedy decoding; so remote and local prefill can be compared word by word.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The words to choose from.
    pub vocabulary: Arc<Vocabulary>,
    /// Decides the words; derived from the prompt.
    pub seed: u64,
    /// How it begins.
    pub opening: Opening,
    /// Words before the end of the turn; `u32::MAX` for an answer that never ends by itself.
    pub length: u32,
}

/// One generated token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Generated<'a> {
    /// A word.
    Word(&'a Word),
    /// The end of the turn.
    End(u32),
}

impl Generated<'_> {
    /// The token.
    #[must_use]
    pub fn id(&self) -> u32 {
        match self {
            Generated::Word(word) => word.id,
            Generated::End(id) => *id,
        }
    }

    /// The text it adds to the answer.
    #[must_use]
    pub fn text(&self) -> &str {
        match self {
            Generated::Word(word) => &word.text,
            Generated::End(_) => "",
        }
    }
}

impl Answer {
    /// The token at `index`, counted from 0.
    #[must_use]
    pub fn token(&self, index: u32) -> Generated<'_> {
        let words = match self.opening {
            Opening::Message if index == 0 && !self.vocabulary.opening.is_empty() => {
                &self.vocabulary.opening
            }
            Opening::Message | Opening::Continuation => &self.vocabulary.following,
        };
        let mut key = [0; 12];
        key[..8].copy_from_slice(&self.seed.to_le_bytes());
        key[8..].copy_from_slice(&index.to_le_bytes());
        let draw = xxhash_rust::xxh3::xxh3_64(&key) % words.len().max(1) as u64;
        match words.get(usize::try_from(draw).unwrap_or(0)) {
            Some(word) if index < self.length => Generated::Word(word),
            Some(_) | None => Generated::End(self.vocabulary.end),
        }
    }
}

/// The seed of the answer to `prompt`.
#[must_use]
pub fn seed(prompt: &[u32]) -> u64 {
    let mut hash = xxhash_rust::xxh3::Xxh3::new();
    for token in prompt {
        hash.update(&token.to_le_bytes());
    }
    hash.digest()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(seed: u64, length: u32) -> Answer {
        let word = |id: u32, text: &str| Word {
            id,
            text: text.into(),
        };
        Answer {
            vocabulary: Arc::new(Vocabulary {
                opening: vec![word(1, "The"), word(2, "A")],
                following: (10..30).map(|id| word(id, " word")).collect(),
                end: 99,
            }),
            seed,
            opening: Opening::Message,
            length,
        }
    }

    #[test]
    fn one_prompt_has_one_answer_and_another_prompt_another() {
        let ids = |prompt: &[u32]| -> Vec<u32> {
            let answer = answer(seed(prompt), u32::MAX);
            (0..32).map(|index| answer.token(index).id()).collect()
        };
        assert_eq!(ids(&[1, 2, 3]), ids(&[1, 2, 3]));
        assert_ne!(ids(&[1, 2, 3]), ids(&[1, 2, 4]));
    }

    #[test]
    fn an_answer_ends_with_the_end_token_and_a_message_begins_without_a_space() {
        let answer = answer(7, 3);
        let text: String = (0..4)
            .map(|index| answer.token(index).text().to_owned())
            .collect();
        assert_eq!(answer.token(3), Generated::End(99));
        assert!(text.ends_with(" word word"), "{text}");
        assert!(!text.starts_with(' '));
    }
}

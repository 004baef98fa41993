//! Conversations that grow from one kilobyte to sixty-four, turn by turn.

use super::publisher::BLOCK;
use super::world::{EXACT, PUBLISHERS};
use sidestep::prompt::{Api, Encoder, Profile, Profiles, parse};

/// After which a conversation is over.
const LONGEST: usize = 60 << 10;

pub(super) struct Conversation {
    task: usize,
    number: usize,
    session: String,
    messages: String,
}

impl Conversation {
    pub(super) fn new(task: usize) -> Conversation {
        let mut conversation = Conversation {
            task,
            number: 0,
            session: String::new(),
            messages: String::new(),
        };
        conversation.restart();
        conversation
    }

    fn restart(&mut self) {
        self.number += 1;
        self.session = format!("session-{}-{}", self.task, self.number);
        let topic = (self.task + self.number) % PUBLISHERS;
        self.messages = format!(
            r#"{},{{"role":"user","content":"{} asks"}}"#,
            system(topic),
            self.session
        );
    }

    pub(super) fn session(&self) -> &str {
        &self.session
    }

    pub(super) fn body(&self, model: &str) -> Vec<u8> {
        body(model, &self.messages)
    }

    /// The answer came: the next turn is longer.
    pub(super) fn answered(&mut self) {
        let turn = self.messages.len();
        let words = format!("{} and so on {turn} ", self.session).repeat(40 + turn % 200);
        self.messages.push_str(&format!(
            r#",{{"role":"assistant","content":"yes"}},{{"role":"user","content":"{words}"}}"#
        ));
        if LONGEST < self.messages.len() {
            self.restart();
        }
    }
}

fn body(model: &str, messages: &str) -> Vec<u8> {
    format!(r#"{{"model":"{model}","stream":true,"max_tokens":200,"messages":[{messages}]}}"#)
        .into_bytes()
}

fn system(topic: usize) -> String {
    let rules = format!("You are helper number {topic}. Be kind, brief and right. ").repeat(18);
    format!(r#"{{"role":"system","content":"{rules}"}}"#)
}

/// The whole blocks that every conversation about a topic begins with, as an engine counts them.
pub(super) fn beginnings() -> Vec<Vec<u32>> {
    let profile = Profile::builtin().unwrap().named(EXACT.into(), Vec::new());
    let encoder = Encoder::new(Profiles::new(vec![profile]).unwrap(), 0);
    (0..PUBLISHERS)
        .map(|topic| {
            let request = parse(Api::ChatCompletions, &body(EXACT, &system(topic))).unwrap();
            let mut tokens = encoder.token_ids(&request).unwrap().remove(0);
            // What comes after the system prompt is the template's.
            tokens.truncate((tokens.len() * 3 / 4).next_multiple_of(BLOCK) - BLOCK);
            tokens
        })
        .collect()
}

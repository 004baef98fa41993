//! The demo's traffic: conversations that grow, and prompts that come out of nowhere.
//!
//! Lives here: [`plan`], a seeded list of conversations.
//! Never here: HTTP, time (see `client` and `mod`).
//! Invariant: the same seed and number give the same traffic, and exactly that many requests.

/// Conversations that begin at the same moment; most often one.
pub(super) type Group = Vec<Conversation>;

/// One conversation: its turns are sent one after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Conversation {
    /// Its name.
    pub(super) id: String,
    /// The instructions it starts with, if any; conversations share them.
    pub(super) system: Option<String>,
    /// What the user says, turn by turn.
    pub(super) turns: Vec<Turn>,
}

/// What the user says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Turn {
    /// The words.
    pub(super) text: String,
    /// How many tokens the model may answer.
    pub(super) max_tokens: u32,
    /// Milliseconds the user thinks before saying so.
    pub(super) think_ms: u64,
}

/// What conversations are like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    /// A long first turn, short questions about it.
    Document,
    /// Shared instructions, turns of a paragraph.
    Assistant,
    /// One question without any context.
    Question,
    /// One paragraph to be improved.
    Paragraph,
    /// Several long texts at once, which nobody asks about again.
    Batch,
}

const SHAPES: [Shape; 8] = [
    Shape::Assistant,
    Shape::Document,
    Shape::Question,
    Shape::Assistant,
    Shape::Batch,
    Shape::Paragraph,
    Shape::Document,
    Shape::Question,
];

/// `requests` requests in conversations, drawn from `seed`.
#[must_use]
pub(super) fn plan(seed: u64, requests: usize) -> Vec<Group> {
    let mut draw = Draw(seed);
    let systems: Vec<String> = (0..3).map(|_| draw.words(350..650)).collect();
    let mut groups = Vec::new();
    let (mut left, mut count) = (requests, 0);
    while 0 < left {
        let shape = SHAPES[groups.len() % SHAPES.len()];
        let (members, turns) = match shape {
            Shape::Document => (1, draw.below(3..6)),
            Shape::Assistant => (1, draw.below(3..7)),
            Shape::Question | Shape::Paragraph => (1, 1),
            Shape::Batch => (3, 1),
        };
        let turns = usize::try_from(turns).unwrap_or(1);
        let system =
            (shape == Shape::Assistant).then(|| systems[groups.len() / 2 % systems.len()].clone());
        let mut group = Group::new();
        for _ in 0..members {
            let turns = turns.min(left);
            if turns == 0 {
                break;
            }
            left -= turns;
            count += 1;
            group.push(Conversation {
                id: format!("{}-{count:02}", name(shape)),
                system: system.clone(),
                turns: (0..turns)
                    .map(|index| turn(&mut draw, shape, index))
                    .collect(),
            });
        }
        groups.push(group);
    }
    groups
}

fn name(shape: Shape) -> &'static str {
    match shape {
        Shape::Document => "document",
        Shape::Assistant => "assistant",
        Shape::Question => "question",
        Shape::Paragraph => "paragraph",
        Shape::Batch => "batch",
    }
}

fn turn(draw: &mut Draw, shape: Shape, index: usize) -> Turn {
    let words = match (shape, index) {
        (Shape::Document, 0) => 900..1800,
        (Shape::Batch, _) => 2000..3500,
        (Shape::Assistant, _) => 40..120,
        (Shape::Paragraph, _) => 120..240,
        (Shape::Question | Shape::Document, _) => 8..30,
    };
    Turn {
        text: draw.words(words),
        max_tokens: u32::try_from(draw.below(16..64)).unwrap_or(16),
        // A program sends a batch, and does not think.
        think_ms: if shape == Shape::Batch {
            0
        } else {
            draw.below(50..400)
        },
    }
}

/// SplitMix64 (Steele, Lea, Flood 2014): small, seeded, good enough for traffic.
struct Draw(u64);

impl Draw {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, range: std::ops::Range<u64>) -> u64 {
        range.start + self.next() % (range.end - range.start).max(1)
    }

    fn words(&mut self, count: std::ops::Range<u64>) -> String {
        let mut text = String::new();
        for position in 0..self.below(count) {
            let index = usize::try_from(self.next()).unwrap_or(usize::MAX) % WORDS.len();
            if 0 < position {
                text.push_str(if position % 13 == 0 { ". " } else { " " });
            }
            text.push_str(WORDS[index]);
        }
        text
    }
}

/// Plain words, most of them one or two tokens.
const WORDS: &[&str] = &[
    "about", "above", "account", "across", "after", "again", "answer", "because", "before",
    "begin", "between", "block", "bring", "build", "cache", "carry", "change", "choose", "circle",
    "clear", "close", "cold", "common", "copy", "count", "course", "cover", "decide", "decode",
    "deliver", "depend", "describe", "detail", "differ", "direct", "double", "early", "engine",
    "enough", "every", "example", "explain", "family", "field", "figure", "final", "follow",
    "forward", "found", "garden", "gather", "general", "given", "green", "ground", "group",
    "happen", "hard", "header", "heard", "history", "house", "hundred", "island", "journey",
    "keep", "kind", "know", "large", "later", "learn", "leave", "length", "letter", "light",
    "listen", "little", "local", "long", "machine", "market", "matter", "mean", "measure",
    "memory", "middle", "minute", "model", "morning", "mountain", "move", "music", "near", "never",
    "night", "north", "notice", "number", "object", "often", "only", "open", "order", "other",
    "paper", "part", "pass", "pattern", "people", "perhaps", "picture", "place", "plain", "plan",
    "point", "prefill", "present", "press", "problem", "produce", "prompt", "question", "quick",
    "quiet", "reach", "reason", "record", "remote", "report", "result", "river", "road", "room",
    "round", "rule", "second", "sentence", "serve", "several", "short", "simple", "single",
    "small", "sound", "south", "space", "special", "stand", "start", "state", "station", "step",
    "still", "stone", "story", "street", "strong", "summer", "system", "table", "think", "three",
    "thread", "time", "token", "toward", "town", "travel", "tree", "turn", "under", "until",
    "usual", "value", "voice", "wait", "walk", "warm", "watch", "water", "weight", "west", "while",
    "white", "whole", "winter", "wonder", "word", "work", "world", "write", "yellow", "young",
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn conversations(requests: usize) -> Vec<Conversation> {
        plan(1, requests).into_iter().flatten().collect()
    }

    #[test]
    fn the_same_seed_gives_the_same_traffic_and_another_seed_another() {
        assert_eq!(plan(7, 60), plan(7, 60));
        assert_ne!(plan(7, 60), plan(8, 60));
    }

    #[test]
    fn exactly_as_many_requests_as_asked_for() {
        for requests in [0, 1, 2, 5, 17, 120, 333] {
            let turns = conversations(requests)
                .into_iter()
                .map(|one| one.turns.len());
            assert_eq!(turns.sum::<usize>(), requests);
        }
    }

    #[test]
    fn instructions_are_shared_and_texts_are_not() {
        let all = conversations(200);
        let with_system: Vec<&String> = all.iter().filter_map(|one| one.system.as_ref()).collect();
        let systems: BTreeSet<&String> = with_system.iter().copied().collect();
        assert_eq!(systems.len(), 3);
        assert!(6 < with_system.len());
        let first: BTreeSet<&String> = all.iter().map(|one| &one.turns[0].text).collect();
        assert_eq!(first.len(), all.len());
    }

    #[test]
    fn names_are_unique() {
        let all = conversations(200);
        let ids: BTreeSet<&String> = all.iter().map(|one| &one.id).collect();
        assert_eq!(ids.len(), all.len());
    }
}

//! What real engines and real models' files say; `tests/engine/run.py` prepares the files named by
//! the environment and runs this. Not part of a plain `cargo test`: without those files it fails.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "fixtures fail the test that uses them"
)]

#[path = "../it/prompt_difference.rs"]
mod prompt_difference;
mod prompts;
mod templates;

fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set; use tests/run engine"))
}

fn read(path: &str) -> Vec<u8> {
    std::fs::read(path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

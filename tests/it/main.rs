//! Black-box and repository tests, one binary.

mod engine;
mod prompt_golden;

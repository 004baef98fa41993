//! Black-box and repository tests, one binary.

mod prompt_engine;
mod prompt_golden;

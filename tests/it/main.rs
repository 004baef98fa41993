//! Black-box and repository tests, one binary.

mod prompt_golden;

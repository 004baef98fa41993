//! Black-box and repository tests, one binary.

mod architecture;

//! Black-box tests of the library.
mod config;
mod fleet;

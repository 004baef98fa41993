//! Black-box tests of the library.
mod config;
mod config_watch;
mod fleet;

//! Black-box tests: the library as its users see it.

mod kv_captures;
mod kv_feed;
mod kv_support;

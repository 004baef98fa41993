//! Which pod holds which KV block.
//!
//! Lives here: the engines' event format ([`event`], [`encode`]), the index built from it
//! ([`index`]) and the tasks that listen to pods ([`feed`]).
//! Never here: what a pod is (`fleet`), what a decision makes of a cached block (`decide`).
//! Invariant: an answer is never longer than what the pod announced and has not taken back; when
//! in doubt (gap, restart, unknown parent, full table) knowledge is dropped, never invented.

pub mod encode;
pub mod event;
pub mod feed;
pub mod index;

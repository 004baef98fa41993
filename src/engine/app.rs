//! What every request of one engine shares.
//!
//! Lives here: [`App`].
//! Never here: behaviour of its own beyond naming answers.
//! Invariant: built once, before the first connection, and never changed.

use super::answer::Vocabulary;
use super::config::EngineConfig;
use super::driver::Handle;
use super::handoff::Peers;
use super::record::Recorder;
use crate::prompt::Api;
use http::HeaderMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// One engine, as its HTTP side sees it.
pub(super) struct App {
    pub(super) config: EngineConfig,
    pub(super) vocabulary: Arc<Vocabulary>,
    pub(super) handle: Handle,
    pub(super) peers: Peers,
    pub(super) recorder: Recorder,
    /// Where other engines reach this one.
    pub(super) address: SocketAddr,
    /// Names this incarnation: blocks kept by an earlier one are gone.
    pub(super) engine_id: String,
    pub(super) answers: AtomicU64,
}

impl App {
    /// A name for an answer: `chatcmpl-` or `cmpl-`, then the request's own id or a fresh one.
    pub(super) fn answer_id(&self, api: Api, headers: &HeaderMap) -> String {
        let kind = match api {
            Api::ChatCompletions => "chatcmpl",
            Api::Completions => "cmpl",
        };
        let given = headers.get("x-request-id").and_then(|id| id.to_str().ok());
        match given {
            Some(id) if id.len() <= 128 => format!("{kind}-{id}"),
            Some(_) | None => {
                let count = self.answers.fetch_add(1, Ordering::Relaxed);
                format!(
                    "{kind}-{}{count:08x}",
                    self.engine_id.get(..8).unwrap_or("")
                )
            }
        }
    }
}

/// A random name. The standard library seeds every such hasher differently.
pub(super) fn random_id() -> String {
    let draw = || RandomState::new().build_hasher().finish();
    format!("{:016x}{:016x}", draw(), draw())
}

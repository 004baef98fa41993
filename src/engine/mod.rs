//! `sidestep engine`: a simulated engine pod that behaves like vLLM wherever a router can see it.
//!
//! Lives here: [`Engine`] (bind, learn the addresses, serve), [`EngineConfig`], and below them the
//! scheduler ([`scheduler`]), the KV cache ([`cache`]), the cost curves ([`timing`]), the answers
//! ([`answer`]), and the private shell: driver, event sockets, HTTP, handoff.
//! Never here: routing choices; nothing of the picker is used except `prompt` and `kv::encode`.
//! Invariant: tokens, cached blocks and events tell one story: what an event announces is held, what
//! is held was announced, and a prompt's hits are exactly the announced blocks it begins with.

pub mod answer;
mod app;
pub mod cache;
mod config;
mod driver;
mod events;
mod fields;
mod generate;
mod handoff;
mod http;
mod metrics;
mod record;
mod refusal;
mod reply;
mod request;
pub mod scheduler;
mod stream;
pub mod timing;
mod words;

pub use config::{ConfigError, EngineConfig, LocalPrefill, Role};
pub use words::VocabularyError;

use self::app::App;
use self::driver::Driver;
use self::events::{Framing, Replay};
use self::handoff::Peers;
use self::record::Recorder;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use tokio::net::TcpListener;

/// Where an engine listens.
#[derive(Debug)]
pub struct Listeners {
    /// The OpenAI API, metrics and health; already bound.
    pub http: TcpListener,
    /// KV events (PUB); port 0 takes a free one.
    pub events: SocketAddr,
    /// Replay of KV events (ROUTER); port 0 takes a free one.
    pub replay: SocketAddr,
}

/// Where an engine really listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Addresses {
    /// The OpenAI API, metrics and health.
    pub http: SocketAddr,
    /// KV events (PUB).
    pub events: SocketAddr,
    /// Replay of KV events (ROUTER).
    pub replay: SocketAddr,
}

/// Why an engine cannot start.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// Its configuration contradicts itself.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Its tokenizer has no words to speak with.
    #[error(transparent)]
    Vocabulary(#[from] VocabularyError),
    /// A socket for KV events cannot be bound.
    #[error("kv events: expected to bind {0} and {1}, found {2}")]
    Events(SocketAddr, SocketAddr, zeromq::ZmqError),
    /// The HTTP listener is of no use.
    #[error("http listener: expected a bound socket, found {0}")]
    Http(std::io::Error),
}

/// An engine that is bound and not yet serving.
pub struct Engine {
    app: Arc<App>,
    driver: Driver,
    replay: Replay,
    listener: TcpListener,
    addresses: Addresses,
}

impl Engine {
    /// Checks `config`, binds the event sockets and makes the engine ready. Must be called inside a
    /// tokio runtime.
    ///
    /// # Errors
    /// See [`EngineError`].
    pub async fn bind(config: EngineConfig, listeners: Listeners) -> Result<Engine, EngineError> {
        let limits = config.limits()?;
        let vocabulary = config.vocabulary()?;
        let http = listeners.http.local_addr().map_err(EngineError::Http)?;
        let framing = Framing {
            topic: config.topic.clone(),
            buffer: config.replay_batches,
            block_size: config.block_size.get(),
        };
        let (events, replay) = (listeners.events, listeners.replay);
        let (publisher, replay_socket, [events, replay]) = events::bind(events, replay, framing)
            .await
            .map_err(|error| EngineError::Events(events, replay, error))?;
        let (driver, handle) = Driver::new(limits, publisher);
        let app = App {
            vocabulary: Arc::new(vocabulary),
            handle,
            peers: Peers::new(config.peer_timeout),
            recorder: Recorder::new(config.record_requests),
            address: http,
            engine_id: app::random_id(),
            answers: AtomicU64::new(0),
            config,
        };
        Ok(Engine {
            app: Arc::new(app),
            driver,
            replay: replay_socket,
            listener: listeners.http,
            addresses: Addresses {
                http,
                events,
                replay,
            },
        })
    }

    /// Where it listens.
    #[must_use]
    pub fn addresses(&self) -> Addresses {
        self.addresses
    }

    /// Serves until `shutdown` is done; then every connection and socket is closed at once.
    pub async fn serve(self, shutdown: impl Future<Output = ()>) {
        tokio::select! {
            () = shutdown => {}
            () = self.driver.run() => {}
            // A broken replay socket is reported and must not end the engine.
            () = async { self.replay.run().await; std::future::pending().await } => {}
            () = http::serve(self.app, self.listener) => {}
        }
    }
}

/// Binds and serves in one go, for callers that chose the ports.
///
/// # Errors
/// See [`EngineError`].
pub async fn serve(
    config: EngineConfig,
    listeners: Listeners,
    shutdown: impl Future<Output = ()>,
) -> Result<(), EngineError> {
    Engine::bind(config, listeners).await?.serve(shutdown).await;
    Ok(())
}

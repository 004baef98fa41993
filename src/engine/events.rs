//! Publishes cache changes the way vLLM does: a PUB socket, and a ROUTER socket for replay.
//!
//! Lives here: [`Publisher`], the frames around a payload, the replay buffer.
//! Never here: the payload's encoding (`kv::encode`), what changed (`cache`).
//! Invariant: sequence numbers count published batches from 0 without a hole, and the buffer holds
//! the newest of them in order.
//!
//! Live: `topic | seq (u64, big-endian) | payload`, one message per pass that changed something.
//! Replay (vLLM 0.27.1 and later): the client, a DEALER, sends `"" | start seq`; each buffered batch
//! from there on comes back as `"" | topic | seq | payload`, then `"" | "" | ff×8 | ""`.

use super::cache::{BlockHash, Change, Space};
use crate::kv::encode;
use crate::kv::event::{
    Adapter, Attention, EngineHash, Event, Extra, Locality, Medium, Removed, Stored, TokenForm,
};
use crate::names::{ModelName, Tenant};
use bytes::Bytes;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use zeromq::{
    Endpoint, PubSocket, RouterRecvHalf, RouterSendHalf, RouterSocket, Socket, SocketRecv,
    SocketSend, ZmqError, ZmqMessage,
};

/// A replay client that does not read for so long is given up.
const REPLAY_PATIENCE: Duration = Duration::from_secs(10);
const END_MARKER: [u8; 8] = [0xff; 8];

type Buffer = Arc<Mutex<VecDeque<(u64, Bytes)>>>;

/// What a publisher needs to know besides its sockets.
#[derive(Clone, Debug)]
pub(super) struct Framing {
    /// First frame of every message.
    pub(super) topic: String,
    /// Batches kept for replay.
    pub(super) buffer: usize,
    /// Tokens per block, part of every stored event.
    pub(super) block_size: u32,
}

/// The event sockets of one engine.
pub(super) struct Publisher {
    socket: PubSocket,
    topic: Bytes,
    block_size: u32,
    next: u64,
    buffer: Buffer,
    capacity: usize,
}

/// The replay socket of one engine.
pub(super) struct Replay {
    requests: RouterRecvHalf,
    replies: RouterSendHalf,
    topic: Bytes,
    buffer: Buffer,
}

/// Binds both sockets; port 0 takes a free one. Returns them with their real addresses.
pub(super) async fn bind(
    events: SocketAddr,
    replay: SocketAddr,
    framing: Framing,
) -> Result<(Publisher, Replay, [SocketAddr; 2]), ZmqError> {
    let mut publisher = PubSocket::new();
    let mut router = RouterSocket::new();
    let events = bound(events, publisher.bind(&format!("tcp://{events}")).await?);
    let replay = bound(replay, router.bind(&format!("tcp://{replay}")).await?);
    let topic = Bytes::from(framing.topic);
    let buffer = Buffer::default();
    let (replies, requests) = router.split();
    let publisher = Publisher {
        socket: publisher,
        topic: topic.clone(),
        block_size: framing.block_size,
        next: 0,
        buffer: buffer.clone(),
        capacity: framing.buffer,
    };
    let replay_socket = Replay {
        requests,
        replies,
        topic,
        buffer,
    };
    Ok((publisher, replay_socket, [events, replay]))
}

fn bound(asked: SocketAddr, got: Endpoint) -> SocketAddr {
    match got {
        Endpoint::Tcp(_, port) => SocketAddr::new(asked.ip(), port),
        _ => asked,
    }
}

impl Publisher {
    /// Sends one batch for `changes`; nothing for none.
    pub(super) async fn publish(&mut self, changes: Vec<Change>) {
        if changes.is_empty() {
            return;
        }
        let events: Vec<Event> = changes
            .into_iter()
            .map(|change| event(change, self.block_size))
            .collect();
        // A clock before 1970 reads as 1970.
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let payload = encode::batch(since.unwrap_or_default().as_secs_f64(), &events, 0);
        let payload = Bytes::from(payload);
        let seq = self.next;
        self.next += 1;
        {
            let mut buffer = self.buffer.lock();
            while self.capacity <= buffer.len() && buffer.pop_front().is_some() {}
            if 0 < self.capacity {
                buffer.push_back((seq, payload.clone()));
            }
        }
        let mut message = ZmqMessage::from(self.topic.clone());
        message.push_back(Bytes::copy_from_slice(&seq.to_be_bytes()));
        message.push_back(payload);
        if let Err(error) = self.socket.send(message).await {
            tracing::warn!(%error, seq, "kv events: a batch could not be published");
        }
    }
}

impl Replay {
    /// Answers replay requests for ever; dropped to stop.
    pub(super) async fn run(mut self) {
        loop {
            let frames = match self.requests.recv().await {
                Ok(message) => message.into_vec(),
                Err(error) => {
                    tracing::warn!(%error, "kv events: the replay socket has failed");
                    return;
                }
            };
            let Some((client, start)) = request(&frames) else {
                tracing::warn!(
                    frames = frames.len(),
                    "kv events: a replay request was malformed"
                );
                continue;
            };
            let answer = tokio::time::timeout(REPLAY_PATIENCE, self.answer(client, start));
            match answer.await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::debug!(%error, "kv events: a replay client went away"),
                Err(_) => tracing::debug!("kv events: a replay client does not read"),
            }
        }
    }

    async fn answer(&mut self, client: Bytes, start: u64) -> Result<(), ZmqError> {
        let batches: Vec<(u64, Bytes)> = {
            let buffer = self.buffer.lock();
            let from = buffer.iter().filter(|(seq, _)| start <= *seq);
            from.cloned().collect()
        };
        let message = |frames: [Bytes; 3]| {
            let mut message = ZmqMessage::from(client.clone());
            message.push_back(Bytes::new());
            frames
                .into_iter()
                .for_each(|frame| message.push_back(frame));
            message
        };
        for (seq, payload) in batches {
            let seq = Bytes::copy_from_slice(&seq.to_be_bytes());
            let batch = message([self.topic.clone(), seq, payload]);
            self.replies.send(batch).await?;
        }
        let end = message([Bytes::new(), Bytes::from_static(&END_MARKER), Bytes::new()]);
        self.replies.send(end).await
    }
}

/// The client and the first sequence number it wants: `client | "" | seq`.
fn request(frames: &[Bytes]) -> Option<(Bytes, u64)> {
    let (client, rest) = frames.split_first()?;
    let start = <[u8; 8]>::try_from(rest.last()?.as_ref()).ok()?;
    Some((client.clone(), u64::from_be_bytes(start)))
}

fn event(change: Change, block_size: u32) -> Event {
    let name = |hash: BlockHash| EngineHash(hash.0);
    match change {
        Change::Cleared => Event::Cleared,
        Change::Removed(hash) => Event::Removed(Removed {
            hashes: vec![name(hash)],
            medium: Medium::Device,
            locality: Locality::Local,
            group: Some(0),
        }),
        Change::Stored {
            parent,
            hashes,
            tokens,
            space,
        } => Event::Stored(Box::new(Stored {
            extra: extra_keys(&space, parent.is_none(), hashes.len()),
            hashes: hashes.into_iter().map(name).collect(),
            parent: parent.map(name),
            tokens,
            tokens_as: TokenForm::Single,
            block_size,
            medium: Medium::Device,
            locality: Locality::Local,
            group: Some(0),
            attention: Attention::Full,
            adapter: match &space.adapter {
                Some(adapter) => Adapter::Named(adapter.0.clone()),
                None => Adapter::None,
            },
            salt: None,
        })),
    }
}

/// vLLM's untagged keys: the adapter's name with every block, the salt with the first of a prompt.
fn extra_keys(space: &Space, from_start: bool, blocks: usize) -> Vec<Vec<Extra>> {
    let adapter = space.adapter.as_ref().map(|ModelName(name)| name);
    let salt = space.salt.as_ref().map(|Tenant(salt)| salt);
    (0..blocks)
        .map(|at| {
            let salt = salt.filter(|_| from_start && at == 0);
            let keys = adapter.into_iter().chain(salt);
            keys.cloned().map(Extra::Text).collect()
        })
        .collect()
}

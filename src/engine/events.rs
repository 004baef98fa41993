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

use super::cache::Change;
use bytes::Bytes;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
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

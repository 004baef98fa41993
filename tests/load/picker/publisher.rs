//! Engines' KV events: what each has published, and what the index must therefore hold.

use bytes::Bytes;
use parking_lot::Mutex;
use sidestep::kv::encode;
use sidestep::kv::event::{EngineHash, Event, Removed, Stored};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::interval;
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

pub(super) const BLOCK: usize = 16;
/// Between two batches of one engine.
const EVERY: Duration = Duration::from_millis(100);
/// Blocks of one prompt, and prompts kept before the oldest is removed.
const BLOCKS: usize = 24;
const PROMPTS: usize = 40;

/// Batches sent so far, by number.
type Sent = Arc<Mutex<Vec<Bytes>>>;

/// One engine's events.
pub(super) struct Publisher {
    events: PubSocket,
    sent: Sent,
    /// Blocks of the prompts of its own, oldest first.
    prompts: Vec<Vec<EngineHash>>,
    holds: Arc<Mutex<BTreeSet<u64>>>,
    next: u64,
    tokens: u32,
}

impl Publisher {
    /// Binds; its addresses, for events and for replay, and what it holds.
    pub(super) async fn bind(
        number: usize,
        tasks: &mut JoinSet<()>,
    ) -> (Publisher, (String, String), Arc<Mutex<BTreeSet<u64>>>) {
        let mut events = PubSocket::new();
        let mut router = RouterSocket::new();
        let bound = events.bind("tcp://127.0.0.1:0").await.unwrap().to_string();
        let replay = router.bind("tcp://127.0.0.1:0").await.unwrap().to_string();
        let sent = Sent::default();
        tasks.spawn(replays(router, Arc::clone(&sent)));
        let holds = Arc::new(Mutex::new(BTreeSet::new()));
        let publisher = Publisher {
            events,
            sent,
            prompts: Vec::new(),
            holds: Arc::clone(&holds),
            next: (number as u64) << 32,
            // Engines hold other prompts each, and no prompt of a client's.
            tokens: 1_000_000 * (number as u32 + 1),
        };
        (publisher, (bound, replay), holds)
    }

    /// Announces the blocks of `tokens` for good.
    pub(super) async fn holds(&mut self, tokens: &[u32]) {
        let (event, _) = self.stored(tokens);
        self.send(vec![event]).await;
    }

    /// Publishes as a busy engine does until it is told to stop.
    pub(super) async fn run(mut self, stop: tokio_util::sync::CancellationToken) {
        let mut ticks = interval(EVERY);
        while stop.run_until_cancelled(ticks.tick()).await.is_some() {
            let tokens: Vec<u32> = (0..(BLOCKS * BLOCK) as u32)
                .map(|at| self.tokens + at)
                .collect();
            self.tokens += 100;
            let (event, hashes) = self.stored(&tokens);
            self.prompts.push(hashes);
            let mut batch = vec![event];
            if PROMPTS < self.prompts.len() {
                // From the end, as engines evict; of every other prompt only the middle.
                let mut hashes = self.prompts.remove(0);
                hashes.reverse();
                if self.tokens.is_multiple_of(200) {
                    hashes = hashes.split_off(BLOCKS / 2);
                    hashes.truncate(1);
                }
                let mut holds = self.holds.lock();
                holds.retain(|held| hashes.iter().all(|hash| hash.0 != *held));
                let removed = Removed {
                    hashes,
                    ..Removed::default()
                };
                batch.push(Event::Removed(removed));
            }
            self.send(batch).await;
        }
        // An engine that has nothing to say is still there.
        std::future::pending::<()>().await;
    }

    fn stored(&mut self, tokens: &[u32]) -> (Event, Vec<EngineHash>) {
        let blocks = tokens.len() / BLOCK;
        let hashes: Vec<_> = (0..blocks as u64)
            .map(|at| EngineHash(self.next + at))
            .collect();
        self.next += blocks as u64;
        self.holds.lock().extend(hashes.iter().map(|hash| hash.0));
        let stored = Stored {
            hashes: hashes.clone(),
            tokens: tokens[..blocks * BLOCK].to_vec(),
            block_size: BLOCK as u32,
            ..Stored::default()
        };
        (Event::Stored(Box::new(stored)), hashes)
    }

    async fn send(&mut self, events: Vec<Event>) {
        let payload = Bytes::from(encode::batch(1.0, &events, 0));
        let number = {
            let mut sent = self.sent.lock();
            sent.push(payload.clone());
            sent.len() as u64 - 1
        };
        let mut message = ZmqMessage::from("kv@pod@model");
        message.push_back(number.to_be_bytes().to_vec().into());
        message.push_back(payload);
        // Whoever does not listen now asks for it later.
        let _ = self.events.send(message).await;
    }
}

/// Sends past batches again to whoever asks.
async fn replays(mut socket: RouterSocket, sent: Sent) {
    loop {
        let Ok(request) = socket.recv().await else {
            continue;
        };
        let request = request.into_vec();
        let (client, start) = (&request[0], &request[request.len() - 1]);
        let start = u64::from_be_bytes(start[..].try_into().unwrap());
        let mut answers: Vec<_> = {
            let sent = sent.lock();
            let batches = sent.iter().enumerate().skip(start as usize);
            batches
                .map(|(at, payload)| (at as u64, payload.clone()))
                .collect()
        };
        answers.push((u64::MAX, Bytes::new()));
        for (number, payload) in answers {
            let mut message = ZmqMessage::from(client.clone());
            message.push_back(Bytes::new());
            let topic: &[u8] = if number == u64::MAX { b"" } else { b"kv@" };
            message.push_back(Bytes::from(topic));
            message.push_back(Bytes::from(number.to_be_bytes().to_vec()));
            message.push_back(payload);
            // A picker that has left the pod out no longer reads.
            let _ = socket.send(message).await;
        }
    }
}

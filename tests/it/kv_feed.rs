//! Feeds against real PUB and ROUTER sockets on loopback.
#![allow(clippy::expect_used, clippy::panic)] // helpers of tests

use crate::kv_support::*;
use parking_lot::Mutex;
use sidestep::decide::snapshot::{KvSource, Role};
use sidestep::fleet::{KvEventsSpec, PodSpec, Roster};
use sidestep::kv::encode;
use sidestep::kv::event::{EngineHash, Event, Stored};
use sidestep::kv::feed::{Feed, FeedSource, spawn};
use sidestep::kv::index::{Index, Limits};
use sidestep::names::PodId;
use sidestep::observe::{Observer, Sources};
use sidestep::units::BlockSize;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;
use zeromq::{RouterSocket, Socket, SocketRecv, SocketSend, XPubSocket, ZmqMessage};

const SIZE: u32 = 16;

/// Tokens of the `i`-th block of the test prompt.
fn block(i: u64) -> Vec<u32> {
    let base = u32::try_from(i * 100).expect("small");
    (base..base + SIZE).collect()
}

/// The test prompt's first `blocks` blocks.
fn prompt(blocks: u64) -> Vec<u32> {
    (0..blocks).flat_map(block).collect()
}

/// The payload that stores the test prompt's `i`-th block, at time `ts`.
fn payload(ts: f64, i: u64) -> Vec<u8> {
    let event = Event::Stored(Box::new(Stored {
        hashes: vec![EngineHash(1000 + i)],
        parent: (0 < i).then(|| EngineHash(1000 + i - 1)),
        tokens: block(i),
        block_size: SIZE,
        ..Stored::default()
    }));
    encode::batch(ts, &[event], 0)
}

/// The payload that stores a block at the start of a prompt of its own.
fn unrelated(ts: f64) -> Vec<u8> {
    let event = Event::Stored(Box::new(Stored {
        hashes: vec![EngineHash(5)],
        tokens: (5000..5000 + SIZE).collect(),
        block_size: SIZE,
        ..Stored::default()
    }));
    encode::batch(ts, &[event], 0)
}

fn unrelated_prompt() -> Vec<u32> {
    (5000..5000 + SIZE).collect()
}

/// An engine's publisher.
struct Publisher {
    socket: XPubSocket,
    address: String,
}

impl Publisher {
    /// Binds to `address`, which a predecessor may be about to leave.
    async fn bind(address: &str) -> Publisher {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            let mut socket = XPubSocket::new();
            match socket.bind(address).await {
                Ok(endpoint) => {
                    let address = endpoint.to_string();
                    return Publisher { socket, address };
                }
                Err(error) => assert!(Instant::now() < deadline, "{address}: {error}"),
            }
            tokio::task::yield_now().await;
        }
    }

    /// Waits until somebody has subscribed.
    async fn subscribed(&mut self) {
        let message = self.socket.recv().await.expect("a subscription");
        assert_eq!(message.get(0).map(|frame| frame[0]), Some(1));
    }

    async fn send(&mut self, seq: u64, payload: &[u8]) {
        let mut message = ZmqMessage::from("kv@pod@model");
        message.push_back(seq.to_be_bytes().to_vec().into());
        message.push_back(payload.to_vec().into());
        self.socket.send(message).await.expect("sends");
    }

    /// Sends the test prompt's blocks `from..to`, block i as number i.
    async fn send_blocks(&mut self, from: u64, to: u64) {
        for i in from..to {
            self.send(i, &payload(1.0, i)).await;
        }
    }
}

/// What an engine would replay.
#[derive(Default)]
struct Buffer {
    batches: BTreeMap<u64, Vec<u8>>,
    /// Numbers left out of an answer, and of how many answers.
    holes: BTreeMap<u64, u32>,
    requests: Vec<u64>,
    old_layout: bool,
}

/// An engine's replay socket.
struct Replayer {
    address: String,
    buffer: Arc<Mutex<Buffer>>,
    task: JoinHandle<()>,
}

impl Replayer {
    async fn start() -> Replayer {
        let mut socket = RouterSocket::new();
        let endpoint = socket.bind("tcp://127.0.0.1:0").await.expect("binds");
        let buffer = Arc::new(Mutex::new(Buffer::default()));
        let shared = Arc::clone(&buffer);
        let task = tokio::spawn(async move {
            loop {
                let request = socket.recv().await.expect("a request").into_vec();
                let [client, empty, start] = request.as_slice() else {
                    panic!("client, nothing, number; found {request:?}");
                };
                assert!(empty.is_empty());
                let start = u64::from_be_bytes(start[..].try_into().expect("8 bytes"));
                let answers = answers(&mut shared.lock(), start);
                for frames in answers {
                    let mut message = ZmqMessage::from(client.clone());
                    frames
                        .into_iter()
                        .for_each(|frame| message.push_back(frame.into()));
                    socket.send(message).await.expect("answers");
                }
            }
        });
        Replayer {
            address: endpoint.to_string(),
            buffer,
            task,
        }
    }

    fn hold_blocks(&self, from: u64, to: u64) {
        let blocks = (from..to).map(|i| (i, payload(1.0, i)));
        self.buffer.lock().batches.extend(blocks);
    }
}

impl Drop for Replayer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn answers(buffer: &mut Buffer, start: u64) -> Vec<Vec<Vec<u8>>> {
    buffer.requests.push(start);
    let mut left_out = BTreeSet::new();
    for (seq, times) in &mut buffer.holes {
        if 0 < *times {
            *times -= 1;
            left_out.insert(*seq);
        }
    }
    let shape = |topic: &[u8], seq: u64, payload: &[u8]| {
        let mut frames = vec![Vec::new(), topic.to_vec(), seq.to_be_bytes().to_vec()];
        if buffer.old_layout {
            frames.remove(1);
        }
        frames.push(payload.to_vec());
        frames
    };
    let batches = buffer.batches.range(start..);
    let batches = batches.filter(|(seq, _)| !left_out.contains(seq));
    let mut all: Vec<_> = batches.map(|(seq, p)| shape(b"kv@", *seq, p)).collect();
    all.push(shape(b"", u64::MAX, b""));
    all
}

/// One pod under test.
struct Bench {
    index: Arc<Index>,
    feed: Feed,
}

impl Bench {
    fn start(events: &str, replay: Option<&Replayer>) -> Bench {
        let index = Arc::new(Index::new(Limits::default()));
        index.add_pod(pod(0));
        let source = FeedSource {
            events: events.to_owned(),
            replay: replay.map(|replay| replay.address.clone()),
            topic: String::from("kv@"),
        };
        let feed = spawn(Arc::clone(&index), pod(0), source);
        Bench { index, feed }
    }

    fn blocks_of(&self, tokens: &[u32]) -> u32 {
        held(&self.index, pod(0), chain(SIZE, tokens, None))
    }

    /// Waits until the pod holds `blocks` of the test prompt and the feed is live.
    async fn holds(&self, blocks: u32) {
        until(&format!("{blocks} blocks, {:?}", self.feed.stats()), || {
            self.blocks_of(&prompt(20)) == blocks && self.feed.state() == KvSource::Live
        })
        .await;
    }
}

async fn pair() -> (Publisher, Bench) {
    let mut publisher = Publisher::bind("tcp://127.0.0.1:0").await;
    let bench = Bench::start(&publisher.address, None);
    publisher.subscribed().await;
    (publisher, bench)
}

async fn pair_with_replay(buffered: u64) -> (Publisher, Replayer, Bench) {
    let mut publisher = Publisher::bind("tcp://127.0.0.1:0").await;
    let replayer = Replayer::start().await;
    replayer.hold_blocks(0, buffered);
    let bench = Bench::start(&publisher.address, Some(&replayer));
    publisher.subscribed().await;
    (publisher, replayer, bench)
}

async fn restart(publisher: Publisher) -> Publisher {
    let address = publisher.address.clone();
    drop(publisher);
    let mut next = Publisher::bind(&address).await;
    next.subscribed().await;
    next
}

#[tokio::test]
async fn blocks_of_a_restarted_engine_are_dropped_without_replay() {
    let (mut publisher, bench) = pair().await;
    let other = PodId { slot: 1, ..pod(0) };
    bench.index.add_pod(other);
    let batch = sidestep::kv::event::Batch::decode(&payload(1.0, 0)).expect("decodes");
    bench.index.apply(other, &batch);
    publisher.send_blocks(0, 10).await;
    bench.holds(10).await;
    let mut publisher = restart(publisher).await;
    publisher.send(0, &unrelated(2.0)).await;
    until("the unrelated block", || {
        bench.blocks_of(&unrelated_prompt()) == 1
    })
    .await;
    assert_eq!(bench.blocks_of(&prompt(10)), 0);
    let stats = bench.feed.stats();
    assert_eq!((stats.resets, stats.reconnects, stats.gaps), (1, 1, 0));
    assert_eq!(held(&bench.index, other, chain(SIZE, &prompt(1), None)), 1);
}

#[tokio::test]
async fn blocks_of_a_restarted_engine_are_dropped_with_replay() {
    let (mut publisher, replayer, bench) = pair_with_replay(0).await;
    replayer.hold_blocks(0, 10);
    publisher.send_blocks(0, 10).await;
    bench.holds(10).await;
    replayer.buffer.lock().batches = BTreeMap::from([(0, unrelated(2.0))]);
    let mut publisher = restart(publisher).await;
    publisher.send(0, &unrelated(2.0)).await;
    until("the unrelated block", || {
        bench.blocks_of(&unrelated_prompt()) == 1
    })
    .await;
    assert_eq!(bench.blocks_of(&prompt(10)), 0);
    assert_eq!(bench.feed.stats().resets, 1);
}

#[tokio::test]
async fn a_restart_is_noticed_although_the_new_engine_says_nothing_live() {
    let (mut publisher, replayer, bench) = pair_with_replay(0).await;
    replayer.hold_blocks(0, 3);
    publisher.send_blocks(0, 3).await;
    bench.holds(3).await;
    // As many batches as before, so that the number alone proves nothing.
    replayer.buffer.lock().batches = (0..3).map(|seq| (seq, unrelated(2.0))).collect();
    let _publisher = restart(publisher).await;
    until("the new engine's block", || {
        bench.blocks_of(&unrelated_prompt()) == 1
    })
    .await;
    assert_eq!(
        (bench.blocks_of(&prompt(3)), bench.feed.stats().resets),
        (0, 1)
    );
}

#[tokio::test]
async fn blocks_survive_a_lost_connection_when_the_engine_is_the_same() {
    let (mut publisher, replayer, bench) = pair_with_replay(0).await;
    replayer.hold_blocks(0, 3);
    publisher.send_blocks(0, 3).await;
    bench.holds(3).await;
    // One batch is published while nobody listens.
    replayer.hold_blocks(3, 4);
    let mut publisher = restart(publisher).await;
    bench.holds(4).await;
    publisher.send_blocks(4, 5).await;
    bench.holds(5).await;
    let stats = bench.feed.stats();
    assert_eq!((stats.resets, stats.gaps, stats.reconnects), (0, 0, 1));
}

#[tokio::test]
async fn a_gap_without_replay_drops_what_was_known() {
    let (mut publisher, bench) = pair().await;
    publisher.send_blocks(0, 2).await;
    bench.holds(2).await;
    publisher.send(5, &unrelated(1.0)).await;
    until("the block after the gap", || {
        bench.blocks_of(&unrelated_prompt()) == 1
    })
    .await;
    assert_eq!(bench.blocks_of(&prompt(2)), 0);
    let stats = bench.feed.stats();
    assert_eq!((stats.gaps, stats.resets, stats.last_seq), (1, 1, Some(5)));
}

#[tokio::test]
async fn a_gap_is_filled_by_replay_in_either_layout() {
    for old_layout in [false, true] {
        let (mut publisher, replayer, bench) = pair_with_replay(0).await;
        replayer.buffer.lock().old_layout = old_layout;
        publisher.send_blocks(0, 2).await;
        bench.holds(2).await;
        replayer.hold_blocks(0, 6);
        publisher.send_blocks(5, 7).await;
        bench.holds(7).await;
        let stats = bench.feed.stats();
        assert_eq!((stats.gaps, stats.resets), (1, 0));
        assert_eq!(replayer.buffer.lock().requests.last(), Some(&2));
    }
}

#[tokio::test]
async fn a_hole_in_a_replay_is_asked_for_again() {
    let (mut publisher, replayer, bench) = pair_with_replay(0).await;
    publisher.send_blocks(0, 2).await;
    bench.holds(2).await;
    replayer.hold_blocks(0, 6);
    replayer.buffer.lock().holes = BTreeMap::from([(3, 1)]);
    publisher.send_blocks(5, 6).await;
    bench.holds(6).await;
    assert_eq!(bench.feed.stats().resets, 0);
    assert_eq!(replayer.buffer.lock().requests.last(), Some(&3));
}

#[tokio::test]
async fn a_hole_that_stays_costs_what_came_before_it() {
    let (mut publisher, replayer, bench) = pair_with_replay(0).await;
    publisher.send_blocks(0, 2).await;
    bench.holds(2).await;
    replayer.hold_blocks(0, 3);
    replayer.buffer.lock().batches.insert(4, unrelated(1.0));
    publisher.send(5, &payload(1.0, 0)).await;
    bench.holds(1).await;
    assert_eq!(bench.blocks_of(&unrelated_prompt()), 1);
    let stats = bench.feed.stats();
    assert_eq!((stats.gaps, stats.resets, stats.last_seq), (1, 1, Some(5)));
    assert!(3 <= stats.replay_failures);
}

#[tokio::test]
async fn a_late_listener_learns_the_past_from_the_replay() {
    let (mut publisher, replayer, bench) = pair_with_replay(8).await;
    bench.holds(8).await;
    assert_eq!(replayer.buffer.lock().requests.first(), Some(&0));
    // Live messages that the replay already brought change nothing.
    publisher.send_blocks(6, 9).await;
    bench.holds(9).await;
    assert_eq!(
        (bench.feed.stats().resets, bench.feed.stats().batches),
        (0, 9)
    );
}

#[tokio::test]
async fn what_was_sent_before_the_subscription_took_effect_is_asked_for() {
    let (_publisher, replayer, bench) = pair_with_replay(0).await;
    until("the first replay", || {
        !replayer.buffer.lock().requests.is_empty()
    })
    .await;
    replayer.hold_blocks(0, 4);
    bench.holds(4).await;
}

#[tokio::test]
async fn an_unreadable_payload_costs_neither_connection_nor_position() {
    let (mut publisher, bench) = pair().await;
    publisher.send_blocks(0, 1).await;
    publisher.send(1, b"twenty bytes of junk").await;
    publisher.send(2, &payload(1.0, 1)).await;
    bench.holds(2).await;
    let stats = bench.feed.stats();
    assert_eq!(
        (stats.malformed, stats.reconnects, stats.gaps, stats.resets),
        (1, 0, 0, 0)
    );
    assert_eq!((stats.batches, stats.last_seq), (2, Some(2)));
}

#[tokio::test]
async fn a_pod_that_is_not_there_yet_is_tried_again() {
    let publisher = Publisher::bind("tcp://127.0.0.1:0").await;
    let address = publisher.address.clone();
    drop(publisher);
    until("the port is free", || {
        std::net::TcpListener::bind(address.trim_start_matches("tcp://")).is_ok()
    })
    .await;
    let bench = Bench::start(&address, None);
    until("a failure", || 0 < bench.feed.stats().connect_failures).await;
    assert_eq!(bench.feed.state(), KvSource::Syncing);
    let mut publisher = Publisher::bind(&address).await;
    publisher.subscribed().await;
    publisher.send_blocks(0, 1).await;
    bench.holds(1).await;
    drop(publisher);
    until("the loss", || bench.feed.state() == KvSource::Lost).await;
}

#[tokio::test]
async fn a_dropped_feed_ends_and_a_forgotten_pod_stays_empty() {
    let (mut publisher, bench) = pair().await;
    publisher.send_blocks(0, 20).await;
    bench.holds(20).await;
    let Bench { index, feed } = bench;
    drop(feed);
    index.forget(pod(0));
    until("the task lets go of the index", || {
        Arc::strong_count(&index) == 1
    })
    .await;
    let next = PodId {
        generation: 1,
        ..pod(0)
    };
    index.add_pod(next);
    assert_eq!(held(&index, pod(0), chain(SIZE, &prompt(20), None)), 0);
    assert_eq!(held(&index, next, chain(SIZE, &prompt(20), None)), 0);
    assert_eq!(index.len(), 0);
}

#[tokio::test]
async fn a_decision_sees_how_a_feed_fares_although_nothing_else_has_changed() {
    let (publisher, bench) = pair().await;
    let roster = Arc::new(Roster::new());
    let events = KvEventsSpec {
        events: publisher.address.clone(),
        replay: None,
        topic: String::new(),
    };
    roster.apply(vec![PodSpec {
        kv_events: Some(events),
        ..crate::telemetry_support::pod("d1", "10.0.0.1:80", Role::Decode)
    }]);
    let sources = Arc::new(Sources::default());
    let Bench { index, feed } = bench;
    sources.set([(pod(0), Arc::new(feed))]);
    let size = BlockSize::new(SIZE).expect("not zero");
    let observer = Observer::new(roster, index, sources, size);
    let source = || {
        let seen = observer.look(&[], &[], Instant::now());
        seen.snapshot.candidate(0).kv_source
    };
    until("live", || source() == KvSource::Live).await;
    drop(publisher);
    until("lost", || source() != KvSource::Live).await;
}

//! The task behind a feed.
//!
//! Lives here: [`Follower`]: connect, catch up, follow, and again.
//! Never here: judging sequence numbers (see `sequence`), the wire (see `zmtp`, `replay`).
//! Invariant: never gives up, never spins (every way round the loop waits for the peer or backs
//! off), and resets the pod before it goes on from a place it cannot connect to the last one.

use super::FeedSource;
use super::replay::{Answer, Replay, numbered};
use super::sequence::{Sequence, Verdict};
use super::stats::{State, Stats};
use super::zmtp::{Connection, Error, Kind};
use crate::kv::event::Batch;
use crate::kv::index::{Index, Writer};
use crate::names::PodId;
use smallvec::SmallVec;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout, timeout_at};

/// First and longest wait between attempts to connect.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// For a connection and its handshake.
const CONNECT: Duration = Duration::from_secs(5);
/// For the rest of a message of which a part has come.
const MESSAGE: Duration = Duration::from_secs(30);
/// Attempts at a replay without progress before what is missing is given up.
const ATTEMPTS: u32 = 3;
/// Between such attempts.
const PAUSE: Duration = Duration::from_millis(100);
/// Between the first attempts of two pods: those of a thousand at one moment would hold up everything else
/// for as long as they take together, and so would their further attempts.
const STAGGER: Duration = Duration::from_micros(100);
/// Ranks whose blocks one feed resets; more do not share a publisher.
const MAX_RANKS: usize = 64;

/// How long silence is borne.
#[derive(Clone, Copy)]
struct Patience {
    /// After catching up: then what was sent before the subscription took effect is asked for.
    first: Duration,
    /// Later, because a connection can die without a word.
    later: Duration,
    /// After a ping.
    pong: Duration,
}

const PATIENCE: Patience = Patience {
    first: Duration::from_secs(1),
    later: Duration::from_secs(60),
    pong: Duration::from_secs(10),
};

/// The state of the task.
pub(super) struct Follower {
    blocks: Writer,
    pod: PodId,
    source: FeedSource,
    stats: Arc<Stats>,
    sequence: Sequence,
    /// Ranks heard on this feed.
    ranks: SmallVec<[u32; 2]>,
    patience: Patience,
}

/// What came of asking a quiet pod.
enum Asked {
    /// Nothing more to wait for.
    Answered,
    /// It should say something now.
    Pinged,
}

fn timed_out() -> Error {
    std::io::Error::from(std::io::ErrorKind::TimedOut).into()
}

/// How a replay ended.
enum Replayed {
    /// It reached the end.
    End,
    /// It skipped something: the next number was this.
    Hole(u64),
    /// It did not start with the batch applied last: another process, or one that no longer has it.
    Stranger,
    /// It broke off.
    Broken,
}

impl Follower {
    pub(super) fn new(
        index: Arc<Index>,
        pod: PodId,
        source: FeedSource,
        stats: Arc<Stats>,
    ) -> Follower {
        Follower {
            blocks: Writer::new(index, pod),
            pod,
            source,
            stats,
            sequence: Sequence::default(),
            ranks: SmallVec::new(),
            patience: PATIENCE,
        }
    }

    pub(super) async fn run(mut self) {
        let mut wait = BACKOFF.0;
        let mut connected_before = false;
        sleep(STAGGER * u32::from(self.pod.slot)).await;
        loop {
            match timeout(CONNECT, self.connect()).await {
                Ok(Ok(connection)) => {
                    self.stats.set_state(State::Syncing);
                    if connected_before {
                        self.stats.count(|stats| stats.reconnects += 1);
                    }
                    let error = self.follow(connection, connected_before, &mut wait).await;
                    connected_before = true;
                    tracing::warn!(pod = %self.pod, %error, "kv event connection lost; its cached blocks are not trusted until it is back");
                    self.stats.set_state(State::Lost);
                }
                Ok(Err(error)) => {
                    self.stats.count(|stats| stats.connect_failures += 1);
                    tracing::warn!(pod = %self.pod, %error, "kv event connection failed; check that the engine publishes KV events at kvEvents");
                }
                Err(_) => self.stats.count(|stats| stats.connect_failures += 1),
            }
            sleep(wait).await;
            wait = (2 * wait).min(BACKOFF.1);
        }
    }

    async fn connect(&self) -> Result<Connection, Error> {
        let mut connection = Connection::open(&self.source.events, Kind::Sub).await?;
        connection.subscribe(&self.source.topic).await?;
        Ok(connection)
    }

    /// Follows one connection to its end.
    async fn follow(
        &mut self,
        mut connection: Connection,
        is_reconnect: bool,
        wait: &mut Duration,
    ) -> Error {
        self.sequence.connected();
        let caught_up = self.catch_up().await;
        // Without a replay, only the first message after a reconnect tells whether the blocks from
        // before are still there.
        if caught_up {
            *wait = BACKOFF.0;
        }
        if caught_up || !(is_reconnect || self.source.replay.is_some()) {
            self.stats.set_state(State::Live);
        }
        let Patience { first, later, pong } = self.patience;
        let mut due = Instant::now() + first;
        let mut pinged = false;
        loop {
            match timeout_at(due, connection.readable()).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => return error,
                Err(_) if pinged => return timed_out(),
                Err(_) => {
                    pinged = match self.ask_whether_alive(&mut connection).await {
                        Ok(Asked::Answered) => false,
                        Ok(Asked::Pinged) => true,
                        Err(error) => return error,
                    };
                    due = Instant::now() + if pinged { pong } else { later };
                    continue;
                }
            }
            match timeout(MESSAGE, connection.receive()).await {
                Ok(Ok(Some(message))) => {
                    (due, pinged) = (Instant::now() + later, false);
                    *wait = BACKOFF.0;
                    match numbered(message) {
                        Ok((seq, payload)) => self.live(seq, payload.as_deref()).await,
                        Err(_) => self.stats.count(|stats| stats.malformed += 1),
                    }
                }
                Ok(Ok(None)) => {
                    if std::mem::take(&mut pinged) {
                        due = Instant::now() + later;
                    }
                    *wait = BACKOFF.0;
                }
                Ok(Err(error)) => return error,
                Err(_) => return timed_out(),
            }
        }
    }

    /// The pod has been quiet: asks what it has to replay, or else for a sign of life.
    async fn ask_whether_alive(&mut self, connection: &mut Connection) -> Result<Asked, Error> {
        if self.source.replay.is_some() {
            if self.catch_up().await {
                self.stats.set_state(State::Live);
            }
            return Ok(Asked::Answered);
        }
        Ok(if connection.ping().await? {
            Asked::Pinged
        } else {
            Asked::Answered
        })
    }

    async fn live(&mut self, seq: u64, payload: Option<&[u8]>) {
        match self.sequence.heard(seq) {
            Verdict::Duplicate => return,
            Verdict::Next => {}
            Verdict::First => self.fill(0, seq).await,
            Verdict::Restart => {
                self.reset("the sequence went back");
                self.sequence.restart();
                self.fill(0, seq).await;
            }
            Verdict::Gap { from } => {
                self.stats.count(|stats| stats.gaps += 1);
                self.fill(from, seq).await;
            }
        }
        match self.sequence.next() {
            // The replay went further than this message.
            Some(next) if seq < next => {}
            Some(next) if next < seq => {
                self.reset("a gap could not be filled");
                self.apply(seq, payload);
            }
            _ => self.apply(seq, payload),
        }
        self.stats.set_state(State::Live);
    }

    /// Tries to get everything from `from` to before `until`.
    async fn fill(&mut self, from: u64, until: u64) {
        if from < until && self.source.replay.is_some() {
            self.stats.set_state(State::Syncing);
            self.replay_all(from, until).await;
        }
    }

    /// Brings the index up to now, if the pod can be asked; whether it did.
    async fn catch_up(&mut self) -> bool {
        if self.source.replay.is_none() {
            return false;
        }
        // The last batch again, to see that it is still the same process.
        let from = self
            .sequence
            .next()
            .map_or(0, |next| next.saturating_sub(1));
        self.replay_all(from, 0).await
    }

    /// Replays from `from` until the end marker, and at least to before `until`; whether it got
    /// there. Holes that stay are jumped over, after a reset.
    async fn replay_all(&mut self, mut from: u64, until: u64) -> bool {
        let mut stalls = 0;
        let mut must_match = self.sequence.next() == from.checked_add(1);
        loop {
            let before = self.sequence.next();
            let outcome = self.replay(from, must_match).await;
            let reached = self.sequence.next().unwrap_or(0);
            if before != self.sequence.next() {
                stalls = 0;
            }
            match outcome {
                Replayed::End if until <= reached => {
                    self.sequence.verify();
                    return true;
                }
                Replayed::Stranger => {
                    self.reset("another process answers");
                    self.sequence.restart();
                    must_match = false;
                    from = 0;
                    continue;
                }
                Replayed::Hole(seq) if ATTEMPTS <= stalls + 1 => {
                    self.stats.count(|stats| stats.replay_failures += 1);
                    self.reset("a replay has a hole");
                    self.sequence.jump(seq);
                    stalls = 0;
                }
                Replayed::End | Replayed::Hole(_) | Replayed::Broken => {
                    self.stats.count(|stats| stats.replay_failures += 1);
                    stalls += 1;
                    if ATTEMPTS <= stalls {
                        return false;
                    }
                    sleep(PAUSE).await;
                }
            }
            must_match &= !self.sequence.is_verified();
            if !must_match {
                from = self.sequence.next().unwrap_or(from);
            }
        }
    }

    /// One request from `from` on, which `must_match` says is the batch applied last.
    async fn replay(&mut self, from: u64, mut must_match: bool) -> Replayed {
        let Some(address) = self.source.replay.clone() else {
            return Replayed::Broken;
        };
        self.stats.count(|stats| stats.replays += 1);
        let mut replay = match Replay::ask(&address, from).await {
            Ok(replay) => replay,
            Err(error) => {
                tracing::debug!(pod = %self.pod, %error, "kv event replay failed");
                return Replayed::Broken;
            }
        };
        loop {
            match replay.next().await {
                Ok(Answer::Batch { seq, payload }) => {
                    let payload = payload.as_deref();
                    if std::mem::take(&mut must_match) {
                        if !self.sequence.is_last(seq, payload.unwrap_or_default()) {
                            return Replayed::Stranger;
                        }
                        self.sequence.verify();
                    }
                    match self.sequence.next() {
                        Some(next) if seq < next => {}
                        Some(next) if next < seq => return Replayed::Hole(seq),
                        _ => self.apply(seq, payload),
                    }
                }
                Ok(Answer::End) if must_match => return Replayed::Stranger,
                Ok(Answer::End) => return Replayed::End,
                Err(error) => {
                    tracing::debug!(pod = %self.pod, %error, "kv event replay broke off");
                    return Replayed::Broken;
                }
            }
        }
    }

    /// Applies the batch `seq`; a payload that is none is counted and takes its number.
    fn apply(&mut self, seq: u64, payload: Option<&[u8]>) {
        self.sequence.applied(seq, payload.unwrap_or_default());
        let Some(Ok(batch)) = payload.map(Batch::decode) else {
            self.stats.heard(seq, |stats| stats.malformed += 1);
            return;
        };
        if !self.ranks.contains(&batch.rank) && self.ranks.len() < MAX_RANKS {
            self.ranks.push(batch.rank);
        }
        let applied = self.blocks.apply(&batch);
        self.stats.heard(seq, |stats| {
            stats.batches += 1;
            stats.events += batch.events.len() as u64;
            stats.skipped += u64::from(batch.skipped.unknown) + u64::from(batch.skipped.malformed);
            stats.applied += applied;
        });
    }

    fn reset(&mut self, why: &'static str) {
        self.stats.count(|stats| stats.resets += 1);
        tracing::info!(pod = %self.pod, why, "kv blocks dropped");
        for rank in &self.ranks {
            self.blocks.reset(*rank);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::encode;
    use crate::kv::event::{EngineHash, Event, Stored};
    use crate::kv::feed::zmtp::tests::{accept, listen};
    use crate::kv::index::Limits;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[tokio::test]
    async fn a_task_that_was_replaced_puts_nothing_back() {
        let index = Arc::new(Index::new(Limits::default()));
        let pod = PodId {
            slot: 0,
            generation: 0,
        };
        index.add_pod(pod);
        let source = FeedSource {
            events: String::new(),
            replay: None,
            topic: String::new(),
        };
        let mut before = Follower::new(Arc::clone(&index), pod, source, Arc::default());
        let stored = Stored {
            hashes: vec![EngineHash(1)],
            tokens: (0..16).collect(),
            block_size: 16,
            ..Stored::default()
        };
        let payload = encode::batch(1.0, &[Event::Stored(Box::new(stored))], 0);
        before.apply(0, Some(&payload));
        assert_eq!(index.blocks(pod), 1);
        // Its events are to be had elsewhere; the task is told to end, and has a batch in its hands.
        index.forget(pod);
        index.add_pod(pod);
        before.apply(1, Some(&payload));
        assert_eq!((index.blocks(pod), index.block_size(pod)), (0, None));
    }

    /// Follows `address` with hardly any patience; the counters.
    fn follow(address: String) -> Arc<Stats> {
        let stats = Arc::new(Stats::default());
        let source = FeedSource {
            events: address,
            replay: None,
            topic: String::new(),
        };
        let pod = PodId {
            slot: 0,
            generation: 0,
        };
        let index = Arc::new(Index::new(Limits::default()));
        let mut follower = Follower::new(index, pod, source, Arc::clone(&stats));
        follower.patience = Patience {
            first: Duration::from_millis(1),
            later: Duration::from_millis(1),
            pong: Duration::from_millis(300),
        };
        tokio::spawn(follower.run());
        stats
    }

    #[tokio::test]
    async fn a_quiet_pod_that_answers_pings_is_kept() {
        let (listener, address) = listen().await;
        let stats = follow(address);
        let mut stream = accept(&listener, "PUB", 1).await;
        let mut subscription = [0; 3];
        stream
            .read_exact(&mut subscription)
            .await
            .expect("subscribes");
        for _ in 0..5 {
            let mut ping = [0; 9];
            stream.read_exact(&mut ping).await.expect("pings");
            assert_eq!(&ping, b"\x04\x07\x04PING\0\0");
            stream
                .write_all(b"\x04\x05\x04PONG")
                .await
                .expect("answers");
        }
        assert_eq!((stats.state(), stats.read().reconnects), (State::Live, 0));
    }

    #[tokio::test]
    async fn a_quiet_pod_that_answers_no_ping_is_dialled_again() {
        let (listener, address) = listen().await;
        let _stats = follow(address);
        let _silent = accept(&listener, "PUB", 1).await;
        accept(&listener, "PUB", 1).await;
    }

    #[tokio::test]
    async fn a_quiet_pod_that_knows_no_pings_is_left_alone() {
        let (listener, address) = listen().await;
        let _stats = follow(address);
        let mut stream = accept(&listener, "PUB", 0).await;
        let mut bytes = Vec::new();
        // It neither hangs up nor sends more than its subscription.
        let reading = stream.read_to_end(&mut bytes);
        assert!(timeout(Duration::from_millis(100), reading).await.is_err());
        assert_eq!(bytes, [0, 1, 1]);
    }
}

//! Asking a pod for past batches.
//!
//! Lives here: [`Replay`], one request to the pod's ROUTER socket and its answers: one message per
//! batch, then an end marker (sequence number `ff×8`). Releases differ in whether a topic stands
//! before the number, so it is read from the end: payload last, number before it.
//! Never here: what to do about a hole. The end marker proves nothing about completeness: real
//! publishers drop messages to slow readers and still send it.
//! Invariant: ends within a bounded time of silence.

use super::zmtp::{Connection, Error, Kind, Message};
use std::time::Duration;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::timeout;

/// Replays under way at a time in this process: each can be thousands of batches long.
static AT_ONCE: Semaphore = Semaphore::const_new(8);
/// For the connection, and until the first answer: the publisher looks for requests only between
/// its own sends.
const FIRST: Duration = Duration::from_secs(5);
/// Between answers.
const SILENCE: Duration = Duration::from_secs(2);

/// A replay under way.
pub(super) struct Replay {
    connection: Connection,
    limit: Duration,
    _turn: Option<SemaphorePermit<'static>>,
}

/// One past batch, or the end.
pub(super) enum Answer {
    /// A batch.
    Batch {
        /// Its number.
        seq: u64,
        /// Its payload; `None` when it was too long to be kept.
        payload: Option<Vec<u8>>,
    },
    /// No more.
    End,
}

/// Why a replay ended early.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReplayError {
    /// No answer in time.
    #[error("replay: expected an answer, found silence")]
    Silence,
    /// The connection failed.
    #[error(transparent)]
    Connection(#[from] Error),
    /// An answer that is neither a batch nor the end.
    #[error("replay: expected a batch, found {0} frames")]
    Shape(usize),
}

impl Replay {
    /// Asks `address` for all batches from `start` on.
    pub(super) async fn ask(address: &str, start: u64) -> Result<Replay, ReplayError> {
        let turn = AT_ONCE.acquire().await.ok();
        let opening = async {
            let mut connection = Connection::open(address, Kind::Dealer).await?;
            connection.send(&[b"", &start.to_be_bytes()]).await?;
            Ok::<_, Error>(connection)
        };
        let connection = timeout(FIRST, opening)
            .await
            .map_err(|_| ReplayError::Silence)??;
        Ok(Replay {
            connection,
            limit: FIRST,
            _turn: turn,
        })
    }

    /// The next answer.
    pub(super) async fn next(&mut self) -> Result<Answer, ReplayError> {
        let received = timeout(self.limit, self.connection.receive()).await;
        let message = received.map_err(|_| ReplayError::Silence)??;
        self.limit = SILENCE;
        match numbered(message) {
            Ok((u64::MAX, _)) => Ok(Answer::End),
            Ok((seq, payload)) => Ok(Answer::Batch { seq, payload }),
            Err(frames) => Err(ReplayError::Shape(frames)),
        }
    }
}

/// Number and payload of a message, live or replayed; its number of frames if it has neither. The
/// payload is `None` when it was too long to be kept.
pub(super) fn numbered(message: Message) -> Result<(u64, Option<Vec<u8>>), usize> {
    let Message {
        mut frames,
        too_long,
    } = message;
    let count = frames.len();
    let payload = frames.pop().ok_or(count)?;
    let seq = frames.pop().ok_or(count)?;
    let seq = <[u8; 8]>::try_from(seq).map_err(|_| count)?;
    Ok((u64::from_be_bytes(seq), (!too_long).then_some(payload)))
}

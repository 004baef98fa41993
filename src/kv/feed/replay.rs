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
        let message = async {
            loop {
                if let Some(message) = self.connection.receive().await? {
                    return Ok::<_, Error>(message);
                }
            }
        };
        let received = timeout(self.limit, message).await;
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

#[cfg(test)]
mod tests {
    use super::*;

    fn unhex(text: &str) -> Vec<u8> {
        let digit = |at| u8::from_str_radix(&text[at..at + 2], 16).expect("hex");
        (0..text.len()).step_by(2).map(digit).collect()
    }

    /// The numbers of a captured replay, in order.
    fn numbers(replay: &[serde_json::Value]) -> Vec<u64> {
        let number = |message: &serde_json::Value| {
            let frames = message.get("frames_hex").unwrap_or(message);
            let frames = frames.as_array().expect("frames").iter();
            let frames = frames.map(|frame| unhex(frame.as_str().expect("hex")));
            let message = Message {
                frames: frames.collect(),
                too_long: false,
            };
            numbered(message).expect("a number and a payload").0
        };
        replay.iter().map(number).collect()
    }

    #[test]
    fn replays_of_every_release_are_read() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/captures");
        let mut read = 0;
        for entry in std::fs::read_dir(folder).expect("the captures") {
            let text = std::fs::read_to_string(entry.expect("readable").path()).expect("text");
            let Ok(capture) = serde_json::from_str::<serde_json::Value>(&text) else {
                continue;
            };
            if let Some(replay) = capture["replay"].as_array() {
                assert_eq!(numbers(replay), [9, 10, 11, u64::MAX]);
                read += 1;
            }
            if let Some(replay) = capture["replay_frames_hex"].as_array() {
                let numbers = numbers(replay);
                let (end, batches) = numbers.split_last().expect("an end marker");
                assert_eq!(*end, u64::MAX);
                assert!(batches.iter().copied().eq(0..batches.len() as u64));
                read += 1;
            }
        }
        assert_eq!(read, 18 + 2, "18 releases, 2 engines");
    }

    #[test]
    fn a_message_without_number_is_refused() {
        let of = |frames: &[&[u8]]| {
            numbered(Message {
                frames: frames.iter().map(|frame| frame.to_vec()).collect(),
                too_long: false,
            })
        };
        assert_eq!(of(&[]), Err(0));
        assert_eq!(of(&[b"payload"]), Err(1));
        assert_eq!(of(&[b"seven__", b"payload"]), Err(2));
        assert_eq!(of(&[b"\0\0\0\0\0\0\0\x05", b""]), Ok((5, Some(Vec::new()))));
    }
}

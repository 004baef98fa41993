//! Ids of decisions.
//!
//! Lives here: [`DecisionId`] and [`DecisionIds`], which hands them out.
//! Never here: anything a client wrote; an id says when it was made, and nothing else.
//! Invariant: ids of one process are distinct and sort, as text, in the order they were handed out.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// Bits of an id that count within a millisecond.
const COUNT_BITS: u32 = 12;
/// Bits of an id that tell replicas apart.
const REPLICA_BITS: u32 = 10;

/// The id of one decision; displays as 16 hexadecimal digits.
///
/// From the top: 42 bits of milliseconds since 1970, 10 bits drawn at start (so that replicas
/// differ), 12 bits of a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DecisionId(u64);

impl DecisionId {
    /// The id with this number, for tests and recorded decisions.
    #[must_use]
    pub const fn from_raw(raw: u64) -> DecisionId {
        DecisionId(raw)
    }

    /// The id that `text` (16 hexadecimal digits) displays.
    #[must_use]
    pub fn parse(text: &str) -> Option<DecisionId> {
        let plain = text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        plain
            .then(|| u64::from_str_radix(text, 16).ok())
            .flatten()
            .map(DecisionId)
    }
}

impl fmt::Display for DecisionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Hands out ids.
#[derive(Debug)]
pub struct DecisionIds {
    replica: u64,
    /// Milliseconds and counter of the last id, without the replica's bits.
    last: AtomicU64,
}

impl DecisionIds {
    /// A source of ids for a process; `replica` is drawn by the caller, of which 10 bits are used.
    #[must_use]
    pub fn new(replica: u64) -> DecisionIds {
        DecisionIds {
            replica: replica & ((1 << REPLICA_BITS) - 1),
            last: AtomicU64::new(0),
        }
    }

    /// The next id. A clock that stands still or goes back only makes the counter run on.
    pub fn next_id(&self, now: SystemTime) -> DecisionId {
        let millis = now
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(0));
        self.next_at(millis)
    }

    fn next_at(&self, millis: u64) -> DecisionId {
        let floor = (millis << (COUNT_BITS + REPLICA_BITS)) >> REPLICA_BITS;
        let advance = |last: u64| floor.max(last.wrapping_add(1));
        let last = self
            .last
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |last| {
                Some(advance(last))
            })
            .unwrap_or_else(|last| last);
        let issued = advance(last);
        let count = issued & ((1 << COUNT_BITS) - 1);
        let millis = issued >> COUNT_BITS;
        DecisionId(millis << (COUNT_BITS + REPLICA_BITS) | self.replica << COUNT_BITS | count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_distinct_and_sort_as_text_even_when_the_clock_goes_back() {
        let ids = DecisionIds::new(77);
        let clock = [1_800_000_000_000, 1_800_000_000_001, 1_700_000_000_000];
        let made: Vec<String> = clock
            .iter()
            .flat_map(|&millis| (0..5_000).map(move |_| millis))
            .map(|millis| ids.next_at(millis).to_string())
            .collect();
        assert!(made.windows(2).all(|pair| pair[0] < pair[1]));
        assert!(made.iter().all(|id| id.len() == 16));
    }

    #[test]
    fn the_text_of_an_id_reads_back() {
        let id = DecisionIds::new(77).next_id(SystemTime::UNIX_EPOCH);
        assert_eq!(DecisionId::parse(&id.to_string()), Some(id));
        assert_eq!(DecisionId::parse("+00000000000000f"), None);
        assert_eq!(DecisionId::parse("0f"), None);
    }

    #[test]
    fn threads_never_get_the_same_id() {
        let ids = DecisionIds::new(77);
        let mut all = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..4)
                .map(|_| {
                    scope.spawn(|| {
                        (0..2_000)
                            .map(|_| ids.next_at(1_800_000_000_000))
                            .collect::<Vec<_>>()
                    })
                })
                .collect();
            workers
                .into_iter()
                .flat_map(|worker| worker.join().unwrap())
                .collect::<Vec<_>>()
        });
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 8_000);
    }
}

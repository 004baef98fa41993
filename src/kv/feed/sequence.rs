//! What a sequence number says about what came before.
//!
//! Lives here: [`Sequence`], the position in one engine process's stream of batches.
//! Never here: I/O; so every order of numbers is a unit test.
//! Invariant: batches up to `next` are applied or given up, and none is applied twice.

use xxhash_rust::xxh3::xxh3_64;

/// What to do with a live message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Apply it: it is the next.
    Next,
    /// Nothing is known of what came before it.
    First,
    /// It came through a replay already.
    Duplicate,
    /// These many are missing before it, from this number on.
    Gap {
        /// The first missing.
        from: u64,
    },
    /// Another process is counting from its own start.
    Restart,
}

/// A position, kept across connections.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sequence {
    /// The number expected next; `None` before the first batch of an engine process.
    next: Option<u64>,
    /// Of the last batch applied.
    fingerprint: u64,
    /// The last number heard live on this connection.
    live: Option<u64>,
    /// Whether a replay on this connection proved that `next` counts the same process.
    verified: bool,
}

impl Sequence {
    pub(super) fn next(&self) -> Option<u64> {
        self.next
    }

    /// A new connection: what is known is kept, but not that it is the same process.
    pub(super) fn connected(&mut self) {
        self.live = None;
        self.verified = false;
    }

    /// A replay started where it should, so this is the same process.
    pub(super) fn verify(&mut self) {
        self.verified = true;
    }

    pub(super) fn is_verified(&self) -> bool {
        self.verified
    }

    /// Everything from before is void.
    pub(super) fn restart(&mut self) {
        self.next = None;
        self.fingerprint = 0;
    }

    /// What came before `seq` is given up.
    pub(super) fn jump(&mut self, seq: u64) {
        self.next = Some(seq);
    }

    /// Judges a live message.
    pub(super) fn heard(&mut self, seq: u64) -> Verdict {
        let before = self.live.replace(seq);
        if before.is_some_and(|before| seq <= before) {
            return Verdict::Restart;
        }
        match self.next {
            None => Verdict::First,
            Some(next) if seq == next => Verdict::Next,
            Some(next) if next < seq => Verdict::Gap { from: next },
            Some(_) if self.verified => Verdict::Duplicate,
            Some(_) => Verdict::Restart,
        }
    }

    /// The batch `seq` has been dealt with.
    pub(super) fn applied(&mut self, seq: u64, payload: &[u8]) {
        self.next = Some(seq.saturating_add(1));
        self.fingerprint = xxh3_64(payload);
    }

    /// Whether `seq` with `payload` is the batch that was applied last. Payloads carry a time, so
    /// another process's batch of the same number differs.
    pub(super) fn is_last(&self, seq: u64, payload: &[u8]) -> bool {
        self.next == seq.checked_add(1) && self.fingerprint == xxh3_64(payload)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hear(sequence: &mut Sequence, seq: u64) -> Verdict {
        let verdict = sequence.heard(seq);
        if matches!(verdict, Verdict::Next | Verdict::First) {
            sequence.applied(seq, b"x");
        }
        verdict
    }

    #[test]
    fn numbers_in_order_are_next_and_a_jump_is_a_gap() {
        let mut sequence = Sequence::default();
        assert_eq!(hear(&mut sequence, 3), Verdict::First);
        assert_eq!(hear(&mut sequence, 4), Verdict::Next);
        assert_eq!(hear(&mut sequence, 7), Verdict::Gap { from: 5 });
    }

    #[test]
    fn a_number_heard_before_on_the_same_connection_is_a_restart() {
        let mut sequence = Sequence::default();
        sequence.verify();
        hear(&mut sequence, 0);
        assert_eq!(hear(&mut sequence, 0), Verdict::Restart);
    }

    #[test]
    fn what_a_replay_brought_is_a_duplicate() {
        let mut sequence = Sequence::default();
        sequence.connected();
        (0..5).for_each(|seq| sequence.applied(seq, b"x"));
        sequence.verify();
        assert_eq!(hear(&mut sequence, 3), Verdict::Duplicate);
        assert_eq!(hear(&mut sequence, 4), Verdict::Duplicate);
        assert_eq!(hear(&mut sequence, 5), Verdict::Next);
    }

    #[test]
    fn without_proof_a_lower_number_after_a_reconnect_is_a_restart() {
        let mut sequence = Sequence::default();
        (0..5).for_each(|seq| sequence.applied(seq, b"x"));
        sequence.connected();
        assert_eq!(hear(&mut sequence, 0), Verdict::Restart);
        sequence.connected();
        assert_eq!(hear(&mut sequence, 5), Verdict::Next);
    }

    #[test]
    fn the_last_batch_is_known_by_number_and_content() {
        let mut sequence = Sequence::default();
        assert!(!sequence.is_last(u64::MAX, b"x"));
        sequence.applied(4, b"x");
        assert!(sequence.is_last(4, b"x"));
        assert!(!sequence.is_last(4, b"y"));
        assert!(!sequence.is_last(3, b"x"));
    }
}

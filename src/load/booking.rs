//! The owner of what one request was charged.
//!
//! Lives here: [`Booking`] and the two charges it carries.
//! Never here: the books themselves (`pods`), a clock, a sweeper.
//! Invariant: whatever becomes of the request, dropping the booking gives back what is left of it.

use crate::blocks::BlockKey;
use crate::load::Ledger;
use crate::load::sessions::SessionKey;
use crate::names::PodId;
use crate::units::{Blocks, Tokens};
use std::sync::Arc;

/// What a decision promised its pods; dropping it releases whatever was not released before.
#[derive(Debug)]
#[must_use = "dropping a booking releases it"]
pub struct Booking {
    ledger: Ledger,
    decode: DecodeCharge,
    prefill: Option<PrefillCharge>,
    session: Option<SessionKey>,
}

/// One request that runs on a pod.
#[derive(Clone, Debug)]
pub(super) struct DecodeCharge {
    pub(super) pod: PodId,
    /// Prefill work of a local route; zero once it is done.
    pub(super) prefill_tokens: Tokens,
    /// Blocks that may be shared with other requests on the pod.
    pub(super) keys: Arc<[BlockKey]>,
    /// Blocks that may not.
    pub(super) unkeyed: Blocks,
}

/// One request that is prefilled on a pod for another.
#[derive(Clone, Copy, Debug)]
pub(super) struct PrefillCharge {
    pub(super) pod: PodId,
    pub(super) tokens: Tokens,
}

impl Booking {
    pub(super) fn new(
        ledger: Ledger,
        decode: DecodeCharge,
        prefill: Option<PrefillCharge>,
        session: Option<SessionKey>,
    ) -> Booking {
        Booking {
            ledger,
            decode,
            prefill,
            session,
        }
    }

    /// The pod charged with the decode.
    #[must_use]
    pub fn decode_pod(&self) -> PodId {
        self.decode.pod
    }

    /// Releases the prefill work, wherever it was: the first token has come. Later calls do nothing.
    pub fn prefill_done(&mut self) {
        let prefill = self.prefill.take();
        if prefill.is_some() || self.decode.prefill_tokens != Tokens::ZERO {
            self.ledger.release_prefill(&mut self.decode, prefill);
        }
    }

    /// Moves the decode charge, and the session, to the pod that really served the request.
    pub fn served_by(&mut self, pod: PodId) {
        if pod != self.decode.pod {
            self.ledger.move_decode(&mut self.decode, pod, self.session);
        }
    }

    /// Moves the prefill charge to the pod that really prefilled; nothing when the prefill is over, or
    /// is the decode pod's.
    pub fn prefilled_by(&mut self, pod: PodId) {
        if let Some(prefill) = &mut self.prefill
            && prefill.pod != pod
        {
            self.ledger.move_prefill(prefill, pod);
        }
    }
}

impl Drop for Booking {
    fn drop(&mut self) {
        self.ledger.release(&self.decode, self.prefill.take());
    }
}

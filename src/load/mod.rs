//! What was promised to pods: each decision is charged to its pods in the same step that makes it.
//!
//! Lives here: the [`Ledger`] with its critical section, the [`Booking`] that gives everything back.
//! Never here: what pods report of themselves (`fleet`), what they hold (`kv`), clocks.
//! Invariant: what a pod is charged is the sum over the bookings that live, each released exactly
//! once, and only on the incarnation of the pod that was charged. Nothing is keyed by an id that a
//! client chose.
//!
//! A local route charges the decode pod one request, its net-new prefill tokens and the blocks of
//! the prompt. A remote route charges the prefill pod one request and its net-new prefill tokens,
//! and the decode pod one request and the blocks. Blocks are counted once per pod however many
//! requests share them; a block that has no key (the partial last one, or all of them when the
//! prompt was only estimated) is shared with nobody.

mod blocks;
mod booking;
mod pods;
mod sessions;

pub use crate::load::booking::Booking;

use crate::blocks::{BlockChain, BlockKey};
use crate::decide::reason::NoRoute;
use crate::decide::snapshot::PodLoad;
use crate::decide::{Decision, Route};
use crate::load::booking::{DecodeCharge, PrefillCharge};
use crate::load::pods::Pods;
use crate::load::sessions::{SessionKey, SessionPods, Sessions};
use crate::names::{PodId, SessionId};
use crate::units::{BlockSize, Blocks, Tokens};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Sessions remembered at most, unless said otherwise; about 100 bytes each.
pub const MAX_SESSIONS: usize = 1_000_000;

/// What all pods were promised by this process, and which pod each session was sent to. Cheap to
/// clone; clones share the same books.
#[derive(Clone, Debug)]
pub struct Ledger {
    books: Arc<Mutex<Books>>,
}

#[derive(Debug)]
struct Books {
    pods: Pods,
    sessions: Sessions,
}

/// A request that wants to be decided and booked.
#[derive(Clone, Copy, Debug)]
pub struct Admission<'a> {
    /// The keys of the prompt's full blocks, one chain per block size in use; empty when unknown.
    pub chains: &'a [BlockChain],
    /// The conversation it belongs to, and how long that is to be remembered.
    pub session: Option<(&'a SessionId, Duration)>,
    /// Now.
    pub now: Instant,
}

/// The books as one decision sees them, while nobody else can write.
#[derive(Debug)]
pub struct Loads<'a> {
    pods: &'a Pods,
    session_pod: Option<PodId>,
    session_prefill_pod: Option<PodId>,
}

impl Default for Ledger {
    fn default() -> Self {
        Ledger::new(MAX_SESSIONS)
    }
}

impl Ledger {
    /// Empty books that remember at most `max_sessions` sessions.
    #[must_use]
    pub fn new(max_sessions: usize) -> Ledger {
        Ledger {
            books: Arc::new(Mutex::new(Books {
                pods: Pods::default(),
                sessions: Sessions::new(max_sessions),
            })),
        }
    }

    /// Decides and books in one step: nothing changes between what `decide` sees and the charge.
    ///
    /// `decide` runs under the ledger's lock: it must be short and must not call the ledger.
    ///
    /// # Errors
    ///
    /// Whatever `decide` returns; then nothing is booked.
    pub fn admit(
        &self,
        admission: Admission<'_>,
        decide: impl FnOnce(&Loads<'_>) -> Result<Decision, NoRoute>,
    ) -> Result<(Decision, Booking), NoRoute> {
        let mut guard = self.books.lock();
        let books = &mut *guard;
        books.sessions.expire(admission.now);
        let session = admission
            .session
            .map(|(name, ttl)| (books.sessions.key(name), ttl));
        let before = session.and_then(|(key, _)| books.sessions.pods(key, admission.now));
        books.pods.mark_shared(admission.chains);
        let decision = decide(&Loads::new(&books.pods, before))?;

        let (mut decode, prefill) = charges(&decision, admission.chains);
        books.pods.charge_decode(&mut decode);
        if let Some(prefill) = &prefill {
            books.pods.charge_prefill(prefill);
        }
        if let Some((key, ttl)) = session {
            // A time to live beyond what the clock can express expires at once rather than panics.
            let expires = admission.now.checked_add(ttl).unwrap_or(admission.now);
            let pods = SessionPods {
                decode: decode.pod,
                prefill: prefill
                    .map(|charge| charge.pod)
                    .or_else(|| before.and_then(|before| before.prefill)),
            };
            books.sessions.record(key, pods, expires);
        }
        let booking = Booking::new(self.clone(), decode, prefill, session.map(|(key, _)| key));
        Ok((decision, booking))
    }

    /// Shows what [`Ledger::admit`] would show, and changes nothing.
    ///
    /// `look` runs under the ledger's lock: it must be short and must not call the ledger.
    pub fn preview<T>(&self, admission: Admission<'_>, look: impl FnOnce(&Loads<'_>) -> T) -> T {
        let mut guard = self.books.lock();
        let books = &mut *guard;
        let before = admission.session.and_then(|(name, _)| {
            let key = books.sessions.key(name);
            books.sessions.pods(key, admission.now)
        });
        // Room that every admission writes anew before it reads it.
        books.pods.mark_shared(admission.chains);
        look(&Loads::new(&books.pods, before))
    }

    /// What `pod` is charged now; nothing for a pod that is not known. `shared_blocks` is zero, for
    /// there is no request to share with.
    #[must_use]
    pub fn load(&self, pod: PodId) -> PodLoad {
        self.books.lock().pods.load(pod)
    }

    /// What each of `pods` is charged at one moment, as [`Ledger::load`] says it: one turn at the lock
    /// that decisions take too, not one for each pod.
    #[must_use]
    pub fn loads(&self, pods: impl IntoIterator<Item = PodId>) -> Vec<PodLoad> {
        let books = self.books.lock();
        pods.into_iter().map(|pod| books.pods.load(pod)).collect()
    }

    /// Drops what `pod` was charged and its sessions. Bookings on it stay valid and release nothing.
    pub fn forget(&self, pod: PodId) {
        self.books.lock().pods.forget(pod);
    }

    /// Sessions remembered, those included that have expired and were not yet dropped.
    #[must_use]
    pub fn sessions(&self) -> usize {
        self.books.lock().sessions.len()
    }

    fn release_prefill(&self, decode: &mut DecodeCharge, prefill: Option<PrefillCharge>) {
        let mut books = self.books.lock();
        books.pods.release_prefill_tokens(decode);
        if let Some(prefill) = prefill {
            books.pods.release_prefill(&prefill);
        }
    }

    fn release(&self, decode: &DecodeCharge, prefill: Option<PrefillCharge>) {
        let mut books = self.books.lock();
        books.pods.release_decode(decode);
        if let Some(prefill) = prefill {
            books.pods.release_prefill(&prefill);
        }
    }

    fn move_prefill(&self, prefill: &mut PrefillCharge, to: PodId) {
        let mut books = self.books.lock();
        books.pods.release_prefill(prefill);
        prefill.pod = to;
        books.pods.charge_prefill(prefill);
    }

    fn move_decode(&self, decode: &mut DecodeCharge, to: PodId, session: Option<SessionKey>) {
        let mut books = self.books.lock();
        books.pods.release_decode(decode);
        if let Some(key) = session {
            books.sessions.rebind(key, decode.pod, to);
        }
        decode.pod = to;
        books.pods.charge_decode(decode);
    }
}

impl<'a> Loads<'a> {
    fn new(pods: &'a Pods, session: Option<SessionPods>) -> Loads<'a> {
        let known = |pod: &PodId| !pods.is_forgotten(*pod);
        Loads {
            pods,
            session_pod: session.map(|pods| pods.decode).filter(known),
            session_prefill_pod: session.and_then(|pods| pods.prefill).filter(known),
        }
    }

    /// What `pod` is charged, and how many leading blocks of this request run there already.
    #[inline]
    #[must_use]
    pub fn of(&self, pod: PodId) -> PodLoad {
        self.pods.load_shared(pod)
    }

    /// The pod this session was sent to last, while it is remembered and the pod is not forgotten.
    #[must_use]
    pub fn session_pod(&self) -> Option<PodId> {
        self.session_pod
    }

    /// The pod that prefilled for this session last, under the same conditions.
    #[must_use]
    pub fn session_prefill_pod(&self) -> Option<PodId> {
        self.session_prefill_pod
    }
}

/// What `decision` charges its two pods.
fn charges(decision: &Decision, chains: &[BlockChain]) -> (DecodeCharge, Option<PrefillCharge>) {
    let chosen = decision.route.decode();
    let keys = keys_for(chosen.candidate.block_size, chains);
    let keyed = Blocks(u32::try_from(keys.len()).unwrap_or(u32::MAX));
    let (prefill_tokens, prefill) = match &decision.route {
        Route::Local { decode } => (decode.net_new_tokens, None),
        Route::Remote { prefill, .. } => (
            Tokens::ZERO,
            Some(PrefillCharge {
                pod: prefill.candidate.pod,
                tokens: prefill.net_new_tokens,
            }),
        ),
    };
    let decode = DecodeCharge {
        pod: chosen.candidate.pod,
        prefill_tokens,
        unkeyed: decision.decode_blocks().saturating_sub(keyed),
        keys,
    };
    (decode, prefill)
}

fn keys_for(size: BlockSize, chains: &[BlockChain]) -> Arc<[BlockKey]> {
    chains
        .iter()
        .find(|chain| chain.size == size)
        .map_or_else(|| Arc::from([]), |chain| chain.keys.clone())
}

//! The kernel and the ledger together: bursts, sessions, late releases.

use crate::decide_fixture::{
    ask, chain, chain_of, decode, endpoint, holding, id, isl, policy, prefill, rule,
};
use sidestep::blocks::BlockChain;
use sidestep::decide::ask::{Affinity, Ask};
use sidestep::decide::policy::{Bypass, ClientPins, Policy};
use sidestep::decide::snapshot::{Candidate, PodLoad};
use sidestep::decide::{Because, Decision, NoRoute, decide};
use sidestep::load::{Admission, Booking, Ledger};
use sidestep::names::{PodId, SessionId};
use sidestep::units::{Blocks, Tokens};
use std::collections::HashSet;
use std::sync::Barrier;
use std::time::{Duration, Instant};

/// One picker: pods, a policy, and the books.
pub(crate) struct World {
    pub(crate) pods: Vec<Candidate>,
    pub(crate) policy: Policy,
    pub(crate) ledger: Ledger,
    now: Instant,
}

impl World {
    pub(crate) fn new(pods: impl IntoIterator<Item = Candidate>, policy: Policy) -> World {
        World {
            pods: pods.into_iter().collect(),
            policy,
            ledger: Ledger::default(),
            now: Instant::now(),
        }
    }

    pub(crate) fn admit(
        &self,
        ask: &Ask,
        chain: &BlockChain,
    ) -> Result<(Decision, Booking), NoRoute> {
        self.admit_for(ask, chain, None)
    }

    fn admit_for(
        &self,
        ask: &Ask,
        chain: &BlockChain,
        session: Option<(&SessionId, Duration)>,
    ) -> Result<(Decision, Booking), NoRoute> {
        let admission = Admission {
            chains: std::slice::from_ref(chain),
            session,
            now: self.now,
        };
        self.ledger.admit(admission, |loads| {
            let mut ask = ask.clone();
            if let Some(pod) = loads.session_pod() {
                ask.affinity = Affinity::Soft(pod);
            }
            let mut candidates = self.pods.clone();
            for pod in &mut candidates {
                let own = pod.load;
                pod.load = loads.of(pod.pod);
                pod.load.decode_blocks = pod.load.decode_blocks.saturating_add(own.decode_blocks);
            }
            decide(&ask, &candidates.into_iter().collect(), &self.policy)
        })
    }

    fn load(&self, slot: u16) -> PodLoad {
        self.ledger.load(id(slot))
    }
}

fn drawn(prompt: u64, round: u64) -> Ask {
    let mut ask = ask(prompt);
    ask.draw = round.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ask
}

fn slot(decision: &Decision) -> u16 {
    decision.route.decode().candidate.pod.slot
}

/// Report 21: a burst of equal requests spreads, because each is booked in the step that picks.
#[test]
fn a_burst_of_equal_requests_spreads_over_equal_pods() {
    let world = World::new((0..8).map(|slot| holding(decode(slot), 160)), isl());
    let chain = chain(160, 1);
    let bookings = parking_lot::Mutex::new(Vec::new());
    let start = Barrier::new(8);
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let (world, chain, bookings, start) = (&world, &chain, &bookings, &start);
            scope.spawn(move || {
                start.wait();
                for round in 0..50 {
                    let (_, booking) = world
                        .admit(&drawn(160, thread * 50 + round), chain)
                        .unwrap();
                    bookings.lock().push(booking);
                }
            });
        }
    });
    for slot in 0..8 {
        let load = world.load(slot);
        assert!((45..=55).contains(&load.requests), "{slot}: {load:?}");
        assert_eq!(load.decode_blocks, Blocks(10), "shared blocks count once");
    }
    drop(bookings);
    for slot in 0..8 {
        assert_eq!(world.load(slot), PodLoad::default());
    }
}

/// Report 23: a release never touches the successor of the pod that was charged.
#[test]
fn a_late_release_does_not_touch_the_next_incarnation() {
    let mut world = World::new([decode(0)], isl());
    let (_, first) = world.admit(&ask(1000), &chain(1000, 1)).unwrap();
    world.ledger.forget(id(0));
    assert_eq!(world.load(0), PodLoad::default());

    let again = PodId {
        slot: 0,
        generation: 1,
    };
    world.pods[0].pod = again;
    let (_, second) = world.admit(&ask(1000), &chain(1000, 1)).unwrap();
    let charged = world.ledger.load(again);
    assert_eq!(charged.requests, 1);
    drop(first);
    assert_eq!(world.ledger.load(again), charged);
    drop(second);
    assert_eq!(world.ledger.load(again), PodLoad::default());
}

#[test]
fn a_forgotten_pod_is_not_charged_again() {
    let world = World::new([decode(0)], isl());
    world.ledger.forget(id(0));
    let (_, booking) = world.admit(&ask(1000), &chain(1000, 1)).unwrap();
    assert_eq!(world.load(0), PodLoad::default());
    drop(booking);
    assert_eq!(world.load(0), PodLoad::default());
}

/// Report 24: prefill work that was sent counts, until the first token or the end.
#[test]
fn forced_remote_prefills_alternate_between_equal_pods() {
    let policy = policy([rule(Bypass::Never)]);
    let world = World::new([decode(0), prefill(1), prefill(2)], policy);
    let mut bookings = Vec::new();
    let mut chosen = Vec::new();
    for round in 0..10 {
        let chain = chain(8000, round);
        let (decision, booking) = world.admit(&drawn(8000, u64::from(round)), &chain).unwrap();
        chosen.push(decision.route.prefill().unwrap().candidate.pod.slot);
        bookings.push(booking);
    }
    for pair in chosen.chunks(2) {
        assert_ne!(pair[0], pair[1], "{chosen:?}");
    }
    for slot in [1, 2] {
        let load = world.load(slot);
        assert_eq!((load.requests, load.prefill_tokens), (5, Tokens(40_000)));
        assert_eq!(load.decode_blocks, Blocks::ZERO);
    }
    assert_eq!(world.load(0).decode_blocks, Blocks(5000));
    assert_eq!(world.load(0).prefill_tokens, Tokens::ZERO);

    bookings.iter_mut().for_each(Booking::prefill_done);
    for slot in [1, 2] {
        assert_eq!(world.load(slot), PodLoad::default());
    }
    assert_eq!(world.load(0).requests, 10);
    // A second first token changes nothing, and neither does the end of a half released booking.
    bookings.iter_mut().for_each(Booking::prefill_done);
    drop(bookings);
    for slot in 0..3 {
        assert_eq!(world.load(slot), PodLoad::default());
    }
}

/// Report 25: who is chosen is charged, not who has the best cache.
#[test]
fn the_cache_winner_is_not_charged_for_requests_that_go_elsewhere() {
    let mut winner = holding(decode(0), 1600);
    winner.load.decode_blocks = Blocks(900);
    let world = World::new([winner, decode(1)], isl());
    for round in 0..50 {
        let (decision, booking) = world.admit(&drawn(1600, round), &chain(1600, 1)).unwrap();
        assert_eq!(slot(&decision), 1);
        assert_eq!(world.load(0), PodLoad::default());
        let load = world.load(1);
        assert_eq!((load.requests, load.prefill_tokens), (1, Tokens(1600)));
        drop(booking);
    }
    assert_eq!(world.load(1), PodLoad::default());
}

#[test]
fn a_local_prefill_is_charged_net_of_the_cache_until_it_is_done() {
    let world = World::new([holding(decode(0), 896), prefill(1)], isl());
    let (decision, mut booking) = world.admit(&ask(1000), &chain(1000, 1)).unwrap();
    assert_eq!(decision.because, Because::NetNewBelowThresholds);
    // 62 full blocks and a partial one.
    let charged = PodLoad {
        requests: 1,
        prefill_tokens: Tokens(104),
        decode_blocks: Blocks(63),
        shared_blocks: Blocks::ZERO,
    };
    assert_eq!(world.load(0), charged);
    booking.prefill_done();
    assert_eq!(
        world.load(0),
        PodLoad {
            prefill_tokens: Tokens::ZERO,
            ..charged
        }
    );
    assert_eq!(world.load(1), PodLoad::default());
}

#[test]
fn a_refused_request_is_not_booked() {
    let world = World::new([prefill(0)], isl());
    let session = SessionId::from("s");
    let refused = world.admit_for(
        &ask(1000),
        &chain(1000, 1),
        Some((&session, Duration::from_secs(60))),
    );
    assert_eq!(refused.unwrap_err(), NoRoute::NoDecodePod);
    assert_eq!(world.load(0), PodLoad::default());
    assert_eq!(world.ledger.sessions(), 0);
}

#[test]
fn shared_blocks_are_the_leading_ones_that_run_there() {
    let world = World::new([decode(0), decode(1)], isl());
    let mut tokens = vec![1; 320];
    let long = chain_of(&tokens);
    tokens[160..].fill(2);
    let branch = chain_of(&tokens);
    tokens[0] = 3;
    let other = chain_of(&tokens);
    let mut pinned = ask(320);
    pinned.affinity = Affinity::Hard(id(0));
    let (_, booking) = world.admit(&pinned, &long).unwrap();

    let shared = |chain: &BlockChain, pod: u16| {
        let mut seen = Blocks(99);
        let admission = Admission {
            chains: std::slice::from_ref(chain),
            session: None,
            now: world.now,
        };
        let refused = world.ledger.admit(admission, |loads| {
            // Asked twice: the second answer starts from the first.
            seen = loads.of(id(pod)).shared_blocks;
            assert_eq!(loads.of(id(pod)).shared_blocks, seen);
            Err(NoRoute::NoDecodePod)
        });
        assert!(refused.is_err());
        seen
    };
    assert_eq!(shared(&long, 0), Blocks(20));
    assert_eq!(shared(&branch, 0), Blocks(10));
    assert_eq!(shared(&other, 0), Blocks(0));
    assert_eq!(shared(&long, 1), Blocks(0));

    let (_, second) = world.admit(&pinned, &branch).unwrap();
    assert_eq!(world.load(0).decode_blocks, Blocks(30));
    drop(booking);
    assert_eq!(world.load(0).decode_blocks, Blocks(20));
    drop(second);
    assert_eq!(world.load(0), PodLoad::default());
}

#[test]
fn a_booking_follows_the_pod_that_served_it() {
    let world = World::new([holding(decode(0), 896), decode(1), prefill(2)], isl());
    let session = SessionId::from("s");
    let ttl = Some((&session, Duration::from_secs(60)));
    let (_, mut booking) = world.admit_for(&ask(1000), &chain(1000, 1), ttl).unwrap();
    let charged = world.load(0);
    booking.served_by(id(1));
    assert_eq!(booking.decode_pod(), id(1));
    assert_eq!(world.load(0), PodLoad::default());
    assert_eq!(world.load(1), charged);
    booking.served_by(id(1));
    assert_eq!(world.load(1), charged);
    // The conversation goes on where its blocks are.
    let (next, second) = world.admit_for(&ask(1000), &chain(1000, 1), ttl).unwrap();
    assert_eq!(slot(&next), 1);
    drop((booking, second));
    assert_eq!(world.load(1), PodLoad::default());
}

#[test]
fn a_prefill_booking_follows_the_pod_that_served_it_and_leaves_the_decode_where_it_is() {
    let pods = [decode(0), prefill(1), prefill(2)];
    let world = World::new(pods, policy([rule(Bypass::Never)]));
    let session = SessionId::from("s");
    let ttl = Some((&session, Duration::from_secs(60)));
    let (decision, mut booking) = world.admit_for(&ask(1000), &chain(1000, 1), ttl).unwrap();
    let planned = decision.route.prefill().unwrap().candidate.pod;
    let other = if planned == id(1) { id(2) } else { id(1) };
    let (decode_load, prefill_load) = (world.load(0), world.load(planned.slot));
    booking.prefilled_by(other);
    assert_eq!(booking.decode_pod(), id(0));
    assert_eq!(world.load(0), decode_load);
    assert_eq!(world.load(planned.slot), PodLoad::default());
    assert_eq!(world.load(other.slot), prefill_load);
    booking.prefill_done();
    booking.prefilled_by(planned);
    assert_eq!(world.load(planned.slot), PodLoad::default());
    assert_eq!(world.load(other.slot), PodLoad::default());
    drop(booking);
    assert_eq!(world.load(0), PodLoad::default());
    // The conversation stays with its decode pod.
    let (next, _booking) = world.admit_for(&ask(1000), &chain(1000, 1), ttl).unwrap();
    assert_eq!(slot(&next), 0);
}

#[test]
fn a_session_is_remembered_for_its_time_to_live() {
    let mut world = World::new([decode(0), decode(1)], isl());
    let session = SessionId::from("s");
    let ttl = Some((&session, Duration::from_secs(60)));
    let mut to_one = ask(100);
    to_one.decode_pin = Some(endpoint(1).into());
    world.policy.client_pins = ClientPins::Honor;
    drop(world.admit_for(&to_one, &chain(100, 1), ttl).unwrap());
    let seen = |world: &World, session: &SessionId| {
        let admission = Admission {
            chains: &[],
            session: Some((session, Duration::ZERO)),
            now: world.now,
        };
        let mut seen = None;
        let refused = world.ledger.admit(admission, |loads| {
            seen = loads.session_pod();
            Err(NoRoute::NoDecodePod)
        });
        assert!(refused.is_err());
        seen
    };
    assert_eq!(seen(&world, &session), Some(id(1)));
    assert_eq!(seen(&world, &SessionId::from("t")), None);
    world.now += Duration::from_millis(59_999);
    assert_eq!(seen(&world, &session), Some(id(1)));
    world.now += Duration::from_millis(1);
    assert_eq!(seen(&world, &session), None);

    drop(world.admit_for(&to_one, &chain(100, 1), ttl).unwrap());
    assert_eq!(seen(&world, &session), Some(id(1)));
    world.ledger.forget(id(1));
    assert_eq!(seen(&world, &session), None);
}

#[test]
fn the_session_table_is_bounded_and_drops_what_expires_first() {
    let mut world = World::new([decode(0)], isl());
    world.ledger = Ledger::new(100);
    for n in 0..1_000_u64 {
        let session = SessionId::from(format!("s{n}").as_str());
        let ttl = Duration::from_secs(if n < 50 { 10_000 } else { 100 + n });
        drop(world.admit_for(&ask(10), &chain(10, 1), Some((&session, ttl))));
        assert!(world.ledger.sessions() <= 100);
    }
    assert_eq!(world.ledger.sessions(), 100);
    let mut kept = |n: u64| {
        let session = SessionId::from(format!("s{n}").as_str());
        let admission = Admission {
            chains: &[],
            session: Some((&session, Duration::ZERO)),
            now: world.now,
        };
        let mut seen = None;
        let _ = world.ledger.admit(admission, |loads| {
            seen = loads.session_pod();
            Err(NoRoute::NoDecodePod)
        });
        seen.is_some()
    };
    assert!((0..50).all(&mut kept), "the long-lived stay");
    assert!((950..1000).all(&mut kept), "the latest stay");
    assert!(!(50..950).any(&mut kept), "what would expire first is gone");
}

#[test]
fn a_session_that_goes_on_outlives_its_first_time_to_live() {
    let mut world = World::new([decode(0)], isl());
    world.ledger = Ledger::new(10);
    let session = SessionId::from("s");
    let turn = |world: &World| {
        let ttl = Some((&session, Duration::from_secs(60)));
        drop(world.admit_for(&ask(10), &chain(10, 1), ttl).unwrap());
        world.ledger.sessions()
    };
    for _ in 0..100 {
        assert_eq!(turn(&world), 1);
        world.now += Duration::from_secs(1);
    }
    // Others come and go without pushing it out.
    let other = SessionId::from("t");
    let ttl = Some((&other, Duration::from_secs(1)));
    drop(world.admit_for(&ask(10), &chain(10, 1), ttl).unwrap());
    assert_eq!(world.ledger.sessions(), 2);
    world.now += Duration::from_secs(58);
    assert_eq!(turn(&world), 1);
}

#[test]
fn a_time_to_live_beyond_all_clocks_is_no_panic() {
    let world = World::new([decode(0)], isl());
    let session = SessionId::from("s");
    let ttl = Some((&session, Duration::MAX));
    assert!(world.admit_for(&ask(10), &chain(10, 1), ttl).is_ok());
}

/// Two requests of one session at once: the second sees where the first was sent.
#[test]
fn concurrent_requests_of_one_session_go_to_one_pod() {
    for round in 0..50 {
        let world = World::new((0..8).map(decode), isl());
        let session = SessionId::from("s");
        let start = Barrier::new(4);
        let slots = parking_lot::Mutex::new(HashSet::new());
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (world, session, start, slots) = (&world, &session, &start, &slots);
                scope.spawn(move || {
                    start.wait();
                    let ttl = Some((session, Duration::from_secs(60)));
                    let ask = drawn(1000, round * 4 + thread);
                    let (decision, _booking) = world.admit_for(&ask, &chain(1000, 1), ttl).unwrap();
                    slots.lock().insert(slot(&decision));
                });
            }
        });
        assert_eq!(slots.lock().len(), 1);
    }
}

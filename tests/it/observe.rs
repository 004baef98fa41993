//! What a decision looks at is what is there now, however much of it was looked at before: a long-lived
//! observer against one that has never looked.

use crate::kv_support::chain;
use proptest::prelude::*;
use sidestep::decide::prerequisite::PrefixCaching;
use sidestep::decide::snapshot::{Availability, LocalPrefill, Role, Serves};
use sidestep::fleet::{KvEventsSpec, Listed, PodSpec, Probe, Reported, Roster, View};
use sidestep::kv::event::{Batch, EngineHash, Event, Skipped, Stored};
use sidestep::kv::feed::{Feed, FeedSource, spawn};
use sidestep::kv::index::Index;
use sidestep::names::{Endpoint, ModelName, PodId};
use sidestep::observe::{Observation, Observer, Sources};
use sidestep::units::{BlockSize, Blocks, Ratio};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const PODS: u8 = 4;
const NAMES: [&str; 4] = ["m", "n", "lora", "nobody's"];
const DEFAULT: u32 = 64;
/// Pods beside those that change, where the fleet is large.
const CROWD: u8 = 64;
/// How long a report may wait there for the next look; nothing else waits.
const REPORTS_WAIT: Duration = Duration::from_millis(10);

/// A pod as a list has it. Index, and small numbers for what it may be.
#[derive(Clone, Debug)]
struct Listing {
    pod: u8,
    uid: u8,
    shape: u8,
    models: Vec<u8>,
    adapters: Vec<u8>,
    listed: Listed,
    sizes: (Option<u32>, Option<u32>),
}

impl Listing {
    fn spec(&self) -> PodSpec {
        let names = |list: &[u8]| -> Vec<ModelName> {
            let names = list.iter().map(|name| NAMES[usize::from(*name)]);
            names.map(ModelName::from).collect()
        };
        let role = [Role::Decode, Role::Prefill, Role::Both][usize::from(self.shape) % 3];
        PodSpec {
            name: format!("pod{}", self.pod).into(),
            uid: self.uid.to_string().into(),
            endpoint: Endpoint(SocketAddr::from(([10, 0, 0, self.pod + 1], 80))),
            role,
            models: names(&self.models),
            adapters: names(&self.adapters),
            local_prefill: if self.shape & 4 == 0 {
                LocalPrefill::Able
            } else {
                LocalPrefill::Unable
            },
            kv_events: (self.shape & 8 == 0).then(|| KvEventsSpec {
                events: "tcp://127.0.0.1:1".into(),
                replay: None,
                topic: String::new(),
            }),
            block_size: self.sizes.0.and_then(BlockSize::new),
            kv_blocks: self.sizes.1.map(Blocks),
            prefill_batch_tokens: None,
            probe: if self.shape & 16 == 0 {
                Probe::Off
            } else {
                Probe::Metrics {
                    path: "/metrics".into(),
                    failure_threshold: Probe::FAILURE_THRESHOLD,
                }
            },
            listed: self.listed,
        }
    }
}

/// Anything that changes what a decision looks at. Pods are named by their place in the view.
#[derive(Clone, Debug)]
enum Step {
    List(Vec<Listing>),
    Set(u8, Availability),
    Probed(u8, Availability),
    Report(u8, Box<Reported>),
    Believe(u8, u64),
    Pass(Duration),
    /// To the moment at which a report ends, give or take.
    Expire(u8, i64),
    Store(u8, u32),
    Forget(u8),
    Follow(Vec<u8>),
}

fn listings() -> impl Strategy<Value = Vec<Listing>> {
    let listed = prop_oneof![
        4 => Just(Listed::Ready),
        1 => Just(Listed::NotReady),
        1 => Just(Listed::Leaving),
    ];
    let names = || prop::collection::vec(0..3_u8, 0..3);
    let size = || prop::option::of(prop_oneof![Just(16_u32), Just(32)]);
    let one = (
        (0..PODS, 0..2_u8, 0..32_u8),
        (names(), names(), listed),
        (size(), size()),
    );
    let one = one.prop_map(
        |((pod, uid, shape), (models, adapters, listed), sizes)| Listing {
            pod,
            uid,
            shape,
            models,
            adapters,
            listed,
            sizes,
        },
    );
    prop::collection::vec(one, 0..6)
}

fn availability() -> impl Strategy<Value = Availability> {
    prop_oneof![
        Just(Availability::Ready),
        Just(Availability::NotReady),
        Just(Availability::Draining),
        Just(Availability::Unreachable),
    ]
}

fn reports() -> impl Strategy<Value = Reported> {
    let small = || prop::option::weighted(0.8, 0..3_u32);
    let caching = prop_oneof![
        Just(PrefixCaching::Unknown),
        Just(PrefixCaching::On),
        Just(PrefixCaching::Off),
    ];
    let usage = prop::option::weighted(0.8, 0.0..1.0_f64);
    let sizes = prop::option::of(prop_oneof![Just(16_u32), Just(48)]);
    (small(), small(), usage, small(), sizes, caching).prop_map(
        |(waiting, running, usage, blocks, size, prefix_caching)| Reported {
            waiting,
            running,
            kv_usage: usage.and_then(Ratio::new),
            kv_blocks: blocks.map(Blocks),
            block_size: size.and_then(BlockSize::new),
            prefix_caching,
        },
    )
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let pod = 0..PODS;
    let step = prop_oneof![
        2 => listings().prop_map(Step::List),
        2 => (pod.clone(), availability()).prop_map(|(pod, to)| Step::Set(pod, to)),
        2 => (pod.clone(), availability()).prop_map(|(pod, to)| Step::Probed(pod, to)),
        4 => (pod.clone(), reports()).prop_map(|(pod, said)| Step::Report(pod, Box::new(said))),
        1 => (pod.clone(), prop_oneof![0..5_u64, Just(u64::MAX)])
            .prop_map(|(pod, limit)| Step::Believe(pod, limit)),
        2 => (0..6_000_000_000_u64).prop_map(|nanos| Step::Pass(Duration::from_nanos(nanos))),
        4 => (pod.clone(), prop_oneof![-1_000_000..=1_000_000_i64, -1..=1_i64])
            .prop_map(|(pod, nanos)| Step::Expire(pod, nanos)),
        2 => (pod.clone(), prop_oneof![Just(16_u32), Just(32)])
            .prop_map(|(pod, size)| Step::Store(pod, size)),
        1 => pod.clone().prop_map(Step::Forget),
        1 => prop::collection::vec(pod, 0..4).prop_map(Step::Follow),
    ];
    prop::collection::vec(step, 1..40)
}

/// The parts of a picker that an observer reads.
struct World {
    roster: Arc<Roster>,
    index: Arc<Index>,
    sources: Arc<Sources>,
    old: Observer,
    now: Instant,
    stored: u64,
    crowd: Vec<PodSpec>,
}

impl World {
    fn new(crowd: u8) -> World {
        let (roster, index) = (
            Arc::new(Roster::new()),
            Arc::new(Index::new(Default::default())),
        );
        let sources = Arc::new(Sources::default());
        World {
            old: observer(&roster, &index, &sources),
            roster,
            index,
            sources,
            now: Instant::now(),
            stored: 0,
            crowd: (0..crowd)
                .map(|at| {
                    let address = format!("10.0.1.{at}:80");
                    crate::telemetry_support::pod(&format!("x{at}"), &address, Role::Decode)
                })
                .collect(),
        }
    }

    fn id(&self, pod: u8) -> Option<PodId> {
        Some(self.roster.view().pods.get(usize::from(pod))?.id)
    }

    fn feed(&self, pod: u8) -> Option<(PodId, Arc<Feed>)> {
        let id = self.id(pod)?;
        let source = FeedSource {
            events: "tcp://127.0.0.1:1".into(),
            replay: None,
            topic: String::new(),
        };
        Some((id, Arc::new(spawn(Arc::clone(&self.index), id, source))))
    }

    fn step(&mut self, step: &Step) {
        let view = self.roster.view();
        let status = |pod: u8| view.pods.get(usize::from(pod)).map(|pod| pod.status());
        match step {
            Step::List(listings) => {
                let listed = listings.iter().map(Listing::spec);
                let all = listed.chain(self.crowd.iter().cloned());
                let changes = self.roster.apply(all.collect());
                changes
                    .added
                    .iter()
                    .for_each(|pod| self.index.add_pod(pod.id));
                changes
                    .removed
                    .iter()
                    .for_each(|pod| self.index.forget(pod.id));
            }
            Step::Set(pod, to) => {
                status(*pod).map(|status| status.set_availability(*to));
            }
            Step::Probed(pod, to) => {
                status(*pod).map(|status| status.observe(*to));
            }
            Step::Report(pod, said) => {
                if let Some(status) = status(*pod) {
                    status.record(said, self.now);
                }
            }
            Step::Believe(pod, limit) => {
                if let Some(status) = status(*pod) {
                    status.set_age_limit(Duration::from_millis(*limit));
                }
            }
            Step::Pass(time) => self.now += *time,
            Step::Expire(pod, nanos) => {
                let ends = status(*pod).and_then(|status| status.report_expires());
                let give = Duration::from_nanos(nanos.unsigned_abs());
                let near = ends.and_then(|ends| match nanos {
                    0.. => ends.checked_add(give),
                    _ => ends.checked_sub(give),
                });
                // A limit of centuries is not waited for.
                let soon = self.now + Duration::from_secs(3600);
                self.now = near
                    .filter(|near| *near < soon)
                    .unwrap_or(self.now)
                    .max(self.now);
            }
            Step::Store(pod, size) => {
                if let Some(id) = self.id(*pod) {
                    self.stored += 1;
                    self.index.apply(id, &store(self.stored, *size));
                }
            }
            Step::Forget(pod) => {
                if let Some(id) = self.id(*pod) {
                    self.index.forget(id);
                    self.index.add_pod(id);
                }
            }
            Step::Follow(pods) => self
                .sources
                .set(pods.iter().filter_map(|pod| self.feed(*pod))),
        }
    }
}

fn observer(roster: &Arc<Roster>, index: &Arc<Index>, sources: &Arc<Sources>) -> Observer {
    Observer::new(
        Arc::clone(roster),
        Arc::clone(index),
        Arc::clone(sources),
        BlockSize::new(DEFAULT).unwrap(),
    )
}

/// A store of the first 64 tokens of the only prompt there is.
fn store(hash: u64, size: u32) -> Batch {
    let blocks = u64::from(64 / size);
    let stored = Stored {
        hashes: (0..blocks).map(|at| EngineHash(hash * 100 + at)).collect(),
        tokens: (0..64).collect(),
        block_size: size,
        ..Stored::default()
    };
    Batch {
        ts: 0.0,
        rank: 0,
        events: vec![Event::Stored(Box::new(stored))],
        skipped: Skipped::default(),
    }
}

fn look(observer: &Observer, names: &[ModelName], now: Instant) -> Observation {
    let names: Vec<&ModelName> = names.iter().collect();
    let prompt: Vec<u32> = (0..100).collect();
    let chains = [chain(16, &prompt, None), chain(32, &prompt, None)];
    observer.look(&names, &chains, now)
}

/// All that a decision sees of the pods that change.
fn seen(observation: &Observation) -> Vec<String> {
    let candidates = observation.snapshot.candidates();
    let those = candidates.take(usize::from(PODS) + 1);
    those.map(|pod| format!("{pod:?}")).collect()
}

/// Who serves a request under `names`, pod by pod.
fn serves(view: &View, names: &[ModelName]) -> Vec<Serves> {
    let mut all = Vec::new();
    for pod in &view.pods {
        let (models, adapters) = (&pod.spec.models, &pod.spec.adapters);
        let named = |name: &ModelName| models.contains(name) || adapters.contains(name);
        all.push(
            if names.is_empty() || models.is_empty() || names.iter().any(named) {
                Serves::Yes
            } else {
                Serves::NotThisModel
            },
        );
    }
    all
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn an_observer_that_has_looked_before_sees_what_a_new_one_sees(
        steps in steps(),
        large in prop::bool::weighted(0.2),
        names in prop::collection::vec(prop::collection::vec(0..NAMES.len(), 0..3), 1..4),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let _inside = runtime.enter();
        let mut world = World::new(if large { CROWD } else { 0 });
        world.step(&Step::List(Vec::new()));
        for step in steps {
            world.step(&step);
            if large && matches!(step, Step::Report(..)) {
                world.now += REPORTS_WAIT;
            }
            let new = observer(&world.roster, &world.index, &world.sources);
            let view = world.roster.view();
            for names in &names {
                let names: Vec<ModelName> = names.iter().map(|at| NAMES[*at].into()).collect();
                let old = look(&world.old, &names, world.now);
                let new = look(&new, &names, world.now);
                prop_assert!(Arc::ptr_eq(&old.view, &view), "{step:?}");
                prop_assert_eq!(seen(&old), seen(&new), "{:?}", step);
                let served: Vec<Serves> = old.snapshot.candidates().map(|pod| pod.serves).collect();
                prop_assert_eq!(served, serves(&view, &names), "{:?}", names);
            }
        }
    }
}

/// Looks again and again on a thread of its own, until it is dropped.
struct Onlooker {
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Onlooker {
    fn start(observer: &Arc<Observer>) -> Onlooker {
        let (observer, stop) = (Arc::clone(observer), Arc::new(AtomicBool::new(false)));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                let _ = look(&observer, &[], Instant::now());
            }
        });
        Onlooker {
            stop,
            thread: Some(thread),
        }
    }
}

impl Drop for Onlooker {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().map(std::thread::JoinHandle::join);
    }
}

fn one_pod() -> (World, Arc<Observer>) {
    let world = World::new(0);
    let listing = Listing {
        pod: 0,
        uid: 0,
        shape: 0,
        models: Vec::new(),
        adapters: Vec::new(),
        listed: Listed::Ready,
        sizes: (None, None),
    };
    world.roster.apply(vec![listing.spec()]);
    let observer = observer(&world.roster, &world.index, &world.sources);
    (world, Arc::new(observer))
}

#[test]
fn a_change_is_seen_by_the_next_look_while_others_look() {
    let (world, observer) = one_pod();
    let _others = [Onlooker::start(&observer), Onlooker::start(&observer)];
    let pod = Arc::clone(&world.roster.view().pods[0]);
    for round in 0..20_000_u32 {
        let to = if round % 2 == 0 {
            Availability::Unreachable
        } else {
            Availability::Ready
        };
        pod.status().observe(to);
        let blocks = Blocks(round + 1);
        let said = Reported {
            kv_blocks: Some(blocks),
            ..Reported::default()
        };
        pod.status().record(&said, Instant::now());
        let seen = look(&observer, &[], Instant::now()).snapshot.candidate(0);
        assert_eq!(
            (seen.availability, seen.kv_capacity),
            (to, pod.kv_capacity())
        );
    }
}

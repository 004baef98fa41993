//! The roster and the scraper, against a small HTTP server on loopback.

use http::{Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use sidestep::decide::snapshot::{Availability, Capacity, EngineReport, LocalPrefill, Role};
use sidestep::fleet::scrape::{MAX_BODY_BYTES, Scrapers, Settings};
use sidestep::fleet::{ASSUMED_PREFILL_BATCH, Listed, Pod, PodSpec, Probe, Roster};
use sidestep::names::{Endpoint, PodId};
use sidestep::units::{BlockSize, Blocks, Ratio, Tokens};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::Instant;

fn spec(name: &str, address: &str) -> PodSpec {
    PodSpec {
        name: Arc::from(name),
        uid: Arc::from("1"),
        endpoint: Endpoint(address.parse().unwrap()),
        role: Role::Decode,
        models: Vec::new(),
        adapters: Vec::new(),
        local_prefill: LocalPrefill::Able,
        kv_events: None,
        block_size: None,
        kv_blocks: None,
        prefill_batch_tokens: None,
        probe: Probe::Off,
        listed: Listed::Ready,
    }
}

fn pod(roster: &Roster, name: &str) -> Arc<Pod> {
    let view = roster.view();
    let found = view.pods.iter().find(|pod| &*pod.spec.name == name);
    Arc::clone(found.unwrap())
}

#[test]
fn the_same_list_again_changes_nothing() {
    let roster = Roster::new();
    let list = || vec![spec("a", "10.0.0.1:80"), spec("b", "10.0.0.2:80")];
    assert_eq!(roster.apply(list()).added.len(), 2);
    let before = roster.view();
    let changes = roster.apply(list());
    assert!(changes.is_empty());
    assert_eq!(changes.kept, 2);
    assert!(Arc::ptr_eq(&before, &roster.view()));
}

#[test]
fn another_endpoint_or_uid_is_another_incarnation() {
    let roster = Roster::new();
    roster.apply(vec![spec("a", "10.0.0.1:80")]);
    let first = pod(&roster, "a").id;
    let changes = roster.apply(vec![spec("a", "10.0.0.9:80")]);
    assert_eq!(changes.removed[0].id, first);
    let second = changes.added[0].id;
    assert_eq!(second.slot, first.slot);
    assert_eq!(second.generation, first.generation + 1);
    let changes = roster.apply(vec![PodSpec {
        uid: Arc::from("2"),
        ..spec("a", "10.0.0.9:80")
    }]);
    assert_eq!(changes.removed[0].id, second);
    assert_eq!(changes.added[0].id.generation, 2);
    assert!(roster.view().get(first).is_none());
    assert!(roster.view().get(changes.added[0].id).is_some());
}

#[test]
fn another_role_or_capacity_is_the_same_incarnation() {
    let roster = Roster::new();
    roster.apply(vec![spec("a", "10.0.0.1:80")]);
    let before = pod(&roster, "a");
    before.status().set_availability(Availability::Unreachable);
    let changes = roster.apply(vec![PodSpec {
        role: Role::Prefill,
        kv_blocks: Some(Blocks(100)),
        ..spec("a", "10.0.0.1:80")
    }]);
    assert_eq!((changes.kept, changes.respecified.len()), (1, 1));
    let after = pod(&roster, "a");
    assert_eq!(after.id, before.id);
    assert_eq!(after.spec.role, Role::Prefill);
    assert_eq!(
        before.spec.role,
        Role::Decode,
        "a pod never changes its spec"
    );
    assert_eq!(after.availability(), Availability::Unreachable);
}

#[test]
fn a_pod_that_comes_back_is_another_incarnation() {
    let roster = Roster::new();
    let list = || vec![spec("a", "10.0.0.1:80"), spec("b", "10.0.0.2:80")];
    roster.apply(list());
    let first = pod(&roster, "b").id;
    roster.apply(vec![spec("a", "10.0.0.1:80")]);
    roster.apply(list());
    assert_ne!(pod(&roster, "b").id, first);
}

#[test]
fn ids_are_never_reused_whatever_comes_and_goes() {
    let roster = Roster::new();
    let mut seen = std::collections::HashSet::new();
    // A fixed scramble of which of 8 pods are there.
    for round in 0..200_u32 {
        let there = round.wrapping_mul(2_654_435_761) >> 24;
        let list = (0..8)
            .filter(|bit| there >> bit & 1 == 1)
            .map(|bit| spec(&format!("p{bit}"), &format!("10.0.0.{}:80", bit + 1)))
            .collect();
        for pod in roster.apply(list).added {
            assert!(seen.insert(pod.id), "{} twice", pod.id);
        }
        let view = roster.view();
        assert!(view.slots() <= 8);
        assert_eq!(view.pods.len(), there.count_ones() as usize);
        for pod in &view.pods {
            assert_eq!(view.get(pod.id).unwrap().spec.name, pod.spec.name);
            assert_eq!(view.at(pod.spec.endpoint).unwrap().id, pod.id);
        }
    }
}

#[test]
fn a_name_or_endpoint_listed_twice_is_refused() {
    let roster = Roster::new();
    let changes = roster.apply(vec![
        spec("a", "10.0.0.1:80"),
        spec("a", "10.0.0.2:80"),
        spec("b", "10.0.0.1:80"),
    ]);
    assert_eq!(changes.added.len(), 1);
    assert_eq!(changes.refused.len(), 2);
    assert_eq!(roster.view().pods.len(), 1);
}

#[test]
fn an_old_view_stays_as_it_was() {
    let roster = Roster::new();
    roster.apply(vec![spec("a", "10.0.0.1:80")]);
    let old = roster.view();
    roster.apply(Vec::new());
    assert_eq!(old.pods.len(), 1);
    assert!(roster.view().pods.is_empty());
}

#[test]
fn an_id_of_another_generation_or_no_slot_is_nobody() {
    let roster = Roster::new();
    roster.apply(vec![spec("a", "10.0.0.1:80")]);
    let view = roster.view();
    let id = |slot, generation| PodId { slot, generation };
    assert!(view.get(id(0, 0)).is_some());
    assert!(view.get(id(0, 1)).is_none());
    assert!(view.get(id(9, 0)).is_none());
}

#[test]
fn what_the_operator_configured_comes_before_what_was_reported_or_assumed() {
    let roster = Roster::new();
    roster.apply(vec![spec("a", "10.0.0.1:80")]);
    let plain = pod(&roster, "a");
    assert_eq!(plain.kv_capacity(), Capacity::Unknown);
    assert_eq!(
        plain.prefill_capacity(),
        Capacity::Assumed(ASSUMED_PREFILL_BATCH)
    );
    assert_eq!(plain.block_size(), None);

    let reported = sidestep::fleet::Reported {
        kv_blocks: Some(Blocks(1000)),
        block_size: BlockSize::new(16),
        ..Default::default()
    };
    plain.status().record(&reported, Instant::now().into_std());
    assert_eq!(plain.kv_capacity(), Capacity::Reported(Blocks(1000)));
    assert_eq!(plain.block_size(), BlockSize::new(16));

    roster.apply(vec![PodSpec {
        kv_blocks: Some(Blocks(900)),
        block_size: BlockSize::new(32),
        prefill_batch_tokens: Some(Tokens(4096)),
        ..spec("a", "10.0.0.1:80")
    }]);
    let configured = pod(&roster, "a");
    assert_eq!(configured.kv_capacity(), Capacity::Configured(Blocks(900)));
    assert_eq!(configured.block_size(), BlockSize::new(32));
    assert_eq!(
        configured.prefill_capacity(),
        Capacity::Configured(Tokens(4096))
    );
}

/// What the engine under test answers with.
#[derive(Clone)]
enum Answer {
    Text(StatusCode, String),
    Never,
}

/// An engine that answers as the sender says, and counts how often it was asked.
struct Engine {
    address: SocketAddr,
    answer: watch::Sender<Answer>,
    asked: Arc<AtomicUsize>,
    task: tokio::task::JoinHandle<()>,
}

impl Engine {
    async fn start(address: &str) -> Engine {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let text = Answer::Text(StatusCode::OK, metrics(0));
        let (answer, answers) = watch::channel(text);
        let asked = Arc::new(AtomicUsize::new(0));
        let task = tokio::spawn(serve(listener, answers, Arc::clone(&asked)));
        Engine {
            address,
            answer,
            asked,
            task,
        }
    }

    fn says(&self, answer: Answer) {
        self.answer.send(answer).unwrap();
    }

    /// Stops listening and closes its connections.
    async fn stop(self) -> String {
        self.task.abort();
        let _ = self.task.await;
        self.address.to_string()
    }
}

async fn serve(listener: TcpListener, answers: watch::Receiver<Answer>, asked: Arc<AtomicUsize>) {
    let mut connections = tokio::task::JoinSet::new();
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            return;
        };
        let answers = answers.clone();
        let asked = Arc::clone(&asked);
        connections.spawn(async move {
            let respond = service_fn(move |request: Request<Incoming>| {
                assert_eq!(request.uri().path(), "/metrics");
                asked.fetch_add(1, Ordering::Relaxed);
                let answer = answers.borrow().clone();
                async move {
                    match answer {
                        Answer::Text(status, text) => {
                            let mut response = Response::new(Full::new(Bytes::from(text)));
                            *response.status_mut() = status;
                            Ok::<_, Infallible>(response)
                        }
                        Answer::Never => std::future::pending().await,
                    }
                }
            });
            let connection = hyper::server::conn::http1::Builder::new();
            let _ = connection
                .serve_connection(TokioIo::new(stream), respond)
                .await;
        });
    }
}

fn metrics(running: u32) -> String {
    format!(
        "vllm:num_requests_running {running}\nvllm:num_requests_waiting 1\n\
         vllm:kv_cache_usage_perc 0.5\n\
         vllm:cache_config_info{{block_size=\"16\",num_gpu_blocks=\"4096\"}} 1\n"
    )
}

const QUICK: Settings = Settings {
    every: Duration::from_millis(10),
    timeout: Duration::from_millis(500),
};

fn probed(name: &str, address: impl ToString) -> PodSpec {
    PodSpec {
        probe: Probe::Metrics {
            path: Arc::from("/metrics"),
            failure_threshold: Probe::FAILURE_THRESHOLD,
        },
        ..spec(name, &address.to_string())
    }
}

/// Waits until `condition` holds; fails after ten seconds.
async fn eventually(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !condition() {
        assert!(Instant::now() < deadline, "never: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

fn now() -> std::time::Instant {
    Instant::now().into_std()
}

#[tokio::test]
async fn a_pod_is_ready_once_it_has_answered_and_unreachable_once_it_does_not() {
    let engine = Engine::start("127.0.0.1:0").await;
    engine.says(Answer::Text(StatusCode::SERVICE_UNAVAILABLE, String::new()));
    let roster = Roster::new();
    roster.apply(vec![probed("a", engine.address)]);
    let pod = pod(&roster, "a");
    assert_eq!(pod.availability(), Availability::NotReady);

    let mut scrapers = Scrapers::new(QUICK);
    scrapers.follow(&roster.view());
    eventually("asked", || 2 <= engine.asked.load(Ordering::Relaxed)).await;
    assert_eq!(
        pod.availability(),
        Availability::NotReady,
        "503 is no answer"
    );

    engine.says(Answer::Text(StatusCode::OK, metrics(7)));
    eventually("ready", || pod.availability() == Availability::Ready).await;
    assert_eq!(
        pod.engine_report(now()),
        EngineReport::Fresh {
            waiting: 1,
            running: 7,
            kv_usage: Ratio::new(0.5).unwrap(),
        }
    );
    assert_eq!(pod.kv_capacity(), Capacity::Reported(Blocks(4096)));

    let address = engine.stop().await;
    eventually("unreachable", || {
        pod.availability() == Availability::Unreachable
    })
    .await;
    let _engine = Engine::start(&address).await;
    eventually("ready again", || pod.availability() == Availability::Ready).await;
}

#[tokio::test]
async fn a_pod_that_never_answers_in_time_is_unreachable_and_its_report_ages() {
    let engine = Engine::start("127.0.0.1:0").await;
    let roster = Roster::new();
    roster.apply(vec![probed("a", engine.address)]);
    let pod = pod(&roster, "a");
    let settings = Settings {
        every: Duration::from_millis(10),
        timeout: Duration::from_millis(50),
    };
    let mut scrapers = Scrapers::new(settings);
    scrapers.follow(&roster.view());
    eventually("ready", || pod.availability() == Availability::Ready).await;
    engine.says(Answer::Never);
    eventually("unreachable", || {
        pod.availability() == Availability::Unreachable
    })
    .await;
    eventually("aged", || pod.engine_report(now()) == EngineReport::None).await;
    assert!(pod.status().report_age(now()).is_some());
    assert_eq!(pod.kv_capacity(), Capacity::Reported(Blocks(4096)), "kept");
}

#[tokio::test]
async fn an_answer_without_numbers_or_too_long_is_an_answer_all_the_same() {
    let engine = Engine::start("127.0.0.1:0").await;
    let roster = Roster::new();
    roster.apply(vec![probed("a", engine.address)]);
    let pod = pod(&roster, "a");
    for text in ["hello".to_owned(), "#".repeat(MAX_BODY_BYTES + 1)] {
        engine.says(Answer::Text(StatusCode::OK, text));
        pod.status().set_availability(Availability::NotReady);
        let mut scrapers = Scrapers::new(QUICK);
        scrapers.follow(&roster.view());
        eventually("ready", || pod.availability() == Availability::Ready).await;
        assert_eq!(pod.engine_report(now()), EngineReport::None);
    }
}

#[tokio::test]
async fn a_pod_that_drains_is_not_called_ready_by_its_probe() {
    let engine = Engine::start("127.0.0.1:0").await;
    let roster = Roster::new();
    roster.apply(vec![probed("a", engine.address)]);
    let pod = pod(&roster, "a");
    pod.status().set_availability(Availability::Draining);
    let mut scrapers = Scrapers::new(QUICK);
    scrapers.follow(&roster.view());
    eventually("reported", || {
        pod.engine_report(now()) != EngineReport::None
    })
    .await;
    assert_eq!(pod.availability(), Availability::Draining);
}

#[tokio::test]
async fn only_pods_in_the_view_are_asked() {
    let stays = Engine::start("127.0.0.1:0").await;
    let goes = Engine::start("127.0.0.1:0").await;
    let roster = Roster::new();
    roster.apply(vec![
        probed("stays", stays.address),
        probed("goes", goes.address),
        spec("unprobed", "10.0.0.1:80"),
    ]);
    let mut scrapers = Scrapers::new(QUICK);
    scrapers.follow(&roster.view());
    assert_eq!(scrapers.len(), 2);
    assert_eq!(pod(&roster, "unprobed").availability(), Availability::Ready);
    eventually("asked", || 0 < goes.asked.load(Ordering::Relaxed)).await;

    roster.apply(vec![probed("stays", stays.address)]);
    scrapers.follow(&roster.view());
    assert_eq!(scrapers.len(), 1);
    // One scrape may have been on its way. After that, a hundred of the other and none of this.
    let before = goes.asked.load(Ordering::Relaxed);
    let asked = stays.asked.load(Ordering::Relaxed);
    eventually("asked on", || {
        asked + 20 <= stays.asked.load(Ordering::Relaxed)
    })
    .await;
    assert!(goes.asked.load(Ordering::Relaxed) <= before + 1);
}

#[tokio::test]
async fn a_probe_that_is_turned_off_makes_the_pod_ready_and_ends_the_asking() {
    let roster = Roster::new();
    let vacant = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = vacant.local_addr().unwrap();
    drop(vacant);
    roster.apply(vec![probed("a", address)]);
    let mut scrapers = Scrapers::new(QUICK);
    scrapers.follow(&roster.view());
    eventually("unreachable", || {
        pod(&roster, "a").availability() == Availability::Unreachable
    })
    .await;
    roster.apply(vec![spec("a", &address.to_string())]);
    scrapers.follow(&roster.view());
    assert!(scrapers.is_empty());
    assert_eq!(pod(&roster, "a").availability(), Availability::Ready);
}

#[tokio::test]
async fn an_engine_on_ipv6_is_asked_too() {
    if TcpListener::bind("[::1]:0").await.is_err() {
        eprintln!("skipped: this machine has no IPv6 loopback");
        return;
    }
    let engine = Engine::start("[::1]:0").await;
    let roster = Roster::new();
    roster.apply(vec![probed("a", engine.address)]);
    let mut scrapers = Scrapers::new(QUICK);
    scrapers.follow(&roster.view());
    let pod = pod(&roster, "a");
    eventually("ready", || pod.availability() == Availability::Ready).await;
}

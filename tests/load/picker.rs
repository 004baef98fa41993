//! The picker itself at full load: a process of its own, one gateway, everything around it in motion.
//!
//! It proves what must hold however fast the machine is; the figures it prints are compared with nothing.
//! `SIDESTEP_LOAD_SECONDS` is for work on it.

mod client;
mod conversation;
mod exposition;
#[allow(
    dead_code,
    reason = "the scripted gateway of other tests is not used here"
)]
#[path = "../it/extproc_gateway.rs"]
mod gateway;
mod process;
mod publisher;
mod tally;
mod world;

use client::{Client, Fate, Stream};
use conversation::{Conversation, beginnings};
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request as Ask;
use exposition::Exposition;
use gateway::{http_body, http_headers};
use parking_lot::Mutex;
use process::{Log, Process, get, get_json};
use publisher::Publisher;
use serde_json::Value;
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tally::Counts;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio::time::{interval, sleep};
use tokio_util::sync::CancellationToken;
use world::{Files, HELD, PODS, PUBLISHERS};

/// Streams at once, and those of them whose body never ends.
const STREAMS: usize = 64;
const STALLING: usize = 8;
/// Gateways that show no answers come in the beginning only: their load is released after 30 s.
const UNSEEN: Duration = Duration::from_secs(2);
/// What must happen once there is no more traffic.
const PATIENCE: Duration = Duration::from_secs(50);
/// Memory, in KiB: in all, and growth from the second third of the run to the last. What is known of
/// prompts fills up to 64 MiB, and when it does depends on the machine.
const MEMORY: u64 = 400 << 10;
const GROWTH: u64 = 64 << 10;
/// Series of `/metrics`: some per pod, and the picker's own.
const SERIES: usize = 10 * PODS + 2000;
/// Lines of the log: some per pod that comes or goes, and hardly any warnings.
const LINES: usize = 3000;
const WARNINGS: usize = 150;

#[tokio::test(flavor = "multi_thread")]
async fn everything_is_answered_released_and_counted_while_everything_around_it_changes() {
    let seconds = std::env::var("SIDESTEP_LOAD_SECONDS").map_or(30, |text| text.parse().unwrap());
    let soak = Soak::start().await;
    let seen = soak.run(Duration::from_secs(seconds)).await;
    let counts = soak.client.tally.counts();
    println!("{}", seen.figures(&counts));
    println!("refused: {:?}", counts.refused);
    assert_eq!(counts.faults, [""; 0]);
    println!("memory, KiB: {:?}", seen.memory);
    soak.is_at_rest().await;
    soak.index_holds_what_was_published().await;
    soak.decisions_are_those_that_clients_saw(&counts).await;
    soak.every_place_is_free_again().await;
    seen.memory_is_bounded();
    assert!(0 < seen.cached, "no decision has found a cached block");
    let last = get_metrics(soak.process.admin).await;
    let (status, log) = soak.process.stop().await;
    assert!(status.success(), "{status}");
    log_is_quiet(&log, &last, seen.refused_policies);
}

struct Soak {
    files: Arc<Files>,
    process: Process,
    client: Client,
    holds: Vec<Arc<Mutex<BTreeSet<u64>>>>,
    publishing: CancellationToken,
    _around: JoinSet<()>,
}

/// What was seen from outside while it ran.
#[derive(Default)]
struct Seen {
    /// Memory in KiB, at even times.
    memory: Vec<u64>,
    spent: Duration,
    took: Duration,
    decisions: u64,
    refused_policies: u64,
    /// Decisions with cached tokens among those looked at.
    cached: usize,
}

impl Soak {
    async fn start() -> Soak {
        let mut around = JoinSet::new();
        let publishing = CancellationToken::new();
        let (mut addresses, mut holds) = (Vec::new(), Vec::new());
        for (number, tokens) in beginnings().into_iter().enumerate() {
            let (mut publisher, address, held) = Publisher::bind(number, &mut around).await;
            publisher.holds(&tokens).await;
            around.spawn(publisher.run(publishing.clone()));
            addresses.push(address);
            holds.push(held);
        }
        let listener = TcpListener::bind("0.0.0.0:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        around.spawn(world::engines(listener));
        let receiver = world::free().await;
        let (open, shut) = (Duration::from_secs(4), Duration::from_secs(3));
        around.spawn(world::spans(receiver, open, shut));
        let files = Arc::new(Files::new(port, addresses, receiver));
        let process = Process::start(&files.config()).await;
        Soak {
            files,
            client: Client::new(process.ext_proc, port),
            process,
            holds,
            publishing,
            _around: around,
        }
    }

    async fn run(&self, length: Duration) -> Seen {
        let began = Instant::now();
        let until = began + length;
        let mut streams = JoinSet::new();
        for task in 0..STREAMS {
            streams.spawn(streams_of(self.client.clone(), task, until));
        }
        let mut changes = JoinSet::new();
        changes.spawn(world::slow_reader(self.process.admin));
        changes.spawn(pods_come_and_go(Arc::clone(&self.files)));
        let mut seen = self.watch(until).await;
        while let Some(ended) = streams.join_next().await {
            ended.unwrap();
        }
        seen.took = began.elapsed();
        seen.decisions = self.client.tally.counts().planned;
        changes.shutdown().await;
        self.files.write_pods(None);
        seen
    }

    /// Looks once a second, and replaces the policy.
    async fn watch(&self, until: Instant) -> Seen {
        let mut seen = Seen::default();
        let admin = self.process.admin;
        let before = self.process.spent();
        let mut metrics: Option<Exposition> = None;
        let mut ticks = interval(Duration::from_millis(500));
        let mut round = 0;
        while Instant::now() < until {
            ticks.tick().await;
            seen.memory.push(self.process.memory());
            if seen.memory.len().is_multiple_of(2) {
                continue;
            }
            round += 1;
            seen.refused_policies += u64::from(!self.files.write_policy(round));
            let now = get_metrics(admin).await;
            if let Some(before) = metrics.replace(now) {
                let fallen = metrics.as_ref().map(|now| now.fallen(&before));
                assert_eq!(fallen, Some(Vec::new()));
            }
            let decisions = get_json(admin, "/v1/decisions?limit=1000").await;
            let cached = |record: &&Value| 0 < record["cached_tokens"].as_u64().unwrap();
            seen.cached += decisions.as_array().unwrap().iter().filter(cached).count();
        }
        seen.spent = self.process.spent() - before;
        seen
    }

    /// Nothing that ended has left anything behind.
    async fn is_at_rest(&self) {
        let admin = self.process.admin;
        eventually("streams and bookings are gone", async || {
            let metrics = get_metrics(admin).await;
            let pods = get_json(admin, "/v1/pods").await;
            let busy = |pod: &&Value| {
                ["requests", "prefill_tokens", "decode_blocks"]
                    .iter()
                    .any(|what| pod[what].as_u64() != Some(0))
            };
            let pods = pods.as_array().unwrap();
            let busy: Vec<_> = pods.iter().filter(busy).take(3).collect();
            let open = metrics.value("sidestep_streams_open");
            let flying = metrics.value("sidestep_requests_in_flight");
            let rest = (open, flying) == (0.0, 0.0) && busy.is_empty() && pods.len() == PODS;
            (!rest).then(|| {
                format!(
                    "{open} streams, {flying} in flight, {} pods: {busy:?}",
                    pods.len()
                )
            })
        })
        .await;
        let metrics = get_metrics(admin).await;
        assert!(
            0.0 < metrics.value("sidestep_leases_total"),
            "no lease was had"
        );
    }

    async fn index_holds_what_was_published(&self) {
        self.publishing.cancel();
        eventually("the index holds what was published", async || {
            let expected: Vec<u64> = self
                .holds
                .iter()
                .map(|holds| holds.lock().len() as u64)
                .collect();
            let pods = get_json(self.process.admin, "/v1/pods").await;
            let found: Vec<u64> = pods
                .as_array()
                .unwrap()
                .iter()
                .filter(|pod| pod["kv_source"] != "absent")
                .map(|pod| pod["kv_blocks"].as_u64().unwrap())
                .collect();
            let metrics = get_metrics(self.process.admin).await;
            let whole = metrics.value("sidestep_index_blocks") as u64;
            let same =
                multiset(&expected) == multiset(&found) && whole == expected.iter().sum::<u64>();
            let live = metrics.value("sidestep_kv_sources{state=\"live\"}") as usize == PUBLISHERS;
            (!(same && live))
                .then(|| format!("expected {expected:?}, found {found:?}, {whole} in all"))
        })
        .await;
    }

    async fn decisions_are_those_that_clients_saw(&self, counts: &Counts) {
        let metrics = get_metrics(self.process.admin).await;
        let name = "sidestep_decisions_total";
        let awaited = metrics.sum(name, Counts::awaited);
        assert_eq!(awaited as u64, counts.planned);
        let others = metrics.sum(name, |series| !Counts::awaited(series));
        assert!(
            others as u64 <= counts.hasty,
            "{others} of {}",
            counts.hasty
        );
        for (code, count) in &counts.refused {
            let label = format!("code=\"{code}\"");
            let refused = metrics.sum("sidestep_refusals_total", |series| series.contains(&label));
            assert_eq!(refused as u64, *count, "{code}");
        }
        let all: u64 = counts.refused.values().sum();
        assert_eq!(metrics.sum("sidestep_refusals_total", |_| true) as u64, all);
        assert_eq!(metrics.value("sidestep_streams_total") as u64, counts.begun);
        assert_eq!(metrics.value("sidestep_streams_cut_total"), 0.0);
    }

    /// As many requests as may be held are, and not one more.
    async fn every_place_is_free_again(&self) {
        let admin = self.process.admin;
        let name = "sidestep_request_bytes_total";
        let before = get_metrics(admin).await.value(name);
        let body = Conversation::new(STREAMS).body(world::EXACT);
        let (first, rest) = body.split_at(1);
        let head = [(":method", "POST"), (":path", "/v1/chat/completions")];
        let open = async || {
            let stream = Stream::open(&self.client.channel(), false).await.unwrap();
            stream.tell(Ask::RequestHeaders(http_headers(&head, false)));
            stream.tell(Ask::RequestBody(http_body(first, false)));
            stream
        };
        let mut held = Vec::new();
        for _ in 0..HELD {
            held.push(open().await);
        }
        eventually("all bodies have begun", async || {
            let more = get_metrics(admin).await.value(name) - before;
            (more != HELD as f64).then(|| format!("{more} bytes"))
        })
        .await;
        let code = open().await.refusal().await.unwrap();
        assert_eq!(code.as_deref(), Some("too_many_requests_held"));
        for stream in &mut held {
            stream.body(rest, true);
            assert_eq!(stream.refusal().await, Ok(None));
            stream.returned(&body).await.unwrap();
        }
    }
}

impl Seen {
    fn figures(&self, counts: &Counts) -> String {
        let last = self.memory.last().copied().unwrap_or_default();
        let most = self.memory.iter().max().copied().unwrap_or_default();
        format!(
            "{} decisions in {:.1} s: {:.0}/s of {} streams; answer p50 {:.2} ms, p99 {:.2} ms; \
             {:.0} µs of processor time per stream; memory {} MiB, at most {} MiB",
            self.decisions,
            self.took.as_secs_f64(),
            self.decisions as f64 / self.took.as_secs_f64(),
            counts.begun,
            counts.wait(0.5),
            counts.wait(0.99),
            self.spent.as_micros() as f64 / counts.begun as f64,
            last >> 10,
            most >> 10,
        )
    }

    fn memory_is_bounded(&self) {
        let third = self.memory.len() / 3;
        let most = |part: &[u64]| part.iter().max().copied().unwrap_or_default();
        let second = most(&self.memory[third..2 * third]);
        let last = most(&self.memory[2 * third..]);
        assert!(last.max(second) <= MEMORY, "{last} KiB");
        assert!(last <= second + GROWTH, "{second} KiB, then {last} KiB");
    }
}

/// One of the streams after the other.
async fn streams_of(client: Client, task: usize, until: Instant) {
    let began = Instant::now();
    let mut conversation = Conversation::new(task);
    let mut draw = task as u64;
    while Instant::now() < until {
        // A linear congruential generator: the same fates in every run.
        draw = draw
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let number = draw >> 33;
        let fate = match task {
            0..STALLING => Fate::Stalls,
            STALLING if began.elapsed() < UNSEEN => Fate::Unseen,
            _ => Fate::draw(number),
        };
        client.stream(fate, &mut conversation, number).await;
    }
}

async fn pods_come_and_go(files: Arc<Files>) -> ! {
    let mut ticks = interval(Duration::from_secs(2));
    ticks.tick().await;
    let mut round = 0;
    loop {
        ticks.tick().await;
        files.write_pods((round % 3 != 2).then_some(round));
        round += 1;
    }
}

/// A scrape, which is valid and of bounded size.
async fn get_metrics(admin: SocketAddr) -> Exposition {
    let metrics = Exposition::read(&get(admin, "/metrics").await).unwrap();
    let series = metrics.series.len();
    assert!(series <= SERIES, "{series} series");
    metrics
}

/// Refused policies are the only errors, each once; warnings are few.
fn log_is_quiet(log: &Log, last: &Exposition, refused_policies: u64) {
    let (expected, others): (Vec<&String>, Vec<&String>) = log
        .errors
        .iter()
        .partition(|line| line.contains("a changed file was not put in force"));
    assert!(others.is_empty(), "{others:?}");
    let failures = last.value("sidestep_config_reload_failures_total") as u64;
    assert_eq!(expected.len() as u64, failures);
    assert!(
        0 < failures && failures <= refused_policies,
        "{failures} of {refused_policies}"
    );
    let kinds = log.kinds();
    println!("{} lines of log, warnings: {kinds:?}", log.lines);
    assert!(log.warnings.len() <= WARNINGS, "{kinds:?}");
    assert!(log.lines <= LINES, "{} lines", log.lines);
}

fn multiset(values: &[u64]) -> Vec<u64> {
    let mut values = values.to_vec();
    values.sort_unstable();
    values
}

/// Waits until `trouble` has none.
async fn eventually(what: &str, mut trouble: impl AsyncFnMut() -> Option<String>) {
    let deadline = Instant::now() + PATIENCE;
    while let Some(trouble) = trouble().await {
        assert!(Instant::now() < deadline, "never: {what}: {trouble}");
        sleep(Duration::from_millis(100)).await;
    }
}

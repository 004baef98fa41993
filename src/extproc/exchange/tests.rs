//! Streams with a stand-in picker, on a paused clock.
use super::*;
use crate::extproc::message::{BodyMode, BodyReply};
use crate::names::Endpoint;
use crate::route::DecisionId;
use parking_lot::Mutex;
use std::io::Write;
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;

/// Everything that happened on the picker's side, in order.
type Log = Arc<Mutex<Vec<String>>>;

/// How the stand-in answers.
#[derive(Clone, Copy, PartialEq)]
enum Mood {
    Plan,
    Refuse,
    NeverAnswer,
}

struct StandIn {
    mood: Mood,
    log: Log,
}

struct Trail(Log);

/// Says when a pick that waits is dropped.
struct Waits(Log);

impl Drop for Waits {
    fn drop(&mut self) {
        self.0.lock().push("pick dropped".into());
    }
}

impl Drop for Trail {
    fn drop(&mut self) {
        self.0.lock().push("flight gone".into());
    }
}

impl Follow for Trail {
    fn response_headers(&mut self, status: Option<u16>, _: Option<Endpoint>) {
        self.0.lock().push(format!("status {status:?}"));
    }
    fn first_bytes(&mut self) {
        self.0.lock().push("first bytes".into());
    }
    fn response_bytes(&mut self, chunk: &[u8]) {
        self.0.lock().push(format!("bytes {}", chunk.len()));
    }
    fn finish(self) {
        self.0.lock().push("finished".into());
    }
}

impl PickPods for StandIn {
    type Flight = Trail;

    fn ended_early(&self, arrival: &Arrival, how: Ended<'_>) {
        let trace = arrival.trace_parent.as_deref().unwrap_or("no trace");
        self.log.lock().push(match how {
            Ended::Refused(refusal) => format!("refused {} {trace}", refusal.code),
            Ended::Aborted => format!("aborted {trace}"),
        });
    }

    fn ready(&self) -> bool {
        true
    }

    async fn pick(&self, _: Head, body: Option<Bytes>) -> Result<(Plan, Trail), Refusal> {
        let body = body.map(|body| String::from_utf8_lossy(&body).into_owned());
        self.log.lock().push(format!("pick {body:?}"));
        match self.mood {
            Mood::Plan => Ok((plan(), Trail(Arc::clone(&self.log)))),
            Mood::Refuse => Err(Refusal::new(503, "no_decode_pod", "no ready decode pod")),
            Mood::NeverAnswer => {
                let _waits = Waits(Arc::clone(&self.log));
                std::future::pending().await
            }
        }
    }
}

fn plan() -> Plan {
    Plan {
        destination: Endpoint("10.0.0.1:8000".parse().unwrap()),
        edits: Vec::new(),
        decision_id: DecisionId::from_raw(7),
    }
}

const LIMITS: Limits = Limits {
    body: 1 << 20,
    held_requests: 2,
    body_stall: Duration::from_secs(10),
    body_total: Duration::from_secs(60),
    unannounced: Duration::from_secs(1),
    decision: Duration::from_secs(5),
    lease: Duration::from_secs(30),
    drain: Duration::from_secs(30),
};

struct Bench {
    shared: Arc<Shared<StandIn>>,
    log: Log,
}

impl Bench {
    fn new(mood: Mood) -> Bench {
        let log = Log::default();
        let picker = Arc::new(StandIn {
            mood,
            log: Arc::clone(&log),
        });
        Bench {
            shared: Arc::new(Shared::new(picker, LIMITS, Arc::default())),
            log,
        }
    }

    fn open(&self, request: BodyMode, response: BodyMode) -> Gateway {
        let (send, receive) = mpsc::unbounded_channel();
        let inbound = UnboundedReceiverStream::new(receive);
        let arrival = Arrival {
            at: std::time::Instant::now(),
            trace_parent: Some("00-gateway".into()),
            trace_state: None,
        };
        let answers = Exchange::answers(inbound, Arc::clone(&self.shared), arrival);
        Gateway {
            send: Some(send),
            modes: Some(Modes { request, response }),
            answers: Box::pin(answers),
        }
    }

    fn duplex(&self) -> Gateway {
        self.open(BodyMode::FullDuplex, BodyMode::Streamed)
    }

    fn log(&self) -> Vec<String> {
        self.log.lock().clone()
    }

    fn counters(&self) -> &Counters {
        &self.shared.counters
    }

    fn free_permits(&self) -> usize {
        self.shared.held.available_permits()
    }
}

/// The gateway's end of a stream.
struct Gateway {
    send: Option<mpsc::UnboundedSender<Received>>,
    modes: Option<Modes>,
    answers: Pin<Box<dyn Stream<Item = Result<Outgoing, Status>> + Send>>,
}

impl Gateway {
    fn tell(&self, incoming: Incoming) {
        let message = Ok((self.modes, incoming));
        self.send.as_ref().unwrap().send(message).ok().unwrap();
    }

    fn break_off(&self, how: Broken) {
        self.send.as_ref().unwrap().send(Err(how)).ok().unwrap();
    }

    fn half_close(&mut self) {
        self.send = None;
    }

    fn request(&self, text: &'static str) {
        self.tell(headers("POST", false));
        self.tell(body(text.as_bytes(), true));
    }

    async fn answer(&mut self) -> Outgoing {
        self.answers.next().await.unwrap().unwrap()
    }

    /// The refusal that comes next, after which the stream must end with OK.
    async fn refusal(&mut self) -> Refusal {
        let Outgoing::Immediate(refusal) = self.answer().await else {
            panic!("expected an immediate response");
        };
        assert!(self.answers.next().await.is_none());
        refusal
    }

    /// Lets the exchange take in what was told, although no answer is due.
    async fn settle(&mut self) {
        tokio::select! {
            biased;
            answer = self.answers.next() => panic!("{answer:?}"),
            () = tokio::task::yield_now() => {}
        }
    }

    async fn planned(&mut self) {
        assert!(matches!(
            self.answer().await,
            Outgoing::RequestHeaders(Some(_))
        ));
        assert!(matches!(
            self.answer().await,
            Outgoing::RequestBody(BodyReply::Bytes { end: true, .. })
        ));
    }
}

fn headers(method: &str, end: bool) -> Incoming {
    encoded(method, None, end)
}

fn encoded(method: &str, encoding: Option<&'static str>, end: bool) -> Incoming {
    let mut head = Head {
        method: method.into(),
        ..Head::default()
    };
    if let Some(encoding) = encoding {
        head.headers.push("content-encoding", encoding);
    }
    let head = Box::new(head);
    Incoming::RequestHeaders { head, end }
}

fn body(bytes: &[u8], end: bool) -> Incoming {
    Incoming::RequestBody {
        bytes: Bytes::copy_from_slice(bytes),
        end,
    }
}

fn response_headers() -> Incoming {
    Incoming::ResponseHeaders {
        status: Some(200),
        served: None,
        end: false,
    }
}

fn response_body(bytes: &'static [u8], end: bool) -> Incoming {
    Incoming::ResponseBody {
        bytes: Bytes::from_static(bytes),
        end,
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_and_its_response_pass_and_the_flight_finishes_once() {
    let bench = Bench::new(Mood::Plan);
    let mut gateway = bench.duplex();
    gateway.request("{}");
    gateway.planned().await;
    gateway.tell(response_headers());
    gateway.answer().await;
    gateway.tell(response_body(b"abc", false));
    gateway.answer().await;
    gateway.tell(response_body(b"", true));
    gateway.answer().await;
    gateway.break_off(Broken::Reset);
    assert!(
        gateway.answers.next().await.is_none(),
        "a reset is a normal end"
    );
    drop(gateway);
    assert_eq!(
        bench.log(),
        [
            "pick Some(\"{}\")",
            "status Some(200)",
            "first bytes",
            "bytes 3",
            "finished",
            "flight gone"
        ]
    );
    let counters = bench.counters();
    assert_eq!((counters.open_streams(), counters.aborted.get()), (0, 0));
    assert_eq!(
        (counters.request_bytes.get(), counters.response_bytes.get()),
        (2, 3)
    );
}

#[tokio::test(start_paused = true)]
async fn an_abort_at_any_point_releases_everything_at_once() {
    type Script = fn(&Gateway);
    let scripts: [(&str, Script); 6] = [
        ("after headers", |g| g.tell(headers("POST", false))),
        ("mid-body", |g| {
            g.tell(headers("POST", false));
            g.tell(body(b"{", false));
        }),
        ("after the pick", |g| g.request("{}")),
        ("after response headers", |g| {
            g.request("{}");
            g.tell(response_headers());
        }),
        ("mid response", |g| {
            g.request("{}");
            g.tell(response_headers());
            g.tell(response_body(b"data", false));
        }),
        ("before the end", |g| {
            g.request("{}");
            g.tell(response_headers());
            g.tell(response_body(b"data", false));
            g.tell(response_body(b"", false));
        }),
    ];
    for (point, script) in scripts {
        for half_close in [true, false] {
            let bench = Bench::new(Mood::Plan);
            let mut gateway = bench.duplex();
            script(&gateway);
            if half_close {
                gateway.half_close();
            } else {
                gateway.break_off(Broken::Reset);
            }
            while gateway.answers.next().await.is_some() {}
            drop(gateway);
            let log = bench.log();
            let picks = log.iter().filter(|line| line.starts_with("pick")).count();
            let gone = log.iter().filter(|line| *line == "flight gone").count();
            assert_eq!(picks, gone, "{point}: {log:?}");
            assert!(!log.contains(&"finished".to_owned()), "{point}: {log:?}");
            assert_eq!(bench.counters().aborted.get(), gone as u64, "{point}");
            assert_eq!(bench.counters().open_streams(), 0);
            assert_eq!(bench.free_permits(), LIMITS.held_requests, "{point}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn dropping_the_stream_while_a_pick_waits_drops_the_pick() {
    let bench = Bench::new(Mood::NeverAnswer);
    let mut gateway = bench.duplex();
    gateway.request("{}");
    gateway.settle().await;
    assert_eq!(bench.log(), ["pick Some(\"{}\")"]);
    drop(gateway);
    assert_eq!(bench.log()[1..], ["aborted no trace", "pick dropped"]);
    assert_eq!(bench.free_permits(), LIMITS.held_requests);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_cancels_its_waiting_pick_and_the_stream_does_not_end_with_ok() {
    let bench = Bench::new(Mood::NeverAnswer);
    let mut gateway = bench.duplex();
    gateway.request("{}");
    gateway.settle().await;
    gateway.half_close();
    let status = gateway.answers.next().await.unwrap().unwrap_err();
    assert_eq!(status.message(), "stream_ended_early");
    assert!(gateway.answers.next().await.is_none());
    drop(gateway);
    assert_eq!(bench.log()[1..], ["aborted no trace", "pick dropped"]);
}

#[tokio::test(start_paused = true)]
async fn a_stalled_body_is_a_408_after_the_pause_and_not_before() {
    let bench = Bench::new(Mood::Plan);
    let mut gateway = bench.duplex();
    let began = Instant::now();
    gateway.tell(headers("POST", false));
    gateway.tell(body(b"{", false));
    gateway.settle().await;
    tokio::time::advance(Duration::from_secs(9)).await;
    gateway.tell(body(b" ", false));
    let refusal = gateway.refusal().await;
    assert_eq!((refusal.status, refusal.code), (408, "body_timeout"));
    assert_eq!(began.elapsed().as_secs(), 19);
    assert_eq!(bench.counters().refusals(), [("body_timeout", 408, 1)]);
    assert_eq!(bench.log(), ["refused body_timeout no trace"], "told once");
}

#[tokio::test(start_paused = true)]
async fn a_body_that_trickles_for_ever_is_a_408_too() {
    let bench = Bench::new(Mood::Plan);
    let mut gateway = bench.duplex();
    let began = Instant::now();
    gateway.tell(headers("POST", false));
    let refusal = loop {
        gateway.tell(body(b" ", false));
        let wait = tokio::time::timeout(Duration::from_secs(9), gateway.answers.next());
        match wait.await {
            Err(_) => {}
            Ok(Some(Ok(Outgoing::Immediate(refusal)))) => break refusal,
            Ok(other) => panic!("{other:?}"),
        }
    };
    assert_eq!(refusal.status, 408);
    assert_eq!(began.elapsed().as_secs(), 60);
}

#[tokio::test(start_paused = true)]
async fn a_pick_that_takes_too_long_is_a_504_and_is_dropped() {
    let bench = Bench::new(Mood::NeverAnswer);
    let mut gateway = bench.duplex();
    let began = Instant::now();
    gateway.request("{}");
    assert_eq!(gateway.refusal().await.code, "decision_timeout");
    assert_eq!(began.elapsed().as_secs(), 5);
    drop(gateway);
    let refused = "refused decision_timeout no trace";
    assert_eq!(bench.log()[1..], [refused, "pick dropped"]);
}

#[tokio::test(start_paused = true)]
async fn a_gateway_that_waits_without_announcing_a_mode_hears_within_a_second() {
    let bench = Bench::new(Mood::Plan);
    let mut gateway = bench.duplex();
    gateway.modes = None;
    let began = Instant::now();
    gateway.tell(headers("POST", false));
    assert_eq!(gateway.refusal().await.code, "unsupported_processing_mode");
    assert_eq!(began.elapsed().as_secs(), 1);
    assert_eq!(bench.counters().unsupported_processing_mode.get(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_refusal_of_the_picker_reaches_the_client_and_ends_the_stream() {
    let bench = Bench::new(Mood::Refuse);
    let mut gateway = bench.duplex();
    gateway.request("{}");
    assert_eq!(gateway.refusal().await.code, "no_decode_pod");
    assert_eq!(bench.counters().refusals(), [("no_decode_pod", 503, 1)]);
    drop(gateway);
    assert_eq!(bench.log().len(), 1, "the picker tells its own refusals");
}

#[tokio::test(start_paused = true)]
async fn requests_above_the_limit_are_refused_at_their_headers_and_permits_come_back() {
    let bench = Bench::new(Mood::Plan);
    let mut stalled: Vec<_> = (0..2).map(|_| bench.duplex()).collect();
    for gateway in &mut stalled {
        gateway.tell(headers("POST", false));
        gateway.tell(body(&[b' '; 1_000], false));
        gateway.settle().await;
    }
    let mut third = bench.duplex();
    third.tell(headers("POST", false));
    let refusal = third.refusal().await;
    assert_eq!(
        (refusal.status, refusal.code),
        (503, "too_many_requests_held")
    );
    assert!(refusal.retry_after.is_some());

    drop(stalled.pop());
    let mut fourth = bench.duplex();
    fourth.request("{}");
    fourth.planned().await;
    assert_eq!(
        bench.free_permits(),
        1,
        "a request that went on is not held, although its response runs"
    );
}

#[tokio::test(start_paused = true)]
async fn load_of_a_response_that_is_not_shown_is_released_after_its_lease() {
    let bench = Bench::new(Mood::Plan);
    let mut gateway = bench.open(BodyMode::FullDuplex, BodyMode::None);
    gateway.request("{}");
    gateway.planned().await;
    gateway.break_off(Broken::Reset);
    assert!(gateway.answers.next().await.is_none());
    drop(gateway);
    tokio::time::sleep(LIMITS.lease - Duration::from_millis(1)).await;
    assert_eq!(bench.log().len(), 1, "still booked");
    tokio::time::sleep(Duration::from_millis(2)).await;
    assert_eq!(bench.log()[1..], ["finished", "flight gone"]);
    assert_eq!(
        (
            bench.counters().leases.get(),
            bench.counters().aborted.get()
        ),
        (1, 0)
    );
}

#[tokio::test(start_paused = true)]
async fn a_cut_refuses_what_waits_and_breaks_what_runs() {
    let bench = Bench::new(Mood::Plan);
    let mut waits = bench.duplex();
    waits.tell(headers("POST", false));
    waits.settle().await;
    let mut runs = bench.duplex();
    runs.request("{}");
    runs.planned().await;
    bench.shared.cut.cancel();
    assert_eq!(waits.refusal().await.code, "shutting_down");
    let status = runs.answers.next().await.unwrap().unwrap_err();
    assert_eq!(status.code(), tonic::Code::Unavailable);
    assert!(runs.answers.next().await.is_none());
    drop((waits, runs));
    assert_eq!(bench.counters().cut.get(), 2);
    let refused = "refused shutting_down no trace";
    assert_eq!(bench.log()[1..], [refused, "flight gone"]);
}

#[tokio::test(start_paused = true)]
async fn a_message_too_long_is_a_413() {
    let bench = Bench::new(Mood::Plan);
    let mut gateway = bench.open(BodyMode::Buffered, BodyMode::None);
    gateway.tell(headers("POST", false));
    assert!(matches!(
        gateway.answer().await,
        Outgoing::RequestHeaders(None)
    ));
    gateway.break_off(Broken::TooLong);
    assert_eq!(gateway.refusal().await.status, 413);
}

#[tokio::test]
async fn a_compressed_body_is_picked_by_its_text_and_goes_back_as_it_came() {
    let text = "{\"model\":\"m\"}".repeat(30_000);
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(text.as_bytes()).unwrap();
    let compressed = Bytes::from(encoder.finish().unwrap());

    let bench = Bench::new(Mood::Plan);
    let mut gateway = bench.duplex();
    gateway.tell(encoded("POST", Some("gzip"), false));
    gateway.tell(body(&compressed, true));
    assert!(matches!(
        gateway.answer().await,
        Outgoing::RequestHeaders(Some(_))
    ));
    let Outgoing::RequestBody(BodyReply::Bytes { bytes, end: true }) = gateway.answer().await
    else {
        panic!();
    };
    assert_eq!(bytes, compressed);
    assert_eq!(bench.log(), [format!("pick {:?}", Some(text))]);
}

#[tokio::test]
async fn a_body_that_is_not_what_its_encoding_says_is_a_400() {
    let bench = Bench::new(Mood::Plan);
    let mut gateway = bench.duplex();
    gateway.tell(encoded("POST", Some("gzip"), false));
    gateway.tell(body(b"{}", true));
    let refusal = gateway.refusal().await;
    assert_eq!(refusal.status, 400);
    assert!(refusal.message.contains("gzip"));
    let told = format!("refused {} no trace", refusal.code);
    assert_eq!(bench.log(), [told]);
}

#[tokio::test(start_paused = true)]
async fn a_body_in_an_unknown_encoding_is_picked_without_it_and_passed_on() {
    let bench = Bench::new(Mood::Plan);
    let mut gateway = bench.duplex();
    gateway.tell(encoded("POST", Some("br"), false));
    gateway.tell(body(b"\x0b\x02", true));
    gateway.planned().await;
    assert_eq!(bench.log(), ["pick None"]);
    assert_eq!(bench.counters().unreadable_encoding.get(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_second_head_on_a_running_stream_takes_no_permit_and_breaks_nothing() {
    let bench = Bench::new(Mood::Plan);
    let mut gateway = bench.duplex();
    gateway.request("{}");
    gateway.planned().await;
    let mut stalled: Vec<_> = (0..2).map(|_| bench.duplex()).collect();
    for other in &mut stalled {
        other.tell(headers("POST", false));
        other.settle().await;
    }
    gateway.tell(headers("POST", false));
    gateway.settle().await;
    assert_eq!(bench.counters().ignored_messages.get(), 1);
}

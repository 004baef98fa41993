//! Every message order and mode, written as a script: message in, answers out.
use super::*;
use crate::route::{HeaderEdit, names};
use proptest::prelude::*;

const LIMIT: usize = 11 << 20;

fn plan() -> Plan {
    Plan {
        destination: Endpoint("10.0.0.1:8000".parse().unwrap()),
        edits: vec![HeaderEdit::Remove(names::PREFILLER)],
        decision_id: DecisionId::from_raw(7),
    }
}

fn head(method: &str, headers: &[(&str, &'static str)]) -> Box<Head> {
    let mut head = Head {
        method: method.to_owned(),
        path: "/v1/chat/completions".to_owned(),
        ..Head::default()
    };
    for (name, value) in headers {
        head.headers.push(name, *value);
    }
    Box::new(head)
}

fn post() -> Incoming {
    Incoming::RequestHeaders {
        head: head("POST", &[]),
        end: false,
    }
}

fn request(method: &str, headers: &[(&str, &'static str)], end: bool) -> Incoming {
    Incoming::RequestHeaders {
        head: head(method, headers),
        end,
    }
}

fn body(bytes: &'static str, end: bool) -> Incoming {
    Incoming::RequestBody {
        bytes: Bytes::from_static(bytes.as_bytes()),
        end,
    }
}

fn response_headers(end: bool) -> Incoming {
    Incoming::ResponseHeaders {
        status: Some(200),
        served: None,
        end,
    }
}

fn response_body(bytes: &'static str, end: bool) -> Incoming {
    Incoming::ResponseBody {
        bytes: Bytes::from_static(bytes.as_bytes()),
        end,
    }
}

fn session(request: BodyMode, response: BodyMode) -> Session {
    let mut session = Session::new(LIMIT);
    session.announce(Some(Modes { request, response }));
    session
}

fn duplex() -> Session {
    session(BodyMode::FullDuplex, BodyMode::FullDuplex)
}

fn buffered() -> Session {
    session(BodyMode::Buffered, BodyMode::Streamed)
}

/// Actions in short: `headers+plan`, `body(abc)`, `body(abc|end)`, `pick(abc)`, …
fn say(actions: Actions) -> Vec<String> {
    actions.into_iter().map(|action| say_one(&action)).collect()
}

fn say_one(action: &Action) -> String {
    let bytes = |bytes: &Bytes| String::from_utf8_lossy(bytes).into_owned();
    let reply = |what: &str, reply: &BodyReply| match reply {
        BodyReply::Continue(Some(_)) => format!("{what}+plan"),
        BodyReply::Continue(None) => format!("{what}+continue"),
        BodyReply::Bytes { bytes: b, end } => {
            format!("{what}({}{})", bytes(b), if *end { "|end" } else { "" })
        }
    };
    match action {
        Action::Send(Outgoing::RequestHeaders(Some(_))) => "headers+plan".into(),
        Action::Send(Outgoing::RequestHeaders(None)) => "headers+continue".into(),
        Action::Send(Outgoing::RequestBody(r)) => reply("body", r),
        Action::Send(Outgoing::RequestTrailers) => "trailers".into(),
        Action::Send(Outgoing::ResponseHeaders { decision: id, .. }) => {
            format!("response-headers{}", if id.is_some() { "+id" } else { "" })
        }
        Action::Send(Outgoing::ResponseBody(r)) => reply("response", r),
        Action::Send(Outgoing::ResponseTrailers) => "response-trailers".into(),
        Action::Send(Outgoing::Immediate(refusal)) => {
            format!("immediate {} {}", refusal.status, refusal.code)
        }
        Action::Pick { body: None, .. } => "pick".into(),
        Action::Pick { body: Some(b), .. } => format!("pick({})", bytes(b)),
        Action::Flight(Flown::Headers { .. }) => "flight headers".into(),
        Action::Flight(Flown::FirstBytes) => "flight first".into(),
        Action::Flight(Flown::Bytes(b)) => format!("flight bytes({})", bytes(b)),
        Action::Flight(Flown::Finish) => "flight finish".into(),
        Action::Count(event) => format!("count {event:?}"),
        Action::Close(close) => format!("close {close:?}"),
    }
}

fn none() -> Vec<String> {
    Vec::new()
}

#[test]
fn full_duplex_holds_everything_then_sends_headers_and_body() {
    let mut s = duplex();
    assert_eq!(say(s.on(post())), none());
    assert_eq!(say(s.on(body("ab", false))), none());
    assert_eq!(s.waiting(), Waiting::Body { received: 2 });
    assert_eq!(say(s.on(body("cd", true))), ["pick(abcd)"]);
    assert_eq!(s.waiting(), Waiting::Decision);
    assert_eq!(
        say(s.picked(Ok(plan()))),
        ["headers+plan", "body(abcd|end)"]
    );
    assert_eq!(s.waiting(), Waiting::Nothing);
}

#[test]
fn an_empty_last_body_message_ends_the_body() {
    let mut s = duplex();
    s.on(post());
    s.on(body("abcd", false));
    assert_eq!(say(s.on(body("", true))), ["pick(abcd)"]);
    assert_eq!(
        say(s.picked(Ok(plan()))),
        ["headers+plan", "body(abcd|end)"]
    );
}

#[test]
fn an_empty_chunked_body_is_picked_without_a_body_and_ended_with_one_empty_chunk() {
    let mut s = duplex();
    s.on(post());
    assert_eq!(say(s.on(body("", true))), ["pick"]);
    assert_eq!(say(s.picked(Ok(plan()))), ["headers+plan", "body(|end)"]);
}

#[test]
fn trailers_end_the_body_and_no_chunk_says_end_of_stream() {
    let mut s = duplex();
    s.on(post());
    s.on(body("abcd", false));
    assert_eq!(say(s.on(Incoming::RequestTrailers)), ["pick(abcd)"]);
    assert_eq!(
        say(s.picked(Ok(plan()))),
        ["headers+plan", "body(abcd)", "trailers"]
    );
}

#[test]
fn trailers_without_any_body_are_answered_without_a_body_chunk() {
    let mut s = duplex();
    s.on(post());
    assert_eq!(say(s.on(Incoming::RequestTrailers)), ["pick"]);
    assert_eq!(say(s.picked(Ok(plan()))), ["headers+plan", "trailers"]);
}

#[test]
fn a_body_after_its_end_changes_nothing_whenever_it_comes() {
    let mut s = duplex();
    s.on(post());
    s.on(body("a", false));
    assert_eq!(say(s.on(body("b", true))), ["pick(ab)"]);
    assert_eq!(say(s.on(body("b", true))), ["count Ignored"]);
    assert_eq!(say(s.picked(Ok(plan()))), ["headers+plan", "body(ab|end)"]);
    assert_eq!(say(s.on(body("b", true))), ["count Ignored"]);
    assert_eq!(say(s.on(body("", true))), ["count Ignored"]);
    assert_eq!(say(s.on(post())), ["count Ignored"]);
    assert_eq!(
        say(s.on(response_headers(false))),
        ["flight headers", "response-headers+id"]
    );
}

#[test]
fn bodies_of_every_size_go_back_in_messages_below_64_kib_with_one_end() {
    for size in [
        0,
        1,
        63 << 10,
        64 << 10,
        65 << 10,
        (128 << 10) + 1,
        1 << 20,
        10 << 20,
    ] {
        let text = Bytes::from(vec![b'x'; size]);
        let mut s = duplex();
        s.on(post());
        for chunk in text.chunks(16 << 10) {
            let bytes = text.slice_ref(chunk);
            assert!(s.on(Incoming::RequestBody { bytes, end: false }).is_empty());
        }
        let picks = s.on(body("", true));
        assert_eq!(picks.len(), 1);
        let mut joined = Vec::new();
        let mut ends = Vec::new();
        for action in s.picked(Ok(plan())) {
            if let Action::Send(Outgoing::RequestBody(BodyReply::Bytes { bytes, end })) = action {
                assert!(bytes.len() < 64 << 10);
                joined.extend_from_slice(&bytes);
                ends.push(end);
            }
        }
        assert_eq!(joined, text);
        assert_eq!(ends.iter().filter(|end| **end).count(), 1);
        assert_eq!(ends.last(), Some(&true));
    }
}

#[test]
fn a_body_above_the_limit_is_a_413_at_once_and_nothing_else() {
    let mut s = duplex();
    s.on(post());
    let half = Bytes::from(vec![0; LIMIT / 2 + 1]);
    let chunk = || Incoming::RequestBody {
        bytes: half.clone(),
        end: false,
    };
    assert!(s.on(chunk()).is_empty());
    assert_eq!(
        say(s.on(chunk())),
        ["immediate 413 body_too_large", "close Ok"]
    );
    assert_eq!(say(s.on(chunk())), ["count Ignored"]);
    assert_eq!(say(s.picked(Ok(plan()))), none());
    assert!(!s.holds_request());
}

#[test]
fn an_announced_length_above_the_limit_is_a_413_before_any_body() {
    for mode in [BodyMode::FullDuplex, BodyMode::Buffered] {
        let mut s = session(mode, BodyMode::None);
        let headers = request("POST", &[("content-length", "99999999999")], false);
        assert_eq!(
            say(s.on(headers)),
            ["immediate 413 body_too_large", "close Ok"]
        );
    }
}

#[test]
fn buffered_answers_headers_first_and_applies_the_plan_in_the_body_reply() {
    let mut s = buffered();
    assert_eq!(say(s.on(post())), ["headers+continue"]);
    assert_eq!(say(s.on(body("abcd", true))), ["pick(abcd)"]);
    assert_eq!(say(s.picked(Ok(plan()))), ["body+plan"]);
    assert_eq!(
        say(s.on(response_headers(false))),
        ["flight headers", "response-headers+id"]
    );
}

#[test]
fn buffered_with_trailers_picks_at_the_body_and_answers_trailers_after_it() {
    let mut s = buffered();
    s.on(post());
    assert_eq!(say(s.on(body("abcd", false))), ["pick(abcd)"]);
    assert_eq!(say(s.on(Incoming::RequestTrailers)), none());
    assert_eq!(say(s.picked(Ok(plan()))), ["body+plan", "trailers"]);

    let mut s = buffered();
    s.on(post());
    s.on(body("abcd", false));
    assert_eq!(say(s.picked(Ok(plan()))), ["body+plan"]);
    assert_eq!(say(s.on(Incoming::RequestTrailers)), ["trailers"]);
    assert_eq!(say(s.on(Incoming::RequestTrailers)), ["count Ignored"]);
}

#[test]
fn buffered_trailers_without_a_body_are_refused_because_no_plan_can_be_applied() {
    let mut s = buffered();
    s.on(post());
    assert_eq!(
        say(s.on(Incoming::RequestTrailers)),
        ["immediate 400 empty_body", "close Ok"]
    );
}

#[test]
fn requests_without_a_body_are_answered_at_their_headers_in_every_mode() {
    let modes = [
        BodyMode::None,
        BodyMode::Streamed,
        BodyMode::Buffered,
        BodyMode::BufferedPartial,
        BodyMode::FullDuplex,
        BodyMode::Unsupported,
        BodyMode::Unannounced,
    ];
    let requests = [
        request("POST", &[], true),
        request("GET", &[], false),
        request("GET", &[], true),
        request("HEAD", &[], false),
        request("OPTIONS", &[], false),
        request("POST", &[("content-length", "0")], false),
        request("GET", &[("upgrade", "websocket")], false),
        request("POST", &[("Upgrade", "h2c")], false),
        request("CONNECT", &[], false),
    ];
    for mode in modes {
        for headers in &requests {
            let mut s = session(mode, BodyMode::Streamed);
            assert_eq!(say(s.on(headers.clone())), ["pick"], "{mode:?} {headers:?}");
            assert_eq!(say(s.picked(Ok(plan()))), ["headers+plan"]);
            assert_eq!(say(s.on(response_headers(false))).len(), 2);
            assert_eq!(
                say(s.on(response_body("x", true))),
                [
                    "flight first",
                    "flight bytes(x)",
                    "flight finish",
                    "response+continue"
                ]
            );
            assert_eq!(s.ending(), Ending::Settled);
        }
    }
}

#[test]
fn what_follows_an_upgrade_is_passed_on_piece_by_piece() {
    let mut s = duplex();
    s.on(request("GET", &[("upgrade", "websocket")], false));
    assert_eq!(say(s.on(body("early", false))), none());
    assert_eq!(say(s.picked(Ok(plan()))), ["headers+plan", "body(early)"]);
    assert_eq!(say(s.on(body("frame", false))), ["body(frame)"]);
    assert_eq!(say(s.on(body("", true))), ["body(|end)"]);
    assert_eq!(say(s.on(body("late", true))), ["count Ignored"]);
}

#[test]
fn a_bodiless_method_with_a_body_loses_none_of_it() {
    for mode in [BodyMode::Streamed, BodyMode::Buffered] {
        let mut s = session(mode, BodyMode::None);
        s.on(request("GET", &[], false));
        assert_eq!(say(s.on(body("a", false))), none());
        assert_eq!(say(s.picked(Ok(plan()))), ["headers+plan", "body+continue"]);
        assert_eq!(say(s.on(body("b", true))), ["body+continue"]);
    }
    let mut s = duplex();
    s.on(request("GET", &[], false));
    s.on(body("ab", true));
    assert_eq!(say(s.picked(Ok(plan()))), ["headers+plan", "body(ab|end)"]);
}

#[test]
fn early_bytes_of_an_upgrade_are_bounded_too() {
    let mut s = duplex();
    s.on(request("GET", &[], false));
    let bytes = Bytes::from(vec![0; LIMIT + 1]);
    assert_eq!(
        say(s.on(Incoming::RequestBody { bytes, end: false })),
        ["immediate 413 body_too_large", "close Ok"]
    );
}

#[test]
fn modes_that_cannot_carry_a_plan_are_refused_by_name_and_counted() {
    for mode in [
        BodyMode::Streamed,
        BodyMode::BufferedPartial,
        BodyMode::Unsupported,
    ] {
        let mut s = session(mode, BodyMode::Streamed);
        let actions = s.on(post());
        assert!(matches!(&actions[0],
            Action::Send(Outgoing::Immediate(refusal)) if refusal.message.contains(mode.as_str())));
        assert_eq!(
            say(actions),
            [
                "immediate 500 unsupported_processing_mode",
                "close Ok",
                "count UnsupportedMode"
            ]
        );
    }
}

#[test]
fn a_body_that_is_not_sent_is_routed_without_it_and_counted() {
    let mut s = session(BodyMode::None, BodyMode::None);
    assert_eq!(say(s.on(post())), ["pick", "count BodyNotSent"]);
    assert_eq!(say(s.picked(Ok(plan()))), ["headers+plan"]);
}

#[test]
fn a_gateway_that_announces_nothing_is_served_as_full_duplex() {
    let mut s = Session::new(LIMIT);
    s.announce(None);
    s.on(post());
    assert_eq!(s.waiting(), Waiting::Unannounced);
    s.on(body("ab", false));
    assert_eq!(s.waiting(), Waiting::Body { received: 2 });
    s.on(body("", true));
    assert_eq!(say(s.picked(Ok(plan()))), ["headers+plan", "body(ab|end)"]);
}

#[test]
fn a_gateway_that_announces_nothing_and_waits_is_told_which_mode_is_missing() {
    let mut s = Session::new(LIMIT);
    s.announce(None);
    s.on(post());
    assert_eq!(
        say(s.expired()),
        [
            "immediate 500 unsupported_processing_mode",
            "close Ok",
            "count UnsupportedMode"
        ]
    );
}

#[test]
fn only_the_first_message_announces_modes() {
    let mut s = duplex();
    s.announce(None);
    s.announce(Some(Modes {
        request: BodyMode::Buffered,
        response: BodyMode::None,
    }));
    assert_eq!(say(s.on(post())), none());
}

#[test]
fn a_body_or_trailers_without_headers_are_refused() {
    for first in [body("a", true), Incoming::RequestTrailers] {
        let mut s = duplex();
        assert_eq!(
            say(s.on(first))[0],
            "immediate 500 unsupported_processing_mode"
        );
    }
}

#[test]
fn deadlines_answer_the_client() {
    let mut s = duplex();
    s.on(post());
    s.on(body("ab", false));
    assert_eq!(say(s.expired()), ["immediate 408 body_timeout", "close Ok"]);
    assert_eq!(say(s.on(body("c", true))), ["count Ignored"]);

    let mut s = buffered();
    s.on(post());
    assert_eq!(say(s.expired()), ["immediate 408 body_timeout", "close Ok"]);

    let mut s = duplex();
    s.on(post());
    s.on(body("ab", true));
    assert_eq!(
        say(s.expired()),
        ["immediate 504 decision_timeout", "close Ok"]
    );
    assert_eq!(say(s.picked(Ok(plan()))), none());

    assert_eq!(say(duplex().expired()), none());
}

#[test]
fn a_chunk_without_bytes_does_not_count_as_progress() {
    let mut s = duplex();
    s.on(post());
    s.on(body("ab", false));
    let before = s.waiting();
    s.on(body("", false));
    assert_eq!(s.waiting(), before);
}

#[test]
fn a_refused_pick_is_the_answer_in_every_mode_and_nothing_follows() {
    for mode in [BodyMode::FullDuplex, BodyMode::Buffered] {
        let mut s = session(mode, BodyMode::Streamed);
        s.on(post());
        s.on(body("ab", true));
        let refusal = Refusal::new(503, "no_decode_pod", "no ready decode pod");
        assert_eq!(
            say(s.picked(Err(refusal))),
            ["immediate 503 no_decode_pod", "close Ok"]
        );
        for late in [
            post(),
            body("x", true),
            Incoming::RequestTrailers,
            response_headers(true),
            response_body("x", true),
            Incoming::ResponseTrailers,
        ] {
            assert_eq!(say(s.on(late)), ["count Ignored"]);
        }
        assert_eq!(s.ending(), Ending::Settled);
    }
}

#[test]
fn a_duplex_response_is_echoed_chunk_by_chunk_and_watched() {
    let mut s = duplex();
    s.on(post());
    s.on(body("ab", true));
    s.picked(Ok(plan()));
    s.on(response_headers(false));
    assert_eq!(say(s.on(response_body("", false))), ["response()"]);
    assert_eq!(
        say(s.on(response_body("data: 1", false))),
        ["flight first", "flight bytes(data: 1)", "response(data: 1)"]
    );
    assert_eq!(
        say(s.on(response_body("data: 2", false))),
        ["flight bytes(data: 2)", "response(data: 2)"]
    );
    assert_eq!(s.ending(), Ending::Aborted);
    assert_eq!(
        say(s.on(response_body("", true))),
        ["flight finish", "response(|end)"]
    );
    assert_eq!(s.ending(), Ending::Settled);
    assert_eq!(say(s.on(response_body("x", true))), ["count Ignored"]);
}

#[test]
fn a_response_that_ends_with_trailers_or_headers_finishes_once() {
    let mut s = duplex();
    s.on(request("GET", &[], true));
    s.picked(Ok(plan()));
    s.on(response_headers(false));
    s.on(response_body("x", false));
    assert_eq!(
        say(s.on(Incoming::ResponseTrailers)),
        ["flight finish", "response-trailers"]
    );
    assert_eq!(say(s.on(Incoming::ResponseTrailers)), ["count Ignored"]);

    let mut s = duplex();
    s.on(request("HEAD", &[], true));
    s.picked(Ok(plan()));
    assert_eq!(
        say(s.on(response_headers(true))),
        ["flight headers", "flight finish", "response-headers+id"]
    );
    assert_eq!(say(s.on(response_headers(true))), ["count Ignored"]);
    assert_eq!(say(s.on(Incoming::ResponseTrailers)), ["response-trailers"]);
}

#[test]
fn responses_without_a_plan_are_answered_and_tell_no_flight() {
    let mut s = session(BodyMode::None, BodyMode::Streamed);
    assert_eq!(say(s.on(response_headers(false))), ["response-headers"]);
    assert_eq!(say(s.on(response_body("x", true))), ["response+continue"]);
}

#[test]
fn the_end_of_a_stream_is_read_from_what_was_seen() {
    let answered = |response| {
        let mut s = session(BodyMode::FullDuplex, response);
        s.on(post());
        s.on(body("ab", true));
        s.picked(Ok(plan()));
        s
    };
    assert_eq!(answered(BodyMode::Streamed).ending(), Ending::Aborted);
    assert_eq!(answered(BodyMode::None).ending(), Ending::Unseen);
    let mut seen = answered(BodyMode::None);
    seen.on(response_headers(false));
    assert_eq!(seen.ending(), Ending::Unseen);
    seen.on(response_body("x", false));
    assert_eq!(seen.ending(), Ending::Aborted);

    let mut s = duplex();
    assert_eq!(s.ending(), Ending::Settled);
    s.on(post());
    assert_eq!(s.ending(), Ending::Aborted);
}

#[test]
fn a_message_too_long_is_a_413_before_the_plan_and_an_error_after_it() {
    let mut s = buffered();
    s.on(post());
    assert_eq!(
        say(s.message_too_long()),
        ["immediate 413 body_too_large", "close Ok"]
    );

    let mut s = duplex();
    s.on(request("GET", &[], true));
    s.picked(Ok(plan()));
    assert_eq!(
        say(s.message_too_long()),
        ["close Error(\"body_too_large\")"]
    );
}

/// Anything a gateway could send, and when the pick and the deadline come in between.
#[derive(Clone, Debug)]
enum Step {
    Message(Incoming),
    Picked,
    PickRefused,
    Expired,
}

fn bytes() -> impl Strategy<Value = Bytes> {
    prop_oneof![
        Just(Bytes::new()),
        proptest::collection::vec(any::<u8>(), 0..40).prop_map(Bytes::from),
        Just(Bytes::from(vec![b'z'; 150_000])),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let method = prop_oneof![3 => Just("POST"), 1 => Just("GET")];
    let message = prop_oneof![
        2 => (method, any::<bool>()).prop_map(|(method, end)| request(method, &[], end)),
        6 => (bytes(), prop::bool::weighted(0.3))
            .prop_map(|(bytes, end)| Incoming::RequestBody { bytes, end }),
        1 => Just(Incoming::RequestTrailers),
        2 => any::<bool>().prop_map(response_headers),
        3 => (bytes(), prop::bool::weighted(0.3))
            .prop_map(|(bytes, end)| Incoming::ResponseBody { bytes, end }),
        1 => Just(Incoming::ResponseTrailers),
        1 => Just(Incoming::Other),
        1 => Just(Incoming::Shown),
    ];
    prop_oneof![
        10 => message.prop_map(Step::Message),
        4 => Just(Step::Picked),
        1 => Just(Step::PickRefused),
        1 => Just(Step::Expired),
    ]
}

fn mode() -> impl Strategy<Value = BodyMode> {
    prop_oneof![
        4 => Just(BodyMode::FullDuplex),
        2 => Just(BodyMode::Buffered),
        1 => Just(BodyMode::Streamed),
        1 => Just(BodyMode::None),
        1 => Just(BodyMode::BufferedPartial),
        1 => Just(BodyMode::Unannounced),
    ]
}

/// What a strict gateway keeps in mind while it checks the answers.
#[derive(Debug, Default)]
struct Ledger {
    picks: usize,
    plans: usize,
    immediates: usize,
    closed: bool,
    header_replies: usize,
    sent: Vec<u8>,
    returned: Vec<u8>,
    request_ends: usize,
    response_sent: Vec<u8>,
    response_returned: Vec<u8>,
    finishes: usize,
    trailers: usize,
}

impl Ledger {
    fn check(&mut self, session_modes: Modes, actions: Actions) {
        for action in actions {
            assert!(
                !self.closed || matches!(action, Action::Count(_)),
                "{action:?} after the end"
            );
            match action {
                Action::Pick { .. } => self.picks += 1,
                Action::Send(outgoing) => self.sent(session_modes, outgoing),
                Action::Flight(Flown::Finish) => self.finishes += 1,
                Action::Close(_) => self.closed = true,
                Action::Flight(_) | Action::Count(_) => {}
            }
        }
        assert!(self.picks <= 1 && self.plans <= 1 && self.immediates <= 1);
        assert!(self.header_replies <= 1 && self.request_ends <= 1);
        assert!(self.finishes <= 1 && self.trailers <= 1);
    }

    fn sent(&mut self, modes: Modes, outgoing: Outgoing) {
        match outgoing {
            Outgoing::RequestHeaders(plan) => {
                self.header_replies += 1;
                self.plans += usize::from(plan.is_some());
                assert!(plan.is_some() || modes.request == BodyMode::Buffered);
            }
            Outgoing::RequestBody(BodyReply::Continue(plan)) => {
                assert!(!modes.request.returns_bytes());
                assert_eq!(self.header_replies, 1, "headers are answered first");
                self.plans += usize::from(plan.is_some());
            }
            Outgoing::RequestBody(BodyReply::Bytes { bytes, end }) => {
                assert!(modes.request.returns_bytes());
                assert_eq!((self.header_replies, self.request_ends), (1, 0));
                assert!(bytes.len() <= body::CHUNK);
                self.returned.extend_from_slice(&bytes);
                self.request_ends += usize::from(end);
            }
            Outgoing::RequestTrailers => {
                assert_eq!(self.header_replies, 1, "headers are answered first");
                self.trailers += 1;
            }
            Outgoing::ResponseBody(BodyReply::Bytes { bytes, .. }) => {
                assert!(modes.response.returns_bytes());
                self.response_returned.extend_from_slice(&bytes);
            }
            Outgoing::ResponseBody(BodyReply::Continue(plan)) => {
                assert!(!modes.response.returns_bytes() && plan.is_none());
            }
            Outgoing::ResponseHeaders { .. } | Outgoing::ResponseTrailers => {}
            Outgoing::Immediate(_) => self.immediates += 1,
        }
    }
}

proptest! {
    #[test]
    fn any_order_of_messages_keeps_the_invariants(
        request in mode(),
        response in mode(),
        steps in proptest::collection::vec(step(), 0..40),
    ) {
        let modes = Modes { request, response };
        let mut s = session(request, response);
        let mut ledger = Ledger::default();
        for step in steps {
            if ledger.closed {
                break;
            }
            let actions = match step {
                Step::Message(message) => {
                    // What a session takes in is decided before the message changes it.
                    let takes = !matches!(s.request, Request::Fresh | Request::Answered | Request::Refused)
                        && !matches!(&s.request, Request::Picking(picking) if picking.end != End::NotYet);
                    if let (true, Incoming::RequestBody { bytes, .. }) = (takes, &message) {
                        ledger.sent.extend_from_slice(bytes);
                    }
                    if let (true, Incoming::ResponseBody { bytes, .. }) =
                        (s.response != Response::Ended, &message)
                    {
                        ledger.response_sent.extend_from_slice(bytes);
                    }
                    s.on(message)
                }
                Step::Picked => s.picked(Ok(plan())),
                Step::PickRefused => s.picked(Err(Refusal::new(503, "no_decode_pod", "none"))),
                Step::Expired => s.expired(),
            };
            ledger.check(modes, actions);
            if response.returns_bytes() && !ledger.closed {
                prop_assert_eq!(&ledger.response_sent, &ledger.response_returned);
            }
            // Whatever is not answered has a deadline.
            if s.holds_request() {
                prop_assert_ne!(s.waiting(), Waiting::Nothing);
            } else if request.returns_bytes() && s.is_answered() && !ledger.closed {
                prop_assert_eq!(&ledger.sent, &ledger.returned);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn every_chunking_of_a_body_goes_back_whole(
        whole in proptest::collection::vec(any::<u8>(), 0..140_000),
        cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..20),
        empty_end in any::<bool>(),
    ) {
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(whole.len() + 1)).collect();
        cuts.extend([0, whole.len()]);
        cuts.sort_unstable();
        let mut s = duplex();
        s.on(post());
        let last = cuts.len() - 2;
        let mut picks = 0;
        for (at, pair) in cuts.windows(2).enumerate() {
            let bytes = Bytes::copy_from_slice(&whole[pair[0]..pair[1]]);
            picks += s.on(Incoming::RequestBody { bytes, end: at == last && !empty_end }).len();
        }
        if empty_end {
            picks += s.on(body("", true)).len();
        }
        prop_assert_eq!(picks, 1);
        let mut back = Vec::new();
        for action in s.picked(Ok(plan())) {
            if let Action::Send(Outgoing::RequestBody(BodyReply::Bytes { bytes, .. })) = action {
                back.extend_from_slice(&bytes);
            }
        }
        prop_assert_eq!(back, whole);
    }
}

//! Any order of messages, picks and deadlines: a session answers, and never breaks its promises.
#![no_main]

use bytes::Bytes;
use libfuzzer_sys::arbitrary::{Arbitrary, Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use sidestep::extproc::body::CHUNK;
use sidestep::extproc::message::{BodyMode, BodyReply, Incoming, Modes, Outgoing};
use sidestep::extproc::session::{Action, Session, Waiting};
use sidestep::names::Endpoint;
use sidestep::pick::{Head, Refusal};
use sidestep::route::{DecisionId, Plan};

const LIMIT: usize = 1 << 20;

/// One thing that happens to a session.
#[derive(Debug)]
enum Step {
    Message(Incoming),
    Picked,
    PickRefused,
    Expired,
    MessageTooLong,
}

/// A stream from its first message on.
#[derive(Debug)]
struct Stream {
    modes: Option<Modes>,
    steps: Vec<Step>,
}

const MODES: [BodyMode; 7] = [
    BodyMode::None,
    BodyMode::Streamed,
    BodyMode::Buffered,
    BodyMode::BufferedPartial,
    BodyMode::FullDuplex,
    BodyMode::Unsupported,
    BodyMode::Unannounced,
];

impl<'a> Arbitrary<'a> for Stream {
    fn arbitrary(u: &mut Unstructured<'a>) -> Result<Self> {
        let modes = Modes {
            request: *u.choose(&MODES)?,
            response: *u.choose(&MODES)?,
        };
        Ok(Stream {
            modes: u.arbitrary::<bool>()?.then_some(modes),
            steps: u.arbitrary_iter::<Step>()?.take(64).collect::<Result<_>>()?,
        })
    }
}

fn bytes(u: &mut Unstructured<'_>) -> Result<Bytes> {
    let size = *u.choose(&[0, 1, 7, CHUNK, CHUNK + 1, LIMIT])?;
    Ok(Bytes::from(vec![u.arbitrary::<u8>()?; size]))
}

fn head(u: &mut Unstructured<'_>) -> Result<Box<Head>> {
    let mut head = Head {
        method: (*u.choose(&["POST", "GET", "CONNECT", ""])?).to_owned(),
        ..Head::default()
    };
    match u.int_in_range(0..=4)? {
        0 => head.headers.push("content-length", u.arbitrary::<String>()?),
        1 => head.headers.push("content-length", "0"),
        2 => head.headers.push("upgrade", "websocket"),
        _ => {}
    }
    Ok(Box::new(head))
}

impl<'a> Arbitrary<'a> for Step {
    fn arbitrary(u: &mut Unstructured<'a>) -> Result<Self> {
        let end = u.arbitrary()?;
        Ok(Step::Message(match u.int_in_range(0..=12)? {
            0 => Incoming::RequestHeaders {
                head: head(u)?,
                end,
            },
            1 | 2 => Incoming::RequestBody {
                bytes: bytes(u)?,
                end,
            },
            3 => Incoming::RequestTrailers,
            4 => Incoming::ResponseHeaders {
                status: u.arbitrary()?,
                served: None,
                end,
            },
            5 => Incoming::ResponseBody {
                bytes: bytes(u)?,
                end,
            },
            6 => Incoming::ResponseTrailers,
            7 => Incoming::Other,
            8 => return Ok(Step::PickRefused),
            9 => return Ok(Step::Expired),
            10 => return Ok(Step::MessageTooLong),
            11 => Incoming::Shown,
            _ => return Ok(Step::Picked),
        }))
    }
}

fn plan() -> Plan {
    Plan {
        destination: Endpoint(([10, 0, 0, 1], 8000).into()),
        edits: Vec::new(),
        decision_id: DecisionId::from_raw(1),
    }
}

fuzz_target!(|stream: Stream| {
    let mut session = Session::new(LIMIT);
    session.announce(stream.modes);
    let (mut picks, mut plans, mut immediates, mut ends) = (0, 0, 0, 0);
    for step in stream.steps {
        let actions = match step {
            Step::Message(message) => session.on(message),
            Step::Picked => session.picked(Ok(plan())),
            Step::PickRefused => session.picked(Err(Refusal::new(503, "no_decode_pod", "none"))),
            Step::Expired => session.expired(),
            Step::MessageTooLong => session.message_too_long(),
        };
        for action in actions {
            match action {
                Action::Pick { body, .. } => {
                    picks += 1;
                    assert!(body.is_none_or(|body| body.len() <= LIMIT));
                }
                Action::Send(
                    Outgoing::RequestHeaders(Some(_))
                    | Outgoing::RequestBody(BodyReply::Continue(Some(_))),
                ) => plans += 1,
                Action::Send(Outgoing::RequestBody(BodyReply::Bytes { bytes, end })) => {
                    assert!(bytes.len() <= CHUNK && ends == 0);
                    ends += usize::from(end);
                }
                Action::Send(Outgoing::Immediate(_)) => immediates += 1,
                Action::Close(_) => {
                    assert!(picks <= 1 && plans <= picks && immediates + plans <= 1);
                    return;
                }
                _ => {}
            }
        }
        // What is held has a deadline.
        assert!(!session.holds_request() || session.waiting() != Waiting::Nothing);
    }
    assert!(picks <= 1 && plans <= picks && immediates + plans <= 1);
});

//! One generation request, from its bytes to its answer.
//!
//! Lives here: the three ways a request is served: here, prefilled elsewhere, decoded elsewhere.
//! Never here: HTTP connections (`http`), what a body means (`request`), how passes work.
//! Invariant: a request that goes away takes its sequences with it, on this engine and on the other.

use super::answer::{Answer, seed};
use super::app::App;
use super::config::{LocalPrefill, Role};
use super::fields::Fields;
use super::handoff::{self, Handoff, Kept, PeerError, Remote, Transfer};
use super::refusal::Refusal;
use super::reply::{About, CachedTokens, OnFirst, Speech, Told};
use super::request::{self, Ask, Delivery, Ending};
use super::scheduler::{Job, Keep, SequenceId, Start};
use crate::prompt::Api;
use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, Response, StatusCode};
use hyper::body::Incoming;
use serde_json::{Value, json};
use std::sync::Arc;

/// Bodies beyond this are read on a blocking thread, so that tokenizing them holds up nobody.
const INLINE_BYTES: usize = 32 << 10;

/// An answer, not yet an HTTP response.
pub(super) enum Answered {
    /// One JSON object.
    Whole(Value),
    /// A stream of tokens.
    Stream(Box<Speech>, super::reply::StreamUsage),
    /// Another engine's answer.
    Relay(Response<Incoming>),
    /// Another engine's error, word for word.
    Verbatim(StatusCode, Bytes),
}

/// Serves one request.
pub(super) async fn generate(
    app: &Arc<App>,
    api: Api,
    head: &Parts,
    body: Bytes,
) -> Result<Answered, Refusal> {
    let handoff = handoff::handoff(&head.headers, app.config.role)?;
    let ask = understand(app, api, body.clone()).await?;
    if handoff != Handoff::Here {
        check_handoff(&ask)?;
    }
    match handoff {
        Handoff::Here => serve(app, ask, &head.headers).await,
        Handoff::PrefillAt(prefiller) => {
            let path = head.uri.path();
            let leg = prefill_leg(app, prefiller, path, &head.headers, &body).await?;
            match leg {
                Leg::Kept(remote) => fetch(app, ask, remote, &head.headers).await,
                Leg::NothingKept => compute(app, ask, &head.headers).await,
                Leg::Refused(status, body) => Ok(Answered::Verbatim(status, body)),
            }
        }
        Handoff::DecodeAt(decoder) => {
            let told = prefill_here(app, ask, &head.headers).await?;
            let fields = Fields::read(&body)
                .ok_or_else(|| Refusal::bad_request("request body: expected an object"))?;
            let body = handoff::decode_body(&fields, told.params);
            let path = head.uri.path();
            let sent = app.peers.send(decoder, path, &head.headers, body).await;
            sent.map(Answered::Relay).map_err(|error| {
                app.handle.release(told.sequence);
                tracing::warn!(%error, "handoff: the decode engine gave no answer");
                let message = "decode engine: expected an answer, found none";
                Refusal::with(StatusCode::SERVICE_UNAVAILABLE, message.into())
            })
        }
    }
}

async fn understand(app: &Arc<App>, api: Api, body: Bytes) -> Result<Ask, Refusal> {
    if body.len() <= INLINE_BYTES {
        return request::read(api, &body, &app.config);
    }
    let owner = app.clone();
    let reading = tokio::task::spawn_blocking(move || request::read(api, &body, &owner.config));
    reading.await.unwrap_or_else(|_| {
        let message = "engine: expected to read the request, found a failure";
        Err(Refusal::with(
            StatusCode::INTERNAL_SERVER_ERROR,
            message.into(),
        ))
    })
}

/// A handoff moves the KV of one sequence. vLLM accepts more in one request and mixes them up.
fn check_handoff(ask: &Ask) -> Result<(), Refusal> {
    let choices = ask.prompts.len() * ask.copies;
    if choices != 1 {
        return Err(Refusal::bad_request(format!(
            "handoff: expected one prompt with n = 1, found {choices} choices"
        )));
    }
    match ask.transfer {
        Transfer::None => Ok(()),
        Transfer::RemoteDecode | Transfer::RemotePrefill(_) => Err(Refusal::bad_field(
            "kv_transfer_params",
            "kv_transfer_params: expected none beside a handoff header, found some",
        )),
    }
}

/// Serves a request without routing headers, which may be a leg of another engine's handoff.
async fn serve(app: &Arc<App>, ask: Ask, headers: &HeaderMap) -> Result<Answered, Refusal> {
    if ask.transfer != Transfer::None && ask.prompts.len() * ask.copies != 1 {
        return Err(Refusal::bad_field(
            "kv_transfer_params",
            "kv_transfer_params: expected one prompt with n = 1, found more",
        ));
    }
    match ask.transfer.clone() {
        Transfer::None => compute(app, ask, headers).await,
        Transfer::RemotePrefill(remote) => fetch(app, ask, remote, headers).await,
        Transfer::RemoteDecode => prefill_for_peer(app, ask, headers).await,
    }
}

/// Prefill and decode here: what a bypass is.
async fn compute(app: &Arc<App>, ask: Ask, headers: &HeaderMap) -> Result<Answered, Refusal> {
    if app.config.role != Role::Prefill && app.config.local_prefill == LocalPrefill::Unable {
        return Err(Refusal::bad_request(
            "engine: expected a prefill engine for this request, found none named, and this engine \
             cannot prefill locally",
        ));
    }
    let speech = speak(app, &ask, headers, Work::HERE, None)?;
    deliver(ask.delivery, speech).await
}

/// Fetch the prompt's KV from `remote`, decode here.
async fn fetch(
    app: &Arc<App>,
    ask: Ask,
    remote: Remote,
    headers: &HeaderMap,
) -> Result<Answered, Refusal> {
    let claim = json!({"engine_id": remote.engine_id, "request_id": remote.request_id});
    let claim = claim.to_string().into_bytes();
    let none = HeaderMap::new();
    let opened = (app.peers)
        .call(remote.address, handoff::KV_OPEN, &none, claim.clone())
        .await;
    if let Err(error) = opened {
        return Err(Refusal::kv_load_failed(&error.to_string()));
    }
    let owner = app.clone();
    let on_first: OnFirst = Box::new(move || {
        // Nobody waits for this; if it is lost, the lease ends the matter. The call has a time-out.
        tokio::spawn(async move {
            let none = HeaderMap::new();
            let done = (owner.peers).call(remote.address, handoff::KV_DONE, &none, claim);
            if let Err(error) = done.await {
                tracing::debug!(%error, "kv transfer: the prefill engine was not told");
            }
        });
    });
    let work = Work {
        start: Start::Pull,
        keep: Keep::Evictable,
        cached: CachedTokens::Reported(remote.cached),
    };
    let speech = speak(app, &ask, headers, work, Some(on_first))?;
    deliver(ask.delivery, speech).await
}

/// The prefill leg, asked for by a decode engine or its proxy.
async fn prefill_for_peer(
    app: &Arc<App>,
    ask: Ask,
    headers: &HeaderMap,
) -> Result<Answered, Refusal> {
    let work = Work {
        keep: Keep::ForDecode,
        ..Work::HERE
    };
    let speech = speak(app, &ask, headers, work, None)?;
    if let Delivery::Stream(usage) = ask.delivery {
        // As in vLLM, a stream has no place for the parameters; the lease will expire.
        return Ok(Answered::Stream(Box::new(speech), usage));
    }
    let sequence = speech.first_sequence();
    let (id, told) = (speech.id.clone(), finish(speech).await?);
    let mut answer = told.body.clone();
    if let (false, Some(sequence)) = (told.kept.is_empty(), sequence) {
        answer["kv_transfer_params"] = params(app, &id, sequence, &told);
    }
    Ok(Answered::Whole(answer))
}

/// What a prefill for a decode engine left behind.
struct Prefilled {
    sequence: SequenceId,
    params: Value,
}

async fn prefill_here(
    app: &Arc<App>,
    mut ask: Ask,
    headers: &HeaderMap,
) -> Result<Prefilled, Refusal> {
    ask.max_tokens = 1;
    let work = Work {
        keep: Keep::ForDecode,
        ..Work::HERE
    };
    let speech = speak(app, &ask, headers, work, None)?;
    let sequence = speech.first_sequence().ok_or_else(stopped)?;
    let (id, told) = (speech.id.clone(), finish(speech).await?);
    let params = params(app, &id, sequence, &told);
    Ok(Prefilled { sequence, params })
}

fn params(app: &App, id: &str, sequence: SequenceId, told: &Told) -> Value {
    let kept = Kept {
        blocks: &told.kept,
        engine_id: &app.engine_id,
        request_id: &request_id(id, sequence),
        address: app.address,
        tokens: told.prompt_tokens,
        cached: told.cached,
    };
    kept.params()
}

/// vLLM's form: the answer's id, the choice, and a suffix; ours is the sequence.
fn request_id(id: &str, sequence: SequenceId) -> String {
    format!("{id}-0-{:08x}", sequence.0)
}

/// The sequence a [`request_id`] names.
pub(super) fn sequence_of(request_id: &str) -> Option<SequenceId> {
    let (_, suffix) = request_id.rsplit_once('-')?;
    u64::from_str_radix(suffix, 16).ok().map(SequenceId)
}

/// What came of a prefill leg.
enum Leg {
    Kept(Remote),
    /// The prefill engine had nothing to hand over; the sidecar goes on without, and so do we.
    NothingKept,
    /// Its error goes to the client word for word.
    Refused(StatusCode, Bytes),
}

async fn prefill_leg(
    app: &App,
    prefiller: std::net::SocketAddr,
    path: &str,
    headers: &HeaderMap,
    body: &[u8],
) -> Result<Leg, Refusal> {
    let fields = Fields::read(body)
        .ok_or_else(|| Refusal::bad_request("request body: expected an object"))?;
    let leg = handoff::prefill_body(&fields);
    let answer = match app.peers.call(prefiller, path, headers, leg).await {
        Ok(answer) => answer,
        Err(PeerError::Refused { status, body, .. }) => return Ok(Leg::Refused(status, body)),
        Err(error @ PeerError::Unreachable { .. }) => {
            return Err(Refusal::kv_load_failed(&error.to_string()));
        }
    };
    let answer: Value = serde_json::from_slice(&answer).unwrap_or_default();
    let params = answer.get("kv_transfer_params").and_then(Value::as_object);
    match handoff::transfer(params, Role::Decode)? {
        Transfer::RemotePrefill(remote) => Ok(Leg::Kept(remote)),
        Transfer::None | Transfer::RemoteDecode => Ok(Leg::NothingKept),
    }
}

/// How the sequences of a request are to be computed.
#[derive(Clone, Copy)]
struct Work {
    start: Start,
    keep: Keep,
    cached: CachedTokens,
}

impl Work {
    const HERE: Work = Work {
        start: Start::Compute,
        keep: Keep::Evictable,
        cached: CachedTokens::Own,
    };
}

/// Queues the sequences of a request.
fn speak(
    app: &App,
    ask: &Ask,
    headers: &HeaderMap,
    work: Work,
    on_first: Option<OnFirst>,
) -> Result<Speech, Refusal> {
    let answers: Vec<(Job, Answer)> = ask
        .prompts
        .iter()
        .flat_map(|prompt| std::iter::repeat_n(prompt, ask.copies))
        .enumerate()
        .map(|(at, prompt)| {
            let copy = (at % ask.copies.max(1)) as u64;
            let answer = answer(app, ask, prompt, copy);
            let job = Job {
                prompt: prompt.clone(),
                space: ask.space.clone(),
                answer: answer.clone(),
                max_tokens: ask.max_tokens,
                start: work.start,
                keep: work.keep,
            };
            (job, answer)
        })
        .collect();
    let (jobs, answers): (Vec<Job>, Vec<Answer>) = answers.into_iter().unzip();
    let tickets = app
        .handle
        .submit(jobs)
        .map_err(|full| Refusal::with(StatusCode::SERVICE_UNAVAILABLE, full.to_string()))?;
    let about = About {
        id: app.answer_id(ask.api, headers),
        api: ask.api,
        model: ask.model.clone(),
        prompt_tokens: ask.prompts.iter().map(|prompt| prompt.len() as u64).sum(),
        cached: work.cached,
    };
    let choices = tickets.into_iter().zip(answers).collect();
    Ok(Speech::new(about, choices, on_first))
}

fn answer(app: &App, ask: &Ask, prompt: &[u32], copy: u64) -> Answer {
    Answer {
        vocabulary: app.vocabulary.clone(),
        seed: seed(prompt).wrapping_add(copy),
        opening: ask.opening,
        length: match ask.ending {
            Ending::Natural => app.config.answer_tokens.max(ask.min_tokens),
            Ending::AtLimit => u32::MAX,
        },
    }
}

async fn deliver(delivery: Delivery, speech: Speech) -> Result<Answered, Refusal> {
    match delivery {
        Delivery::Stream(usage) => Ok(Answered::Stream(Box::new(speech), usage)),
        Delivery::Whole => finish(speech).await.map(|told| Answered::Whole(told.body)),
    }
}

async fn finish(speech: Speech) -> Result<Told, Refusal> {
    speech.whole().await.ok_or_else(stopped)
}

fn stopped() -> Refusal {
    let message = "engine: expected to run, found it stopping";
    Refusal::with(StatusCode::SERVICE_UNAVAILABLE, message.into())
}

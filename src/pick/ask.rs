//! From a body to what the kernel is asked.
//!
//! Lives here: [`Understood`], and how headers and body become an [`Ask`].
//! Never here: waiting, choices.
//! Invariant: nothing that leaves here holds prompt text; what the client names is kept only where
//! it is bounded or configured.

use crate::decide::ask::{Affinity, Ask, AskKind, Counted, Pin};
use crate::decide::policy::{ClientPins, SessionAffinity};
use crate::names::{Endpoint, ModelName, PodId, SessionId};
use crate::pick::{Chains, Head, InForce, Refusal};
use crate::prompt::openai::Sequences;
use crate::prompt::{self, Api, Encoder};
use crate::route::Dialect;
use crate::route::names::{DECODE_PIN, POLICY_CLASS, PREFILL_PIN, PRIORITY};
use crate::telemetry::record::Times;
use crate::units::{BlockSize, Tokens};
use smallvec::SmallVec;
use std::sync::Arc;
use std::time::Instant;

/// Longest policy class looked at.
const LONGEST_CLASS: usize = 128;

/// A request whose body has been read.
#[derive(Debug)]
pub(super) struct Understood {
    pub(super) kind: AskKind,
    /// The model as the client named it.
    pub(super) model: Option<ModelName>,
    /// Names under which pods may serve it.
    pub(super) names: SmallVec<[ModelName; 2]>,
    /// The model for labels: only when it is a configured one.
    pub(super) label: Option<Arc<str>>,
    pub(super) operation: Option<&'static str>,
    pub(super) stream: bool,
    pub(super) max_tokens: Option<u32>,
    pub(super) tokens: Tokens,
    pub(super) counted: Counted,
    pub(super) chains: Chains,
    pub(super) trouble: Option<&'static str>,
    pub(super) session: Option<SessionId>,
    pub(super) priority: Option<i32>,
    pub(super) times: Times,
}

impl Understood {
    /// A request without a prompt: anything but a generation.
    pub(super) fn pass_through() -> Understood {
        Understood {
            kind: AskKind::PassThrough,
            model: None,
            names: SmallVec::new(),
            label: None,
            operation: None,
            stream: false,
            max_tokens: None,
            tokens: Tokens::ZERO,
            counted: Counted::NoPrompt,
            chains: Chains::new(),
            trouble: None,
            session: None,
            priority: None,
            times: Times::default(),
        }
    }

    /// What the kernel is asked. Affinity is filled in under the ledger's lock.
    ///
    /// # Errors
    /// When pins count and one of them is no address.
    pub(super) fn ask(&self, head: &Head, in_force: &InForce, draw: u64) -> Result<Ask, Refusal> {
        let pins = in_force.policy.client_pins;
        let subset = head.subset.clone();
        Ok(Ask {
            kind: self.kind,
            model: self.model.clone(),
            policy_class: head
                .headers
                .get(POLICY_CLASS)
                .filter(|class| class.len() <= LONGEST_CLASS)
                .map(Arc::from),
            priority: head
                .headers
                .get(PRIORITY)
                .and_then(|value| value.trim().parse().ok())
                .or(self.priority)
                .unwrap_or(0),
            prompt_tokens: self.tokens,
            counted: self.counted,
            subset: match in_force.dialect {
                Dialect::DecodeFirst => subset,
                Dialect::PrefillFirst => subset.throughout(),
            },
            decode_pin: pin(head, DECODE_PIN, pins)?,
            prefill_pin: pin(head, PREFILL_PIN, pins)?,
            affinity: Affinity::None,
            prefill_affinity: None,
            draw,
        })
    }
}

/// The pod that the client names in header `name`. A pin that counts and cannot be read is a fault of
/// the request: to go on without it would send the request where the client did not want it.
fn pin(head: &Head, name: &'static str, pins: ClientPins) -> Result<Option<Pin>, Refusal> {
    let Some(text) = head.headers.get(name) else {
        return Ok(None);
    };
    let text = text.trim();
    let endpoint = text.parse().map(|address| Pin::Endpoint(Endpoint(address)));
    match (endpoint.or_else(|_| text.parse().map(Pin::Address)), pins) {
        (Ok(pin), _) => Ok(Some(pin)),
        (Err(_), ClientPins::Ignore) => Ok(None),
        (Err(_), ClientPins::Honor) => Err(Refusal::new(
            400,
            "invalid_pin",
            format!("{name}: expected an address, ip:port or ip"),
        )),
    }
}

/// Reads a body, whole since `whole`, and turns its prompt into tokens and block keys. Takes CPU time,
/// waits for nothing.
pub(super) fn understand(
    encoder: &Encoder,
    (api, body): (Api, &[u8]),
    sizes: &[BlockSize],
    whole: Instant,
) -> Result<Understood, Refusal> {
    let began = Instant::now();
    let request = prompt::parse(api, body).map_err(|error| {
        Refusal::new(400, "invalid_body", error.to_string()).with_param(error.param())
    })?;
    let parsed = Instant::now();
    let resolved = encoder.profiles().resolve(&request.model);
    let prompt = encoder.encode(&request, sizes);
    let mut names = SmallVec::new();
    names.push(request.model.clone());
    let label = resolved.as_ref().map(|_| Arc::clone(&request.model.0));
    // An alias is a name that only clients know; the pods know the model's own. An adapter's name
    // stands for itself: a pod may serve the model without it.
    if let Some(resolved) = resolved
        && resolved.adapter.is_none()
        && !names.contains(resolved.profile.name())
    {
        names.push(resolved.profile.name().clone());
    }
    Ok(Understood {
        kind: match request.sequences {
            Sequences::One => AskKind::Generate,
            Sequences::Several => AskKind::GenerateSeveral,
        },
        names,
        label,
        operation: Some(match api {
            Api::ChatCompletions => "chat",
            Api::Completions => "text_completion",
        }),
        stream: request.stream,
        max_tokens: request.max_tokens,
        tokens: prompt.tokens,
        counted: match prompt.counted {
            prompt::Counted::Exact => Counted::Exact,
            prompt::Counted::EstimatedFromBytes => Counted::EstimatedFromBytes,
        },
        chains: prompt.chains,
        trouble: prompt.trouble.map(|trouble| trouble.as_str()),
        session: request.session.clone(),
        priority: request.priority,
        times: Times {
            waited: began - whole,
            parse: parsed - began,
            encode: parsed.elapsed(),
            ..Times::default()
        },
        model: Some(request.model),
    })
}

/// What session affinity asks of the kernel.
pub(super) fn affinity(mode: &SessionAffinity, before: Option<PodId>) -> Affinity {
    match (mode, before) {
        (SessionAffinity::Off, _) | (_, None) => Affinity::None,
        (SessionAffinity::Soft(_), Some(pod)) => Affinity::Soft(pod),
        (SessionAffinity::Hard(_), Some(pod)) => Affinity::Hard(pod),
    }
}

//! The small model that ships with the program: for the simulated engine, the demo and the tests.
//!
//! Lives here: a byte-level tokenizer of about 5,000 entries and a chat template, both made for this
//! project (`tests/tools/train_tokenizer.py`) and under its licence.
//! Never here: any vendor's vocabulary or template.
//! Invariant: any Unicode text survives encoding and decoding unchanged.

use super::profile::{Profile, ProfileError, ProfileFiles};
use crate::names::ModelName;

/// The name the model is served under unless it is given another.
pub const NAME: &str = "sidestep-small";

const TOKENIZER: &[u8] = include_bytes!("tokenizer.json");
const TEMPLATE: &str = include_str!("chat_template.jinja");
const SPECIAL_TOKENS: &[(&str, &str)] = &[("bos_token", "<|bos|>"), ("eos_token", "<|eos|>")];

pub(super) fn profile() -> Result<Profile, ProfileError> {
    let profile = Profile::load(&ProfileFiles {
        tokenizer_json: TOKENIZER,
        chat_template: Some(TEMPLATE),
        special_tokens: SPECIAL_TOKENS,
        ..ProfileFiles::default()
    })?;
    Ok(profile.named(ModelName::from(NAME), Vec::new()))
}

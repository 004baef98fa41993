//! The models of the config as prompt profiles.
//!
//! Lives here: reading tokenizer and template files.
//! Never here: what is in them (see `prompt`).
//! Invariant: every configured model has a profile, or the start fails and says which file is at fault.

use crate::config::{ModelConfig, Template, Tokenizer};
use crate::prompt::{Encoder, Profile, ProfileError, ProfileFiles, Profiles};
use std::path::{Path, PathBuf};

/// Memory for prompt prefixes that are known already.
const MEMO_BYTES: usize = 64 << 20;

/// A model's files could not be used.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A file could not be read.
    #[error("models[{model}]: expected a readable file, found {path}: {cause}")]
    Read {
        /// The model.
        model: String,
        /// The file.
        path: PathBuf,
        /// Why not.
        cause: std::io::Error,
    },
    /// A file is not what it should be.
    #[error("models[{model}]: {cause}")]
    Profile {
        /// The model.
        model: String,
        /// What is wrong.
        cause: ProfileError,
    },
}

/// An encoder for all configured models.
pub(super) fn encoder(models: &[ModelConfig]) -> Result<Encoder, ModelError> {
    let built: Result<Vec<Profile>, ModelError> = models.iter().map(profile).collect();
    let mut profiles = Profiles::new(built?).map_err(|cause| ModelError::Profile {
        model: "*".to_owned(),
        cause,
    })?;
    for model in models {
        for alias in &model.aliases {
            profiles
                .alias(&model.name, alias)
                .map_err(|cause| fault(model, cause))?;
        }
    }
    Ok(Encoder::new(profiles, MEMO_BYTES))
}

fn fault(model: &ModelConfig, cause: ProfileError) -> ModelError {
    ModelError::Profile {
        model: model.name.to_string(),
        cause,
    }
}

fn profile(model: &ModelConfig) -> Result<Profile, ModelError> {
    let (name, adapters) = (model.name.clone(), model.adapters.clone());
    let profile = match &model.tokenizer {
        Tokenizer::ByteEstimate => return Ok(Profile::byte_estimate(name, adapters)),
        Tokenizer::Builtin => Profile::builtin(),
        Tokenizer::File {
            tokenizer,
            template,
        } => {
            let tokenizer_json = read(model, tokenizer)?;
            let config = read_if_there(model, &tokenizer.with_file_name("tokenizer_config.json"))?;
            let template = match template {
                Template::File(path) => Some(read(model, path)?),
                Template::BesideTokenizer => {
                    read_if_there(model, &tokenizer.with_file_name("chat_template.jinja"))?
                }
            };
            let template = template.map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
            Profile::load(&ProfileFiles {
                tokenizer_json: &tokenizer_json,
                tokenizer_config: config.as_deref(),
                chat_template: template.as_deref(),
                ..ProfileFiles::default()
            })
        }
    };
    profile
        .map(|profile| profile.named(name, adapters))
        .map_err(|cause| fault(model, cause))
}

fn read(model: &ModelConfig, path: &Path) -> Result<Vec<u8>, ModelError> {
    std::fs::read(path).map_err(|cause| ModelError::Read {
        model: model.name.to_string(),
        path: path.to_owned(),
        cause,
    })
}

fn read_if_there(model: &ModelConfig, path: &Path) -> Result<Option<Vec<u8>>, ModelError> {
    if path.exists() {
        read(model, path).map(Some)
    } else {
        Ok(None)
    }
}

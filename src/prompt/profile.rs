//! What is known about a model's prompts: tokenizer, template, special tokens, names.
//!
//! Lives here: [`Profile`] and [`Profiles`], the lookup from a request's model to one.
//! Never here: reading files (`config` does), encoding (`encode`).
//! Invariant: a name resolves to one profile; two profiles with a name in common cannot be built
//! into a [`Profiles`].

use super::template::{ContentFormat, RenderError, Template, TemplateError};
use super::tokenizer::{Tokenizer, TokenizerError};
use crate::names::ModelName;
use minijinja::Value;
use rustc_hash::FxBuildHasher;
use std::collections::HashMap;
use std::sync::Arc;

/// A model's files, as bytes.
#[derive(Clone, Debug, Default)]
pub struct ProfileFiles<'a> {
    /// `tokenizer.json`.
    pub tokenizer_json: &'a [u8],
    /// `tokenizer_config.json`: special tokens, and the chat template unless given below.
    pub tokenizer_config: Option<&'a [u8]>,
    /// The chat template (`chat_template.jinja`, or the engine's `--chat-template`).
    pub chat_template: Option<&'a str>,
    /// Special tokens the template may name (`bos_token`, …), over those of the config.
    pub special_tokens: &'a [(&'a str, &'a str)],
    /// The engine's `--default-chat-template-kwargs`, a JSON object.
    pub template_args: Option<&'a str>,
    /// The engine's `--chat-template-content-format`; detected from the template where `None`.
    pub content_format: Option<ContentFormat>,
}

/// Files that do not make a profile.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProfileError {
    /// `tokenizer.json` is at fault.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The chat template is at fault.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// `tokenizer_config.json` is at fault.
    #[error("tokenizer_config.json: expected a JSON object, found something else")]
    Config,
    /// The default template arguments are at fault.
    #[error("default template arguments: expected a JSON object, found something else")]
    TemplateArgs,
    /// Two profiles answer to one name.
    #[error("models: expected each name once, found {0} twice")]
    Duplicate(ModelName),
}

/// Whether a chat template that a client sends is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum ClientTemplate {
    /// It is ignored, as engines do unless started with `--trust-request-chat-template`.
    #[default]
    Ignored,
    /// It replaces the model's. A template can be made to run for very long, so this is only for
    /// clients that are trusted not to.
    Trusted,
}

/// Whether the template sees the tools of a request with `"tool_choice": "none"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum DeclinedTools {
    /// It does, as in vLLM by default.
    #[default]
    Shown,
    /// It does not: vLLM's `--exclude-tools-when-tool-choice-none`.
    Hidden,
}

/// One model.
#[derive(Debug)]
pub struct Profile {
    name: ModelName,
    adapters: Vec<ModelName>,
    counting: Counting,
}

#[derive(Debug)]
pub(super) enum Counting {
    /// No tokenizer: a quarter of the bytes.
    Estimate,
    /// The model's own files.
    Exact(Box<Exact>),
}

/// What exact counting needs.
#[derive(Debug)]
pub(super) struct Exact {
    /// Tells the models of one [`Profiles`] apart.
    pub(super) id: u32,
    pub(super) tokenizer: Tokenizer,
    template: Option<Template>,
    /// The template used for requests with tools, if the model has a separate one.
    tool_template: Option<Template>,
    /// Special tokens and default arguments, as template variables.
    pub(super) variables: Vec<(Value, Value)>,
    pub(super) client_template: ClientTemplate,
    pub(super) declined_tools: DeclinedTools,
}

impl Exact {
    /// The model's template for a request with or without tools.
    pub(super) fn template(&self, tools: bool) -> Option<&Template> {
        (self.tool_template.as_ref().filter(|_| tools)).or(self.template.as_ref())
    }
}

impl Profile {
    /// A model without a tokenizer: its prompts are estimated, except those sent as token ids.
    #[must_use]
    pub fn byte_estimate(name: ModelName, adapters: Vec<ModelName>) -> Profile {
        Profile {
            name,
            adapters,
            counting: Counting::Estimate,
        }
    }

    /// A model with its tokenizer, under the name `model` and without adapters; see
    /// [`named`](Self::named).
    ///
    /// # Errors
    /// When a file is damaged or uses a part that this build does not have.
    pub fn load(files: &ProfileFiles) -> Result<Profile, ProfileError> {
        let tokenizer = Tokenizer::from_json(files.tokenizer_json)?;
        let config = match files.tokenizer_config {
            Some(bytes) => ModelConfig::read(bytes)?,
            None => ModelConfig::default(),
        };
        let template = files.chat_template.or(config.template.as_deref());
        let tool_template = match files.chat_template {
            Some(_) => None,
            None => config.tool_template.as_deref(),
        };
        let compile = |source: Option<&str>| match source {
            Some(source) => Template::compile_for(source, files.content_format).map(Some),
            None => Ok(None),
        };
        let mut variables = config.special_tokens;
        let given = files.special_tokens.iter();
        variables.extend(given.map(|(name, token)| (Value::from(*name), Value::from(*token))));
        if let Some(text) = files.template_args {
            variables.extend(object(text.as_bytes()).ok_or(ProfileError::TemplateArgs)?);
        }
        Ok(Profile {
            name: ModelName::from("model"),
            adapters: Vec::new(),
            counting: Counting::Exact(Box::new(Exact {
                id: 0,
                tokenizer,
                template: compile(template)?,
                tool_template: compile(tool_template)?,
                variables,
                client_template: ClientTemplate::default(),
                declined_tools: DeclinedTools::default(),
            })),
        })
    }

    /// The small model of the simulated engine, under the name `sidestep-small`.
    ///
    /// # Errors
    /// Never in practice: the files are compiled in, and a test loads them.
    pub fn builtin() -> Result<Profile, ProfileError> {
        super::builtin::profile()
    }

    /// The same model under another name and with these adapters.
    #[must_use]
    pub fn named(mut self, name: ModelName, adapters: Vec<ModelName>) -> Profile {
        self.name = name;
        self.adapters = adapters;
        self
    }

    /// The same model, with what to do about clients' templates.
    #[must_use]
    pub fn client_template(mut self, client_template: ClientTemplate) -> Profile {
        if let Counting::Exact(exact) = &mut self.counting {
            exact.client_template = client_template;
        }
        self
    }

    /// The same model, with what to do about declined tools.
    #[must_use]
    pub fn declined_tools(mut self, declined_tools: DeclinedTools) -> Profile {
        if let Counting::Exact(exact) = &mut self.counting {
            exact.declined_tools = declined_tools;
        }
        self
    }

    /// The name clients use.
    #[must_use]
    pub fn name(&self) -> &ModelName {
        &self.name
    }

    /// The adapters served on this model, each a name clients use.
    #[must_use]
    pub fn adapters(&self) -> &[ModelName] {
        &self.adapters
    }

    /// The tokenizer, if the model has one here.
    #[must_use]
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        self.exact().map(|exact| &exact.tokenizer)
    }

    /// How the model's chat template takes message contents.
    #[must_use]
    pub fn content_format(&self) -> Option<ContentFormat> {
        self.exact()?.template(false).map(Template::format)
    }

    /// Renders the model's chat template with exactly these variables.
    ///
    /// # Errors
    /// When the template refuses. `None` when the model has no template.
    pub fn render(&self, values: impl serde::Serialize) -> Option<Result<String, RenderError>> {
        Some(self.exact()?.template(false)?.render(values))
    }

    pub(super) fn exact(&self) -> Option<&Exact> {
        match &self.counting {
            Counting::Estimate => None,
            Counting::Exact(exact) => Some(exact),
        }
    }
}

/// What `tokenizer_config.json` says.
#[derive(Default)]
struct ModelConfig {
    special_tokens: Vec<(Value, Value)>,
    template: Option<String>,
    tool_template: Option<String>,
}

impl ModelConfig {
    fn read(bytes: &[u8]) -> Result<ModelConfig, ProfileError> {
        let mut config = ModelConfig::default();
        for (key, value) in object(bytes).ok_or(ProfileError::Config)? {
            match key.as_str() {
                Some("chat_template") => config.templates(&value),
                Some(name) if name.ends_with("_token") => {
                    if let Some(token) = spelling(&value) {
                        config.special_tokens.push((key, Value::from(token)));
                    }
                }
                _ => {}
            }
        }
        Ok(config)
    }

    /// One template, or a list of `{"name": …, "template": …}`.
    fn templates(&mut self, value: &Value) {
        self.template = value.as_str().map(str::to_owned);
        if self.template.is_some() {
            return;
        }
        for entry in value.try_iter().into_iter().flatten() {
            let field = |name| entry.get_attr(name).unwrap_or_default();
            let template = field("template").as_str().map(str::to_owned);
            match field("name").as_str() {
                Some("default") => self.template = template,
                Some("tool_use") => self.tool_template = template,
                _ => {}
            }
        }
    }
}

/// A token as text, or as an object with its `content`.
fn spelling(token: &Value) -> Option<String> {
    let content = token.get_attr("content").unwrap_or_default();
    token.as_str().or(content.as_str()).map(str::to_owned)
}

/// The entries of a JSON object.
fn object(bytes: &[u8]) -> Option<Vec<(Value, Value)>> {
    let value = super::openai::value_from_str(std::str::from_utf8(bytes).ok()?)?;
    if value.kind() != minijinja::value::ValueKind::Map {
        return None;
    }
    let keys = value.try_iter().ok()?;
    let entries = keys.map(|key| {
        let value = value.get_item(&key).unwrap_or_default();
        (key, value)
    });
    Some(entries.collect())
}

/// The profile a request runs under.
#[derive(Clone, Debug)]
pub struct Resolved {
    /// The model.
    pub profile: Arc<Profile>,
    /// The adapter, when the request named one.
    pub adapter: Option<ModelName>,
}

impl Resolved {
    /// The base model's name, whether or not the request named an adapter.
    #[must_use]
    pub fn model_name(&self) -> ModelName {
        self.profile.name.clone()
    }
}

/// Every model that is served, by the names clients use.
#[derive(Clone, Debug, Default)]
pub struct Profiles {
    by_name: HashMap<ModelName, Resolved, FxBuildHasher>,
}

impl Profiles {
    /// The profiles of a fleet.
    ///
    /// # Errors
    /// When two of them share a name.
    pub fn new(profiles: Vec<Profile>) -> Result<Profiles, ProfileError> {
        let mut by_name = HashMap::default();
        for (id, mut profile) in (0..).zip(profiles) {
            if let Counting::Exact(exact) = &mut profile.counting {
                exact.id = id;
            }
            let profile = Arc::new(profile);
            let adapters = profile.adapters.iter().map(Some);
            for adapter in std::iter::once(None).chain(adapters) {
                let name = adapter.unwrap_or(&profile.name).clone();
                let resolved = Resolved {
                    profile: Arc::clone(&profile),
                    adapter: adapter.cloned(),
                };
                if by_name.insert(name.clone(), resolved).is_some() {
                    return Err(ProfileError::Duplicate(name));
                }
            }
        }
        Ok(Profiles { by_name })
    }

    /// Lets clients use `alias` for `name`.
    ///
    /// # Errors
    /// When `alias` is taken. A `name` that is not known is left alone.
    pub fn alias(&mut self, name: &ModelName, alias: &ModelName) -> Result<(), ProfileError> {
        if let Some(resolved) = self.resolve(name)
            && self.by_name.insert(alias.clone(), resolved).is_some()
        {
            return Err(ProfileError::Duplicate(alias.clone()));
        }
        Ok(())
    }

    /// The profile of `model`, which may be an adapter's name.
    #[must_use]
    pub fn resolve(&self, model: &ModelName) -> Option<Resolved> {
        self.by_name.get(model).cloned()
    }

    /// Every name a client may use, in no particular order.
    pub fn names(&self) -> impl Iterator<Item = &ModelName> {
        self.by_name.keys()
    }
}

#[cfg(test)]
mod tests;

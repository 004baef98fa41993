//! Chat templates, rendered as the engines render them.
//!
//! Lives here: [`Template`], a Jinja template in the environment that Hugging Face `transformers`
//! (and so every engine) gives it: trimmed blocks, loop controls, Python's string methods and
//! Python's spelling of values.
//! Never here: which template a model has (`profile`), tokens.
//! Invariant: same values in, same bytes out as the Python reference; what cannot be rendered is an
//! error that carries a place in the template and no text.

mod clock;
pub mod format;
mod messages;
mod python;

pub use format::ContentFormat;
pub(crate) use messages::arguments;

use super::guarded;
use minijinja::{Environment, Error, ErrorKind, State, Value};
use serde::Serialize;
use std::time::SystemTime;

/// Name of the only template in an environment.
const NAME: &str = "chat";

/// A compiled chat template.
#[derive(Debug)]
pub struct Template {
    environment: Environment<'static>,
    /// How the template wants message contents.
    format: ContentFormat,
}

/// The template text is not a template.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("chat template: expected Jinja, found {fault} at line {line}")]
pub struct TemplateError {
    /// The kind of fault.
    pub fault: String,
    /// Line of the template, from 1; 0 when unknown.
    pub line: usize,
}

/// The template did not render.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("chat template: expected a rendered conversation, found {fault} at line {line}")]
pub struct RenderError {
    /// The kind of fault, from a fixed list.
    pub fault: String,
    /// Line of the template, from 1; 0 when unknown.
    pub line: usize,
}

impl Template {
    /// Compiles `source`, and detects how it wants message contents.
    ///
    /// # Errors
    /// When `source` is not valid Jinja.
    pub fn compile(source: &str) -> Result<Template, TemplateError> {
        Template::compile_for(source, None)
    }

    /// Compiles `source` for contents in `format`; detected where `None`.
    ///
    /// # Errors
    /// When `source` is not valid Jinja.
    pub fn compile_for(
        source: &str,
        format: Option<ContentFormat>,
    ) -> Result<Template, TemplateError> {
        let mut environment = environment();
        environment
            .add_template_owned(NAME, without_generation_tags(source))
            .map_err(|error| TemplateError {
                fault: error.kind().to_string(),
                line: error.line().unwrap_or(0),
            })?;
        Ok(Template {
            environment,
            format: format.unwrap_or_else(|| ContentFormat::detect(source)),
        })
    }

    /// How the template wants message contents.
    #[must_use]
    pub fn format(&self) -> ContentFormat {
        self.format
    }

    /// Renders with `values` (a map) as the template's variables, exactly as given.
    ///
    /// # Errors
    /// When the template refuses: by `raise_exception`, or because an operation on a value failed.
    pub fn render(&self, values: impl Serialize) -> Result<String, RenderError> {
        guarded(|| {
            (self.environment.get_template(NAME))
                .and_then(|template| template.render(values))
                .map_err(|error| RenderError {
                    fault: error.kind().to_string(),
                    line: error.line().unwrap_or(0),
                })
        })
        .unwrap_or_else(|| {
            Err(RenderError {
                fault: "a panic".to_owned(),
                line: 0,
            })
        })
    }
}

/// The environment of `transformers.utils.chat_template_utils`.
fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_unknown_method_callback(python::method);
    environment.set_formatter(|out, _state, value| python::write_str(out, value));
    environment.add_filter("tojson", python::tojson);
    environment.add_filter("string", python::string);
    environment.add_test("sequence", python::is_sequence);
    environment.add_test("iterable", python::is_iterable);
    environment.add_test("number", python::is_number);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    environment
}

/// What a template calls to refuse a conversation. The message may quote the conversation, so it is
/// dropped here.
fn raise_exception(_state: &State, _message: Value) -> Result<Value, Error> {
    Err(Error::new(
        ErrorKind::InvalidOperation,
        "raised by the template",
    ))
}

/// The engine's wall clock, which is taken to be in UTC. A prompt with a date in it is counted wrongly
/// where the engine runs in another time zone, and for a moment around midnight.
fn strftime_now(format: &str) -> String {
    clock::strftime(SystemTime::now(), format)
}

/// `{% generation %}` marks the assistant's text for training. It renders nothing, so it becomes a
/// block that renders its body, with the tag's own whitespace control.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        let Some(end) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let (tag, after) = tag.split_at(end + 2);
        let word = tag[2..end].trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+');
        match word {
            "generation" => out.push_str(&tag.replacen("generation", "if true", 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endif", 1)),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests;

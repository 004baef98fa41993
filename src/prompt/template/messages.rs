//! A client's conversation as the engine hands it to the template.
//!
//! Lives here: the rewriting vLLM does before it renders (`vllm/entrypoints/chat_utils.py`): contents
//! in the template's form, tool-call arguments as objects, the reasoning under both its names.
//! Never here: rendering.
//! Invariant: a conversation that holds anything but text is refused as a whole, because only the
//! engine knows how many tokens an image takes.

use super::ContentFormat;
use crate::prompt::openai::{ChatInput, value_from_str};
use minijinja::Value;
use minijinja::value::ValueKind;

/// The conversation holds images, audio, video or files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NotText;

/// Marks the end of the last message while it is rendered, so that the text can be cut there. Ends
/// in a space to see whether the template trims.
const END_MARK: &str = "\u{f8ff}end-of-the-last-message\u{f8ff} ";

/// A conversation ready for its template.
pub(crate) struct Arguments {
    /// The template's variables.
    pub(crate) values: Value,
    /// Whether the rendered text must be cut at the end of the last message.
    continues: bool,
}

impl Arguments {
    /// What the engine tokenizes of `rendered`; `None` when the template left the last message out
    /// although it is to be continued.
    pub(crate) fn cut(&self, mut rendered: String) -> Option<String> {
        if self.continues {
            let end = rendered.rfind(END_MARK.trim_end())?;
            let trims = !rendered[end..].starts_with(END_MARK);
            rendered.truncate(end);
            if trims {
                rendered.truncate(rendered.trim_end().len());
            }
        }
        Some(rendered)
    }
}

/// The variables for `chat`; `base` holds the model's special tokens and default arguments.
pub(crate) fn arguments(
    chat: &ChatInput,
    format: ContentFormat,
    base: &[(Value, Value)],
) -> Result<Arguments, NotText> {
    let mut messages = Vec::with_capacity(chat.messages.len());
    for message in &chat.messages {
        messages.push(rewrite(message, format)?);
    }
    let continues = chat.continue_final_message && !messages.is_empty();
    if let Some(last) = messages.last_mut().filter(|_| continues) {
        *last = mark_end(last);
    }
    let given = entries(chat.template_args.as_ref().unwrap_or(&Value::UNDEFINED));
    let effort = chat.reasoning_effort.as_deref();
    let thinking = effort.filter(|_| !given.iter().any(|(key, _)| is(key, "enable_thinking")));
    let own = [
        thinking.map(|effort| ("enable_thinking", Value::from(effort != "none"))),
        effort.map(|effort| ("reasoning_effort", Value::from(effort))),
        Some(("messages", Value::from(messages))),
        Some(("tools", list_or_none(chat.tools.as_ref()))),
        Some(("documents", list_or_none(chat.documents.as_ref()))),
        Some((
            "add_generation_prompt",
            Value::from(chat.add_generation_prompt),
        )),
    ];
    let own = own.into_iter().flatten();
    let own = own.map(|(key, value)| (Value::from(key), value));
    // Of a repeated name the last counts: the client's over the model's, ours over the client's.
    let values = base.iter().cloned().chain(given).chain(own).collect();
    Ok(Arguments { values, continues })
}

/// An empty list is the same to an engine as none.
fn list_or_none(list: Option<&Value>) -> Value {
    match list {
        Some(list) if list.is_true() => list.clone(),
        _ => Value::from(()),
    }
}

/// Key by key, in order; empty for anything that is not an object.
fn entries(object: &Value) -> Vec<(Value, Value)> {
    if object.kind() != ValueKind::Map {
        return Vec::new();
    }
    let keys = object.try_iter().into_iter().flatten();
    keys.map(|key| {
        let value = object.get_item(&key).unwrap_or_default();
        (key, value)
    })
    .collect()
}

fn is(key: &Value, name: &str) -> bool {
    key.as_str() == Some(name)
}

fn field(object: &Value, name: &str) -> Value {
    object.get_attr(name).unwrap_or_default()
}

/// Absent or `null`.
fn absent(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Undefined | ValueKind::None)
}

fn rewrite(message: &Value, format: ContentFormat) -> Result<Value, NotText> {
    let role = field(message, "role");
    let mut out = vec![
        (Value::from("role"), role.clone()),
        (
            Value::from("content"),
            content(&field(message, "content"), format)?,
        ),
    ];
    let mut keep = |name: &'static str, value: Value| out.push((Value::from(name), value));
    if is(&role, "assistant") {
        let calls = field(message, "tool_calls");
        if calls.kind() == ValueKind::Seq && calls.is_true() {
            let calls = calls.try_iter().into_iter().flatten();
            keep("tool_calls", calls.map(|call| tool_call(&call)).collect());
        }
        let mut reasoning = field(message, "reasoning");
        if absent(&reasoning) {
            reasoning = field(message, "reasoning_content");
        }
        if !absent(&reasoning) {
            keep("reasoning", reasoning.clone());
            keep("reasoning_content", reasoning);
        }
    }
    if is(&role, "tool") && !absent(&field(message, "tool_call_id")) {
        keep("tool_call_id", field(message, "tool_call_id"));
    }
    if is(&role, "developer") && !absent(&field(message, "tools")) {
        keep("tools", field(message, "tools"));
    }
    if field(message, "name").as_str().is_some() {
        keep("name", field(message, "name"));
    }
    Ok(out.into_iter().collect())
}

/// A content in the form the template wants.
fn content(content: &Value, format: ContentFormat) -> Result<Value, NotText> {
    let texts = match content.kind() {
        ValueKind::Undefined | ValueKind::None => Vec::new(),
        ValueKind::String if format == ContentFormat::Text => return Ok(content.clone()),
        ValueKind::String => vec![content.clone()],
        ValueKind::Seq => {
            let parts = content.try_iter().into_iter().flatten();
            parts.map(|part| text(&part)).collect::<Result<_, _>>()?
        }
        _ => return Err(NotText),
    };
    Ok(match format {
        ContentFormat::Text => {
            let texts: Vec<&str> = (texts.iter().filter_map(Value::as_str))
                .filter(|text| !text.is_empty())
                .collect();
            Value::from(texts.join("\n"))
        }
        ContentFormat::Parts => texts
            .into_iter()
            .map(|text| -> Value {
                [("type", Value::from("text")), ("text", text)]
                    .into_iter()
                    .collect()
            })
            .collect(),
    })
}

/// The text of one part.
fn text(part: &Value) -> Result<Value, NotText> {
    if part.as_str().is_some() {
        return Ok(part.clone());
    }
    let kind = field(part, "type");
    let key = match kind.as_str() {
        Some("text" | "input_text" | "output_text") => "text",
        Some("refusal") => "refusal",
        Some("thinking") => "thinking",
        None if absent(&kind) => "text",
        _ => return Err(NotText),
    };
    let text = field(part, key);
    if text.as_str().is_some() {
        Ok(text)
    } else {
        Err(NotText)
    }
}

/// A tool call whose arguments are an object, where the client sent JSON text.
fn tool_call(call: &Value) -> Value {
    let function = field(call, "function");
    if function.kind() != ValueKind::Map {
        return call.clone();
    }
    let arguments = field(&function, "arguments");
    let parsed = match arguments.as_str() {
        Some(text) => value_from_str(text).filter(|value| !absent(value)),
        None => Some(arguments).filter(Value::is_true),
    };
    let parsed = parsed.unwrap_or_else(|| Value::from_iter(<[(&str, Value); 0]>::default()));
    let function = with(&function, "arguments", parsed);
    with(call, "function", function)
}

/// `object` with one key set: at its place if it is there, else at the end.
fn with(object: &Value, key: &'static str, value: Value) -> Value {
    (entries(object).into_iter())
        .chain([(Value::from(key), value)])
        .collect()
}

/// `message` with the mark behind its (last) text.
fn mark_end(message: &Value) -> Value {
    let content = field(message, "content");
    let marked = match content.as_str() {
        Some(text) => Value::from(format!("{text}{END_MARK}")),
        None => {
            let mut parts: Vec<Value> = content.try_iter().into_iter().flatten().collect();
            if let Some(last) = parts.last_mut() {
                let text = field(last, "text");
                let text = format!("{}{END_MARK}", text.as_str().unwrap_or_default());
                *last = with(last, "text", Value::from(text));
            }
            Value::from(parts)
        }
    };
    with(message, "content", marked)
}

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
    let parts = parts(&field(message, "content"))?;
    let content = match format {
        ContentFormat::Text => joined(parts.iter().filter(|part| !part.text().is_empty())),
        // Few templates read parts of a tool's answer, so it is one text in either format.
        ContentFormat::Parts if is(&role, "tool") && parts.iter().all(Part::is_text) => {
            joined(parts.iter())
        }
        ContentFormat::Parts => parts.iter().map(Part::to_value).collect(),
    };
    let mut out = vec![("role", role.clone()), ("content", content)];
    if is(&role, "assistant") {
        let calls = field(message, "tool_calls");
        if calls.kind() == ValueKind::Seq && calls.is_true() {
            let calls = calls.try_iter().into_iter().flatten();
            out.push(("tool_calls", calls.map(|call| tool_call(&call)).collect()));
        }
        let mut reasoning = field(message, "reasoning");
        if absent(&reasoning) {
            reasoning = field(message, "reasoning_content");
        }
        if !absent(&reasoning) {
            out.push(("reasoning", reasoning.clone()));
            out.push(("reasoning_content", reasoning));
        }
    }
    if is(&role, "tool") && !absent(&field(message, "tool_call_id")) {
        out.push(("tool_call_id", field(message, "tool_call_id")));
    }
    for name in ["name", "task"] {
        let value = field(message, name);
        if value.as_str().is_some() {
            out.push((name, value));
        }
    }
    if is(&role, "developer") {
        let tools = field(message, "tools");
        let tools = if absent(&tools) {
            Value::from(())
        } else {
            tools
        };
        out.push(("tools", tools));
    }
    Ok(out.into_iter().collect())
}

/// One part of a content.
enum Part {
    Text(Value),
    /// The name of a tool that the template is to explain at this place.
    ToolReference(Value),
}

impl Part {
    fn text(&self) -> &str {
        let (Part::Text(text) | Part::ToolReference(text)) = self;
        text.as_str().unwrap_or_default()
    }

    fn is_text(&self) -> bool {
        matches!(self, Part::Text(_))
    }

    fn to_value(&self) -> Value {
        let (kind, key, text) = match self {
            Part::Text(text) => ("text", "text", text),
            Part::ToolReference(name) => ("tool_reference", "name", name),
        };
        [("type", Value::from(kind)), (key, text.clone())]
            .into_iter()
            .collect()
    }
}

fn joined<'p>(parts: impl Iterator<Item = &'p Part>) -> Value {
    let mut parts = parts.peekable();
    let Some(first) = parts.next() else {
        return Value::from("");
    };
    if parts.peek().is_none() {
        // By far the most frequent case, and the text need not be copied.
        let (Part::Text(text) | Part::ToolReference(text)) = first;
        return text.clone();
    }
    let mut text = first.text().to_owned();
    for part in parts {
        text.push('\n');
        text.push_str(part.text());
    }
    Value::from(text)
}

fn parts(content: &Value) -> Result<Vec<Part>, NotText> {
    match content.kind() {
        ValueKind::Undefined | ValueKind::None => Ok(Vec::new()),
        ValueKind::String => Ok(vec![Part::Text(content.clone())]),
        ValueKind::Seq => {
            let parts = content.try_iter().into_iter().flatten();
            parts.filter_map(|item| part(&item).transpose()).collect()
        }
        _ => Err(NotText),
    }
}

/// Reads one part; `None` for a text without a text, which engines skip.
fn part(item: &Value) -> Result<Option<Part>, NotText> {
    if item.as_str().is_some() {
        return Ok(Some(Part::Text(item.clone())));
    }
    let kind = field(item, "type");
    let key = match kind.as_str() {
        Some("text" | "input_text" | "output_text") => "text",
        Some("refusal") => "refusal",
        Some("thinking") => "thinking",
        Some("tool_reference") => "name",
        None if absent(&kind) => "text",
        _ => return Err(NotText),
    };
    let text = field(item, key);
    match (text.as_str(), kind.as_str()) {
        (Some(_), Some("tool_reference")) => Ok(Some(Part::ToolReference(text))),
        (Some(_), _) => Ok(Some(Part::Text(text))),
        (None, Some("text" | "refusal")) if absent(&text) => Ok(None),
        (None, _) => Err(NotText),
    }
}

/// A tool call whose arguments are an object, where the client sent JSON text.
fn tool_call(call: &Value) -> Value {
    let function = field(call, "function");
    if function.kind() != ValueKind::Map {
        return call.clone();
    }
    let arguments = field(&function, "arguments");
    let parsed = match (arguments.as_str(), arguments.kind()) {
        (Some(text), _) => value_from_str(text),
        (None, ValueKind::Map | ValueKind::Seq) => return call.clone(),
        (None, _) => None,
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

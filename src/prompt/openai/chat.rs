//! `POST /v1/chat/completions`: the conversation and what a chat template is given besides.
//!
//! Lives here: [`ChatInput`], the client's values as they came.
//! Never here: how an engine rewrites them before rendering (`template::messages`).
//! Invariant: key order and number types are the client's.

use super::Input;
use super::error::BodyError;
use super::fields::Fields;
use minijinja::Value;
use std::fmt;

/// A conversation, and the arguments of its chat template.
#[derive(Clone, Default)]
pub struct ChatInput {
    /// `messages`: objects, unchecked otherwise.
    pub messages: Vec<Value>,
    /// `tools`, in the client's order.
    pub tools: Option<Value>,
    /// Whether `tool_choice` is `"none"`.
    pub tools_declined: bool,
    /// `documents` for retrieval templates.
    pub documents: Option<Value>,
    /// `chat_template_kwargs`: handed to the template by name.
    pub template_args: Option<Value>,
    /// `reasoning_effort`.
    pub reasoning_effort: Option<String>,
    /// `add_generation_prompt`, true unless the client says otherwise.
    pub add_generation_prompt: bool,
    /// `continue_final_message`: the answer continues the last message instead of starting a new one.
    pub continue_final_message: bool,
    /// `chat_template`: a template of the client's own, used only where a profile trusts clients.
    pub template: Option<String>,
    /// Whether the conversation exceeded [`MAX_VALUES`](super::MAX_VALUES) and is incomplete here.
    pub too_complex: bool,
}

/// Sizes only: a prompt must not reach a log by way of `{:?}`.
impl fmt::Debug for ChatInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tools = (self.tools.as_ref()).map_or(0, |tools| tools.len().unwrap_or(0));
        write!(f, "Chat({} messages, {tools} tools)", self.messages.len())
    }
}

pub(super) fn input(fields: &mut Fields, body: &[u8]) -> Result<Input, BodyError> {
    let messages = (fields.messages).require(body, "messages", "a list of objects")?;
    Ok(Input::Chat(Box::new(ChatInput {
        messages,
        tools: fields.tools.found(),
        tools_declined: fields.tool_choice.found().as_deref() == Some("none"),
        documents: fields.documents.found(),
        template_args: fields.chat_template_kwargs.found(),
        reasoning_effort: fields.reasoning_effort.found(),
        add_generation_prompt: fields.add_generation_prompt.found().unwrap_or(true),
        continue_final_message: fields.continue_final_message.found().unwrap_or(false),
        template: fields.chat_template.found(),
        too_complex: fields.too_complex,
    })))
}

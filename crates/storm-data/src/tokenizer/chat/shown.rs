//! Checks that a template renders all of a chat. Many silently ignore a role, a tool or a content
//! part that they do not know.

use super::engine::{Render, Then};
use super::{Chat, PROBE, field, role, with_field};
use minijinja::Value;
use minijinja::value::ValueKind;

/// Rejects a chat if the template omits part of it.
pub(super) fn check(render: &Render<'_>, chat: &Chat, text: &str) -> Result<(), String> {
    for (number, message) in chat.messages.iter().enumerate() {
        let refuse =
            |what: String| Err(format!("message {}: the chat template {what}", number + 1));
        let changes = |other: Value| {
            render.text(&chat.with(number, other), Then::Nothing).map(|other| other != text)
        };
        if let Some(content) = field(message, "content") {
            match content.kind() {
                ValueKind::Seq => {
                    if let Some(what) = parts(render, chat, number, text, &content)? {
                        return refuse(what);
                    }
                }
                _ if is_in(&content, text) || changes(with_probe(message, &content))? => {}
                _ => return refuse(format!("does not show what `{}` says", role(message))),
            }
        }
        if let Some(calls) = field(message, "tool_calls")
            && !changes(with_field(message, "tool_calls", other_calls(&calls)?))?
        {
            return refuse("does not show tool calls".to_owned());
        }
    }
    if chat.tools.as_ref().is_some_and(|tools| tools.len().is_some_and(|count| count > 0)) {
        let without = Chat { messages: chat.messages.clone(), tools: None };
        if render.text(&without, Then::Nothing)? == text {
            return Err("the chat template does not show `tools`".to_owned());
        }
    }
    Ok(())
}

/// What the template does wrong with a message made of content parts, if anything.
fn parts(
    render: &Render<'_>,
    chat: &Chat,
    number: usize,
    text: &str,
    content: &Value,
) -> Result<Option<String>, String> {
    let message = &chat.messages[number];
    let parts: Vec<Value> = content.try_iter().map_err(|error| error.to_string())?.collect();
    for (at, part) in parts.iter().enumerate() {
        let with = |other: Value| {
            let mut parts = parts.clone();
            parts[at] = other;
            let other = with_field(message, "content", Value::from(parts));
            render.text(&chat.with(number, other), Then::Nothing)
        };
        // A template without support for parts prints their whole structure.
        if with(with_field(part, "other", Value::from(PROBE.to_string())))?.contains(PROBE) {
            return Ok(Some("does not know content parts; write `content` as one text".to_owned()));
        }
        let said = field(part, "text").unwrap_or_default();
        if !is_in(&said, text) && with(with_field(part, "text", probed(&said)))? == text {
            return Ok(Some(
                "does not show all content parts; write `content` as one text".to_owned(),
            ));
        }
    }
    Ok(None)
}

fn is_in(said: &Value, text: &str) -> bool {
    said.as_str().is_some_and(|said| text.contains(said.trim()))
}

fn probed(said: &Value) -> Value {
    Value::from(format!("{}{PROBE}", said.as_str().unwrap_or_default()))
}

fn with_probe(message: &Value, content: &Value) -> Value {
    let other = match content.kind() {
        ValueKind::Map => with_field(content, "other", Value::from(PROBE.to_string())),
        _ => probed(content),
    };
    with_field(message, "content", other)
}

/// The same calls, with the last one calling another function.
fn other_calls(calls: &Value) -> Result<Value, String> {
    let bad = || "`tool_calls` is a list of objects with a `function`".to_owned();
    let mut calls: Vec<Value> = match calls.kind() {
        ValueKind::Seq => calls.try_iter().map_err(|_| bad())?.collect(),
        _ => return Err(bad()),
    };
    let last = calls.last_mut().ok_or_else(bad)?;
    let renamed = |call: &Value| {
        let name = field(call, "name").filter(|name| name.as_str().is_some())?;
        Some(with_field(call, "name", probed(&name)))
    };
    let other = match field(last, "function") {
        Some(function) => renamed(&function).map(|other| with_field(last, "function", other)),
        None => renamed(last),
    };
    *last = other.ok_or_else(|| "a tool call without the `name` of its function".to_owned())?;
    Ok(Value::from(calls))
}

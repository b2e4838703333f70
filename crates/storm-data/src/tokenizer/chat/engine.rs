//! Jinja as configured by `transformers`: the functions templates may call, and how much work they
//! may do.

use super::source::ChatSetup;
use super::{Chat, MARK_BEGIN, MARK_END, json, strftime};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Value};
use std::cell::Cell;
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// Instruction limits, per rendering and for all renderings of one chat.
const RENDER_FUEL: u64 = 20_000_000;
const CHAT_FUEL: u64 = 200_000_000;

const NAME: &str = "chat template";
const TOOL_NAME: &str = "chat template for tools";

/// A filter that stands in for `{% generation %}`, a tag that this Jinja engine does not have.
const GENERATION_FILTER: &str = "storm_generation";

/// A compiled template.
pub(super) struct Engine {
    environment: Environment<'static>,
    special: Vec<(String, String)>,
    has_tool_template: bool,
    marks_answers: bool,
    /// The message that a template passed to `raise_exception`.
    raised: Arc<Mutex<Option<String>>>,
}

impl Engine {
    pub(super) fn new(setup: &ChatSetup) -> Result<Engine, String> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|error| error.to_string())?);
        environment.set_fuel(Some(RENDER_FUEL));
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_formatter(|out, _, value| match json::printed(value) {
            Some(text) => Ok(out.write_str(&text)?),
            None => Ok(write!(out, "{value}")?),
        });
        environment.add_filter("tojson", json::tojson);
        // As in Python, None cannot be iterated.
        environment.add_test("iterable", |value: &Value| {
            !value.is_none() && (value.kind() == ValueKind::String || value.try_iter().is_ok())
        });
        environment
            .add_filter(GENERATION_FILTER, |text: String| format!("{MARK_BEGIN}{text}{MARK_END}"));
        let raised = Arc::new(Mutex::new(None));
        let says = Arc::clone(&raised);
        environment.add_function(
            "raise_exception",
            move |message: String| -> Result<Value, Error> {
                if let Ok(mut says) = says.lock() {
                    *says = Some(message.clone());
                }
                Err(Error::new(ErrorKind::InvalidOperation, message))
            },
        );
        let now = setup.now_seconds;
        environment
            .add_function("strftime_now", move |format: &str| strftime::strftime(now, format));
        environment.add_function("dict", |pairs: Kwargs| -> Value {
            let pair = |name: &str| Some((Value::from(name), pairs.get::<Value>(name).ok()?));
            Value::from_pairs(pairs.args().filter_map(pair))
        });
        let mut marks_answers = false;
        let mut add = |name: &'static str, source: &str| {
            let (source, marks) = with_generation_filter(source);
            marks_answers |= marks;
            environment.add_template_owned(name, source).map_err(|error| words(name, &error))
        };
        add(NAME, &setup.template)?;
        if let Some(source) = &setup.tool_template {
            add(TOOL_NAME, source)?;
        }
        let special = setup.special.clone().into_iter().collect();
        let has_tool_template = setup.tool_template.is_some();
        Ok(Engine { environment, special, has_tool_template, marks_answers, raised })
    }

    /// Whether the template itself marks the assistant's text.
    pub(super) fn marks_answers(&self) -> bool {
        self.marks_answers
    }

    /// Starts the renderings of one chat.
    pub(super) fn begin(&self) -> Render<'_> {
        Render { engine: self, fuel: Cell::new(CHAT_FUEL) }
    }
}

/// What to render after the last message.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Then {
    Nothing,
    /// The start of the assistant's answer.
    Answer,
}

/// Renders one chat, all of it or parts.
pub(super) struct Render<'a> {
    engine: &'a Engine,
    fuel: Cell<u64>,
}

impl Render<'_> {
    /// The text of a chat, and the ranges that the template marks as generated.
    pub(super) fn whole(&self, chat: &Chat) -> Result<(String, Vec<Range<usize>>), String> {
        Ok(without_marks(&self.rendered(chat, Then::Nothing)?))
    }

    pub(super) fn text(&self, chat: &Chat, then: Then) -> Result<String, String> {
        Ok(without_marks(&self.rendered(chat, then)?).0)
    }

    fn rendered(&self, chat: &Chat, then: Then) -> Result<String, String> {
        let engine = self.engine;
        let name = match chat.tools.is_some() && engine.has_tool_template {
            true => TOOL_NAME,
            false => NAME,
        };
        let special = engine.special.iter();
        let special = special.map(|(name, token)| (name.as_str(), Value::from(token.as_str())));
        let given = [
            ("messages", Value::from(chat.messages.clone())),
            // Absent values are passed as None, as in `transformers`.
            ("tools", chat.tools.clone().unwrap_or_else(|| Value::from(()))),
            ("documents", Value::from(())),
            ("add_generation_prompt", Value::from(then == Then::Answer)),
        ];
        let context = Value::from_pairs(special.chain(given));
        if let Ok(mut raised) = engine.raised.lock() {
            *raised = None;
        }
        let template =
            engine.environment.get_template(name).map_err(|error| words(name, &error))?;
        let captured = template.render_captured(context).map_err(|error| {
            let raised = engine.raised.lock().ok().and_then(|mut raised| raised.take());
            match raised {
                Some(message) => format!("the chat template refuses it: {message}"),
                None => words(name, &error),
            }
        })?;
        let used = captured.state().fuel_levels().map_or(0, |(used, _)| used);
        let Some(left) = self.fuel.get().checked_sub(used) else {
            return Err("a chat of too many messages for its template; split it".to_owned());
        };
        self.fuel.set(left);
        Ok(captured.into_output())
    }
}

/// The error message, with its line in the template.
fn words(name: &str, error: &Error) -> String {
    if error.kind() == ErrorKind::OutOfFuel {
        return format!("the {name} takes more than {RENDER_FUEL} steps");
    }
    let line = error.line().map_or_else(String::new, |line| format!(", line {line}"));
    let detail = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    format!("the {name} fails{line}: {detail}")
}

/// Removes the marks from a text, and returns the byte ranges between them.
fn without_marks(marked: &str) -> (String, Vec<Range<usize>>) {
    let (mut text, mut spans) = (String::with_capacity(marked.len()), Vec::new());
    let (mut depth, mut begin) = (0, 0);
    for part in marked.split_inclusive([MARK_BEGIN, MARK_END]) {
        text.push_str(part.trim_end_matches([MARK_BEGIN, MARK_END]));
        if part.ends_with(MARK_BEGIN) {
            if depth == 0 {
                begin = text.len();
            }
            depth += 1;
        } else if part.ends_with(MARK_END) && depth > 0 {
            depth -= 1;
            if depth == 0 && begin < text.len() {
                spans.push(begin..text.len());
            }
        }
    }
    (text, spans)
}

/// Replaces `{% generation %}` and its end tag with a filter block. Returns whether there was one.
fn with_generation_filter(source: &str) -> (String, bool) {
    let mut text = String::with_capacity(source.len());
    let mut rest = source;
    let mut found = false;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        text.push_str(before);
        let Some(end) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let (open, close) = (2, end);
        let inner = &tag[open..close];
        let is_sign = |sign: &char| matches!(sign, '-' | '+');
        let first = inner.chars().next().filter(is_sign).map_or("", |_| &inner[..1]);
        let body = &inner[first.len()..];
        let last = body.chars().next_back().filter(is_sign).map_or("", |_| &body[body.len() - 1..]);
        let name = body[..body.len() - last.len()].trim();
        let stand_in = match name {
            "generation" => format!("filter {GENERATION_FILTER}"),
            "endgeneration" => "endfilter".to_owned(),
            _ => {
                text.push_str("{%");
                rest = &tag[2..];
                continue;
            }
        };
        found = true;
        text.push_str(&format!("{{%{first} {stand_in} {last}%}}"));
        rest = &tag[end + 2..];
    }
    text.push_str(rest);
    (text, found)
}

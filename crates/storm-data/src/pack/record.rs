//! The record types.

use crate::Kind;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

/// A parsed record.
pub(super) enum Record {
    /// `{"text": …}`
    Text(String),
    /// `{"messages": [{"role": …, "content": …}, …]}`, or the ShareGPT or Alpaca equivalent.
    Chat(Chat),
    /// `{"prompt": …, "completion": …}`
    Instruction(Instruction),
}

/// An unparsed chat. Only the process that renders it parses it, because parsed messages take far
/// more memory than their text.
#[derive(Serialize)]
pub(super) struct Chat {
    messages: Box<RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tools: Option<Box<RawValue>>,
}

pub(super) struct Instruction {
    pub(super) prompt: String,
    pub(super) completion: String,
}

/// All known fields. Others are ignored.
#[derive(Deserialize)]
struct Fields {
    text: Option<String>,
    messages: Option<Box<RawValue>>,
    tools: Option<Box<RawValue>>,
    prompt: Option<String>,
    completion: Option<String>,
    // Unvalidated, because other records may use these names for other contents.
    conversations: Option<Box<RawValue>>,
    instruction: Option<Box<RawValue>>,
    input: Option<Box<RawValue>>,
    output: Option<Box<RawValue>>,
}

/// A ShareGPT message.
#[derive(Deserialize)]
struct Said {
    from: String,
    value: String,
}

/// A message as templates expect it.
#[derive(Serialize)]
struct Message {
    role: &'static str,
    content: String,
}

impl Said {
    fn message(self) -> Result<Message, String> {
        let role = match self.from.as_str() {
            "human" | "user" => "user",
            "gpt" | "assistant" | "chatgpt" | "model" => "assistant",
            "system" => "system",
            other => {
                return Err(format!(
                    "a message `from` `{other}`; known are system, human, user, gpt, assistant, chatgpt and model. \
                     Write tools as `messages`"
                ));
            }
        };
        Ok(Message { role, content: self.value })
    }
}

impl Chat {
    fn of(messages: &[Message]) -> Result<Chat, String> {
        let messages = serde_json::value::to_raw_value(messages);
        Ok(Chat { messages: messages.map_err(|error| error.to_string())?, tools: None })
    }

    /// A conversation in ShareGPT format.
    fn of_said(json: &RawValue) -> Result<Chat, String> {
        let said: Vec<Said> = serde_json::from_str(json.get())
            .map_err(|error| format!("`conversations`: {error}"))?;
        let messages: Vec<Message> =
            said.into_iter().map(Said::message).collect::<Result<_, String>>()?;
        Chat::of(&messages)
    }

    /// A task in Alpaca format: the instruction, optional input, and the answer.
    fn of_task(
        instruction: &RawValue,
        input: Option<&RawValue>,
        output: &RawValue,
    ) -> Result<Chat, String> {
        let text = |name: &str, json: &RawValue| {
            serde_json::from_str::<String>(json.get()).map_err(|error| format!("`{name}`: {error}"))
        };
        let instruction = text("instruction", instruction)?;
        let input = input.map(|input| text("input", input)).transpose()?;
        let output = text("output", output)?;
        let content = match input.filter(|input| !input.is_empty()) {
            Some(input) => format!("{instruction}\n\n{input}"),
            None => instruction,
        };
        let answer = Message { role: "assistant", content: output };
        Chat::of(&[Message { role: "user", content }, answer])
    }
}

impl Record {
    /// A chat if it has messages, an instruction if it has a prompt and a completion, text if it
    /// has `text`, otherwise a chat in ShareGPT or Alpaca format.
    pub(super) fn parse(json: &str) -> Result<Record, String> {
        let fields: Fields = serde_json::from_str(json).map_err(|error| error.to_string())?;
        match fields {
            Fields { messages: Some(messages), tools, .. } => {
                Ok(Record::Chat(Chat { messages, tools }))
            }
            Fields { prompt: Some(prompt), completion: Some(completion), .. } => {
                Ok(Record::Instruction(Instruction { prompt, completion }))
            }
            Fields { text: None, conversations: Some(said), .. } => {
                Chat::of_said(&said).map(Record::Chat)
            }
            Fields { text: None, instruction: Some(instruction), output: Some(output), input, .. } => {
                Chat::of_task(&instruction, input.as_deref(), &output).map(Record::Chat)
            }
            Fields { text: Some(text), .. } => Ok(Record::Text(text)),
            _ => Err("has neither `text`, nor `messages`, nor `prompt` and `completion`, nor `conversations`, nor \
                      `instruction` and `output`"
                .to_owned()),
        }
    }

    pub(super) fn kind(&self) -> Kind {
        match self {
            Record::Text(_) => Kind::Text,
            Record::Chat(_) | Record::Instruction(_) => Kind::Samples,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(json: &str) -> String {
        match Record::parse(json) {
            Ok(Record::Chat(chat)) => chat.messages.get().to_owned(),
            Ok(_) => "no chat".to_owned(),
            Err(error) => error,
        }
    }

    #[test]
    fn conversations_and_tasks_are_chats() {
        let shared = r#"{"id": 1, "conversations": [{"from": "system", "value": "s", "weight": null},
            {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}"#;
        let expected = r#"[{"role":"system","content":"s"},{"role":"user","content":"q"},{"role":"assistant","content":"a"}]"#;
        assert_eq!(messages(shared), expected);
        let task = |input: &str| {
            messages(&format!(r#"{{"instruction": "do", {input} "output": "done"}}"#))
        };
        let expected = |asked: &str| {
            format!(
                r#"[{{"role":"user","content":"{asked}"}},{{"role":"assistant","content":"done"}}]"#
            )
        };
        assert_eq!(task(""), expected("do"));
        assert_eq!(task(r#""input": "","#), expected("do"));
        assert_eq!(task(r#""input": null,"#), expected("do"));
        assert_eq!(task(r#""input": "with","#), expected(r"do\n\nwith"));
    }

    #[test]
    fn what_is_unclear_is_refused() {
        let refused = |json: &str, part: &str| {
            let error = messages(json);
            assert!(error.contains(part), "{error}");
        };
        refused(r#"{"conversations": [{"from": "observation", "value": "x"}]}"#, "`observation`");
        refused(r#"{"conversations": [{"role": "user", "content": "x"}]}"#, "`conversations`");
        refused(r#"{"instruction": 1, "output": "x"}"#, "`instruction`");
        refused(r#"{"instruction": "x"}"#, "has neither `text`");
        // Fields that do not apply to text are ignored.
        assert!(matches!(
            Record::parse(r#"{"text": "a", "input": 1, "conversations": 2}"#),
            Ok(Record::Text(_))
        ));
    }
}

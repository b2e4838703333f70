//! Converts the cells of a table to the equivalent JSONL object.

use serde::de::IgnoredAny;
use std::borrow::Cow;

/// Columns that records use. Others are ignored.
pub(crate) const COLUMNS: [&str; 9] = [
    "text",
    "messages",
    "tools",
    "prompt",
    "completion",
    "conversations",
    "instruction",
    "input",
    "output",
];

/// Columns whose text is JSON.
const JSON_COLUMNS: [&str; 3] = ["messages", "tools", "conversations"];

/// The contents of a cell.
pub(crate) enum Cell<'a> {
    Text(&'a str),
    /// A value that is already JSON.
    Json(&'a str),
}

/// A record under construction.
pub(crate) struct RecordJson {
    json: String,
}

impl RecordJson {
    pub(crate) fn new() -> RecordJson {
        RecordJson { json: "{".to_owned() }
    }

    /// Adds a column. An empty cell in a JSON column counts as absent.
    pub(crate) fn push(&mut self, name: &str, cell: Cell<'_>) -> Result<(), String> {
        let bad = |error: serde_json::Error| format!("`{name}`: {error}");
        let value = match cell {
            Cell::Text(text) if JSON_COLUMNS.contains(&name) => {
                if text.trim().is_empty() {
                    return Ok(());
                }
                serde_json::from_str::<IgnoredAny>(text).map_err(bad)?;
                Cow::Borrowed(text)
            }
            Cell::Text(text) => Cow::Owned(serde_json::to_string(text).map_err(bad)?),
            Cell::Json(json) => Cow::Borrowed(json),
        };
        if self.json.len() > 1 {
            self.json.push(',');
        }
        self.json.push('"');
        self.json.push_str(name);
        self.json.push_str("\":");
        self.json.push_str(&value);
        Ok(())
    }

    pub(crate) fn finish(mut self) -> String {
        self.json.push('}');
        self.json
    }
}

/// The error for a table with none of the columns.
pub(crate) fn no_columns(names: &[&str]) -> String {
    let shown: String = names.join(", ").chars().take(200).collect();
    format!(
        "none of its columns can be packed: it has {shown}; it needs `text`, or `messages`, or `prompt` and \
         `completion`, or `conversations`, or `instruction` and `output`"
    )
}

//! Formats values as Python does: `tojson` is `json.dumps`, and printing is `str`.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};
use std::fmt::Write;

/// `json.dumps(value, ensure_ascii=False, indent=…, separators=…, sort_keys=…)`.
pub(super) fn tojson(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let text = |value: Option<Value>| value.filter(|value| !value.is_none());
    let indent = text(options.get("indent")?).map(usize::try_from).transpose()?;
    let separators = text(options.get("separators")?).map(|pair| separators(&pair)).transpose()?;
    let default = || match indent {
        Some(_) => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
    };
    let (item, key) = separators.unwrap_or_else(default);
    let ascii = options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let sorted = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    options.assert_all_used()?;
    let mut writer = Writer { out: String::new(), indent, item, key, ascii, sorted };
    writer.value(value, 0)?;
    Ok(Value::from(writer.out))
}

fn separators(pair: &Value) -> Result<(String, String), Error> {
    let parts: Vec<String> = pair.try_iter()?.map(|part| part.to_string()).collect();
    match <[String; 2]>::try_from(parts) {
        Ok([item, key]) => Ok((item, key)),
        Err(_) => Err(Error::new(ErrorKind::InvalidOperation, "separators are two texts")),
    }
}

struct Writer {
    out: String,
    indent: Option<usize>,
    item: String,
    key: String,
    ascii: bool,
    sorted: bool,
}

impl Writer {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.out.push_str(&number(value)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.list('[', ']', depth, items.len(), |writer, at| {
                    writer.value(&items[at], depth + 1)
                })?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sorted {
                    keys.sort();
                }
                self.list('{', '}', depth, keys.len(), |writer, at| {
                    let key = &keys[at];
                    match key.as_str() {
                        Some(text) => writer.string(text),
                        None => writer.string(&printed(key).unwrap_or_else(|| key.to_string())),
                    }
                    let separator = writer.key.clone();
                    writer.out.push_str(&separator);
                    writer.value(&value.get_item(key)?, depth + 1)
                })?;
            }
            kind => {
                let problem = format!("a value of kind {kind} is not JSON");
                return Err(Error::new(ErrorKind::InvalidOperation, problem));
            }
        }
        Ok(())
    }

    fn list(
        &mut self,
        open: char,
        close: char,
        depth: usize,
        count: usize,
        mut item: impl FnMut(&mut Writer, usize) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out.push(open);
        for at in 0..count {
            if at > 0 {
                let separator = self.item.clone();
                self.out.push_str(&separator);
            }
            self.new_line(depth + 1);
            item(self, at)?;
        }
        if count > 0 {
            self.new_line(depth);
        }
        self.out.push(close);
        Ok(())
    }

    fn new_line(&mut self, depth: usize) {
        if let Some(indent) = self.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', indent.saturating_mul(depth).min(1 << 12)));
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for character in text.chars() {
            match character {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                control if control < ' ' => {
                    let _ = write!(self.out, "\\u{:04x}", u32::from(control));
                }
                other if self.ascii && !other.is_ascii() => {
                    for unit in other.encode_utf16(&mut [0; 2]) {
                        let _ = write!(self.out, "\\u{unit:04x}");
                    }
                }
                other => self.out.push(other),
            }
        }
        self.out.push('"');
    }
}

/// A number as Python's `repr` writes it.
fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    let Ok(float) = f64::try_from(value.clone()) else { return value.to_string() };
    if float.is_nan() {
        return "NaN".to_owned();
    }
    if float.is_infinite() {
        return if float > 0.0 { "Infinity".to_owned() } else { "-Infinity".to_owned() };
    }
    let exponent = float.abs().log10();
    if float == 0.0 || (-4.0..16.0).contains(&exponent) {
        return format!("{float:?}");
    }
    // Rust writes 1e20 and 1e-7, Python 1e+20 and 1e-07.
    let text = format!("{float:e}");
    let (digits, power) = text.split_once('e').unwrap_or((&text, "0"));
    let (sign, power) = match power.strip_prefix('-') {
        Some(power) => ('-', power),
        None => ('+', power),
    };
    format!("{digits}e{sign}{power:0>2}")
}

/// How Python prints a value that this Jinja prints differently.
pub(super) fn printed(value: &Value) -> Option<String> {
    match value.kind() {
        ValueKind::None => Some("None".to_owned()),
        ValueKind::Bool => Some(if value.is_true() { "True" } else { "False" }.to_owned()),
        ValueKind::Number => Some(number(value)),
        ValueKind::Seq => {
            let items: Vec<String> = value.try_iter().ok()?.map(|item| quoted(&item)).collect();
            Some(format!("[{}]", items.join(", ")))
        }
        ValueKind::Map => {
            let keys: Vec<Value> = value.try_iter().ok()?.collect();
            let pair = |key: &Value| {
                format!("{}: {}", quoted(key), quoted(&value.get_item(key).unwrap_or_default()))
            };
            Some(format!("{{{}}}", keys.iter().map(pair).collect::<Vec<_>>().join(", ")))
        }
        _ => None,
    }
}

/// Python's `repr`.
fn quoted(value: &Value) -> String {
    let Some(text) = value.as_str() else {
        return printed(value).unwrap_or_else(|| value.to_string());
    };
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::from(quote);
    for character in text.chars() {
        match character {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            other if other == quote => out.extend(['\\', other]),
            control if control < ' ' => {
                let _ = write!(out, "\\x{:02x}", u32::from(control));
            }
            other => out.push(other),
        }
    }
    out.push(quote);
    out
}

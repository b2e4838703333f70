//! Converts a row of a table to the equivalent JSONL object.

use crate::pack::{Cell, RecordJson};
use parquet::record::{Field, Row};
use serde::Serialize;

/// The row as JSON, or the problem with it. Skips nulls, because tables exported from JSON have
/// them where a field was absent.
pub(super) fn object(row: &Row) -> Result<String, String> {
    let mut json = RecordJson::new();
    let mut written = String::new();
    for (name, field) in row.get_column_iter() {
        let bad = |problem: String| format!("`{name}`: {problem}");
        match field {
            Field::Null => {}
            Field::Str(text) => json.push(name, Cell::Text(text))?,
            Field::Bytes(bytes) => {
                let text = bytes.as_utf8().map_err(|_| bad("is not UTF-8 text".to_owned()))?;
                json.push(name, Cell::Text(text))?;
            }
            other => {
                written.clear();
                write(other, &mut written).map_err(bad)?;
                json.push(name, Cell::Json(&written))?;
            }
        }
    }
    Ok(json.finish())
}

/// Appends a value. Struct fields keep their order.
fn write(field: &Field, out: &mut String) -> Result<(), String> {
    match field {
        Field::Null => out.push_str("null"),
        Field::Bool(value) => put(value, out)?,
        Field::Byte(value) => put(value, out)?,
        Field::Short(value) => put(value, out)?,
        Field::Int(value) => put(value, out)?,
        Field::Long(value) => put(value, out)?,
        Field::UByte(value) => put(value, out)?,
        Field::UShort(value) => put(value, out)?,
        Field::UInt(value) => put(value, out)?,
        Field::ULong(value) => put(value, out)?,
        Field::Float(value) => put(value, out)?,
        Field::Double(value) => put(value, out)?,
        Field::Str(text) => put(text, out)?,
        Field::Bytes(bytes) => put(bytes.as_utf8().map_err(|_| "is not UTF-8 text")?, out)?,
        Field::ListInternal(list) => {
            let values = list.elements().iter();
            write_all('[', ']', values, out, write)?;
        }
        Field::Group(row) => {
            let fields = row.get_column_iter().filter(|(_, field)| **field != Field::Null);
            write_all('{', '}', fields, out, |(name, field), out| write_pair(name, field, out))?;
        }
        Field::MapInternal(map) => {
            let pairs = map.entries().iter();
            write_all('{', '}', pairs, out, |(key, field), out| match key {
                Field::Str(key) => write_pair(key, field, out),
                _ => Err("a map with other keys than text".to_owned()),
            })?;
        }
        _ => return Err("holds something else than text, numbers, lists and structs".to_owned()),
    }
    Ok(())
}

fn write_all<T>(
    begin: char,
    end: char,
    items: impl Iterator<Item = T>,
    out: &mut String,
    mut write: impl FnMut(T, &mut String) -> Result<(), String>,
) -> Result<(), String> {
    out.push(begin);
    for (number, item) in items.enumerate() {
        if number > 0 {
            out.push(',');
        }
        write(item, out)?;
    }
    out.push(end);
    Ok(())
}

fn write_pair(name: &str, field: &Field, out: &mut String) -> Result<(), String> {
    put(name, out)?;
    out.push(':');
    write(field, out)
}

/// A scalar value. Non-finite numbers become null.
fn put(value: &(impl Serialize + ?Sized), out: &mut String) -> Result<(), String> {
    out.push_str(&serde_json::to_string(value).map_err(|error| error.to_string())?);
    Ok(())
}

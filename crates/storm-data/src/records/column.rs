//! The columns of a record.

use serde::{Deserialize, Serialize};
use storm_graph::DType;

/// Size limit of a record.
pub(super) const RECORD_BYTES_MAX: u64 = 64 << 20;
/// Limit on columns of a dataset.
const COLUMNS_MAX: usize = 64;
/// Limit on dimensions of a column.
const DIMENSIONS_MAX: usize = 8;
/// Limit on the length of a column name.
const NAME_BYTES_MAX: usize = 64;
/// The checksum at the end of a record.
pub(super) const CHECKSUM_BYTES: usize = 4;

/// The element type of a column, stored little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ColumnType {
    /// An unsigned byte.
    U8,
    /// A signed byte.
    I8,
    /// A 32-bit signed integer.
    I32,
    /// IEEE single precision.
    F32,
    /// bfloat16.
    Bf16,
}

impl ColumnType {
    /// The corresponding tensor type.
    pub fn dtype(self) -> DType {
        match self {
            ColumnType::U8 => DType::U8,
            ColumnType::I8 => DType::I8,
            ColumnType::I32 => DType::I32,
            ColumnType::F32 => DType::F32,
            ColumnType::Bf16 => DType::BF16,
        }
    }
}

/// Whether a column has the same size in all records.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ColumnKind {
    /// An array of the column's shape.
    Fixed,
    /// Any number of bytes.
    Bytes,
}

/// A named part of every record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Column {
    /// Its name, which is also the name of the model input.
    pub name: String,
    /// Its element type.
    pub dtype: ColumnType,
    /// The shape of one record's array. Empty for scalars and for bytes.
    pub shape: Vec<usize>,
    /// Whether its size is fixed.
    pub kind: ColumnKind,
    /// Values are in `0..below`, for labels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub below: Option<u32>,
}

impl Column {
    /// An array of the same shape in every record.
    pub fn fixed(name: &str, dtype: ColumnType, shape: &[usize]) -> Column {
        let (name, shape) = (name.to_owned(), shape.to_vec());
        Column { name, dtype, shape, kind: ColumnKind::Fixed, below: None }
    }

    /// A class label, as an i32 in `0..classes`.
    pub fn label(name: &str, classes: u32) -> Column {
        Column { below: Some(classes), ..Column::fixed(name, ColumnType::I32, &[]) }
    }

    /// Any number of bytes.
    pub fn bytes(name: &str) -> Column {
        let (dtype, shape) = (ColumnType::U8, Vec::new());
        Column { name: name.to_owned(), dtype, shape, kind: ColumnKind::Bytes, below: None }
    }

    /// Bytes in a record. `None` for columns of varying size, and on overflow.
    pub(super) fn record_bytes(&self) -> Option<usize> {
        if self.kind == ColumnKind::Bytes {
            return None;
        }
        let size = self.dtype.dtype().size_bytes();
        self.shape.iter().try_fold(size, |bytes, &length| bytes.checked_mul(length))
    }

    fn check(&self) -> Result<(), String> {
        let name = &self.name;
        let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
        if name.is_empty() || name.len() > NAME_BYTES_MAX || !name.chars().all(is_plain) {
            return Err(format!("`{}` is no name for a column", name.escape_debug()));
        }
        if self.shape.len() > DIMENSIONS_MAX || self.shape.contains(&0) {
            return Err(format!("the shape of column {name} cannot be used"));
        }
        let fits = match self.kind {
            ColumnKind::Bytes => self.shape.is_empty() && self.dtype == ColumnType::U8,
            ColumnKind::Fixed => {
                self.record_bytes().is_some_and(|bytes| bytes as u64 <= RECORD_BYTES_MAX)
            }
        };
        if !fits {
            return Err(format!("a record has too many bytes of column {name}"));
        }
        match self.below {
            Some(_) if self.dtype != ColumnType::I32 || self.kind != ColumnKind::Fixed => {
                Err(format!("column {name} has classes that are not i32"))
            }
            Some(below) if below == 0 || i32::try_from(below).is_err() => {
                Err(format!("column {name} has {below} classes"))
            }
            _ => Ok(()),
        }
    }
}

/// Where the columns are in a record: the fixed ones, then the length of each varying one as `u32`,
/// then the bytes of those, and a CRC-32 of it all.
#[derive(Clone, Debug)]
pub(super) struct RecordLayout {
    columns: Vec<Column>,
    /// For each column: its offset among the fixed ones, or its index among the varying ones.
    places: Vec<Place>,
    fixed_bytes: usize,
    /// Number of columns of varying size.
    varying: usize,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Place {
    Fixed { at: usize, bytes: usize },
    Varying { number: usize },
}

impl RecordLayout {
    pub(super) fn new(columns: &[Column]) -> Result<RecordLayout, String> {
        if columns.is_empty() || columns.len() > COLUMNS_MAX {
            return Err(format!("{} columns; there can be 1 to {COLUMNS_MAX}", columns.len()));
        }
        for (number, column) in columns.iter().enumerate() {
            column.check()?;
            if columns[..number].iter().any(|other| other.name == column.name) {
                return Err(format!("two columns are named {}", column.name));
            }
        }
        let layout = RecordLayout::of_columns(columns);
        match layout.record_bytes_min() as u64 <= RECORD_BYTES_MAX {
            true => Ok(layout),
            false => Err(format!("a record has more than {RECORD_BYTES_MAX} bytes")),
        }
    }

    /// For columns that need no check, because they do not come from a file.
    pub(super) fn of_columns(columns: &[Column]) -> RecordLayout {
        let (mut fixed_bytes, mut varying) = (0, 0);
        let place = |column: &Column| match column.record_bytes() {
            Some(bytes) => {
                fixed_bytes += bytes;
                Place::Fixed { at: fixed_bytes - bytes, bytes }
            }
            None => {
                varying += 1;
                Place::Varying { number: varying - 1 }
            }
        };
        let places = columns.iter().map(place).collect();
        RecordLayout { columns: columns.to_vec(), places, fixed_bytes, varying }
    }

    pub(super) fn columns(&self) -> &[Column] {
        &self.columns
    }

    pub(super) fn places(&self) -> &[Place] {
        &self.places
    }

    /// Bytes of a record whose varying columns are empty.
    pub(super) fn record_bytes_min(&self) -> usize {
        self.fixed_bytes + 4 * self.varying + CHECKSUM_BYTES
    }

    /// Bytes of every record, if all have the same size.
    pub(super) fn record_bytes(&self) -> Option<usize> {
        (self.varying == 0).then(|| self.record_bytes_min())
    }

    /// Appends a record. `values` has the bytes of each column.
    pub(super) fn write(&self, values: &[&[u8]], out: &mut Vec<u8>) -> Result<(), String> {
        let start = out.len();
        if values.len() != self.columns.len() {
            return Err(format!("{} columns instead of {}", values.len(), self.columns.len()));
        }
        for (column, value) in self.columns.iter().zip(values) {
            if let Some(expected) = column.record_bytes() {
                if value.len() != expected {
                    let (name, length) = (&column.name, value.len());
                    return Err(format!("column {name} has {length} bytes instead of {expected}"));
                }
                check_range(column, value)?;
                out.extend_from_slice(value);
            }
        }
        let varying = || {
            let pairs = self.columns.iter().zip(values);
            pairs.filter(|(column, _)| column.kind == ColumnKind::Bytes).map(|(_, value)| value)
        };
        let bytes: u64 = varying().map(|value| value.len() as u64).sum();
        if bytes + self.record_bytes_min() as u64 > RECORD_BYTES_MAX {
            return Err(format!("it has more than {RECORD_BYTES_MAX} bytes"));
        }
        for value in varying() {
            out.extend((value.len() as u32).to_le_bytes());
        }
        for value in varying() {
            out.extend_from_slice(value);
        }
        let checksum = crc32fast::hash(&out[start..]);
        out.extend(checksum.to_le_bytes());
        Ok(())
    }

    /// The bytes of a varying column, of a record that may be damaged.
    pub(super) fn varying<'a>(&self, record: &'a [u8], number: usize) -> Option<&'a [u8]> {
        let length = |number: usize| {
            let at = self.fixed_bytes + 4 * number;
            let four = record.get(at..at + 4)?;
            Some(u32::from_le_bytes(four.try_into().ok()?) as usize)
        };
        let mut start = self.fixed_bytes + 4 * self.varying;
        for earlier in 0..number {
            start = start.checked_add(length(earlier)?)?;
        }
        let end = start.checked_add(length(number)?)?;
        record[..record.len() - CHECKSUM_BYTES].get(start..end)
    }
}

/// Checks that values are below the column's limit.
pub(super) fn check_range(column: &Column, value: &[u8]) -> Result<(), String> {
    let Some(below) = column.below else { return Ok(()) };
    for four in value.as_chunks().0 {
        let label = i32::from_le_bytes(*four);
        if u32::try_from(label).is_ok_and(|label| label < below) {
            continue;
        }
        return Err(format!("{} {label} is not below {below}", column.name));
    }
    Ok(())
}

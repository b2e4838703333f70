//! Records in the rows of a table: CSV and TSV.

use super::cells::{COLUMNS, Cell, RecordJson, no_columns};
use super::records::{RECORD_BYTES_MAX, Raw, Records, too_long};
use super::stream::{Buffered, Stream};
use crate::{DataError, RecordPlace};
use csv_core::{ReadFieldResult, Reader, ReaderBuilder};

/// Size limit of the header.
const HEADER_BYTES_MAX: u64 = 256 << 10;

/// The rows of a table, counted from 1 without the header.
pub(super) struct Rows {
    input: Buffered,
    parser: Reader,
    /// Cells per row.
    width: usize,
    /// The columns used: index and name.
    columns: Vec<(usize, &'static str)>,
    number: u64,
    /// The last row was too long, and the rest of it is still to be skipped.
    is_inside: bool,
}

/// How reading a row ended.
enum Ended {
    /// The row has this many cells.
    Cells(usize),
    /// There are no more rows.
    NoRow,
    /// The row exceeds the limit and has not ended.
    TooLong,
}

impl Rows {
    pub(super) fn new(stream: Stream, delimiter: u8) -> Result<Rows, DataError> {
        let parser = ReaderBuilder::new().delimiter(delimiter).build();
        let input = Buffered::new(stream);
        let mut rows =
            Rows { input, parser, width: 0, columns: Vec::new(), number: 0, is_inside: false };
        let mut names: Vec<Vec<u8>> = Vec::new();
        let ended = rows.read(HEADER_BYTES_MAX, |column, bytes| {
            names.resize_with(names.len().max(column + 1), Vec::new);
            names[column].extend(bytes);
        })?;
        let path = rows.input.stream().path();
        match ended {
            Ended::Cells(width) => rows.width = width,
            // An empty file has no rows.
            Ended::NoRow => return Ok(rows),
            Ended::TooLong => {
                let problem = "its first line is longer than 256 KiB, and a header is not";
                return Err(DataError::input(path, problem));
            }
        }
        let names: Vec<String> =
            names.iter().map(|name| String::from_utf8_lossy(name).trim().to_owned()).collect();
        for (place, name) in names.iter().enumerate() {
            let Some(known) = COLUMNS.into_iter().find(|known| known == name) else { continue };
            if rows.columns.iter().any(|(_, other)| *other == known) {
                return Err(DataError::input(path, format!("it has two columns `{known}`")));
            }
            rows.columns.push((place, known));
        }
        match rows.columns.is_empty() {
            true => {
                let names: Vec<&str> = names.iter().map(String::as_str).collect();
                let problem = no_columns(&names);
                Err(DataError::input(path, format!("{problem}. The first line is a header")))
            }
            false => Ok(rows),
        }
    }

    /// Reads a row of at most `bytes_max`, and passes parts of its cells to `take`.
    fn read(
        &mut self,
        bytes_max: u64,
        mut take: impl FnMut(usize, &[u8]),
    ) -> Result<Ended, DataError> {
        let (mut column, mut row_bytes) = (0, 0);
        let mut part = [0; 4096];
        loop {
            let (result, read, written) = self.parser.read_field(self.input.bytes()?, &mut part);
            self.input.consume(read);
            row_bytes += read as u64;
            if written > 0 || matches!(result, ReadFieldResult::Field { .. }) {
                take(column, &part[..written]);
            }
            match result {
                ReadFieldResult::Field { record_end: true } => return Ok(Ended::Cells(column + 1)),
                ReadFieldResult::Field { record_end: false } => column += 1,
                ReadFieldResult::End => return Ok(Ended::NoRow),
                ReadFieldResult::InputEmpty | ReadFieldResult::OutputFull => {}
            }
            if row_bytes > bytes_max {
                return Ok(Ended::TooLong);
            }
        }
    }

    /// The cells of a row as JSON, or the problem with them.
    fn json(&self, cells: &[Vec<u8>], width: usize) -> Result<String, String> {
        if width != self.width {
            return Err(format!("has {width} cells, and the header {}", self.width));
        }
        let mut json = RecordJson::new();
        for ((_, name), cell) in self.columns.iter().zip(cells) {
            let text =
                std::str::from_utf8(cell).map_err(|_| format!("`{name}` is not UTF-8 text"))?;
            json.push(name, Cell::Text(text))?;
        }
        Ok(json.finish())
    }
}

impl Records for Rows {
    fn taken(&self) -> u64 {
        self.input.stream().taken()
    }

    fn next(&mut self) -> Result<Option<Raw>, DataError> {
        if self.width == 0 {
            return Ok(None);
        }
        if std::mem::take(&mut self.is_inside) {
            self.read(u64::MAX, |_, _| {})?;
        }
        let columns = std::mem::take(&mut self.columns);
        let mut cells = vec![Vec::new(); columns.len()];
        let mut bytes = 0;
        let ended = self.read(RECORD_BYTES_MAX, |column, part| {
            bytes += part.len() as u64 + 1;
            if let Some(at) = columns.iter().position(|(place, _)| *place == column) {
                cells[at].extend(part);
            }
        });
        self.columns = columns;
        let json = match ended? {
            Ended::NoRow => return Ok(None),
            Ended::TooLong => {
                self.is_inside = true;
                Err(too_long())
            }
            Ended::Cells(width) => self.json(&cells, width),
        };
        self.number += 1;
        Ok(Some(Raw { place: RecordPlace::Row(self.number), bytes, json }))
    }
}

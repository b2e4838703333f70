//! The worker process of a table.

use super::frame;
use super::json::object;
use crate::pack::{COLUMNS, RECORD_BYTES_MAX, no_columns, too_long};
use crate::worker::{ProcessorTime, guarded, put_frame, write_frame};
use parquet::basic::Compression;
use parquet::file::metadata::ParquetMetaData;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::reader::{ReaderIter, TreeBuilder};
use parquet::schema::types::{SchemaDescriptor, Type};
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::sync::Arc;
use storm_files::open_plain;

/// Address space limit of the process. It holds one decompressed page per column.
pub(crate) const MEMORY_BYTES_MAX: u64 = 2 << 30;

/// Size limit of the file metadata. A million pages need less.
const METADATA_BYTES_MAX: u64 = 64 << 20;
const ROW_GROUPS_MAX: usize = 1 << 20;
const MAGIC: [u8; 4] = *b"PAR1";

/// Rows decoded at once.
const BATCH_ROWS: usize = 64;

/// CPU seconds per [`RENEWED_BYTES`] of rows.
pub(crate) const SECONDS_MAX: u64 = 60;

/// Bytes of rows after which the CPU time limit is renewed.
const RENEWED_BYTES: usize = 1 << 20;

/// The subject of the error message if it panics.
const CODE: &str = "the code that reads Parquet";

/// The file to read.
#[derive(Serialize, Deserialize)]
pub(crate) struct OpenTable {
    /// The raw bytes of its path.
    pub(super) path: Vec<u8>,
    /// The first row group to read.
    pub(super) first_group: u64,
    /// Whether to continue with the next group after one that cannot be read.
    pub(super) skip_damaged: bool,
}

/// Sends the rows of a file.
pub(crate) fn serve(
    open: &OpenTable,
    time: &ProcessorTime,
    output: &mut impl Write,
) -> io::Result<()> {
    match guarded(CODE, || send(open, time, output)) {
        Ok(()) => write_frame(output, &[&[frame::END]]),
        Err(problem) => write_frame(output, &[&[frame::FAILED], problem.as_bytes()]),
    }
}

fn send(open: &OpenTable, time: &ProcessorTime, output: &mut impl Write) -> Result<(), String> {
    let words = |error: io::Error| error.to_string();
    let path = PathBuf::from(OsString::from_vec(open.path.clone()));
    let mut file = open_plain(&path).map_err(words)?;
    check_tail(&mut file).map_err(words)??;
    let reader = SerializedFileReader::new(file).map_err(|error| error.to_string())?;
    let metadata = reader.metadata();
    let columns = Arc::new(SchemaDescriptor::new(Arc::new(projection(metadata)?)));
    let rows = check_groups(metadata)?;
    write_frame(output, &[&[frame::OPENED], &rows.to_le_bytes()]).map_err(words)?;
    let first = usize::try_from(open.first_group).map_err(|error| error.to_string())?;
    let mut renewal = Renewal { time, sent: 0 };
    for (number, group) in metadata.row_groups().iter().enumerate().skip(first) {
        let rows = group.num_rows().to_le_bytes();
        // Flushed now, because reading the group may kill this process.
        write_frame(output, &[&[frame::GROUP], &rows]).map_err(words)?;
        let begin = || {
            let group = reader.get_row_group(number).map_err(|error| error.to_string())?;
            // The library's `RowIter` decodes more rows at once, and a damaged page would lose all
            // of them.
            TreeBuilder::new()
                .with_batch_size(BATCH_ROWS)
                .as_iter(Arc::clone(&columns), &*group)
                .map_err(|error| error.to_string())
                .and_then(|rows| send_group(rows, &mut renewal, output))
        };
        match guarded(CODE, begin) {
            Ok(()) => {}
            Err(problem) if open.skip_damaged => {
                // This also ends on a broken pipe.
                write_frame(output, &[&[frame::DAMAGED], problem.as_bytes()]).map_err(words)?;
            }
            Err(problem) => return Err(problem),
        }
    }
    Ok(())
}

/// Renews the CPU time limit as rows are sent.
struct Renewal<'a> {
    time: &'a ProcessorTime,
    sent: usize,
}

impl Renewal<'_> {
    fn count(&mut self, bytes: usize) -> io::Result<()> {
        self.sent += bytes;
        if self.sent >= RENEWED_BYTES {
            self.sent = 0;
            self.time.renew()?;
        }
        Ok(())
    }
}

/// Sends the rows of a group.
fn send_group(
    rows: ReaderIter,
    renewal: &mut Renewal<'_>,
    output: &mut impl Write,
) -> Result<(), String> {
    let words = |error: io::Error| error.to_string();
    for row in rows {
        let row = row.map_err(|error| error.to_string())?;
        let json = object(&row).and_then(|json| match json.len() as u64 > RECORD_BYTES_MAX {
            true => Err(too_long()),
            false => Ok(json),
        });
        let (kind, bytes) = match &json {
            Ok(json) => (frame::ROW, json),
            Err(problem) => (frame::BAD_ROW, problem),
        };
        put_frame(output, &[&[kind], bytes.as_bytes()]).map_err(words)?;
        renewal.count(bytes.len() + 5).map_err(words)?;
    }
    Ok(())
}

/// Checks the length of the file metadata before it is read.
fn check_tail(file: &mut File) -> io::Result<Result<(), String>> {
    let bytes = file.metadata()?.len();
    let mut ends = [0; 12];
    if bytes >= ends.len() as u64 {
        file.read_exact(&mut ends[..4])?;
        file.seek(SeekFrom::End(-8))?;
        file.read_exact(&mut ends[4..])?;
    }
    let [magic, length, end] = [0, 4, 8].map(|at| [0, 1, 2, 3].map(|byte| ends[at + byte]));
    if magic != MAGIC || end != MAGIC {
        return Ok(Err("it is not a Parquet file, or only a part of one".to_owned()));
    }
    let length = u64::from(u32::from_le_bytes(length));
    Ok(match length > METADATA_BYTES_MAX || length > bytes - ends.len() as u64 {
        true => Err(format!("its description would have {length} bytes")),
        false => Ok(()),
    })
}

/// The columns that records use.
fn projection(metadata: &ParquetMetaData) -> Result<Type, String> {
    let schema = metadata.file_metadata().schema();
    let all = schema.get_fields();
    let known: Vec<_> =
        all.iter().filter(|field| COLUMNS.contains(&field.name())).cloned().collect();
    if known.is_empty() {
        let names: Vec<&str> = all.iter().map(|field| field.name()).collect();
        return Err(no_columns(&names));
    }
    let builder = Type::group_type_builder(schema.name()).with_fields(known);
    builder.build().map_err(|error| error.to_string())
}

/// Counts the rows, and rejects groups that cannot be read.
fn check_groups(metadata: &ParquetMetaData) -> Result<u64, String> {
    let groups = metadata.row_groups();
    if groups.len() > ROW_GROUPS_MAX {
        return Err(format!(
            "it has {} row groups, and at most {ROW_GROUPS_MAX} are read",
            groups.len()
        ));
    }
    let mut rows = 0u64;
    for group in groups {
        let count =
            u64::try_from(group.num_rows()).map_err(|_| "a row group of less than no rows")?;
        rows = rows.checked_add(count).ok_or("more rows than can be counted")?;
        for column in group.columns() {
            let codec = column.compression();
            if matches!(codec, Compression::BROTLI(_) | Compression::LZO) {
                return Err(format!(
                    "its pages are compressed with {codec}; write it with Snappy, zstd, gzip or LZ4"
                ));
            }
        }
    }
    Ok(rows)
}

//! The rows of a Parquet file, from a worker process.

use super::frame;
use super::worker::OpenTable;
use crate::DataError;
use crate::worker::{Task, WorkerCommand, read_frame};
use std::io::{self, BufReader, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Stdio};

/// How many workers may die inside a row group of a file when damaged groups are skipped. Each may
/// take a minute.
const RESTARTS_MAX: usize = 8;

/// A file that is being read. The thread that opened it must read it, because the system kills the
/// worker when that thread exits.
pub(crate) struct Table {
    path: PathBuf,
    command: WorkerCommand,
    if_damaged: IfDamaged,
    process: Process,
    /// Total rows.
    rows: u64,
    /// Row groups started, by all workers.
    groups: u64,
    /// Rows of the current group that have not arrived.
    rows_left: u64,
    restarts_left: usize,
}

/// What to do with a row group that cannot be read to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IfDamaged {
    Fail,
    /// Continue with the next group.
    Skip,
}

/// An item of a table.
pub(crate) enum TableItem {
    /// A row as JSON, or the problem with it.
    Row(Result<String, String>),
    /// The rest of a row group that cannot be read.
    Lost { rows: u64, problem: String },
}

struct Process {
    child: Child,
    frames: BufReader<ChildStdout>,
}

impl Table {
    pub(crate) fn open(
        path: &Path,
        command: &WorkerCommand,
        if_damaged: IfDamaged,
    ) -> Result<Table, DataError> {
        let (process, rows) = Process::start(path, command, if_damaged, 0)?;
        Ok(Table {
            path: path.to_owned(),
            command: command.clone(),
            if_damaged,
            process,
            rows,
            groups: 0,
            rows_left: 0,
            restarts_left: RESTARTS_MAX,
        })
    }

    pub(crate) fn rows(&self) -> u64 {
        self.rows
    }

    /// The next row, or a run of rows that were lost.
    pub(crate) fn next(&mut self) -> Result<Option<TableItem>, DataError> {
        loop {
            let Some((kind, bytes)) = self.process.frame() else {
                let problem = self.process.ended();
                let restarts =
                    self.if_damaged == IfDamaged::Skip && self.groups > 0 && self.restarts_left > 0;
                if !restarts {
                    return Err(DataError::input(&self.path, problem));
                }
                self.restarts_left -= 1;
                (self.process, _) =
                    Process::start(&self.path, &self.command, self.if_damaged, self.groups)?;
                match self.lost(problem) {
                    Some(lost) => return Ok(Some(lost)),
                    None => continue,
                }
            };
            if kind == frame::GROUP {
                let rows = bytes.first_chunk().ok_or_else(|| self.broken())?;
                self.rows_left = u64::from_le_bytes(*rows);
                self.groups += 1;
                continue;
            }
            let text = String::from_utf8(bytes).map_err(|_| self.broken())?;
            let row = match kind {
                frame::ROW => Ok(text),
                frame::BAD_ROW => Err(text),
                frame::END => return Ok(None),
                frame::FAILED => return Err(DataError::input(&self.path, text)),
                frame::DAMAGED => match self.lost(text) {
                    Some(lost) => return Ok(Some(lost)),
                    None => continue,
                },
                _ => return Err(self.broken()),
            };
            self.rows_left = self.rows_left.saturating_sub(1);
            return Ok(Some(TableItem::Row(row)));
        }
    }

    /// Gives up the rest of the row group.
    fn lost(&mut self, problem: String) -> Option<TableItem> {
        let rows = std::mem::take(&mut self.rows_left);
        (rows > 0).then_some(TableItem::Lost { rows, problem })
    }

    fn broken(&mut self) -> DataError {
        DataError::input(&self.path, self.process.ended())
    }
}

impl Process {
    /// Starts a worker that sends the rows from a row group on. Also returns how many rows the file
    /// has.
    fn start(
        path: &Path,
        command: &WorkerCommand,
        if_damaged: IfDamaged,
        first_group: u64,
    ) -> Result<(Process, u64), DataError> {
        let bad = |problem: String| DataError::input(path, problem);
        let no_start =
            |error: io::Error| bad(format!("cannot start the process that reads it: {error}"));
        let mut process = command.process();
        process.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = process.spawn().map_err(no_start)?;
        let pipes = (child.stdin.take(), child.stdout.take());
        let (Some(mut input), Some(output)) = pipes else {
            return Err(bad("the process that reads it has no pipes".to_owned()));
        };
        let mut process = Process { child, frames: BufReader::with_capacity(1 << 18, output) };
        let open = OpenTable {
            path: path.as_os_str().as_bytes().to_owned(),
            first_group,
            skip_damaged: if_damaged == IfDamaged::Skip,
        };
        let begin = command.begin(Task::Table(open), &[]).map_err(no_start)?;
        // A process that has already exited is reported below.
        input.write_all(&begin).ok();
        let (kind, bytes) = process.frame().ok_or_else(|| bad(process.ended()))?;
        match (kind, bytes.first_chunk()) {
            (frame::OPENED, Some(rows)) => Ok((process, u64::from_le_bytes(*rows))),
            (frame::FAILED, _) => Err(bad(String::from_utf8_lossy(&bytes).into_owned())),
            _ => Err(bad(process.ended())),
        }
    }

    /// The next frame. `None` if the worker exited or sends garbage.
    fn frame(&mut self) -> Option<(u8, Vec<u8>)> {
        let mut bytes = read_frame(&mut self.frames).ok()??;
        if bytes.is_empty() {
            return None;
        }
        let kind = bytes.remove(0);
        Some((kind, bytes))
    }

    /// Kills the worker and describes how it ended.
    fn ended(&mut self) -> String {
        self.child.kill().ok();
        let how = match self.child.wait() {
            Ok(status) => status.to_string(),
            Err(error) => error.to_string(),
        };
        format!(
            "the process that reads it ended ({how}): the file is damaged, or has pages that take more than its 2 GiB \
             of memory"
        )
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It has no state to save.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

//! The rows of a Parquet file, from a worker process.

use super::frame;
use super::worker::OpenTable;
use crate::DataError;
use crate::worker::{Task, WorkerCommand, read_frame};
use std::io::{self, BufReader, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Stdio};

/// A file that is being read. The thread that opened it must read it: the system ends the process with that thread.
pub(crate) struct Table {
    path: PathBuf,
    child: Child,
    frames: BufReader<ChildStdout>,
    /// In all.
    rows: u64,
}

impl Table {
    pub(crate) fn open(path: &Path, command: &WorkerCommand) -> Result<Table, DataError> {
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
        let open = OpenTable { path: path.as_os_str().as_bytes().to_owned() };
        let begin = command.begin(Task::Table(open), &[]).map_err(no_start)?;
        let frames = BufReader::with_capacity(1 << 18, output);
        let mut table = Table { path: path.to_owned(), child, frames, rows: 0 };
        // A process that ended already is reported below.
        input.write_all(&begin).ok();
        match table.frame()? {
            (frame::OPENED, bytes) => {
                let rows = bytes.first_chunk().ok_or_else(|| table.ended())?;
                table.rows = u64::from_le_bytes(*rows);
                Ok(table)
            }
            _ => Err(table.ended()),
        }
    }

    pub(crate) fn rows(&self) -> u64 {
        self.rows
    }

    /// The next row as JSON, or what is wrong with it.
    pub(crate) fn next(&mut self) -> Result<Option<Result<String, String>>, DataError> {
        let (kind, bytes) = self.frame()?;
        let text = String::from_utf8(bytes).map_err(|_| self.ended())?;
        match kind {
            frame::ROW => Ok(Some(Ok(text))),
            frame::BAD_ROW => Ok(Some(Err(text))),
            frame::END => Ok(None),
            _ => Err(self.ended()),
        }
    }

    fn frame(&mut self) -> Result<(u8, Vec<u8>), DataError> {
        let Ok(Some(mut bytes)) = read_frame(&mut self.frames) else { return Err(self.ended()) };
        if bytes.is_empty() {
            return Err(self.ended());
        }
        match bytes.remove(0) {
            frame::FAILED => {
                let problem = String::from_utf8_lossy(&bytes).into_owned();
                Err(DataError::input(&self.path, problem))
            }
            kind => Ok((kind, bytes)),
        }
    }

    /// The process is gone: describes how it ended.
    fn ended(&mut self) -> DataError {
        self.child.kill().ok();
        let how = match self.child.wait() {
            Ok(status) => status.to_string(),
            Err(error) => error.to_string(),
        };
        let problem = format!(
            "the process that reads it ended ({how}): the file is damaged, or has pages that take more than its 2 GiB \
             of memory"
        );
        DataError::input(&self.path, problem)
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        // It holds nothing that must be saved.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

//! The input files and their contents.

use super::delimited::Rows;
use super::folder;
use super::format::{Compression, FileFormat, Named};
use super::lines::Lines;
use super::record::Record;
use super::records::{self, Records};
use super::skip::Skipped;
use super::stream::{Origin, Stdin, Stream, Use};
use super::table::TableRows;
use super::values::Values;
use super::{InputFormat, PackOptions, text};
use crate::table::IfDamaged;
use crate::{DataError, Kind, RecordPlace, WorkerCommand};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use storm_files::open_plain;

/// The input name that means standard input.
const STDIN: &str = "-";

/// A unit of work for the encoder.
pub(super) struct Job {
    pub(super) content: Content,
    /// Bytes of input in memory.
    pub(super) bytes: u64,
    /// Bytes of the input files.
    pub(super) input_bytes: u64,
}

pub(super) enum Content {
    /// Pieces of documents, in order.
    Text(Vec<Piece>),
    /// Records of a file as JSON, or the problem with them.
    Records { file: usize, records: Vec<(RecordPlace, Result<String, String>)> },
    /// A file that is skipped entirely.
    Skipped(DataError),
}

/// A part of a document, or all of it.
pub(super) struct Piece {
    pub(super) text: String,
    pub(super) begins: bool,
    pub(super) ends: bool,
}

/// All input files.
pub(super) struct Inputs {
    files: Vec<InputFile>,
    kind: Kind,
    skip_bad: bool,
    worker: WorkerCommand,
    /// Bytes of all files. Standard input is not counted until it has been read.
    file_bytes: u64,
    stdin_bytes: Mutex<u64>,
    /// Files in folders that are of unknown format.
    passed_over: Vec<PathBuf>,
}

struct InputFile {
    origin: Origin,
    format: FileFormat,
    compression: Option<Compression>,
    /// 0 for standard input.
    bytes: u64,
}

impl InputFile {
    fn is_stdin(&self) -> bool {
        matches!(self.origin, Origin::Stdin(_))
    }

    fn of_path(path: &Path, format: InputFormat) -> Result<InputFile, DataError> {
        let file = open_plain(path).map_err(DataError::io(path))?;
        let bytes = file.metadata().map_err(DataError::io(path))?.len();
        let named = Named::of(path);
        let format = named.format(path, format)?;
        let origin = Origin::File(path.to_owned());
        Ok(InputFile { origin, format, compression: named.compression, bytes })
    }

    fn stdin(format: InputFormat) -> Result<InputFile, DataError> {
        let origin = Origin::Stdin(Stdin::default());
        let refuse = |problem: &str| {
            Err(DataError::Option { option: "--format", problem: problem.to_owned() })
        };
        let format = match format.format() {
            None => return refuse("standard input has no name: say what it is"),
            Some(FileFormat::Parquet) => {
                return refuse(
                    "Parquet cannot be read from standard input: its description is at its end",
                );
            }
            Some(format) => format,
        };
        Ok(InputFile { origin, format, compression: None, bytes: 0 })
    }

    fn stream(&self, how: Use) -> Result<Stream, DataError> {
        Stream::open(&self.origin, self.compression, how)
    }

    /// The records of the file. `None` if it is text.
    fn records(
        &self,
        how: Use,
        worker: &WorkerCommand,
        if_damaged: IfDamaged,
    ) -> Result<Option<Box<dyn Records>>, DataError> {
        Ok(Some(match self.format {
            FileFormat::Text => return Ok(None),
            FileFormat::Jsonl => Box::new(Lines::new(self.stream(how)?)),
            FileFormat::Json => Box::new(Values::new(self.stream(how)?)),
            FileFormat::Delimited(delimiter) => Box::new(Rows::new(self.stream(how)?, delimiter)?),
            FileFormat::Parquet => {
                Box::new(TableRows::open(self.origin.path(), self.bytes, worker, if_damaged)?)
            }
        }))
    }
}

impl Inputs {
    /// Finds and checks all files, and reads the start of the first to determine their kind.
    pub(super) fn open(options: &PackOptions) -> Result<Inputs, DataError> {
        let (mut files, mut passed_over) = (Vec::new(), Vec::new());
        for path in &options.inputs {
            if path.as_os_str() == STDIN {
                if files.iter().any(InputFile::is_stdin) {
                    let problem = "standard input can be read once";
                    return Err(DataError::Option { option: "input", problem: problem.to_owned() });
                }
                files.push(InputFile::stdin(options.format)?);
            } else if path.is_dir() {
                let found = folder::find(path, options.format)?;
                for path in &found.used {
                    files.push(InputFile::of_path(path, options.format)?);
                }
                passed_over.extend(found.passed_over);
            } else {
                files.push(InputFile::of_path(path, options.format)?);
            }
        }
        let file_bytes = files.iter().map(|file| file.bytes).sum();
        let mut inputs = Inputs {
            files,
            kind: Kind::Text,
            skip_bad: options.skip_bad,
            worker: options.worker.clone(),
            file_bytes,
            stdin_bytes: Mutex::new(0),
            passed_over,
        };
        inputs.kind = inputs.find_kind()?;
        Ok(inputs)
    }

    /// Text if any file is text. Otherwise the kind of the first record.
    fn find_kind(&self) -> Result<Kind, DataError> {
        if self.files.iter().any(|file| file.format == FileFormat::Text) {
            return Ok(Kind::Text);
        }
        let mut skipped = Skipped::new(self.skip_bad);
        for file in &self.files {
            let Some(mut records) = file.records(Use::Look, &self.worker, self.if_damaged())?
            else {
                continue;
            };
            while let Some(raw) = records.next()? {
                if raw.is_blank() {
                    continue;
                }
                let record = raw.json.and_then(|json| Record::parse(&json));
                match record {
                    Ok(record) => return Ok(record.kind()),
                    Err(problem) => skipped.add(file.origin.path(), raw.place, problem)?,
                }
            }
        }
        match skipped.first() {
            Some(first) => {
                let path = self.files[0].origin.path();
                Err(DataError::input(
                    path,
                    format!("none of the records can be packed; the first: {first}"),
                ))
            }
            None => Ok(Kind::Text),
        }
    }

    fn if_damaged(&self) -> IfDamaged {
        match self.skip_bad {
            true => IfDamaged::Skip,
            false => IfDamaged::Fail,
        }
    }

    pub(super) fn kind(&self) -> Kind {
        self.kind
    }

    pub(super) fn count(&self) -> u64 {
        self.files.len() as u64
    }

    /// Bytes of all files, valid once they have been read.
    pub(super) fn bytes(&self) -> u64 {
        self.file_bytes + self.stdin_bytes.lock().map_or(0, |bytes| *bytes)
    }

    /// Bytes of all files, if known in advance.
    pub(super) fn known_bytes(&self) -> Option<u64> {
        (!self.files.iter().any(InputFile::is_stdin)).then_some(self.file_bytes)
    }

    pub(super) fn path(&self, file: usize) -> &Path {
        self.files[file].origin.path()
    }

    /// The first file, for errors about all of them.
    pub(super) fn first(&self) -> &Path {
        self.files.first().map_or(Path::new("input"), |file| file.origin.path())
    }

    pub(super) fn passed_over(&self) -> &[PathBuf] {
        &self.passed_over
    }

    /// Reads everything. Stops early if `emit` returns false.
    pub(super) fn read(&self, emit: &mut dyn FnMut(Job) -> bool) -> Result<(), DataError> {
        for (number, file) in self.files.iter().enumerate() {
            let mut taken = 0;
            let mut counted = |job: Job| {
                taken += job.input_bytes;
                emit(job)
            };
            let wanted = match file.records(Use::Take, &self.worker, self.if_damaged())? {
                Some(reader) => records::read(number, reader, self.skip_bad, &mut counted)?,
                None => self.read_text(file, &mut counted)?,
            };
            if let (true, Ok(mut bytes)) = (file.is_stdin(), self.stdin_bytes.lock()) {
                *bytes = taken;
            }
            if !wanted {
                break;
            }
        }
        Ok(())
    }

    fn read_text(
        &self,
        file: &InputFile,
        emit: &mut dyn FnMut(Job) -> bool,
    ) -> Result<bool, DataError> {
        // Parts of a document are encoded before its end is read, so the whole file is checked
        // first.
        let problem = match self.skip_bad && !file.is_stdin() {
            true => text::problem(file.stream(Use::Take)?)?,
            false => None,
        };
        match problem {
            None => text::read(file.stream(Use::Take)?, emit),
            Some(problem) => {
                let content = Content::Skipped(problem);
                Ok(emit(Job { content, bytes: 0, input_bytes: file.bytes }))
            }
        }
    }
}

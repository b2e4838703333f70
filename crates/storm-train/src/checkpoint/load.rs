//! Finding a checkpoint that is what was written, and going on from it.

use super::known::Condition;
use super::manifest::{self, FileEntry, Manifest};
use super::source::Hashing;
use super::{
    CheckpointError, Checkpoints, Progress, StatePart, StateTensor, Storage, TrainingState,
};
use crate::TrainError;
use std::io::Read;
use std::path::{Path, PathBuf};
use storm_files::open_plain;
use storm_model::{HEADER_BYTES_MAX, ModelError, SafetensorsFile, TensorEntry};

/// Files are read in pieces of this size.
const PIECE_BYTES: usize = 4 << 20;

/// A checkpoint whose every byte is as it was written, and whose tensors are those of the run.
#[derive(Debug)]
pub struct Verified {
    path: PathBuf,
    progress: Progress,
    /// By part; none where the checkpoint has none, or nobody asked.
    files: Vec<Option<SafetensorsFile>>,
}

impl<S: Storage> Checkpoints<S> {
    /// The newest checkpoint that can be used; none if there is no checkpoint at all. Those after it that
    /// cannot are handed to `skipped` with the reason.
    ///
    /// # Errors
    /// There are checkpoints and none can be used; or one is of another model or newer than this program:
    /// an older one would only hide that.
    pub fn newest(
        &self,
        expected: &[StateTensor],
        mut skipped: impl FnMut(u64, &CheckpointError),
    ) -> Result<Option<Verified>, CheckpointError> {
        let steps = self.steps()?;
        for &step in steps.iter().rev() {
            match self.verify(step, expected) {
                Ok(verified) => return Ok(Some(verified)),
                Err(error) if error.is_damage() => skipped(step, &error),
                Err(error) => return Err(error),
            }
        }
        match steps.len() {
            0 => Ok(None),
            count => Err(CheckpointError::NoneUsable { path: self.root.clone(), count }),
        }
    }

    /// The settings of the newest checkpoint whose manifest can be read: what must be known before there
    /// is anything to compare tensors with.
    ///
    /// # Errors
    /// The folder cannot be listed, or a manifest is newer than this program.
    pub fn newest_progress(&self) -> Result<Option<Progress>, CheckpointError> {
        for step in self.steps()?.into_iter().rev() {
            match Manifest::read(&self.path(step).join(manifest::FILE_NAME)) {
                Ok(manifest) => return Ok(Some(manifest.progress)),
                Err(error) if error.is_damage() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    /// Reads all of a checkpoint and compares it with its manifest and with these tensors.
    ///
    /// # Errors
    /// It is damaged, or not of these tensors.
    pub fn verify(&self, step: u64, expected: &[StateTensor]) -> Result<Verified, CheckpointError> {
        self.verify_by(step, expected, Hashing::AllCores)
    }

    pub(super) fn verify_by(
        &self,
        step: u64,
        expected: &[StateTensor],
        hashing: Hashing,
    ) -> Result<Verified, CheckpointError> {
        let verified = self.read_all(step, expected, hashing);
        let condition = if verified.is_ok() { Condition::Whole } else { Condition::Unusable };
        self.known.set(step, condition);
        verified
    }

    fn read_all(
        &self,
        step: u64,
        expected: &[StateTensor],
        hashing: Hashing,
    ) -> Result<Verified, CheckpointError> {
        let path = self.path(step);
        let Manifest { progress, files, .. } = Manifest::read(&path.join(manifest::FILE_NAME))?;
        if progress.step != step {
            let problem = format!("its manifest is of step {}", progress.step);
            return Err(CheckpointError::Damaged { path, problem });
        }
        let mut opened = Vec::new();
        for part in StatePart::ALL {
            let name = part.file_name();
            let tensors: Vec<&StateTensor> = expected.iter().filter(|t| t.part == part).collect();
            let is_there = files.iter().any(|entry| entry.name == name);
            if !part.is_always_saved() && (tensors.is_empty() || !is_there) {
                opened.push(None);
                continue;
            }
            let entry = part_entry(&path, &files, part)?;
            opened.push(Some(verify_file(&path.join(name), entry, &tensors, hashing)?));
        }
        Ok(Verified { path, progress, files: opened })
    }
}

/// What a manifest says of the file of a part.
pub(super) fn part_entry<'a>(
    checkpoint: &Path,
    files: &'a [FileEntry],
    part: StatePart,
) -> Result<&'a FileEntry, CheckpointError> {
    let name = part.file_name();
    files.iter().find(|entry| entry.name == name).ok_or_else(|| {
        let problem = format!("its manifest does not name {name}");
        CheckpointError::Damaged { path: checkpoint.to_owned(), problem }
    })
}

fn verify_file(
    path: &Path,
    entry: &FileEntry,
    expected: &[&StateTensor],
    hashing: Hashing,
) -> Result<SafetensorsFile, CheckpointError> {
    let other = |problem: String| CheckpointError::OtherRun { path: path.to_owned(), problem };
    let expected_bytes: u64 = expected.iter().map(|tensor| tensor.size_bytes() as u64).sum();
    if entry.bytes > expected_bytes.saturating_add(HEADER_BYTES_MAX) {
        return Err(other(format!(
            "it has {} bytes where the model's tensors take {expected_bytes}",
            entry.bytes
        )));
    }
    let file = open_as_written(path, entry, hashing)?;
    for tensor in expected {
        let Some(TensorEntry { dtype, shape, .. }) = file.tensors().get(&tensor.name) else {
            return Err(other(format!("it has no tensor `{}`", tensor.name)));
        };
        if *dtype != tensor.file_dtype() || shape.as_slice() != tensor.shape.axes() {
            let found = format!(
                "`{}` is {} {shape:?} there and {} {} here",
                tensor.name,
                dtype.name(),
                tensor.dtype,
                tensor.shape
            );
            return Err(other(match tensor.part {
                StatePart::Controller => {
                    format!("the controller of this version of STORM has another shape: {found}")
                }
                _ => found,
            }));
        }
    }
    match file.tensors().len() == expected.len() {
        true => Ok(file),
        false => Err(other("it has tensors that the model has not".to_owned())),
    }
}

/// Opens a file of a checkpoint, every byte of which is as it was written.
pub(super) fn open_as_written(
    path: &Path,
    entry: &FileEntry,
    hashing: Hashing,
) -> Result<SafetensorsFile, CheckpointError> {
    let damaged = |problem: String| CheckpointError::Damaged { path: path.to_owned(), problem };
    let (bytes, hash) =
        hash_of(path, entry.bytes, hashing).map_err(CheckpointError::io("read", path))?;
    if bytes != entry.bytes {
        return Err(damaged(format!("it has {bytes} bytes, not {}", entry.bytes)));
    }
    if hash.to_hex().as_str() != entry.blake3 {
        return Err(damaged("its hash is not the one that was written down".to_owned()));
    }
    SafetensorsFile::open(path).map_err(|error| damaged(error.to_string()))
}

/// The length and hash of a file; of one that is longer than `limit`, of a little more than that.
fn hash_of(path: &Path, limit: u64, hashing: Hashing) -> std::io::Result<(u64, blake3::Hash)> {
    let mut file = open_plain(path)?.take(limit.saturating_add(1));
    let mut hasher = blake3::Hasher::new();
    let mut piece = vec![0; PIECE_BYTES];
    let mut bytes = 0;
    loop {
        match file.read(&mut piece)? {
            0 => return Ok((bytes, hasher.finalize())),
            count => {
                hashing.update(&mut hasher, &piece[..count]);
                bytes += count as u64;
            }
        }
    }
}

impl Verified {
    /// How far the run had come.
    pub fn progress(&self) -> &Progress {
        &self.progress
    }

    /// Its folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it has the tensors of a part.
    pub(crate) fn has(&self, part: StatePart) -> bool {
        self.file(part).is_some()
    }

    fn file(&self, part: StatePart) -> Option<&SafetensorsFile> {
        let index = StatePart::ALL.iter().position(|known| *known == part);
        self.files[index.expect("every part is in the list")].as_ref()
    }

    /// Puts the state back, all of it that the checkpoint has. After an error it is neither the old one nor this one.
    ///
    /// # Errors
    /// A file that changed since it was verified, or from the device.
    pub fn restore(&self, state: &mut impl TrainingState) -> Result<(), TrainError> {
        let mut piece = Vec::new();
        for tensor in state.tensors() {
            let Some(file) = self.file(tensor.part) else { continue };
            let gone = |error: ModelError| CheckpointError::Damaged {
                path: file.path().to_owned(),
                problem: error.to_string(),
            };
            let entry = &file.tensors()[&tensor.name];
            let size = tensor.size_bytes();
            for first in (0..size).step_by(PIECE_BYTES) {
                piece.resize(PIECE_BYTES.min(size - first), 0);
                file.read_bytes(entry, first as u64, &mut piece).map_err(gone)?;
                state.write(&tensor.name, first, &piece)?;
            }
        }
        state.set_updates(self.progress.updates);
        Ok(())
    }
}

//! Writes a checkpoint under a temporary name, and moves it into place once all of it is on disk.

use super::known::Condition;
use super::manifest::{self, FileEntry, Manifest};
use super::source::{Hashing, Live, StateSource};
use super::{
    CheckpointError, Checkpoints, OutputFile, Progress, Snapshot, StatePart, Storage,
    TrainingState, name_of,
};
use crate::TrainError;
use std::io;
use std::path::{Path, PathBuf};
use storm_model::{HEADER_BYTES_MAX, safetensors_header};

/// Size of the pieces in which tensors are read and written.
const PIECE_BYTES: usize = 4 << 20;

impl<S: Storage> Checkpoints<S> {
    /// Saves a checkpoint and returns its path. On return it is durable, and checkpoints of earlier
    /// steps are unchanged, even if saving fails. A usable checkpoint of the same step is not
    /// written again.
    ///
    /// # Errors
    /// From the disk or the device.
    pub fn save(
        &self,
        state: &mut impl TrainingState,
        progress: &Progress,
    ) -> Result<PathBuf, TrainError> {
        self.save_from(Live::new(state), progress)
    }

    /// Like [`Checkpoints::save`], with the state of a snapshot.
    pub(super) fn save_snapshot(
        &self,
        snapshot: &Snapshot,
        progress: &Progress,
    ) -> Result<PathBuf, CheckpointError> {
        self.save_from(snapshot, progress)
    }

    fn save_from<F: StateSource>(
        &self,
        mut source: F,
        progress: &Progress,
    ) -> Result<PathBuf, F::Error> {
        let target = self.path(progress.step);
        let is_there = target.symlink_metadata().is_ok();
        if is_there && self.verify_by(progress.step, &source.tensors(), F::HASHING).is_ok() {
            return Ok(target);
        }
        let partial = self.beside(progress.step, "partial");
        let written = self.write(&partial, &mut source, progress);
        if written.is_err() {
            // Ignore this error: the one above matters, and the next run deletes what is left.
            let _ = self.storage.remove_tree(&partial);
        }
        written?;
        let replaced = self.beside(progress.step, "replaced");
        if is_there {
            self.clear(&replaced)?;
            self.rename(&target, &replaced)?;
        }
        self.rename(&partial, &target)?;
        self.sync_root()?;
        self.known.set(progress.step, Condition::Whole);
        if is_there {
            self.clear(&replaced)?;
        }
        Ok(target)
    }

    fn write<F: StateSource>(
        &self,
        partial: &Path,
        source: &mut F,
        progress: &Progress,
    ) -> Result<(), F::Error> {
        self.clear(partial)?;
        self.storage.create_directories(partial).map_err(CheckpointError::io("create", partial))?;
        let files = match source.write_by_ranks(partial)? {
            Some(files) => files,
            None => {
                let held: Vec<StatePart> =
                    StatePart::ALL.into_iter().filter(|&part| source.holds(part)).collect();
                held.into_iter()
                    .map(|part| self.write_part(partial, part, source))
                    .collect::<Result<_, _>>()?
            }
        };
        let path = partial.join(manifest::FILE_NAME);
        let text = Manifest::new(progress.clone(), files).to_text();
        let mut file = HashedFile::create(&self.storage, &path, F::HASHING)?;
        file.write(text.as_bytes())?;
        file.finish()?;
        self.storage
            .sync_directory(partial)
            .map_err(CheckpointError::io("flush to disk", partial))?;
        Ok(())
    }

    fn write_part<F: StateSource>(
        &self,
        partial: &Path,
        part: StatePart,
        source: &mut F,
    ) -> Result<FileEntry, F::Error> {
        let all = source.tensors();
        let tensors = || all.iter().enumerate().filter(|(_, tensor)| tensor.part == part);
        let path = partial.join(part.file_name());
        let entries = tensors().map(|(_, t)| (t.name.as_str(), t.file_dtype(), t.shape.axes()));
        let (header, _) = safetensors_header(entries);
        if header.len() as u64 > HEADER_BYTES_MAX {
            // Readers would refuse a header this large.
            let source = io::Error::other("the model has too many tensors for one file");
            return Err(CheckpointError::Io { action: "write", path, source }.into());
        }
        let mut file = HashedFile::create(&self.storage, &path, F::HASHING)?;
        file.write(&header)?;
        for (index, tensor) in tensors() {
            let size = tensor.size_bytes();
            for first in (0..size).step_by(PIECE_BYTES) {
                file.write(source.piece(index, first, PIECE_BYTES.min(size - first))?)?;
            }
        }
        Ok(file.finish()?)
    }

    pub(crate) fn beside(&self, step: u64, suffix: &str) -> PathBuf {
        self.root.join(format!("{}.{suffix}", name_of(step)))
    }

    /// Deletes a folder, if it exists.
    pub(super) fn clear(&self, path: &Path) -> Result<(), CheckpointError> {
        match self.storage.remove_tree(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(CheckpointError::io("delete", path)(error))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn rename(&self, from: &Path, to: &Path) -> Result<(), CheckpointError> {
        self.storage.rename(from, to).map_err(CheckpointError::io("put in place", to))
    }

    pub(super) fn sync_root(&self) -> Result<(), CheckpointError> {
        let root = &self.root;
        self.storage.sync_directory(root).map_err(CheckpointError::io("flush to disk", root))
    }
}

/// A file that is hashed while it is written.
struct HashedFile<F> {
    path: PathBuf,
    file: F,
    hashing: Hashing,
    hasher: blake3::Hasher,
    bytes: u64,
}

impl<F: OutputFile> HashedFile<F> {
    fn create<S: Storage<File = F>>(
        storage: &S,
        path: &Path,
        hashing: Hashing,
    ) -> Result<Self, CheckpointError> {
        let file = storage.create_file(path).map_err(CheckpointError::io("create", path))?;
        let (path, hasher) = (path.to_owned(), blake3::Hasher::new());
        Ok(HashedFile { path, file, hashing, hasher, bytes: 0 })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), CheckpointError> {
        self.hashing.update(&mut self.hasher, bytes);
        self.bytes += bytes.len() as u64;
        self.file.write_all(bytes).map_err(CheckpointError::io("write", &self.path))
    }

    fn finish(mut self) -> Result<FileEntry, CheckpointError> {
        self.file.sync().map_err(CheckpointError::io("flush to disk", &self.path))?;
        let name = self.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let blake3 = self.hasher.finalize().to_hex().to_string();
        Ok(FileEntry { name, bytes: self.bytes, blake3 })
    }
}

use super::{CheckpointError, FileEntry, Snapshot, StatePart, StateTensor, TrainingState};
use crate::TrainError;
use std::path::Path;

/// A source for the tensors of a checkpoint, read piece by piece.
pub(super) trait StateSource {
    /// The error of a failed read.
    type Error: From<CheckpointError>;

    /// How to hash: with all cores while training pauses, or with one core while steps run.
    const HASHING: Hashing;

    /// Its tensors.
    fn tensors(&self) -> Vec<StateTensor>;

    /// Whether the tensors of a part are to be saved.
    fn holds(&self, part: StatePart) -> bool;

    /// Reads `count` bytes of the tensor at `index`, starting at byte `first`.
    fn piece(&mut self, index: usize, first: usize, count: usize) -> Result<&[u8], Self::Error>;

    /// Writes all files together with the ranks that own parts of them; `None` if this process writes them piece by
    /// piece.
    fn write_by_ranks(&mut self, _folder: &Path) -> Result<Option<Vec<FileEntry>>, Self::Error> {
        Ok(None)
    }
}

/// How many cores hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hashing {
    AllCores,
    OneCore,
}

impl Hashing {
    pub(super) fn update(self, hasher: &mut blake3::Hasher, bytes: &[u8]) {
        match self {
            Hashing::AllCores => hasher.update_rayon(bytes),
            Hashing::OneCore => hasher.update(bytes),
        };
    }
}

/// The live state, which must not change during the save.
pub(super) struct Live<'a, T> {
    state: &'a mut T,
    tensors: Vec<StateTensor>,
    piece: Vec<u8>,
}

impl<'a, T: TrainingState> Live<'a, T> {
    pub(super) fn new(state: &'a mut T) -> Live<'a, T> {
        Live { tensors: state.tensors(), state, piece: Vec::new() }
    }
}

impl<T: TrainingState> StateSource for Live<'_, T> {
    type Error = TrainError;

    const HASHING: Hashing = Hashing::AllCores;

    fn tensors(&self) -> Vec<StateTensor> {
        self.tensors.clone()
    }

    fn holds(&self, part: StatePart) -> bool {
        self.state.holds(part)
    }

    fn piece(&mut self, index: usize, first: usize, count: usize) -> Result<&[u8], TrainError> {
        self.piece.resize(count, 0);
        self.state.read(&self.tensors[index].name, first, &mut self.piece)?;
        Ok(&self.piece)
    }

    fn write_by_ranks(&mut self, folder: &Path) -> Result<Option<Vec<FileEntry>>, TrainError> {
        self.state.write_by_ranks(folder)
    }
}

impl StateSource for &Snapshot {
    type Error = CheckpointError;

    const HASHING: Hashing = Hashing::OneCore;

    fn tensors(&self) -> Vec<StateTensor> {
        Snapshot::tensors(self).to_vec()
    }

    fn holds(&self, part: StatePart) -> bool {
        part.is_always_saved()
    }

    fn piece(
        &mut self,
        index: usize,
        first: usize,
        count: usize,
    ) -> Result<&[u8], CheckpointError> {
        Ok(&self.bytes(index)[first..first + count])
    }
}

use super::{CheckpointError, FileEntry, Snapshot, StatePart, StateTensor, TrainingState};
use crate::TrainError;
use std::path::Path;

/// Where the tensors of a checkpoint are taken from, piece by piece.
pub(super) trait StateSource {
    /// What it cannot do.
    type Error: From<CheckpointError>;

    /// How pieces are hashed: by all cores while nothing else happens, or by one beside the steps.
    const HASHING: Hashing;

    /// Its tensors.
    fn tensors(&self) -> Vec<StateTensor>;

    /// Whether those of a part are saved.
    fn holds(&self, part: StatePart) -> bool;

    /// Some bytes of the tensor at that place among all, `first` and following.
    fn piece(&mut self, index: usize, first: usize, count: usize) -> Result<&[u8], Self::Error>;

    /// Writes all files with the ranks that own parts of them; none if this process writes them piece by piece.
    fn write_by_ranks(&mut self, _folder: &Path) -> Result<Option<Vec<FileEntry>>, Self::Error> {
        Ok(None)
    }
}

/// Who hashes.
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

/// The state itself, which must not change meanwhile.
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

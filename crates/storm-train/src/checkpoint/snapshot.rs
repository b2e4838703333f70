//! A copy of the training state in host memory, from which a checkpoint is written while steps
//! continue.

use super::{StateTensor, TrainingState};
use crate::TrainError;
use std::ops::Range;
use storm_device::HostBuffer;

/// Alignment of tensors: a cache line, for fast copies.
const ALIGNMENT: usize = 64;

/// A buffer for all or part of the state, allocated once and refilled for every checkpoint.
#[derive(Debug)]
pub struct Snapshot {
    tensors: Vec<StateTensor>,
    /// The range of each tensor in `memory`.
    ranges: Vec<Range<usize>>,
    memory: HostBuffer,
}

impl Snapshot {
    /// Allocates a snapshot of the whole state.
    ///
    /// # Errors
    /// The machine or a limit refuses the memory.
    pub fn new(state: &impl TrainingState) -> Result<Snapshot, TrainError> {
        Snapshot::of(state, state.tensors())
    }

    /// Allocates a snapshot of these tensors.
    pub(crate) fn of(
        state: &impl TrainingState,
        tensors: Vec<StateTensor>,
    ) -> Result<Snapshot, TrainError> {
        let (ranges, bytes) = layout(&tensors);
        Ok(Snapshot { memory: state.host_buffer(bytes)?, tensors, ranges })
    }

    /// Copies the current state into the snapshot.
    ///
    /// # Errors
    /// From the device.
    pub fn take(&mut self, state: &mut impl TrainingState) -> Result<(), TrainError> {
        let mut reads = Vec::with_capacity(self.tensors.len());
        let (mut rest, mut offset) = (self.memory.as_mut_slice(), 0);
        for (tensor, range) in self.tensors.iter().zip(&self.ranges) {
            let (before, after) = rest.split_at_mut(range.end - offset);
            reads.push((tensor.name.as_str(), &mut before[range.start - offset..]));
            (rest, offset) = (after, range.end);
        }
        state.read_all(reads)
    }

    /// Whether the snapshot equals the current state, read tensor by tensor.
    ///
    /// # Errors
    /// From the device.
    pub fn is_of(&self, state: &mut impl TrainingState) -> Result<bool, TrainError> {
        for (index, tensor) in self.tensors.iter().enumerate() {
            let mut bytes = vec![0; tensor.size_bytes()];
            state.read(&tensor.name, 0, &mut bytes)?;
            if bytes != self.bytes(index) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Restores the state from the snapshot, except for the number of updates.
    ///
    /// # Errors
    /// From the device.
    pub(crate) fn restore(&self, state: &mut impl TrainingState) -> Result<(), TrainError> {
        let mut tensors = self.tensors.iter().enumerate();
        tensors.try_for_each(|(index, tensor)| state.write(&tensor.name, 0, self.bytes(index)))
    }

    pub(crate) fn tensors(&self) -> &[StateTensor] {
        &self.tensors
    }

    /// Host memory of the snapshot.
    pub(crate) fn size_bytes(&self) -> usize {
        self.memory.as_slice().len()
    }

    /// The bytes of the tensor at this index of [`Snapshot::tensors`].
    pub(crate) fn bytes(&self, index: usize) -> &[u8] {
        &self.memory.as_slice()[self.ranges[index].clone()]
    }

    pub(crate) fn bytes_mut(&mut self, index: usize) -> &mut [u8] {
        &mut self.memory.as_mut_slice()[self.ranges[index].clone()]
    }
}

/// The range of each tensor in a snapshot, and the snapshot's size.
fn layout(tensors: &[StateTensor]) -> (Vec<Range<usize>>, usize) {
    let mut end: usize = 0;
    let ranges = tensors.iter().map(|tensor| {
        let start = end.next_multiple_of(ALIGNMENT);
        end = start + tensor.size_bytes();
        start..end
    });
    (ranges.collect(), end)
}

/// Size of a snapshot of these tensors.
pub(crate) fn snapshot_bytes(tensors: &[StateTensor]) -> usize {
    layout(tensors).1
}

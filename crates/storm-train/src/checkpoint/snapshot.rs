//! A copy of the state in host memory, from which a checkpoint is written while steps go on.

use super::{StateTensor, TrainingState};
use crate::TrainError;
use std::ops::Range;
use storm_device::HostBuffer;

/// Where a tensor begins: a line of a cache, so that copies are as fast as they can be.
const ALIGNMENT: usize = 64;

/// Room for all of the state, taken once and filled for every checkpoint.
#[derive(Debug)]
pub struct Snapshot {
    tensors: Vec<StateTensor>,
    /// Of each tensor in `memory`.
    ranges: Vec<Range<usize>>,
    memory: HostBuffer,
}

impl Snapshot {
    /// Takes the memory, for all of this state.
    ///
    /// # Errors
    /// The machine or a limit does not allow it.
    pub fn new(state: &impl TrainingState) -> Result<Snapshot, TrainError> {
        let tensors = state.tensors();
        let mut ranges = Vec::with_capacity(tensors.len());
        let mut end: usize = 0;
        for tensor in &tensors {
            let start = end.next_multiple_of(ALIGNMENT);
            end = start + tensor.size_bytes();
            ranges.push(start..end);
        }
        Ok(Snapshot { memory: state.host_buffer(end)?, tensors, ranges })
    }

    /// Makes it a copy of the state as it is now.
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

    /// Whether it holds what the state yields tensor by tensor.
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

    pub(super) fn tensors(&self) -> &[StateTensor] {
        &self.tensors
    }

    /// The bytes of the tensor at that place among [`Snapshot::tensors`].
    pub(super) fn bytes(&self, index: usize) -> &[u8] {
        &self.memory.as_slice()[self.ranges[index].clone()]
    }
}

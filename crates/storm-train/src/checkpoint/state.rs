use crate::{PlannedTrainer, TrainError};
use storm_device::PlanDevice;
use storm_graph::{DType, Shape};
use storm_model::Dtype;

/// Which file of a checkpoint a tensor is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatePart {
    /// What the model computes with.
    Parameters,
    /// Moments and f32 masters.
    Optimizer,
}

impl StatePart {
    pub(crate) const ALL: [StatePart; 2] = [StatePart::Parameters, StatePart::Optimizer];

    pub(crate) fn file_name(self) -> &'static str {
        match self {
            StatePart::Parameters => "parameters.safetensors",
            StatePart::Optimizer => "optimizer.safetensors",
        }
    }
}

/// A tensor that training goes on from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateTensor {
    /// `layers.3.attention.qkv.weight.first_moment`.
    pub name: String,
    /// Its shape.
    pub shape: Shape,
    /// Its dtype.
    pub dtype: DType,
    /// Its file.
    pub part: StatePart,
}

impl StateTensor {
    /// Bytes of its elements.
    pub fn size_bytes(&self) -> usize {
        self.shape.elements() * self.dtype.size_bytes()
    }

    /// Its dtype as files name it.
    pub(crate) fn file_dtype(&self) -> Dtype {
        match self.dtype {
            DType::F32 => Dtype::F32,
            DType::BF16 => Dtype::BF16,
            DType::I32 => Dtype::I32,
            DType::I8 => Dtype::I8,
            DType::U8 => Dtype::U8,
        }
    }
}

/// What has state to save and to restore.
pub trait TrainingState {
    /// Its tensors, always the same in the same order.
    fn tensors(&self) -> Vec<StateTensor>;

    /// Updates that were made.
    fn updates(&self) -> u32;

    /// Bytes of a tensor as it is after the last step, `first` and following.
    ///
    /// # Errors
    /// There is no such tensor, or from the device.
    fn read(&mut self, name: &str, first: usize, bytes: &mut [u8]) -> Result<(), TrainError>;

    /// Sets bytes of a tensor.
    ///
    /// # Errors
    /// There is no such tensor, or from the device.
    fn write(&mut self, name: &str, first: usize, bytes: &[u8]) -> Result<(), TrainError>;

    /// Goes on as if this many updates had been made.
    fn set_updates(&mut self, updates: u32);
}

impl<D: PlanDevice> TrainingState for PlannedTrainer<D> {
    fn tensors(&self) -> Vec<StateTensor> {
        self.state_tensors()
    }

    fn updates(&self) -> u32 {
        PlannedTrainer::updates(self)
    }

    fn read(&mut self, name: &str, first: usize, bytes: &mut [u8]) -> Result<(), TrainError> {
        self.read_state(name, first, bytes)
    }

    fn write(&mut self, name: &str, first: usize, bytes: &[u8]) -> Result<(), TrainError> {
        self.write_state(name, first, bytes)
    }

    fn set_updates(&mut self, updates: u32) {
        PlannedTrainer::set_updates(self, updates);
    }
}

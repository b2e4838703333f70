use super::FileEntry;
use crate::reference::check_moments;
use crate::{TrainError, TrainOptions, Trainer};
use std::path::Path;
use storm_device::{HostBuffer, PlanDevice};
use storm_graph::{DType, MomentFormat, ParameterInstance, Shape, Training};
use storm_model::{AnyModel, Dtype};

/// The part of the state that a tensor belongs to. Each part has its own file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatePart {
    /// Parameters in the compute precision.
    Parameters,
    /// Optimizer moments and f32 master weights.
    Optimizer,
    /// The state that undoing a prediction restores.
    Undo,
    /// Weights at the start of a direction's window.
    Reference,
    /// State of the prediction direction.
    Direction,
    /// State of a learned controller.
    Controller,
}

impl StatePart {
    pub(crate) const ALL: [StatePart; 6] = [
        StatePart::Parameters,
        StatePart::Optimizer,
        StatePart::Undo,
        StatePart::Reference,
        StatePart::Direction,
        StatePart::Controller,
    ];

    /// Whether every checkpoint contains this part.
    pub(crate) fn is_always_saved(self) -> bool {
        matches!(self, StatePart::Parameters | StatePart::Optimizer)
    }

    pub(crate) fn file_name(self) -> &'static str {
        match self {
            StatePart::Parameters => "parameters.safetensors",
            StatePart::Optimizer => "optimizer.safetensors",
            StatePart::Undo => "undo.safetensors",
            StatePart::Reference => "reference.safetensors",
            StatePart::Direction => "direction.safetensors",
            StatePart::Controller => "controller.safetensors",
        }
    }
}

/// A tensor of the training state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateTensor {
    /// `layers.3.attention.qkv.weight.first_moment`.
    pub name: String,
    /// Its shape.
    pub shape: Shape,
    /// Its dtype.
    pub dtype: DType,
    /// The part it belongs to.
    pub part: StatePart,
}

impl StateTensor {
    /// Size of its data.
    pub fn size_bytes(&self) -> usize {
        self.shape.elements() * self.dtype.size_bytes()
    }

    /// Its dtype in safetensors.
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

/// Where a resumed run gets its frozen parameters from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Base {
    /// From the checkpoint, like all others.
    Saved,
    /// From the base model of the adapters, whose hash is in the run's settings.
    Elsewhere,
}

impl Base {
    pub(crate) fn of(model: Option<&AnyModel>) -> Base {
        match model.is_some_and(|model| model.adapters().is_some()) {
            true => Base::Elsewhere,
            false => Base::Saved,
        }
    }
}

/// Every tensor of the training state for these parameters, in a fixed order.
pub(crate) fn state_tensors(
    instances: &[ParameterInstance],
    options: &TrainOptions,
    base: Base,
) -> Vec<StateTensor> {
    let mut tensors = Vec::new();
    for ParameterInstance { name, parameter, .. } in instances {
        if base == Base::Elsewhere && parameter.training == Training::Frozen {
            continue;
        }
        let mut add = |name: String, format: MomentFormat, part: StatePart| {
            let (shape, dtype) = (format.shape(&parameter.shape), format.dtype());
            tensors.push(StateTensor { name, shape, dtype, part });
        };
        let elements = MomentFormat::Elements;
        add(name.clone(), elements(parameter.dtype), StatePart::Parameters);
        if parameter.training != Training::Trainable {
            continue;
        }
        for (suffix, format) in options.optimizer.state(options.precision, parameter) {
            add(format!("{name}.{suffix}"), format, StatePart::Optimizer);
        }
    }
    tensors
}

/// Size of the training state: what a snapshot takes in host memory, and, except for some kilobytes of headers, a
/// checkpoint on disk.
///
/// # Errors
/// The model is invalid with these options.
pub fn checkpoint_bytes(
    model: impl Into<AnyModel>,
    options: &TrainOptions,
) -> Result<u64, TrainError> {
    let model = model.into();
    let program = model.build(&options.build_options())?;
    let instances = program.parameter_instances();
    check_moments(options, &instances)?;
    let tensors = state_tensors(&instances, options, Base::of(Some(&model)));
    Ok(tensors.iter().map(|tensor| tensor.size_bytes() as u64).sum())
}

/// Training state that can be saved and restored.
pub trait TrainingState {
    /// The tensors of the state, always in the same order.
    fn tensors(&self) -> Vec<StateTensor>;

    /// Whether the tensors of a part are valid now. Others are not saved.
    fn holds(&self, part: StatePart) -> bool {
        part.is_always_saved()
    }

    /// Number of updates made.
    fn updates(&self) -> u32;

    /// Reads bytes of a tensor as of the last step, starting at byte `first`.
    ///
    /// # Errors
    /// The tensor does not exist, or from the device.
    fn read(&mut self, name: &str, first: usize, bytes: &mut [u8]) -> Result<(), TrainError>;

    /// Reads several whole tensors as of the last step, as fast as possible.
    ///
    /// # Errors
    /// A tensor does not exist or has another size, or from the device.
    fn read_all(&mut self, reads: Vec<(&str, &mut [u8])>) -> Result<(), TrainError>;

    /// Allocates the host memory that [`TrainingState::read_all`] fills fastest.
    ///
    /// # Errors
    /// The machine or a limit refuses the memory.
    fn host_buffer(&self, bytes: usize) -> Result<HostBuffer, TrainError>;

    /// Writes bytes of a tensor, starting at byte `first`.
    ///
    /// # Errors
    /// The tensor does not exist, or from the device.
    fn write(&mut self, name: &str, first: usize, bytes: &[u8]) -> Result<(), TrainError>;

    /// Sets the number of updates made.
    fn set_updates(&mut self, updates: u32);

    /// Writes the files of all tensors into a folder, each rank its own part, and waits until they are on disk. `None`
    /// if one process writes them.
    ///
    /// # Errors
    /// From the device or the disk of any rank.
    fn write_by_ranks(&mut self, _folder: &Path) -> Result<Option<Vec<FileEntry>>, TrainError> {
        Ok(None)
    }
}

impl<D: PlanDevice> TrainingState for Trainer<D> {
    fn tensors(&self) -> Vec<StateTensor> {
        self.state_tensors()
    }

    fn updates(&self) -> u32 {
        Trainer::updates(self)
    }

    fn read(&mut self, name: &str, first: usize, bytes: &mut [u8]) -> Result<(), TrainError> {
        self.read_state(name, first, bytes)
    }

    fn read_all(&mut self, reads: Vec<(&str, &mut [u8])>) -> Result<(), TrainError> {
        self.read_states(reads)
    }

    fn host_buffer(&self, bytes: usize) -> Result<HostBuffer, TrainError> {
        Trainer::host_buffer(self, bytes)
    }

    fn write(&mut self, name: &str, first: usize, bytes: &[u8]) -> Result<(), TrainError> {
        self.write_state(name, first, bytes)
    }

    fn set_updates(&mut self, updates: u32) {
        Trainer::set_updates(self, updates);
    }

    fn write_by_ranks(&mut self, folder: &Path) -> Result<Option<Vec<FileEntry>>, TrainError> {
        Trainer::write_by_ranks(self, folder)
    }
}

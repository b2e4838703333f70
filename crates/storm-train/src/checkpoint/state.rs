use super::FileEntry;
use crate::reference::check_moments;
use crate::{TrainError, TrainOptions, Trainer};
use std::path::Path;
use storm_device::{HostBuffer, PlanDevice};
use storm_graph::{DType, MomentFormat, ParameterInstance, Shape, Training};
use storm_model::{AnyModel, Dtype};

/// Which file of a checkpoint a tensor is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatePart {
    /// What the model computes with.
    Parameters,
    /// Moments and f32 masters.
    Optimizer,
    /// What predictions are undone to.
    Undo,
    /// Weights at the start of the window of a direction.
    Reference,
    /// What a direction keeps.
    Direction,
    /// The state of a controller that learns.
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

    /// Whether every checkpoint has it.
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

/// A tensor that training resumes from.
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

/// Where the frozen parameters of a resumed run come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Base {
    /// From the checkpoint, with all others.
    Saved,
    /// From the model that the adapters are for. The run's settings have its hash.
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

/// Every tensor that training of these parameters resumes from, in a fixed order.
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

/// Bytes of the state of a model in training: what a snapshot takes in host memory, and, but for some
/// kilobytes of headers, a checkpoint on a disk.
///
/// # Errors
/// A model that is not valid with these options.
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

/// What has state to save and to restore.
pub trait TrainingState {
    /// Its tensors, always the same in the same order.
    fn tensors(&self) -> Vec<StateTensor>;

    /// Whether the tensors of a part mean something now; others are not saved.
    fn holds(&self, part: StatePart) -> bool {
        part.is_always_saved()
    }

    /// Updates that were made.
    fn updates(&self) -> u32;

    /// Bytes of a tensor as it is after the last step, `first` and following.
    ///
    /// # Errors
    /// There is no such tensor, or from the device.
    fn read(&mut self, name: &str, first: usize, bytes: &mut [u8]) -> Result<(), TrainError>;

    /// All of some tensors as they are after the last step, as fast as they can be had.
    ///
    /// # Errors
    /// There is no such tensor, it has another number of bytes, or from the device.
    fn read_all(&mut self, reads: Vec<(&str, &mut [u8])>) -> Result<(), TrainError>;

    /// Host memory that [`TrainingState::read_all`] fills the fastest.
    ///
    /// # Errors
    /// The machine or a limit does not allow it.
    fn host_buffer(&self, bytes: usize) -> Result<HostBuffer, TrainError>;

    /// Sets bytes of a tensor.
    ///
    /// # Errors
    /// There is no such tensor, or from the device.
    fn write(&mut self, name: &str, first: usize, bytes: &[u8]) -> Result<(), TrainError>;

    /// Goes on as if this many updates had been made.
    fn set_updates(&mut self, updates: u32);

    /// Writes the files of all tensors into a folder with all ranks, each what it owns, and waits until they are on the disk. None
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

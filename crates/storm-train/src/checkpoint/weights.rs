//! The weights of a checkpoint, for everything but resuming. Reads only, so it does not disturb a run in progress.

use super::load::{open_as_written, part_entry};
use super::manifest::{self, Manifest};
use super::source::Hashing;
use super::{CheckpointError, Checkpoints, Progress, StatePart, Storage, step_of};
use std::collections::BTreeSet;
use std::ops::Range;
use std::path::{Path, PathBuf};
use storm_model::{
    AnyModel, Element, ModelError, ParameterSource, ParameterSpec, SafetensorsFile, TensorEntry,
};

/// The parameter with one row per vocabulary entry.
const EMBEDDING: &str = "embedding.weight";

/// Suffix of a parameter's f32 master copy, stored with the optimizer's moments.
const MASTER: &str = ".master";

/// The verified parameters of a checkpoint. Uses f32 master weights where they exist, because a run's model is exported
/// from those.
#[derive(Debug)]
pub struct SavedWeights {
    path: PathBuf,
    progress: Progress,
    parameters: SafetensorsFile,
    masters: Option<SafetensorsFile>,
}

impl<S: Storage> Checkpoints<S> {
    /// The weights of the newest intact checkpoint; `None` if there is none. Passes others to `skipped` with the
    /// reason, unless the run has just deleted them.
    ///
    /// # Errors
    /// The folder cannot be listed, or a checkpoint is newer than this program.
    pub fn newest_weights(
        &self,
        mut skipped: impl FnMut(u64, &CheckpointError),
    ) -> Result<Option<SavedWeights>, CheckpointError> {
        let mut tried = BTreeSet::new();
        loop {
            // List again each time: a run in progress adds and deletes checkpoints.
            let steps = self.steps()?;
            let Some(&step) = steps.iter().rev().find(|step| !tried.contains(*step)) else {
                return Ok(None);
            };
            tried.insert(step);
            match self.weights(step) {
                Ok(weights) => return Ok(Some(weights)),
                Err(error) if error.is_damage() => {
                    if self.path(step).exists() {
                        skipped(step, &error);
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// The weights of a step's checkpoint.
    ///
    /// # Errors
    /// The checkpoint does not exist, or is damaged.
    pub fn weights(&self, step: u64) -> Result<SavedWeights, CheckpointError> {
        let weights = SavedWeights::open(&self.path(step))?;
        match weights.progress.step == step {
            true => Ok(weights),
            false => Err(weights.of_other_step()),
        }
    }
}

impl SavedWeights {
    /// Opens the folder of one checkpoint, wherever it is.
    ///
    /// # Errors
    /// The checkpoint is damaged, or newer than this program.
    pub fn open(path: &Path) -> Result<SavedWeights, CheckpointError> {
        let Manifest { progress, files, .. } = Manifest::read(&path.join(manifest::FILE_NAME))?;
        let file = |part: StatePart| path.join(part.file_name());
        let open = |part: StatePart| {
            open_as_written(&file(part), part_entry(path, &files, part)?, Hashing::AllCores)
        };
        let parameters = open(StatePart::Parameters)?;
        let optimizer_path = file(StatePart::Optimizer);
        let optimizer = SafetensorsFile::open(&optimizer_path).map_err(|error| {
            CheckpointError::Damaged { path: optimizer_path, problem: error.to_string() }
        })?;
        // Read the optimizer file only for master weights: moments are not needed here, and are the largest part.
        let has_masters = optimizer.tensors().keys().any(|name| name.ends_with(MASTER));
        let masters = has_masters.then(|| open(StatePart::Optimizer)).transpose()?;
        let weights = SavedWeights { path: path.to_owned(), progress, parameters, masters };
        let name = path.file_name().and_then(|name| name.to_str()).and_then(step_of);
        match name.is_none_or(|step| step == weights.progress.step) {
            true => Ok(weights),
            false => Err(weights.of_other_step()),
        }
    }

    /// Its folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Progress and settings of the run.
    pub fn progress(&self) -> &Progress {
        &self.progress
    }

    /// Vocabulary size of the model.
    pub fn vocabulary(&self) -> Option<usize> {
        self.parameters.tensors().get(EMBEDDING)?.shape.first().copied()
    }

    /// Checks that these are the weights of this model.
    ///
    /// # Errors
    /// A parameter is missing, unexpected or has another shape.
    pub fn check(&self, model: impl Into<AnyModel>) -> Result<(), CheckpointError> {
        let model = model.into();
        let other = |problem: String| CheckpointError::OtherRun {
            path: self.parameters.path().to_owned(),
            problem,
        };
        let expected = match (model.language(), model.adapters()) {
            (Some(config), Some(adapters)) => adapters.specs(config),
            _ => model.parameters(),
        };
        let mut count = 0;
        for spec in expected {
            count += 1;
            let (_, entry) = self
                .find(&spec)
                .ok_or_else(|| other(format!("it has no tensor `{}`", spec.name)))?;
            if entry.shape != spec.shape {
                return Err(other(format!(
                    "`{}` is {:?} there and {:?} in the model",
                    spec.name, entry.shape, spec.shape
                )));
            }
        }
        match self.parameters.tensors().len() == count {
            true => Ok(()),
            false => Err(other("it has tensors that the model has not".to_owned())),
        }
    }

    fn find(&self, spec: &ParameterSpec) -> Option<(&SafetensorsFile, &TensorEntry)> {
        let entry = self.parameters.tensors().get(&spec.name)?;
        let master = self
            .masters
            .as_ref()
            .and_then(|file| Some((file, file.tensors().get(&format!("{}{MASTER}", spec.name))?)));
        Some(master.unwrap_or((&self.parameters, entry)))
    }

    fn of_other_step(&self) -> CheckpointError {
        let problem = format!("its manifest is of step {}", self.progress.step);
        CheckpointError::Damaged { path: self.path.clone(), problem }
    }
}

impl ParameterSource for SavedWeights {
    fn load_rows<E: Element>(
        &self,
        spec: &ParameterSpec,
        rows: Range<usize>,
        dest: &mut [E],
    ) -> Result<(), ModelError> {
        let Some((file, entry)) = self.find(spec) else {
            let (path, name) = (self.path.clone(), spec.name.clone());
            return Err(ModelError::NoSuchTensor { path, name });
        };
        let row = spec.row_elements();
        let wrong = |what, got, expected| {
            let name = spec.name.clone();
            Err(ModelError::WrongLength { what, name, got, expected })
        };
        if entry.element_count() != spec.element_count() {
            return wrong("the tensor", entry.element_count(), spec.element_count());
        }
        if dest.len() != rows.len() * row {
            return wrong("the buffer", dest.len(), rows.len() * row);
        }
        file.read_elements(&spec.name, entry, rows.start * row, dest)
    }
}

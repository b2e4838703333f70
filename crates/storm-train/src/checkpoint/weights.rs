//! The weights of a checkpoint, for all that does not go on training. Nothing is written, and a run that trains at the
//! same time is not disturbed.

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

/// The parameter whose rows are the vocabulary.
const EMBEDDING: &str = "embedding.weight";

/// A parameter in full precision, beside the optimizer's moments.
const MASTER: &str = ".master";

/// The parameters of a checkpoint, every byte of which is as it was written. Masters are taken where there are some:
/// they are what a run's model is saved from.
#[derive(Debug)]
pub struct SavedWeights {
    path: PathBuf,
    progress: Progress,
    parameters: SafetensorsFile,
    masters: Option<SafetensorsFile>,
}

impl<S: Storage> Checkpoints<S> {
    /// The weights of the newest checkpoint that is whole; none if none is. Others are handed to `skipped` with the
    /// reason, unless the run that they belong to has just deleted them.
    ///
    /// # Errors
    /// The folder cannot be listed, or a checkpoint is newer than this program.
    pub fn newest_weights(
        &self,
        mut skipped: impl FnMut(u64, &CheckpointError),
    ) -> Result<Option<SavedWeights>, CheckpointError> {
        let mut tried = BTreeSet::new();
        loop {
            // Listed each time: a resumed run makes new ones and deletes old ones.
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

    /// The weights of the checkpoint of a step.
    ///
    /// # Errors
    /// It is not there, or damaged.
    pub fn weights(&self, step: u64) -> Result<SavedWeights, CheckpointError> {
        let weights = SavedWeights::open(&self.path(step))?;
        match weights.progress.step == step {
            true => Ok(weights),
            false => Err(weights.of_other_step()),
        }
    }
}

impl SavedWeights {
    /// Opens the folder of one checkpoint, whatever it lies in.
    ///
    /// # Errors
    /// It is damaged, or newer than this program.
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
        // Moments are of no use here and the largest part: they are not read.
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

    /// How far the run had come, and its settings.
    pub fn progress(&self) -> &Progress {
        &self.progress
    }

    /// Tokens that the model knows.
    pub fn vocabulary(&self) -> Option<usize> {
        self.parameters.tensors().get(EMBEDDING)?.shape.first().copied()
    }

    /// Refuses to be taken for the weights of a model that they are not of.
    ///
    /// # Errors
    /// A parameter is missing, superfluous or of another shape.
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

//! Finds image classifiers named on the command line: a directory, a run's folder, or a checkpoint's folder.

use crate::train::IMAGE_CONFIG;
use anyhow::{Context, Result};
use std::ops::Range;
use std::path::{Path, PathBuf};
use storm_model::{
    Element, ImageConfig, ImageDirectory, ModelError, ParameterSource, ParameterSpec,
};
use storm_train::SavedWeights;

/// An opened image classifier.
pub(crate) struct ImageSource {
    pub(crate) config: ImageConfig,
    weights: Weights,
    /// The folder of the run, for a checkpoint inside of one.
    pub(crate) folder: Option<PathBuf>,
}

enum Weights {
    Directory(Box<ImageDirectory>),
    Checkpoint(Box<SavedWeights>),
}

impl ImageSource {
    /// Opens a directory that holds an image classifier.
    pub(crate) fn of_directory(directory: &Path) -> Result<ImageSource> {
        let directory = ImageDirectory::open(directory)?;
        let config = directory.config().clone();
        Ok(ImageSource { config, weights: Weights::Directory(Box::new(directory)), folder: None })
    }

    /// Whether a checkpoint holds an image classifier.
    pub(crate) fn is_checkpoint(weights: &SavedWeights) -> bool {
        weights.progress().settings.contains_key(IMAGE_CONFIG)
    }

    /// Opens a checkpoint. Its recorded settings contain the model's config.
    pub(crate) fn of_checkpoint(
        folder: Option<PathBuf>,
        weights: SavedWeights,
    ) -> Result<ImageSource> {
        let json = weights.progress().settings.get(IMAGE_CONFIG).map_or("", String::as_str);
        let config: ImageConfig = serde_json::from_str(json)
            .with_context(|| format!("{} has no usable config", weights.path().display()))?;
        config.validate()?;
        weights.check(&config)?;
        Ok(ImageSource { config, weights: Weights::Checkpoint(Box::new(weights)), folder })
    }
}

impl ParameterSource for ImageSource {
    fn load_rows<E: Element>(
        &self,
        spec: &ParameterSpec,
        rows: Range<usize>,
        dest: &mut [E],
    ) -> Result<(), ModelError> {
        match &self.weights {
            Weights::Directory(directory) => directory.load_rows(spec, rows, dest),
            Weights::Checkpoint(checkpoint) => checkpoint.load_rows(spec, rows, dest),
        }
    }
}

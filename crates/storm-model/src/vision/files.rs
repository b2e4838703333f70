//! Image classifiers on disk: config.json, and model.safetensors with PyTorch's names and shapes.

use super::{IMAGE_MODEL_TYPE, ImageConfig, parameters};
use crate::hf::{parse_json, read_capped, save_parts};
use crate::{
    Element, ModelError, ParameterSource, ParameterSpec, SafetensorsFile, SaveOptions, TensorEntry,
};
use serde::Deserialize;
use serde_json::Value;
use std::error::Error;
use std::ops::Range;
use std::path::{Path, PathBuf};

const CONFIG: &str = "config.json";
const WEIGHTS: &str = "model.safetensors";

/// The config of an image classifier has a few hundred bytes.
const CONFIG_BYTES_MAX: u64 = 1 << 16;

/// A saved image classifier whose tensors match its config.
#[derive(Debug)]
pub struct ImageDirectory {
    path: PathBuf,
    config: ImageConfig,
    weights: SafetensorsFile,
}

/// The part of a config.json that identifies the kind of model.
#[derive(Deserialize)]
struct Kind {
    #[serde(default)]
    model_type: Value,
}

impl ImageDirectory {
    /// Whether the config.json of a directory describes an image classifier.
    pub fn is_one(path: &Path) -> bool {
        let bytes = read_capped(&path.join(CONFIG), "config.json", CONFIG_BYTES_MAX);
        let kind = bytes.ok().and_then(|bytes| serde_json::from_slice::<Kind>(&bytes).ok());
        kind.is_some_and(|kind| kind.model_type == IMAGE_MODEL_TYPE)
    }

    /// Reads the config of an image classifier.
    ///
    /// # Errors
    /// It cannot be read, or is not the config of an image classifier.
    pub fn read_config(path: &Path) -> Result<ImageConfig, ModelError> {
        let path = path.join(CONFIG);
        let bytes = read_capped(&path, "config.json", CONFIG_BYTES_MAX)?;
        let config: ImageConfig = parse_json(&path, &bytes)?;
        config.validate()?;
        Ok(config)
    }

    /// Opens a directory. Weights are read on demand.
    ///
    /// # Errors
    /// The config is not valid, or a tensor is missing, extra or of the wrong shape.
    pub fn open(path: &Path) -> Result<ImageDirectory, ModelError> {
        let config = ImageDirectory::read_config(path)?;
        let weights = SafetensorsFile::open(&path.join(WEIGHTS))?;
        let specs = parameters(&config);
        let expected = specs.iter().flat_map(|spec| &spec.pieces);
        for piece in expected.clone() {
            let entry = entry(&weights, &piece.hf_name)?;
            if entry.shape != piece.shape {
                let got = entry.element_count();
                let expected = piece.shape.iter().product();
                let (what, name) = ("a tensor of another shape", piece.hf_name.clone());
                return Err(ModelError::WrongLength { what, name, got, expected });
            }
        }
        // PyTorch also stores the number of batches that a norm has seen, which is not used here.
        let names = weights.tensors().keys().filter(|name| !name.ends_with(".num_batches_tracked"));
        let (got, expected) = (names.count(), expected.count());
        if got != expected {
            let (what, name) = ("the number of tensors", weights.path().display().to_string());
            return Err(ModelError::WrongLength { what, name, got, expected });
        }
        Ok(ImageDirectory { path: path.to_owned(), config, weights })
    }

    /// The model's config.
    pub fn config(&self) -> &ImageConfig {
        &self.config
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

fn entry<'a>(weights: &'a SafetensorsFile, name: &str) -> Result<&'a TensorEntry, ModelError> {
    weights.tensors().get(name).ok_or_else(|| ModelError::NoSuchTensor {
        path: weights.path().to_owned(),
        name: name.to_owned(),
    })
}

impl ParameterSource for ImageDirectory {
    fn load_rows<E: Element>(
        &self,
        spec: &ParameterSpec,
        rows: Range<usize>,
        dest: &mut [E],
    ) -> Result<(), ModelError> {
        let row = spec.row_elements();
        for piece in &spec.pieces {
            let entry = entry(&self.weights, &piece.hf_name)?;
            if entry.element_count() != spec.element_count() || dest.len() != rows.len() * row {
                let (what, name) = ("the buffer", spec.name.clone());
                let (got, expected) = (dest.len(), rows.len() * row);
                return Err(ModelError::WrongLength { what, name, got, expected });
            }
            self.weights.read_elements(&piece.hf_name, entry, rows.start * row, dest)?;
            piece.order.restore_rows(row, dest);
        }
        Ok(())
    }
}

/// Saves an image classifier, see [`AnyModel::save`](crate::AnyModel::save).
pub(crate) fn save<E, P>(
    output: &Path,
    config: &ImageConfig,
    options: &SaveOptions<'_>,
    provider: P,
) -> Result<(), ModelError>
where
    E: Element,
    P: FnMut(&ParameterSpec, Range<usize>, &mut [E]) -> Result<(), Box<dyn Error + Send + Sync>>,
{
    config.validate()?;
    let Ok(Value::Object(map)) = serde_json::to_value(config) else {
        unreachable!("a config is numbers and names");
    };
    // One file of any size, so that a few lines of PyTorch can load it.
    let options = SaveOptions { shard_bytes: u64::MAX, source: None, ..options.clone() };
    save_parts(output, map, &parameters(config), &options, provider)
}

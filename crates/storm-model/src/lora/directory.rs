//! Reads and writes PEFT adapter directories.

use super::adapters::Adapters;
use super::peft::{self, PeftConfig};
use super::{LoraOptions, is_adapter};
use crate::error::clip;
use crate::hf::{
    Element, ParameterSource, ParameterSpec, SafetensorsFile, SafetensorsWriter, WeightDtype,
    parse_json, read_capped, write_json,
};
use crate::{BaseFormat, IfExists, ModelConfig, ModelError};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::error::Error;
use std::ops::Range;
use std::path::{Path, PathBuf};
use storm_files::StagedDirectory;

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";
const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// Adapter properties that only STORM needs. PEFT ignores this file.
const OWN: &str = "storm.json";

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Own {
    /// The base format of the run.
    base_format: String,
}

/// Whether a directory contains an adapter rather than a model.
pub fn is_adapter_directory(path: &Path) -> bool {
    path.join(CONFIG).exists()
}

/// An adapter saved by PEFT or STORM.
#[derive(Debug)]
pub struct AdapterDirectory {
    path: PathBuf,
    config: PeftConfig,
    base_format: BaseFormat,
    file: SafetensorsFile,
}

impl AdapterDirectory {
    /// Opens a directory. Reads its config and the header of its weights.
    ///
    /// # Errors
    /// A file is missing or damaged, or the config needs an unsupported feature.
    pub fn open(path: &Path) -> Result<AdapterDirectory, ModelError> {
        let config_path = path.join(CONFIG);
        let bytes = read_capped(&config_path, CONFIG, CONFIG_BYTES_MAX)?;
        let map: Map<String, Value> = parse_json(&config_path, &bytes)?;
        let config = peft::read(&config_path, &map)?;
        if !path.join(WEIGHTS).exists() && path.join("adapter_model.bin").exists() {
            return Err(ModelError::Pickle { path: path.join("adapter_model.bin") });
        }
        let file = SafetensorsFile::open(&path.join(WEIGHTS))?;
        let base_format = base_format(&path.join(OWN))?;
        Ok(AdapterDirectory { path: path.to_owned(), config, base_format, file })
    }

    /// The storage format of the base that it was trained with.
    pub fn base_format(&self) -> BaseFormat {
        self.base_format
    }

    /// Its directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The options of the adapter.
    pub fn options(&self) -> &LoraOptions {
        &self.config.options
    }

    /// The base model named in the file: a directory or a name on a hub.
    pub fn base(&self) -> Option<&str> {
        self.config.base.as_deref()
    }

    /// The config of a base with these adapters. Checks that every tensor fits and is finite.
    ///
    /// # Errors
    /// The adapter belongs to another model, or has values that are not finite.
    pub fn apply_to(&self, base: &ModelConfig) -> Result<ModelConfig, ModelError> {
        let adapters = Adapters::of_peft(base, self.config.options.clone())?;
        let refuse = |problem: String| {
            Err(ModelError::BadAdapter { path: self.file.path().to_owned(), problem })
        };
        let mut known = 0;
        for piece in adapters.specs(base).iter().flat_map(|spec| &spec.pieces) {
            let name = clip(&piece.hf_name);
            let Some(entry) = self.file.tensors().get(&piece.hf_name) else {
                return refuse(format!(
                    "it has no tensor {name}, which its config and the base model call for; is it for another base?"
                ));
            };
            if entry.shape != piece.shape {
                return refuse(format!(
                    "{name} is {:?} there, and {:?} fits the base model; is it for another base?",
                    entry.shape, piece.shape
                ));
            }
            let mut values = vec![0f32; entry.element_count()];
            self.file.read_elements(&piece.hf_name, entry, 0, &mut values)?;
            if let Some(value) = values.iter().find(|value| !value.is_finite()) {
                return refuse(format!("{name} holds {value}; use an adapter that is whole"));
            }
            known += 1;
        }
        if known != self.file.tensors().len() {
            let specs = adapters.specs(base);
            let is_known = |name: &str| {
                specs.iter().flat_map(|spec| &spec.pieces).any(|piece| piece.hf_name == name)
            };
            let extra = self.file.tensors().keys().find(|name| !is_known(name));
            return refuse(format!(
                "it has {}, which the base model has no place for; is it for another base, or were embeddings saved \
                 with it?",
                clip(extra.map_or("a tensor", String::as_str))
            ));
        }
        Ok(ModelConfig { adapters: Some(adapters), ..base.clone() })
    }
}

/// The format in the file, or the compute type if there is no file.
fn base_format(path: &Path) -> Result<BaseFormat, ModelError> {
    if !path.exists() {
        return Ok(BaseFormat::Computed);
    }
    let bytes = read_capped(path, OWN, CONFIG_BYTES_MAX)?;
    let own: Own = parse_json(path, &bytes)?;
    own.base_format.parse().map_err(|problem: String| ModelError::BadAdapter {
        path: path.to_owned(),
        problem: clip(&problem),
    })
}

impl ParameterSource for AdapterDirectory {
    fn load_rows<E: Element>(
        &self,
        spec: &ParameterSpec,
        rows: Range<usize>,
        dest: &mut [E],
    ) -> Result<(), ModelError> {
        let row = spec.row_elements();
        for piece in &spec.pieces {
            let Some((own, at)) = piece.part_of(&rows) else { continue };
            let Some(entry) = self.file.tensors().get(&piece.hf_name) else {
                let (path, name) = (self.path.clone(), piece.hf_name.clone());
                return Err(ModelError::NoSuchTensor { path, name });
            };
            let part = dest.get_mut(at * row..(at + own.len()) * row);
            match part {
                Some(part) if piece.rows.len() * row == entry.element_count() => {
                    self.file.read_elements(&piece.hf_name, entry, own.start * row, part)?;
                }
                _ => {
                    return Err(ModelError::WrongLength {
                        what: "a piece",
                        name: spec.name.clone(),
                        got: entry.element_count(),
                        expected: piece.rows.len() * row,
                    });
                }
            }
        }
        Ok(())
    }
}

/// The weights of a base model with adapters from another source.
#[derive(Debug)]
pub struct AdaptedSource<B, A> {
    base: B,
    adapter: A,
    /// The adapter's parameters, with the names under which it stores them.
    trained: Vec<ParameterSpec>,
}

impl<B: ParameterSource, A: ParameterSource> AdaptedSource<B, A> {
    /// Combines the two, for a config with adapters.
    pub fn new(config: &ModelConfig, base: B, adapter: A) -> AdaptedSource<B, A> {
        let trained =
            config.adapters.as_ref().map(|adapters| adapters.specs(config)).unwrap_or_default();
        AdaptedSource { base, adapter, trained }
    }

    /// The source of the base model.
    pub fn base(&self) -> &B {
        &self.base
    }

    /// The source of the adapters.
    pub fn adapter(&self) -> &A {
        &self.adapter
    }
}

impl<B: ParameterSource, A: ParameterSource> ParameterSource for AdaptedSource<B, A> {
    fn load_rows<E: Element>(
        &self,
        spec: &ParameterSpec,
        rows: Range<usize>,
        dest: &mut [E],
    ) -> Result<(), ModelError> {
        match self.trained.iter().find(|trained| trained.name == spec.name) {
            Some(trained) => self.adapter.load_rows(trained, rows, dest),
            None => self.base.load_rows(spec, rows, dest),
        }
    }

    fn starts_fresh(&self, spec: &ParameterSpec) -> bool {
        !is_adapter(&spec.name) && self.base.starts_fresh(spec)
    }
}

/// Saves the adapters of a model for PEFT, in f32. `provide` fills a buffer with a whole parameter.
/// `base` tells PEFT where to load the base model from.
///
/// # Errors
/// From the file system or the provider. An existing directory is unchanged.
pub fn save_adapter(
    output: &Path,
    config: &ModelConfig,
    base: Option<&str>,
    if_exists: IfExists,
    mut provide: impl FnMut(&ParameterSpec, &mut [f32]) -> Result<(), Box<dyn Error + Send + Sync>>,
) -> Result<(), ModelError> {
    let Some(adapters) = &config.adapters else {
        let problem = "the model has no adapters to save".to_owned();
        return Err(ModelError::Lora { problem });
    };
    let staged =
        StagedDirectory::create(output, "saving", move |path| may_replace(if_exists, path))
            .map_err(ModelError::stage(output))?;
    let Value::Object(fields) = peft::write(config, &adapters.options, base) else {
        unreachable!("an object was written");
    };
    write_json(&staged.path().join(CONFIG), fields)?;
    if config.base != BaseFormat::Computed {
        let own = Map::from_iter([("base-format".to_owned(), config.base.to_string().into())]);
        write_json(&staged.path().join(OWN), own)?;
    }
    let specs = adapters.specs(config);
    let tensors: Vec<(String, Vec<usize>)> = specs
        .iter()
        .flat_map(|spec| &spec.pieces)
        .map(|piece| (piece.hf_name.clone(), piece.shape.clone()))
        .collect();
    let path = staged.path().join(WEIGHTS);
    let mut writer = SafetensorsWriter::create(&path, WeightDtype::F32, &tensors)?;
    let mut values = Vec::new();
    for spec in &specs {
        values.resize(spec.element_count(), 0f32);
        provide(spec, &mut values)
            .map_err(|source| ModelError::Provider { name: spec.name.clone(), source })?;
        // Pieces are consecutive rows of the parameter. None is transposed.
        writer.write(&values)?;
    }
    writer.finish()?;
    staged.finish().map_err(ModelError::stage(output))
}

fn may_replace(if_exists: IfExists, path: &Path) -> Result<(), String> {
    let is_ours = is_adapter_directory(path)
        && std::fs::read_dir(path).is_ok_and(|mut entries| {
            entries.all(|entry| {
                entry.is_ok_and(|entry| entry.file_type().is_ok_and(|kind| !kind.is_dir()))
            })
        });
    match if_exists {
        IfExists::Replace if is_ours => Ok(()),
        IfExists::Replace => {
            Err("is not a plain adapter directory (adapter_config.json, no folders), so it is not replaced; name another"
                .to_owned())
        }
        IfExists::Refuse => {
            Err("exists and is not empty; name another directory, or ask for it to be replaced".to_owned())
        }
    }
}

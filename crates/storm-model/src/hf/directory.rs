//! A Hugging Face model directory, opened and checked.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Read;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use storm_files::open_plain;

use super::check::check_tensors;
use super::config_json::HfConfig;
use super::dtype::{Dtype, Element};
use super::names::{HF_HEAD, hf_embedding, hf_prefix};
use super::packed::{self, Packed, Reading};
use super::paths::Root;
use super::pickle::is_pickle;
use super::remarks::Remark;
use super::safetensors_file::{HeaderBudget, SafetensorsFile, TensorEntry};
use super::strict_json::{Name, UniqueMap, open_capped, parse_stream};
use super::wrappers::{Unwrapped, is_of_adapter};
use crate::error::clip;
use crate::{ModelConfig, ModelError};

const CONFIG: &str = "config.json";
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const ADAPTER: &str = "adapter_config.json";

const INDEX_BYTES_MAX: u64 = 16 << 20;
pub(super) const SHARDS_MAX: usize = 4096;
/// Maximum number of files checked for pickles in a directory without weights.
const SNIFFED_FILES_MAX: usize = 1000;

/// An open model directory whose tensors match its config.json.
#[derive(Debug)]
pub struct HfDirectory {
    root: Root,
    config: HfConfig,
    files: Vec<SafetensorsFile>,
    /// Tensors by their transformers name, regardless of the name in the file.
    tensors: BTreeMap<String, TensorEntry>,
    /// The quantized tensors, by the same names.
    packed: BTreeMap<String, Packed>,
    remarks: Vec<Remark>,
}

impl HfDirectory {
    /// Opens a directory: config.json and model.safetensors, or an index and its shards. Reads
    /// headers but no weights. Missing, extra and wrongly shaped tensors are reported in one error.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let (root, config) = open_config(path)?;
        let (files, stored) = match root.file(SINGLE)? {
            Some(path) => open_single(&path)?,
            None => match root.file(INDEX)? {
                Some(index) => open_shards(&root, &index)?,
                None => return Err(no_file(&root, "model.safetensors")),
            },
        };
        let mut unwrapped = Unwrapped::default();
        let mut tensors = with_prefix(&root, &config.model, stored, &mut unwrapped)?;
        let quantization = config.quantization();
        let packed = match quantization {
            Some(by) => packed::find(root.directory(), by, &files, &mut tensors)?,
            None => BTreeMap::new(),
        };
        let report = check_tensors(&config.model, &tensors, &packed);
        if !report.is_empty() {
            let path = root.directory().to_owned();
            return Err(ModelError::Tensors { path, report: Box::new(report) });
        }
        let mut remarks: Vec<Remark> = unwrapped.remarks().collect();
        let wide = tensors.values().filter(|entry| entry.dtype == Dtype::F64).count();
        if wide > 0 {
            remarks.push(Remark::WideWeights { tensors: wide });
        }
        if let Some(by) = quantization {
            remarks.push(Remark::Quantized { by, tensors: packed.len() });
        }
        let mut directory = Self { root, config, files, tensors, packed, remarks };
        if !directory.has_head() {
            directory.remarks.push(Remark::NoHead);
        }
        Ok(directory)
    }

    /// Remarks for the user about unusual properties of the files.
    pub fn remarks(&self) -> &[Remark] {
        &self.remarks
    }

    /// Whether the model has a head. Without one it can only be trained.
    pub fn has_head(&self) -> bool {
        self.config.model.tied_embeddings || self.tensors.contains_key(HF_HEAD)
    }

    /// The model.
    pub fn model(&self) -> &ModelConfig {
        &self.config.model
    }

    /// The model and the config.json it came from.
    pub fn config(&self) -> &HfConfig {
        &self.config
    }

    /// The directory, links resolved.
    pub fn path(&self) -> &Path {
        self.root.directory()
    }

    /// Names of all tensors in order, as in transformers: with the prefix `model.` or
    /// `transformer.`, even if the files lack it.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The type, shape and location of a tensor.
    pub fn tensor(&self, name: &str) -> Option<&TensorEntry> {
        self.tensors.get(name)
    }

    /// The file that contains a [`TensorEntry`] of this directory.
    pub fn file(&self, entry: &TensorEntry) -> Option<&SafetensorsFile> {
        self.files.get(entry.file)
    }

    /// Reads a whole tensor as `f32` or `bf16`.
    pub fn read<E: Element>(&self, name: &str, dest: &mut [E]) -> Result<(), ModelError> {
        let expected = self.element_count(name)?;
        if dest.len() != expected {
            let (what, name, got) = ("the buffer", clip(name), dest.len());
            return Err(ModelError::WrongLength { what, name, got, expected });
        }
        self.read_elements(name, 0, dest)
    }

    /// Number of elements of a tensor, quantized or not.
    pub(super) fn element_count(&self, name: &str) -> Result<usize, ModelError> {
        let (_, entry) = self.find(name)?;
        Ok(match self.packed.get(name) {
            Some(packed) => packed.shape.iter().product(),
            None => entry.element_count(),
        })
    }

    /// Reads elements of a tensor as `f32` or `bf16`, starting at `first`. Quantized elements are
    /// dequantized.
    pub(super) fn read_elements<E: Element>(
        &self,
        name: &str,
        first: usize,
        dest: &mut [E],
    ) -> Result<(), ModelError> {
        let (file, entry) = self.find(name)?;
        match self.packed.get(name) {
            Some(packed) => {
                let reading = Reading { path: self.path(), files: &self.files, name, entry };
                packed.read(&reading, first, dest)
            }
            None => file.read_elements(name, entry, first, dest),
        }
    }

    /// The other tensors that a quantized tensor consists of, with their names.
    pub fn parts(&self, name: &str) -> &[(String, TensorEntry)] {
        self.packed.get(name).map_or(&[], |packed| &packed.parts)
    }

    /// Reads the stored bytes of a tensor, starting at `offset` in the tensor.
    pub fn read_bytes(&self, name: &str, offset: u64, dest: &mut [u8]) -> Result<(), ModelError> {
        let (file, entry) = self.find(name)?;
        file.read_bytes(entry, offset, dest)
    }

    pub(super) fn find(&self, name: &str) -> Result<(&SafetensorsFile, &TensorEntry), ModelError> {
        let entry = self.tensors.get(name).or_else(|| {
            // A tied model saved with only the head, as `open` has verified.
            let is_embedding = name == hf_embedding(self.config.model.family);
            is_embedding.then(|| self.tensors.get(HF_HEAD)).flatten()
        });
        entry.and_then(|entry| Some((self.files.get(entry.file)?, entry))).ok_or_else(|| {
            ModelError::NoSuchTensor { path: self.path().to_owned(), name: clip(name) }
        })
    }
}

type Opened = (Vec<SafetensorsFile>, BTreeMap<String, TensorEntry>);

fn open_single(path: &Path) -> Result<Opened, ModelError> {
    let mut file = SafetensorsFile::open(path)?;
    let tensors = file.take_tensors();
    Ok((vec![file], tensors))
}

#[derive(Deserialize)]
struct Index {
    weight_map: UniqueMap<Name>,
}

fn open_shards(root: &Root, index_path: &Path) -> Result<Opened, ModelError> {
    let (index_file, index_bytes) = open_capped(index_path, "the index", INDEX_BYTES_MAX)?;
    let index =
        parse_stream(index_file.take(index_bytes), PhantomData::<Index>).map_err(|error| {
            let (path, problem) = (index_path.to_owned(), clip(&error.to_string()));
            ModelError::Json { path, problem }
        })?;
    let wrong = |problem: String| ModelError::Index { path: index_path.to_owned(), problem };
    let shard_names: BTreeSet<&str> =
        index.weight_map.0.iter().map(|(_, Name(shard))| shard.as_str()).collect();
    if shard_names.len() > SHARDS_MAX {
        return Err(wrong(format!(
            "it names {} shards; the limit is {SHARDS_MAX}",
            shard_names.len()
        )));
    }
    // Check all names before opening any file, to detect a hostile entry anywhere in the list.
    let mut paths: Vec<(&str, PathBuf)> = Vec::new();
    for name in shard_names {
        match root.file(name)? {
            Some(path) => paths.push((name, path)),
            None => return Err(wrong(format!("the shard {} is missing", clip(name)))),
        }
    }
    let (mut files, mut tensors) = (Vec::new(), BTreeMap::new());
    let mut budget = HeaderBudget::new();
    for (shard, path) in &paths {
        let mut file = SafetensorsFile::open_within(path, &mut budget)?;
        for (name, entry) in file.take_tensors() {
            match tensors.entry(name) {
                Entry::Vacant(place) => place.insert(TensorEntry { file: files.len(), ..entry }),
                Entry::Occupied(place) => {
                    return Err(wrong(format!(
                        "tensor {} is in two shards, one is {shard}",
                        clip(place.key())
                    )));
                }
            };
        }
        files.push(file);
    }
    for (name, Name(shard)) in &index.weight_map.0 {
        let found = tensors.get(name).is_some_and(|entry| paths[entry.file].0 == shard);
        if !found {
            return Err(wrong(format!(
                "tensor {} is not in the shard {}",
                clip(name),
                clip(shard)
            )));
        }
    }
    Ok((files, tensors))
}

/// Renames each tensor to its transformers name. Files of bare models lack the prefix. Those of
/// wrapped models have additional parts.
fn with_prefix(
    root: &Root,
    config: &ModelConfig,
    stored: BTreeMap<String, TensorEntry>,
    unwrapped: &mut Unwrapped,
) -> Result<BTreeMap<String, TensorEntry>, ModelError> {
    let (prefix, stems) = hf_prefix(config.family);
    let mut tensors = BTreeMap::new();
    for (name, entry) in stored {
        if is_of_adapter(&name) {
            let (path, found) = (root.directory().to_owned(), format!("it has {}", clip(&name)));
            return Err(ModelError::Adapter { path, found });
        }
        let name = unwrapped.name(name);
        let is_bare = stems.iter().any(|stem| name.starts_with(stem));
        let name = if is_bare { format!("{prefix}{name}") } else { name };
        match tensors.entry(name) {
            Entry::Vacant(place) => place.insert(entry),
            Entry::Occupied(place) => {
                let problem =
                    format!("tensor {} is there with and without its prefix", clip(place.key()));
                return Err(ModelError::Index { path: root.directory().to_owned(), problem });
            }
        };
    }
    Ok(tensors)
}

impl HfConfig {
    /// Reads the config.json of a directory, ignoring its weights.
    pub fn of_directory(path: &Path) -> Result<Self, ModelError> {
        open_config(path).map(|(_, config)| config)
    }
}

fn open_config(path: &Path) -> Result<(Root, HfConfig), ModelError> {
    let metadata = fs::metadata(path).map_err(ModelError::io("open the directory", path))?;
    if !metadata.is_dir() {
        let is_pickle = open_plain(path).is_ok_and(|file| is_pickle(&file));
        let path = path.to_owned();
        return Err(match is_pickle {
            true => ModelError::Pickle { path },
            false => ModelError::NotAModel { path, missing: "directory" },
        });
    }
    let root = Root::new(path)?;
    // transformers applies an adapter in the model's directory. Ignoring it would give different
    // results.
    if root.file(ADAPTER)?.is_some() {
        let (path, found) = (root.directory().to_owned(), format!("it has {ADAPTER}"));
        return Err(ModelError::Adapter { path, found });
    }
    match root.file(CONFIG)? {
        Some(path) => {
            let config = HfConfig::read(&path)?;
            Ok((root, config))
        }
        None => Err(no_file(&root, "config.json")),
    }
}

/// The error for a missing file. The most common cause is that the weights are pickles.
fn no_file(root: &Root, missing: &'static str) -> ModelError {
    let entries = fs::read_dir(root.directory()).into_iter().flatten().flatten();
    let mut pickles: Vec<PathBuf> = entries
        .take(SNIFFED_FILES_MAX)
        .filter_map(|entry| {
            root.file(entry.file_name().to_str()?).ok().flatten().map(|path| (entry.path(), path))
        })
        .filter(|(_, path)| open_plain(path).is_ok_and(|file| is_pickle(&file)))
        .map(|(entry, _)| entry)
        .collect();
    pickles.sort();
    match pickles.into_iter().next() {
        Some(path) => ModelError::Pickle { path },
        None => ModelError::NotAModel { path: root.directory().to_owned(), missing },
    }
}

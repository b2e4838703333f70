//! One error type: what is wrong, where, and what to do next.

use std::fmt;
use std::path::{Path, PathBuf};
use storm_files::StageError;

/// Why a model could not be described, read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// No preset has this name.
    #[error("no preset is named {name:?}{}; presets: {known}", suggest(.closest))]
    UnknownPreset {
        /// The name that was asked for, shortened.
        name: String,
        /// The nearest preset, when one is near.
        closest: Option<&'static str>,
        /// Every preset name.
        known: String,
    },

    /// Adapters that a model cannot have.
    #[error("lora: {problem}")]
    Lora {
        /// What is wrong, and what to do.
        problem: String,
    },

    /// An adapter directory that cannot be used.
    #[error("{path}: {problem}", path = .path.display())]
    BadAdapter {
        /// The directory, or its file.
        path: PathBuf,
        /// What is wrong, and what to do.
        problem: String,
    },

    /// The graph of the model could not be built.
    #[error(transparent)]
    Graph(#[from] storm_graph::GraphError),

    /// A number of the model is outside the range that STORM accepts.
    #[error("model config: {field} is {value}; it must be {rule}")]
    InvalidConfig {
        /// The field of [`crate::ModelConfig`].
        field: &'static str,
        /// Its value.
        value: String,
        /// What it must be.
        rule: String,
    },

    /// A field of config.json has a value that STORM does not support.
    #[error("config.json: `{field}` is {value}; {advice}")]
    UnsupportedField {
        /// The field.
        field: String,
        /// Its value, shortened.
        value: String,
        /// What is supported instead.
        advice: String,
    },

    /// config.json has fields that STORM does not know, so it cannot know what they change.
    #[error(
        "config.json: unknown field {fields} for model type {model_type}; supported fields: {supported}. \
         If a field has no effect on the forward pass, remove it from config.json"
    )]
    UnknownFields {
        /// The unknown names, comma separated, shortened.
        fields: String,
        /// The model type of the file.
        model_type: &'static str,
        /// The names that are read or known to be harmless.
        supported: String,
    },

    /// A field that every model of this family needs is absent.
    #[error("config.json: `{field}` is missing; a {model_type} model needs it")]
    MissingField {
        /// The field.
        field: &'static str,
        /// The model type of the file.
        model_type: &'static str,
    },

    /// The model is of a kind that STORM does not have.
    #[error("config.json: {found} is not supported; supported architectures: {supported}")]
    UnsupportedArchitecture {
        /// What the file says.
        found: String,
        /// What STORM has.
        supported: String,
    },

    /// The model needs Python code of its repository.
    #[error(
        "config.json: `auto_map` asks for code from the model repository to be run, which STORM never does; \
         use a model whose architecture is built in ({supported}), or remove `auto_map` if it is one of these"
    )]
    RemoteCode {
        /// What STORM has.
        supported: String,
    },

    /// The weights are quantized in a way that is not read.
    #[error(
        "config.json: the weights are quantized ({method}); STORM reads f64, f32, bf16 and f16 weights, and of quantized ones \
         those of compressed-tensors (int-quantized, 8 bits, symmetric) and bitsandbytes (int8, nf4): take the unquantized \
         model, or dequantize it in transformers with `model.dequantize()` and save it again"
    )]
    Quantized {
        /// The method the file names.
        method: String,
    },

    /// A quantized weight is not what its config says.
    #[error("{path}: the quantized weight {name} cannot be read: {problem}", path = .path.display())]
    BadQuantized {
        /// The model directory.
        path: PathBuf,
        /// The weight.
        name: String,
        /// What is wrong.
        problem: String,
    },

    /// A JSON file does not parse.
    #[error("{path}: unexpected JSON: {problem}", path = .path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// What the parser says.
        problem: String,
    },

    /// A file, or a part of it, is larger than any genuine one.
    #[error("{path}: {what} is {bytes} bytes; the limit is {limit}", path = .path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Which part of it.
        what: &'static str,
        /// Its size, as found or as claimed.
        bytes: u64,
        /// The limit.
        limit: u64,
    },

    /// The weights are in a format that runs code when it is opened.
    #[error(
        "{path}: this is a pickle file, and opening a pickle can run any code; convert it where you trust it: \
         `python -c \"from transformers import AutoModelForCausalLM as A; A.from_pretrained('DIR').save_pretrained('NEW_DIR')\"`, \
         or take a repository that has safetensors",
        path = .path.display()
    )]
    Pickle {
        /// The file.
        path: PathBuf,
    },

    /// A safetensors file breaks the format's rules.
    #[error("{path}: damaged or hostile safetensors file: {problem}; download it again", path = .path.display())]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// The rule that is broken.
        problem: String,
    },

    /// A name or a link leads outside the model directory.
    #[error("{directory}: {entry} {problem}; files of a model must lie in its own directory", directory = .directory.display())]
    UnsafePath {
        /// The model directory.
        directory: PathBuf,
        /// The entry, quoted and shortened.
        entry: String,
        /// What is wrong with it.
        problem: &'static str,
    },

    /// There is nothing to load.
    #[error(
        "{path}: no {missing}; expected a Hugging Face directory with config.json and model.safetensors \
         (or model.safetensors.index.json and its shards)",
        path = .path.display()
    )]
    NotAModel {
        /// The path that was given.
        path: PathBuf,
        /// What was not found.
        missing: &'static str,
    },

    /// The index and the shards of a model disagree.
    #[error("{path}: {problem}; download the model again", path = .path.display())]
    Index {
        /// The index file.
        path: PathBuf,
        /// What does not fit.
        problem: String,
    },

    /// The tensors are not those of the model that config.json describes.
    #[error("{path}: the tensors do not fit config.json:{report}", path = .path.display())]
    Tensors {
        /// The model directory.
        path: PathBuf,
        /// What is missing, left over or wrong.
        report: Box<TensorReport>,
    },

    /// The embedding and the head are tied in config.json but differ in the file.
    #[error(
        "{path}: config.json ties the embedding and the head, but `lm_head.weight` differs from the embedding; \
         set `tie_word_embeddings` to false in config.json if they are meant to differ, or delete `lm_head.weight`",
        path = .path.display()
    )]
    TiedWeightsDiffer {
        /// The model directory.
        path: PathBuf,
    },

    /// The directory holds an adapter, which is not a model by itself.
    #[error(
        "{path}: {found}: this is a PEFT adapter, not a whole model; train on from it with `--model BASE --adapter {path}`, \
         or make a model of it with `storm merge {path} --out NEW_DIR`",
        path = .path.display()
    )]
    Adapter {
        /// The model directory.
        path: PathBuf,
        /// What shows it.
        found: String,
    },

    /// The model has no head, and something other than training asked for it.
    #[error(
        "{path}: the model has no head: there is no `lm_head.weight`, and `tie_word_embeddings` is false, so nothing \
         says which token comes next; train it, which starts a fresh head, or use the files of the whole model",
        path = .path.display()
    )]
    NoHead {
        /// The model directory.
        path: PathBuf,
    },

    /// A requested tensor does not exist.
    #[error("{path}: no tensor is named {name}", path = .path.display())]
    NoSuchTensor {
        /// The model directory or file.
        path: PathBuf,
        /// The name, quoted and shortened.
        name: String,
    },

    /// A tensor is stored in a type that is not converted.
    #[error("tensor {name} is stored as {dtype}; STORM reads F64, F32, BF16 and F16")]
    UnsupportedDtype {
        /// The tensor.
        name: String,
        /// Its type.
        dtype: &'static str,
    },

    /// A caller's buffer, range or specification does not fit the tensor.
    #[error("{what} of {name} is {got}; it must be {expected}")]
    WrongLength {
        /// What has the wrong size.
        what: &'static str,
        /// The tensor or parameter.
        name: String,
        /// Its size.
        got: usize,
        /// The size that fits.
        expected: usize,
    },

    /// The place to save to is occupied.
    #[error("{path} {problem}", path = .path.display())]
    Output {
        /// Where the model was to be saved.
        path: PathBuf,
        /// Why not, and what to do.
        problem: String,
    },

    /// The caller could not deliver a parameter that was to be saved.
    #[error("parameter {name} could not be read for saving: {source}")]
    Provider {
        /// The parameter.
        name: String,
        /// The caller's error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },

    /// The operating system refused.
    #[error("{path}: cannot {action}: {source}", path = .path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
}

impl ModelError {
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Io { action, path: path.to_owned(), source }
    }

    pub(crate) fn stage(output: &Path) -> impl FnOnce(StageError) -> Self {
        move |error| match error {
            StageError::Refused { problem } => Self::Output { path: output.to_owned(), problem },
            StageError::Io { doing, path, source } => Self::Io { action: doing, path, source },
        }
    }
}

fn suggest(closest: &Option<&'static str>) -> String {
    closest.map_or_else(String::new, |name| format!(" (did you mean {name}?)"))
}

/// How many names of each kind a [`TensorReport`] keeps; the rest is counted.
pub(crate) const REPORT_NAMES_MAX: usize = 20;

/// Everything that is wrong with the tensors of a directory, in one report.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct TensorReport {
    /// Tensors that the model needs and the files do not have.
    pub missing: NameList,
    /// Tensors that the files have and the model does not.
    pub extra: NameList,
    /// Tensors with another shape than the model's: `name: found [..], expected [..]`.
    pub wrong_shape: NameList,
    /// Tensors of a type that is not read: `name: I8`.
    pub wrong_dtype: NameList,
}

/// Up to twenty names, and how many there are in all.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct NameList {
    /// The first names.
    pub first: Vec<String>,
    /// How many names there are, those not kept included.
    pub count: usize,
}

impl NameList {
    pub(crate) fn add(&mut self, name: impl FnOnce() -> String) {
        if self.first.len() < REPORT_NAMES_MAX {
            self.first.push(name());
        }
        self.count += 1;
    }
}

impl TensorReport {
    /// Whether nothing is wrong.
    pub fn is_empty(&self) -> bool {
        self.kinds().iter().all(|(_, names)| names.count == 0)
    }

    fn kinds(&self) -> [(&'static str, &NameList); 4] {
        [
            ("missing", &self.missing),
            ("not part of the model", &self.extra),
            ("wrong shape", &self.wrong_shape),
            ("unsupported type", &self.wrong_dtype),
        ]
    }
}

impl fmt::Display for TensorReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (kind, names) in self.kinds() {
            if names.count == 0 {
                continue;
            }
            write!(f, "\n  {kind} ({}): {}", names.count, names.first.join(", "))?;
            if names.count > names.first.len() {
                write!(f, " and {} more", names.count - names.first.len())?;
            }
        }
        Ok(())
    }
}

/// Text from a file, made safe for a terminal: escaped and not longer than a line.
pub(crate) fn clip(text: &str) -> String {
    const CHARS_MAX: usize = 100;
    let mut clipped: String = text.chars().take(CHARS_MAX).flat_map(char::escape_debug).collect();
    if text.chars().nth(CHARS_MAX).is_some() {
        clipped.push('…');
    }
    clipped
}

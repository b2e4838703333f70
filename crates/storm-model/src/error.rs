//! The error type: what is wrong, where, and what to do next.

use std::fmt;
use std::path::{Path, PathBuf};
use storm_files::StageError;

/// Why a model could not be built, read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// No preset has this name.
    #[error("no preset is named {name:?}{}; presets: {known}", suggest(.closest))]
    UnknownPreset {
        /// The requested name, shortened.
        name: String,
        /// The closest preset, if one is close.
        closest: Option<&'static str>,
        /// Every preset name.
        known: String,
    },

    /// The model cannot have these adapters.
    #[error("lora: {problem}")]
    Lora {
        /// What is wrong, and what to do.
        problem: String,
    },

    /// An adapter directory cannot be used.
    #[error("{path}: {problem}", path = .path.display())]
    BadAdapter {
        /// The directory, or its file.
        path: PathBuf,
        /// What is wrong, and what to do.
        problem: String,
    },

    /// The model's graph could not be built.
    #[error(transparent)]
    Graph(#[from] storm_graph::GraphError),

    /// A number of the model is out of range.
    #[error("model config: {field} is {value}; it must be {rule}")]
    InvalidConfig {
        /// The field of [`crate::ModelConfig`].
        field: &'static str,
        /// Its value.
        value: String,
        /// What it must be.
        rule: String,
    },

    /// A field of config.json has an unsupported value.
    #[error("config.json: `{field}` is {value}; {advice}")]
    UnsupportedField {
        /// The field.
        field: String,
        /// Its value, shortened.
        value: String,
        /// What is supported instead.
        advice: String,
    },

    /// config.json has unknown fields, which might change the model.
    #[error(
        "config.json: unknown field {fields} for model type {model_type}; supported fields: {supported}. \
         If a field has no effect on the forward pass, remove it from config.json"
    )]
    UnknownFields {
        /// The unknown names, comma separated, shortened.
        fields: String,
        /// The model type of the file.
        model_type: &'static str,
        /// Fields that are read or known to be harmless.
        supported: String,
    },

    /// A required field is missing.
    #[error("config.json: `{field}` is missing; a {model_type} model needs it")]
    MissingField {
        /// The field.
        field: &'static str,
        /// The model type of the file.
        model_type: &'static str,
    },

    /// The architecture is not supported.
    #[error("config.json: {found} is not supported; supported architectures: {supported}")]
    UnsupportedArchitecture {
        /// The architecture in the file.
        found: String,
        /// The supported architectures.
        supported: String,
    },

    /// The model needs Python code from its repository.
    #[error(
        "config.json: `auto_map` asks for code from the model repository to be run, which STORM never does; \
         use a model whose architecture is built in ({supported}), or remove `auto_map` if it is one of these"
    )]
    RemoteCode {
        /// The supported architectures.
        supported: String,
    },

    /// The weights are quantized in an unsupported format.
    #[error(
        "config.json: the weights are quantized ({method}); STORM reads f64, f32, bf16 and f16 weights, and of quantized ones \
         those of compressed-tensors (int-quantized, 8 bits, symmetric) and bitsandbytes (int8, nf4): take the unquantized \
         model, or dequantize it in transformers with `model.dequantize()` and save it again"
    )]
    Quantized {
        /// The method named in the file.
        method: String,
    },

    /// A quantized weight does not match its config.
    #[error("{path}: the quantized weight {name} cannot be read: {problem}", path = .path.display())]
    BadQuantized {
        /// The model directory.
        path: PathBuf,
        /// The weight.
        name: String,
        /// The problem.
        problem: String,
    },

    /// A JSON file does not parse.
    #[error("{path}: unexpected JSON: {problem}", path = .path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The parser's message.
        problem: String,
    },

    /// A file or a part of it is too large.
    #[error("{path}: {what} is {bytes} bytes; the limit is {limit}", path = .path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// The part of the file.
        what: &'static str,
        /// Its actual or claimed size.
        bytes: u64,
        /// The limit.
        limit: u64,
    },

    /// The weights are in a format that can run code when opened.
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

    /// A safetensors file violates the format.
    #[error("{path}: damaged or hostile safetensors file: {problem}; download it again", path = .path.display())]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// The violation.
        problem: String,
    },

    /// A name or a link leads outside the model directory.
    #[error("{directory}: {entry} {problem}; files of a model must lie in its own directory", directory = .directory.display())]
    UnsafePath {
        /// The model directory.
        directory: PathBuf,
        /// The entry, quoted and shortened.
        entry: String,
        /// The problem.
        problem: &'static str,
    },

    /// The directory contains no model.
    #[error(
        "{path}: no {missing}; expected a Hugging Face directory with config.json and model.safetensors \
         (or model.safetensors.index.json and its shards)",
        path = .path.display()
    )]
    NotAModel {
        /// The path that was given.
        path: PathBuf,
        /// The missing file.
        missing: &'static str,
    },

    /// The index and the shards of a model disagree.
    #[error("{path}: {problem}; download the model again", path = .path.display())]
    Index {
        /// The index file.
        path: PathBuf,
        /// The mismatch.
        problem: String,
    },

    /// The tensors do not match config.json.
    #[error("{path}: the tensors do not fit config.json:{report}", path = .path.display())]
    Tensors {
        /// The model directory.
        path: PathBuf,
        /// The missing, extra and wrong tensors.
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

    /// The directory contains an adapter, which is not a complete model.
    #[error(
        "{path}: {found}: this is a PEFT adapter, not a whole model; train on from it with `--model BASE --adapter {path}`, \
         or make a model of it with `storm merge {path} --out NEW_DIR`",
        path = .path.display()
    )]
    Adapter {
        /// The model directory.
        path: PathBuf,
        /// The evidence.
        found: String,
    },

    /// The model has no head, which everything but training needs.
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

    /// A tensor is stored in an unsupported type.
    #[error("tensor {name} is stored as {dtype}; STORM reads F64, F32, BF16 and F16")]
    UnsupportedDtype {
        /// The tensor.
        name: String,
        /// Its type.
        dtype: &'static str,
    },

    /// A caller's buffer, range or specification does not match the tensor.
    #[error("{what} of {name} is {got}; it must be {expected}")]
    WrongLength {
        /// The object with the wrong size.
        what: &'static str,
        /// The tensor or parameter.
        name: String,
        /// Its size.
        got: usize,
        /// The correct size.
        expected: usize,
    },

    /// The model cannot be saved to this path.
    #[error("{path} {problem}", path = .path.display())]
    Output {
        /// The output path.
        path: PathBuf,
        /// Why not, and what to do.
        problem: String,
    },

    /// The caller failed to provide a parameter for saving.
    #[error("parameter {name} could not be read for saving: {source}")]
    Provider {
        /// The parameter.
        name: String,
        /// The caller's error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },

    /// A file system operation failed.
    #[error("{path}: cannot {action}: {source}", path = .path.display())]
    Io {
        /// The operation.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
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

/// Maximum number of names of each kind in a [`TensorReport`]. The rest are only counted.
pub(crate) const REPORT_NAMES_MAX: usize = 20;

/// All problems with the tensors of a directory, in one report.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct TensorReport {
    /// Tensors of the model that are missing from the files.
    pub missing: NameList,
    /// Tensors in the files that the model does not have.
    pub extra: NameList,
    /// Tensors with the wrong shape: `name: found [..], expected [..]`.
    pub wrong_shape: NameList,
    /// Tensors with an unsupported type: `name: I8`.
    pub wrong_dtype: NameList,
}

/// Up to twenty names, and the total count.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct NameList {
    /// The first names.
    pub first: Vec<String>,
    /// The total number of names.
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
    /// Whether there are no problems.
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

/// Text from a file, made safe for a terminal: escaped and truncated.
pub(crate) fn clip(text: &str) -> String {
    const CHARS_MAX: usize = 100;
    let mut clipped: String = text.chars().take(CHARS_MAX).flat_map(char::escape_debug).collect();
    if text.chars().nth(CHARS_MAX).is_some() {
        clipped.push('…');
    }
    clipped
}

//! Opens models named on the command line: a Hugging Face directory, the folder of a run or a checkpoint, or a hub
//! name.

use crate::base::BaseArg;
use crate::image_source::ImageSource;
use crate::lora::LoraArg;
use crate::train;
use crate::writing::Ends;
use crate::{UsageError, model, model_tokenizer};
use anyhow::{Context, Result};
use clap::Args;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use storm_data::{ChatTemplate, ChatTokenizer, Dataset, Tokenizer, TokenizerSource};
use storm_graph::DType;
use storm_hub::Wanted;
use storm_model::{
    AdaptedSource, AdapterDirectory, AnyModel, BaseFormat, Dtype, Element, HfConfig, HfDirectory,
    ImageDirectory, ModelConfig, ModelError, ParameterSource, ParameterSpec, end_of_text,
    is_adapter_directory,
};
use storm_train::{CheckpointError, Checkpoints, Disk, SavedWeights};

const CHECKPOINTS: &str = "checkpoints";
const MANIFEST: &str = "manifest.json";

/// Which weights of a run.
#[derive(Args, Clone, Default)]
pub(crate) struct Which {
    /// For an adapter: directory or hub name of its base model. Default: the one that the adapter or its run names.
    #[arg(long, value_name = "DIRECTORY OR NAME")]
    base_model: Option<String>,
    /// For a run: use the checkpoint with the best evaluation instead of the newest.
    #[arg(long, conflicts_with = "step")]
    best: bool,
    /// For a run: use the checkpoint of this step instead of the newest.
    #[arg(long)]
    step: Option<u64>,
}

/// The error for a folder without a usable model.
#[derive(Debug)]
pub(crate) struct NoModel(String);

impl NoModel {
    pub(crate) fn new(problem: String) -> NoModel {
        NoModel(problem)
    }
}

impl std::fmt::Display for NoModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NoModel {}

/// Where weights are read from.
pub(crate) enum Weights {
    Directory(Box<HfDirectory>),
    Checkpoint(Box<SavedWeights>),
    Adapter(Box<AdaptedSource<HfDirectory, AdapterDirectory>>),
    /// A run's adapters, with the base weights it started from.
    Adapted(Box<AdaptedSource<HfDirectory, SavedWeights>>),
}

impl ParameterSource for Weights {
    fn load_rows<E: Element>(
        &self,
        spec: &ParameterSpec,
        rows: Range<usize>,
        dest: &mut [E],
    ) -> Result<(), ModelError> {
        match self {
            Weights::Directory(directory) => directory.load_rows(spec, rows, dest),
            Weights::Checkpoint(checkpoint) => checkpoint.load_rows(spec, rows, dest),
            Weights::Adapter(adapted) => adapted.load_rows(spec, rows, dest),
            Weights::Adapted(adapted) => adapted.load_rows(spec, rows, dest),
        }
    }
}

/// An opened language model and the files that belong to it.
pub(crate) struct ModelSource {
    pub(crate) config: ModelConfig,
    pub(crate) weights: Weights,
    /// The Hugging Face directory with the tokenizer and related files; `None` for a run started from a preset.
    pub(crate) files: Option<PathBuf>,
    /// The run, for a checkpoint.
    pub(crate) run: Option<RunSource>,
    /// The name as given.
    shown: PathBuf,
    /// Its config.json.
    json: Option<HfConfig>,
}

/// The run that a checkpoint belongs to.
pub(crate) struct RunSource {
    /// `runs/NAME`, if the checkpoint is in a run's folder.
    pub(crate) folder: Option<PathBuf>,
    /// All recorded options of the run.
    pub(crate) settings: BTreeMap<String, String>,
}

/// An opened model of any kind.
pub(crate) enum AnySource {
    Language(Box<ModelSource>),
    Image(Box<ImageSource>),
}

impl From<ModelSource> for AnySource {
    fn from(source: ModelSource) -> AnySource {
        AnySource::Language(Box::new(source))
    }
}

impl From<ImageSource> for AnySource {
    fn from(source: ImageSource) -> AnySource {
        AnySource::Image(Box::new(source))
    }
}

impl ParameterSource for AnySource {
    fn load_rows<E: Element>(
        &self,
        spec: &ParameterSpec,
        rows: Range<usize>,
        dest: &mut [E],
    ) -> Result<(), ModelError> {
        match self {
            AnySource::Language(source) => source.weights.load_rows(spec, rows, dest),
            AnySource::Image(source) => source.load_rows(spec, rows, dest),
        }
    }
}

impl AnySource {
    /// The model's config.
    pub(crate) fn model(&self) -> AnyModel {
        match self {
            AnySource::Language(source) => (&source.config).into(),
            AnySource::Image(source) => (&source.config).into(),
        }
    }

    /// The folder of the run, for a checkpoint inside of one.
    pub(crate) fn run_folder(&self) -> Option<&Path> {
        match self {
            AnySource::Language(source) => source.run.as_ref()?.folder.as_deref(),
            AnySource::Image(source) => source.folder.as_deref(),
        }
    }

    /// Opens a model, and prints the chosen checkpoint to standard error.
    pub(crate) fn open(named: &Path, which: &Which) -> Result<AnySource> {
        if is_adapter_directory(named) {
            which.refuse_checkpoints(named)?;
            return Ok(ModelSource::of_adapter(named, which.base_model.as_deref())?.into());
        }
        let located = named.to_str().map(|named| model::locate(named, Wanted::All)).transpose()?;
        if let Some(located) = located.flatten() {
            which.refuse(named)?;
            return AnySource::of_directory(named, &located.directory);
        }
        let is_run = named.join(CHECKPOINTS).is_dir();
        let is_checkpoint = named.join(MANIFEST).is_file();
        if named.join("config.json").exists() || !(is_run || is_checkpoint) {
            which.refuse(named)?;
            return AnySource::of_directory(named, named);
        }
        if is_checkpoint {
            which.refuse(named)?;
            let weights = SavedWeights::open(named)?;
            eprintln!("{}: checkpoint of step {}", named.display(), weights.progress().step);
            let run = run_of_checkpoint(named);
            return AnySource::of_checkpoint(named, run, weights, which);
        }
        let checkpoints = Checkpoints::reading(&named.join(CHECKPOINTS), Disk);
        match find(named, &checkpoints, which)? {
            Found::Checkpoint(weights) => {
                AnySource::of_checkpoint(named, Some(named.to_owned()), *weights, which)
            }
            Found::Directory(directory) if is_adapter_directory(&directory) => {
                Ok(ModelSource::of_adapter(&directory, which.base_model.as_deref())?.into())
            }
            Found::Directory(directory) => AnySource::of_directory(named, &directory),
        }
    }

    fn of_directory(named: &Path, directory: &Path) -> Result<AnySource> {
        match ImageDirectory::is_one(directory) {
            true => Ok(ImageSource::of_directory(directory)?.into()),
            false => Ok(ModelSource::of_directory(named, directory)?.into()),
        }
    }

    fn of_checkpoint(
        named: &Path,
        folder: Option<PathBuf>,
        weights: SavedWeights,
        which: &Which,
    ) -> Result<AnySource> {
        match ImageSource::is_checkpoint(&weights) {
            true => Ok(ImageSource::of_checkpoint(folder, weights)?.into()),
            false => Ok(ModelSource::of_checkpoint(named, folder, weights, which)?.into()),
        }
    }
}

impl ModelSource {
    /// Opens a language model, and prints the chosen checkpoint to standard error.
    pub(crate) fn open(named: &Path, which: &Which) -> Result<ModelSource> {
        match AnySource::open(named, which)? {
            AnySource::Language(source) => Ok(*source),
            AnySource::Image(_) => Err(NoModel(format!(
                "{} is an image classifier; this command is for language models",
                named.display()
            ))
            .into()),
        }
    }

    fn of_directory(named: &Path, directory: &Path) -> Result<ModelSource> {
        let opened = model::open(directory)?;
        // Check this before anything slow: these commands predict the next token, which takes a head.
        if !opened.has_head() {
            return Err(ModelError::NoHead { path: directory.to_owned() }.into());
        }
        Ok(ModelSource {
            config: opened.model().clone(),
            json: Some(opened.config().clone()),
            weights: Weights::Directory(Box::new(opened)),
            files: Some(directory.to_owned()),
            run: None,
            shown: named.to_owned(),
        })
    }

    /// Opens an adapter and its base: the given one, else the one the adapter names, relative to the current directory
    /// or to the adapter's.
    fn of_adapter(named: &Path, base: Option<&str>) -> Result<ModelSource> {
        let adapter = AdapterDirectory::open(named)?;
        let Some(name) = base.or(adapter.base()) else {
            let problem = format!(
                "{} does not name its base model; give --base-model, the directory or hub name of that model",
                named.display()
            );
            return Err(UsageError(problem).into());
        };
        let base = ModelSource::of_base(named, name)?;
        let config = ModelConfig {
            base: said_base(named, adapter.base_format()),
            ..adapter.apply_to(&base.config)?
        };
        let Weights::Directory(directory) = base.weights else {
            unreachable!("a base is a directory");
        };
        let source = AdaptedSource::new(&config, *directory, adapter);
        let weights = Weights::Adapter(Box::new(source));
        Ok(ModelSource { config, weights, shown: named.to_owned(), ..base })
    }

    /// Opens the base model of an adapter.
    fn of_base(named: &Path, base: &str) -> Result<ModelSource> {
        let located = model::locate(base, Wanted::All)?.map(|located| located.directory);
        let near = named.join(base);
        let directory =
            located.unwrap_or_else(|| match Path::new(base).is_dir() || !near.is_dir() {
                true => PathBuf::from(base),
                false => near,
            });
        if !directory.is_dir() {
            return Err(NoModel(format!(
                "the base model of {} is {base}, which was not found; give --base-model, the directory of that model",
                named.display()
            ))
            .into());
        }
        ModelSource::of_directory(&directory, &directory)
    }

    /// Opens a checkpoint of a LoRA run.
    fn of_adapted_checkpoint(
        named: &Path,
        run: RunSource,
        lora: &str,
        weights: SavedWeights,
        base: Option<&str>,
    ) -> Result<ModelSource> {
        let began = run.model_files().map(|path| path.display().to_string());
        let Some(name) = base.map(str::to_owned).or(began) else {
            return Err(NoModel(format!(
                "the run began from {}, which was not found; give --base-model, the directory of that model",
                run.setting("model").unwrap_or_default()
            ))
            .into());
        };
        let base = ModelSource::of_base(named, &name)?;
        let config = LoraArg::of_record(lora)?.apply_to(base.config)?;
        let config = BaseArg::of_record(run.setting("base"))?.apply_to(config)?;
        said_base(named, config.base);
        weights.check(&config)?;
        let Weights::Directory(directory) = base.weights else {
            unreachable!("a base is a directory");
        };
        let source = AdaptedSource::new(&config, *directory, weights);
        let weights = Weights::Adapted(Box::new(source));
        Ok(ModelSource {
            config,
            weights,
            files: base.files,
            run: Some(run),
            shown: named.to_owned(),
            json: base.json,
        })
    }

    fn of_checkpoint(
        named: &Path,
        folder: Option<PathBuf>,
        weights: SavedWeights,
        which: &Which,
    ) -> Result<ModelSource> {
        let settings = weights.progress().settings.clone();
        let run = RunSource { folder, settings };
        if let Some(lora) = run.setting("lora").map(str::to_owned) {
            let base = which.base_model.as_deref();
            return ModelSource::of_adapted_checkpoint(named, run, &lora, weights, base);
        }
        let files = run.model_files();
        let json = files.as_deref().map(HfConfig::of_directory).transpose()?;
        let config = match &json {
            Some(json) => json.model.clone(),
            None => run.fresh_config(&weights)?,
        };
        weights.check(&config)?;
        let (weights, run) = (Weights::Checkpoint(Box::new(weights)), Some(run));
        Ok(ModelSource { config, weights, files, run, shown: named.to_owned(), json })
    }

    /// The data type the model was trained or saved in, and how that is known.
    pub(crate) fn own_dtype(&self) -> (DType, String) {
        match (&self.run, &self.weights) {
            (None, Weights::Directory(directory)) => dtype_of(directory),
            (None, Weights::Adapter(adapted)) => dtype_of(adapted.base()),
            (run, _) => dtype_of_run(run.as_ref().and_then(|run| run.setting("precision"))),
        }
    }

    /// The model's tokenizer: the given one, else that of the run's data, else the one in the model's directory.
    pub(crate) fn tokenizer(&self, given: Option<&str>) -> Result<TokenizerSource> {
        if let Some(text) = given {
            return Ok(TokenizerSource::parse(text));
        }
        if let Some(source) = self.run.as_ref().and_then(|run| run.tokenizer(self.files.as_deref()))
        {
            return Ok(source);
        }
        let directory = self.files.as_deref().unwrap_or(&self.shown);
        Ok(model_tokenizer::needed(directory, self.config.vocab_size)?)
    }

    /// What ends a text, as in `transformers.generate`: the tokens named in the model's files. If there are none, or
    /// the model was trained by a run, also the tokenizer's end-of-text token.
    pub(crate) fn ends(&self, tokenizer: &Tokenizer) -> Result<Ends> {
        let mut tokens = match (&self.files, &self.json) {
            (Some(directory), Some(json)) => end_of_text(directory, json)?,
            _ => Vec::new(),
        };
        if tokens.is_empty() || self.run.is_some() {
            tokens.extend(tokenizer.info().end_of_text);
        }
        Ok(Ends { tokens, line: false })
    }

    /// What ends an answer in a chat.
    pub(crate) fn ends_of_answer(&self, chats: &ChatTokenizer) -> Result<Ends> {
        let mut ends = self.ends(chats.tokenizer())?;
        ends.tokens.extend(chats.ends());
        Ok(Ends { line: chats.line_ends(), ..ends })
    }

    /// The chat template: the given one, else the run's, else the model's own.
    pub(crate) fn chat_template(&self, given: Option<&str>) -> ChatTemplate {
        let recorded = || self.run.as_ref()?.settings.get("chat-template").map(String::as_str);
        ChatTemplate::parse(given.or_else(recorded).unwrap_or("model"))
    }
}

/// Prints how the base of an adapter is stored, if that affects the result.
fn said_base(named: &Path, base: BaseFormat) -> BaseFormat {
    if base != BaseFormat::Computed {
        eprintln!("{}: its base is stored as {base}, as in the run", named.display());
    }
    base
}

/// The data type of a directory's largest tensor.
fn dtype_of(directory: &HfDirectory) -> (DType, String) {
    if let Some(quantization) = directory.config().quantization() {
        return (DType::BF16, format!("the model's weights are quantized ({quantization})"));
    }
    let tensors = directory.names().filter_map(|name| directory.tensor(name));
    let stored = tensors.max_by_key(|entry| entry.element_count()).map(|entry| entry.dtype);
    match stored {
        Some(Dtype::BF16) => (DType::BF16, "the model's weights are bf16".to_owned()),
        Some(Dtype::F16) => {
            (DType::F32, "the model's weights are f16, of which bf16 would lose digits".to_owned())
        }
        Some(other) => {
            (DType::F32, format!("the model's weights are {}", other.name().to_lowercase()))
        }
        None => (DType::F32, "the model has no weights".to_owned()),
    }
}

/// The compute type of a run's precision.
fn dtype_of_run(precision: Option<&str>) -> (DType, String) {
    let dtype = match precision {
        Some("bf16-master" | "bf16-stochastic" | "fp8") => DType::BF16,
        _ => DType::F32,
    };
    let why = precision.map_or("the run does not say its precision".to_owned(), |precision| {
        format!("the run's precision is {precision}")
    });
    (dtype, why)
}

enum Found {
    Checkpoint(Box<SavedWeights>),
    /// The exported model of a run whose checkpoints are gone.
    Directory(PathBuf),
}

/// Finds the weights of a run.
fn find(run: &Path, checkpoints: &Checkpoints, which: &Which) -> Result<Found> {
    let shown = run.display();
    let say = |weights: SavedWeights, why: &str| {
        eprintln!("{shown}: checkpoint of step {}, {why}", weights.progress().step);
        Found::Checkpoint(Box::new(weights))
    };
    let missing = |step: u64, why: &str| -> Result<NoModel, CheckpointError> {
        let steps: Vec<String> = checkpoints.steps()?.iter().map(u64::to_string).collect();
        let there = match steps.is_empty() {
            true => "it has no checkpoints".to_owned(),
            false => format!("it has those of steps {}", steps.join(", ")),
        };
        Ok(NoModel(format!("{shown} has no checkpoint of step {step}{why}; {there}")))
    };
    let is_there = |step: u64| checkpoints.path(step).exists();
    if let Some(step) = which.step {
        return match is_there(step) {
            true => Ok(say(checkpoints.weights(step)?, "as asked for")),
            false => Err(missing(step, "")?.into()),
        };
    }
    if which.best {
        let best = checkpoints.newest_progress()?.and_then(|progress| progress.best);
        return match best {
            Some(best) if is_there(best.step) => {
                let why = format!("its best, with a held-out loss of {:.4}", best.loss);
                Ok(say(checkpoints.weights(best.step)?, &why))
            }
            Some(best) => Err(missing(best.step, ", its best (see keep-best)")?.into()),
            None => {
                let problem = format!(
                    "{shown} has no checkpoint with an evaluation, and so no best one; leave out --best"
                );
                Err(NoModel(problem).into())
            }
        };
    }
    let mut damaged = 0;
    let newest = checkpoints.newest_weights(|step, error| {
        damaged += 1;
        eprintln!("warning: skipping the checkpoint of step {step}: {error}");
    })?;
    if let Some(weights) = newest {
        let why = if damaged == 0 { "the newest" } else { "the newest that is intact" };
        return Ok(say(weights, why));
    }
    let adapter = run.join("adapter");
    let model = if is_adapter_directory(&adapter) { adapter } else { run.join("model") };
    if damaged == 0 && (model.join("config.json").exists() || is_adapter_directory(&model)) {
        eprintln!("{shown}: it has no checkpoints; taking {}", model.display());
        return Ok(Found::Directory(model));
    }
    let problem = match damaged {
        0 => format!(
            "{shown} has no checkpoint yet: a run saves every `save-every` steps, and at its end"
        ),
        _ => {
            format!("none of the {damaged} checkpoints of {shown} is intact; restore a copy of one")
        }
    };
    Err(NoModel(problem).into())
}

impl Which {
    fn refuse(&self, named: &Path) -> Result<(), UsageError> {
        if self.base_model.is_some() {
            let problem =
                format!("--base-model is for adapters, and {} is not one", named.display());
            return Err(UsageError(problem));
        }
        self.refuse_checkpoints(named)
    }

    fn refuse_checkpoints(&self, named: &Path) -> Result<(), UsageError> {
        let flag = match self {
            Which { best: true, .. } => "--best",
            Which { step: Some(_), .. } => "--step",
            _ => return Ok(()),
        };
        let named = named.display();
        let problem = format!(
            "{flag} chooses among the checkpoints of a run, and {named} is not the folder of a run"
        );
        Err(UsageError(problem))
    }
}

/// The run's folder, `runs/NAME`, from `runs/NAME/checkpoints/step-00000100`.
fn run_of_checkpoint(checkpoint: &Path) -> Option<PathBuf> {
    let checkpoint = checkpoint.canonicalize().ok()?;
    let folder = checkpoint.parent()?;
    let is_ours = folder.file_name()? == CHECKPOINTS;
    is_ours.then(|| folder.parent().map(Path::to_owned)).flatten()
}

impl RunSource {
    fn setting(&self, key: &str) -> Option<&str> {
        self.settings.get(key).map(String::as_str)
    }

    /// Resolves a path given to the run, relative to the current directory or to where the run was started.
    fn place(&self, path: &str) -> Option<PathBuf> {
        let begun_in = || {
            let folder = self.folder.as_ref()?.canonicalize().ok()?;
            let runs = Path::new(self.setting("runs")?);
            let is_below = runs.is_relative() && folder.parent()?.ends_with(runs);
            let depth = runs.components().count();
            is_below.then(|| folder.ancestors().nth(1 + depth).map(Path::to_owned)).flatten()
        };
        let here = PathBuf::from(path);
        if here.exists() {
            return Some(here);
        }
        begun_in().map(|folder| folder.join(path)).filter(|path| path.exists())
    }

    /// The model directory the run started from, or the one it saved.
    fn model_files(&self) -> Option<PathBuf> {
        let is_model = |directory: &PathBuf| directory.join("config.json").exists();
        let began = self.setting("model").and_then(|name| self.place(name)).filter(is_model);
        let of_hub = || model::cached(self.setting("model")?, Wanted::Config);
        let began = began.or_else(of_hub);
        began.or_else(|| self.folder.as_ref().map(|run| run.join("model")).filter(is_model))
    }

    /// The config of a run started from a preset.
    fn fresh_config(&self, weights: &SavedWeights) -> Result<ModelConfig> {
        let vocabulary = weights.vocabulary().context("the checkpoint has no embedding")?;
        train::config_of_record(&self.settings, vocabulary).with_context(|| {
            let model = self.setting("model").unwrap_or_default();
            format!(
                "the run began from {model}, which was not found: run the command in the folder where the run was \
                 started, or restore the model"
            )
        })
    }

    /// The run's dataset.
    pub(crate) fn data(&self) -> Option<PathBuf> {
        let is_dataset = |folder: &PathBuf| folder.join("dataset.json").exists();
        let given = self.setting("data").and_then(|data| self.place(data)).filter(is_dataset);
        given.or_else(|| self.folder.as_ref().map(|run| run.join("data")).filter(is_dataset))
    }

    /// The tokenizer of the run's data. Among identical files, prefers the one given to the run, because related files
    /// such as a chat template are next to it.
    fn tokenizer(&self, files: Option<&Path>) -> Option<TokenizerSource> {
        let given = self.setting("tokenizer").filter(|name| *name != "bytes");
        let given = given.and_then(|name| self.place(name)).map(|path| match path.is_dir() {
            true => model_tokenizer::file(&path),
            false => path,
        });
        let known = given.into_iter().chain(files.map(model_tokenizer::file));
        let known = known.filter(|path| path.is_file()).map(TokenizerSource::File);
        let Some(folder) = self.data() else {
            let bytes =
                (self.setting("tokenizer") == Some("bytes")).then_some(TokenizerSource::Bytes);
            return bytes.or_else(|| known.into_iter().next());
        };
        let dataset = Dataset::open(&folder).ok()?;
        let Some(made_by) = dataset.manifest().tokenizer.sha256.clone() else {
            return (!dataset.manifest().tokenizer.is_unknown()).then_some(TokenizerSource::Bytes);
        };
        let is_same = |source: &TokenizerSource| {
            source.sha256().is_ok_and(|sha256| sha256.as_ref() == Some(&made_by))
        };
        let copy = model_tokenizer::file(&folder);
        known.into_iter().find(is_same).or(Some(TokenizerSource::File(copy)))
    }
}

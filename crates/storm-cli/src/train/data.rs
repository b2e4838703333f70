//! The training data of a run: recognizing, packing and opening it.

use super::folder::Start;
use super::model::Model;
use super::normalization::Normalization;
use super::options::{Given, Settings};
use super::output::Style;
use super::packing::{Pictures, pack_text};
use super::values::OrderArg;
use crate::UsageError;
use crate::lengths;
use crate::model_tokenizer::{self, BYTE_VOCABULARY, OtherTokenizer};
use anyhow::Result;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use storm_data::records::{Column, ColumnType, RecordLoaderOptions, RecordSet};
use storm_data::{
    DataError, Dataset, Kind, LoaderOptions, Order, Split, Tokenizer, TokenizerSource,
    files_to_pack,
};
use storm_files::open_plain;
use storm_model::{AnyModel, ImageConfig, Packing};
use storm_train::{BatchSource, LoaderSource, RecordSource, RunError};

/// A folder that contains this file is a packed dataset.
const MANIFEST: &str = "dataset.json";

/// The kind of samples in a dataset.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum DataForm {
    /// Sequences of tokens.
    Tokens {
        /// Number of distinct tokens.
        vocabulary: usize,
        /// Whether the data is packed. For text that is not packed yet, `vocabulary` is a lower bound: every tokenizer
        /// covers at least all bytes.
        is_packed: bool,
    },
    /// Labeled images.
    Images {
        /// Height, width and channels.
        shape: [usize; 3],
        classes: usize,
        normalization: Normalization,
    },
}

impl DataForm {
    /// The form of data that a model takes.
    pub(super) fn of_model(model: &AnyModel) -> DataForm {
        match model {
            AnyModel::Language(config) => {
                DataForm::Tokens { vocabulary: config.vocab_size, is_packed: true }
            }
            AnyModel::Image(config) => {
                let [height, width] = config.image_size;
                DataForm::Images {
                    shape: [height, width, config.channels],
                    classes: config.classes,
                    normalization: Normalization::Unknown,
                }
            }
        }
    }

    /// The form of a dataset of records.
    ///
    /// # Errors
    /// The records are not labeled images.
    fn of_records(set: &RecordSet) -> Result<DataForm, UsageError> {
        let (shape, classes) = pictures_of(&set.manifest().columns, set.dir())?;
        let normalization = Normalization::of_records(set.manifest());
        Ok(DataForm::Images { shape, classes, normalization })
    }

    /// The form that images will have once packed.
    fn of_pictures(pictures: &Pictures, data: &Path) -> Result<DataForm, UsageError> {
        let (shape, classes) = pictures_of(&pictures.outline.columns, data)?;
        Ok(DataForm::Images { shape, classes, normalization: Normalization::Unknown })
    }

    fn of_dataset(dataset: &Dataset) -> DataForm {
        let vocabulary = dataset.manifest().tokenizer.vocabulary as usize;
        DataForm::Tokens { vocabulary, is_packed: true }
    }
}

/// The image shape and the number of classes for these columns.
///
/// # Errors
/// The columns are not those of labeled images.
pub(crate) fn pictures_of(
    columns: &[Column],
    dir: &Path,
) -> Result<([usize; 3], usize), UsageError> {
    let column = |name: &str, dtype: ColumnType| {
        columns.iter().find(|column| column.name == name && column.dtype == dtype)
    };
    let images = column("images", ColumnType::U8);
    let shape = images.and_then(|column| <[usize; 3]>::try_from(column.shape.as_slice()).ok());
    let targets = column("targets", ColumnType::I32);
    let classes = targets.and_then(|column| column.below);
    match (shape, classes) {
        (Some(shape), Some(classes)) => Ok((shape, classes as usize)),
        _ => Err(UsageError(format!(
            "{} has no column `images` of bytes (height, width, channels), or no column `targets` of classes; pack \
             pictures with `storm data pack`",
            dir.display()
        ))),
    }
}

/// A run's dataset, open.
pub(super) enum RunData {
    Tokens(Arc<Dataset>),
    /// Labeled images.
    Records(Arc<RecordSet>, DataForm),
}

/// The size of the dataset.
pub(super) struct Amount {
    /// Tokens or images to train on.
    pub(super) train: u64,
    /// Tokens or images held out.
    pub(super) held: u64,
}

/// Micro-batches for training, and for evaluation if anything is held out.
pub(super) type Sources = (Box<dyn BatchSource>, Option<Box<dyn BatchSource>>);

impl RunData {
    /// The form of its samples.
    pub(super) fn form(&self) -> DataForm {
        match self {
            RunData::Tokens(dataset) => DataForm::of_dataset(dataset),
            RunData::Records(_, form) => form.clone(),
        }
    }

    /// Whether rows hold several samples.
    pub(super) fn packing(&self) -> Packing {
        match self {
            RunData::Tokens(dataset) => packing(dataset),
            RunData::Records(..) => Packing::Single,
        }
    }

    /// The dataset, if it holds tokens.
    pub(super) fn tokens(&self) -> Option<&Arc<Dataset>> {
        match self {
            RunData::Tokens(dataset) => Some(dataset),
            RunData::Records(..) => None,
        }
    }

    /// The dataset, if it holds records.
    pub(super) fn records(&self) -> Option<&Arc<RecordSet>> {
        match self {
            RunData::Tokens(_) => None,
            RunData::Records(set, _) => Some(set),
        }
    }

    pub(super) fn amount(&self) -> Amount {
        match self {
            RunData::Tokens(dataset) => {
                let tokens = |split| {
                    let range = dataset.token_range(split);
                    range.end - range.start
                };
                Amount { train: tokens(Split::Train), held: tokens(Split::Held) }
            }
            RunData::Records(set, _) => {
                Amount { train: set.records(Split::Train), held: set.records(Split::Held) }
            }
        }
    }

    /// Rows per epoch. Reports how many samples are longer than a row and how they are handled. Refuses rows with more
    /// positions than the model has.
    pub(super) fn rows_per_epoch(&self, settings: &Settings, model: &AnyModel) -> Result<u64> {
        match self {
            RunData::Tokens(dataset) => {
                let positions = model.language().map_or(usize::MAX, |config| config.max_positions);
                check_lengths(settings, dataset, positions)
            }
            RunData::Records(set, _) => Ok(set.records(Split::Train)),
        }
    }

    /// Host memory for buffering data read from disk.
    pub(super) fn loading_bytes(&self, settings: &Settings) -> u64 {
        match self {
            RunData::Tokens(dataset) => token_bytes(dataset, settings),
            RunData::Records(..) => settings.data_ram.0,
        }
    }

    /// Number of held-out rows.
    pub(super) fn held_rows(&self, settings: &Settings) -> Result<u64, RunError> {
        Ok(match self {
            RunData::Tokens(dataset) => token_sources(settings, dataset, 1)?
                .1
                .map_or(0, |source| source.loader().rows_per_epoch()),
            RunData::Records(set, _) => set.records(Split::Held),
        })
    }

    /// The micro-batches of a run.
    pub(super) fn sources(&self, settings: &Settings, batch: usize) -> Result<Sources, RunError> {
        match self {
            RunData::Tokens(dataset) => {
                let (train, held) = token_sources(settings, dataset, batch)?;
                let held = held.map(|source| Box::new(source) as Box<dyn BatchSource>);
                Ok((Box::new(train), held))
            }
            RunData::Records(set, _) => record_sources(settings, set, batch),
        }
    }
}

/// The data of a run as far as file names and headers tell.
pub(super) enum Outline {
    Dataset(Arc<Dataset>),
    /// Images, packed or not.
    Images(DataForm),
    /// Files that are not packed yet.
    Text(Vec<PathBuf>),
}

impl Outline {
    /// Inspects the data given by the options, for a run in this folder. Refuses data that does not exist.
    pub(super) fn new(given: &Given, run: &Path, start: Start) -> Result<Outline> {
        let settings = given.clone().resolve();
        let data = named(&settings)?;
        let dataset = dataset_of(data, run);
        let is_packed = start == Start::Resume && dataset.join(MANIFEST).exists();
        if dataset == data || is_packed {
            return Ok(match open(&dataset)? {
                RunData::Tokens(dataset) => Outline::Dataset(dataset),
                RunData::Records(_, form) => Outline::Images(form),
            });
        }
        if let Some(pictures) = Pictures::find(data)? {
            pictures.check(given)?;
            return Ok(Outline::Images(DataForm::of_pictures(&pictures, data)?));
        }
        let files = files_to_pack(data)?;
        for file in &files {
            open_plain(file).map_err(|source| DataError::Io { path: file.clone(), source })?;
        }
        if let Some(tokenizer) = &settings.tokenizer {
            TokenizerSource::parse(tokenizer).sha256()?;
        }
        Ok(Outline::Text(files))
    }

    /// The form of the data as far as it is known before packing. For text, the vocabulary is a lower bound: every
    /// tokenizer covers at least all bytes.
    pub(super) fn form(&self) -> DataForm {
        match self {
            Outline::Dataset(dataset) => DataForm::of_dataset(dataset),
            Outline::Images(form) => form.clone(),
            Outline::Text(_) => DataForm::Tokens { vocabulary: BYTE_VOCABULARY, is_packed: false },
        }
    }

    /// Host memory for buffering data read from disk. For text that is not packed yet the size is unknown and may be
    /// small.
    pub(super) fn loading_bytes(&self, settings: &Settings) -> u64 {
        match self {
            Outline::Dataset(dataset) => token_bytes(dataset, settings),
            Outline::Images(form) => loading_bytes_of(form, settings),
            Outline::Text(_) => 0,
        }
    }

    /// The form of the data after packing; uses the vocabulary of the tokenizer if one is given.
    pub(super) fn form_when_packed(&self, settings: &Settings) -> Result<DataForm> {
        let (Outline::Text(_), Some(tokenizer)) = (self, &settings.tokenizer) else {
            return Ok(self.form());
        };
        let worker = crate::data::worker()?;
        let tokenizer = Tokenizer::open(&TokenizerSource::parse(tokenizer), None, &worker)?;
        let vocabulary = tokenizer.info().vocabulary as usize;
        Ok(DataForm::Tokens { vocabulary, is_packed: true })
    }

    /// Whether rows hold several samples. For files of records that is not known before packing.
    pub(super) fn packing(&self) -> Packing {
        match self {
            Outline::Dataset(dataset) => packing(dataset),
            Outline::Images(..) => Packing::Single,
            Outline::Text(files) if files.iter().any(|file| has_records(file)) => Packing::Segments,
            Outline::Text(_) => Packing::Single,
        }
    }
}

/// Whether a file holds records, judged by its extension.
fn has_records(path: &Path) -> bool {
    let name = path.file_name().map(|name| name.to_string_lossy().to_lowercase());
    let name = name.unwrap_or_default();
    let name =
        [".gz", ".zst", ".zstd"].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(&name);
    let endings = [".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".pq"];
    endings.iter().any(|end| name.ends_with(end))
}

fn named(settings: &Settings) -> Result<&Path, UsageError> {
    settings.data.as_deref().ok_or_else(|| {
        let problem =
            "give data: a dataset that `storm data pack` made, text, or a folder of pictures";
        UsageError(problem.to_owned())
    })
}

/// Where a run's dataset comes from, and where it is packed to.
pub(super) struct Source<'a> {
    pub(super) model: &'a Model,
    /// The run's folder.
    pub(super) run: &'a Path,
    /// Where data is packed to instead of the run's folder.
    pub(super) scratch: Option<&'a Path>,
    pub(super) start: Start,
    pub(super) other: OtherTokenizer,
    pub(super) style: Style,
}

impl Source<'_> {
    /// Opens the dataset. A new run packs text and images into its folder; a resumed run reads them from there. Records
    /// the chosen tokenizer in `given`.
    pub(super) fn open(&self, given: &mut Given) -> Result<RunData> {
        let settings = given.clone().resolve();
        let data = named(&settings)?;
        let mut dataset = dataset_of(data, self.run);
        if dataset != data && (self.start != Start::Resume || !dataset.join(MANIFEST).exists()) {
            dataset = self.scratch.map_or(dataset, |scratch| scratch.join("data"));
            if let Some(pictures) = Pictures::find(data)? {
                pictures.pack(&settings, &dataset, self.style)?;
            } else {
                let tokenizer = self.tokenizer(&settings)?;
                given.tokenizer = Some(tokenizer.to_string());
                pack_text(&settings, data, tokenizer, &dataset, self.style)?;
            }
        }
        let data = open(&dataset)?;
        if let (RunData::Tokens(dataset), Some(weights)) = (&data, self.model.of_tokenizer()) {
            weights.check_dataset(dataset, self.other)?;
        }
        if let (RunData::Tokens(dataset), Start::Fresh | Start::Anew) = (&data, self.start) {
            check_mapped(&settings, dataset)?;
        }
        Ok(data)
    }

    /// The tokenizer for text: the given one, else the model's own.
    fn tokenizer(&self, settings: &Settings) -> Result<TokenizerSource> {
        let weights = self.model.of_tokenizer();
        let (source, why) = match (&settings.tokenizer, &weights) {
            (Some(text), _) => (TokenizerSource::parse(text), "as given"),
            (None, Some(weights)) => {
                let own = model_tokenizer::needed(weights.directory, weights.vocabulary)?;
                (own, "the model's own")
            }
            (None, None) => (TokenizerSource::Bytes, "a preset has none of its own"),
        };
        if let Some(weights) = &weights {
            weights.check_source(&source, self.other)?;
        }
        self.style.say(&format!("tokenizer {source}, {why}"));
        Ok(source)
    }
}

/// Opens a dataset of tokens or of records.
pub(super) fn open(dir: &Path) -> Result<RunData> {
    if !RecordSet::is_one(dir) {
        return Ok(RunData::Tokens(Arc::new(Dataset::open(dir)?)));
    }
    let set = Arc::new(RecordSet::open(dir)?);
    let form = DataForm::of_records(&set)?;
    Ok(RunData::Records(set, form))
}

/// Opens a dataset of images and checks that it fits an existing classifier.
pub(crate) fn open_images(dir: &Path, config: &ImageConfig) -> Result<Arc<RecordSet>> {
    match open(dir)? {
        RunData::Records(set, DataForm::Images { shape, classes, .. }) => {
            config.check_images(shape, classes)?;
            Ok(set)
        }
        _ => Err(UsageError(format!(
            "the model reads pictures, and {} holds text; give a dataset of pictures",
            dir.display()
        ))
        .into()),
    }
}

/// Threads that load records: half of the cores, within 2 to 8.
pub(crate) fn loader_threads() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    (cores / 2).clamp(2, 8)
}

/// Host memory for buffering data of this form, when only the form is known.
pub(super) fn loading_bytes_of(form: &DataForm, settings: &Settings) -> u64 {
    match form {
        DataForm::Tokens { .. } => 0,
        DataForm::Images { .. } => settings.data_ram.0,
    }
}

/// Host memory for buffering tokens: at most data-ram, and no more than the training part holds. Memory-mapped files
/// need none.
fn token_bytes(dataset: &Dataset, settings: &Settings) -> u64 {
    let all = dataset.token_blocks().map_or(0, |blocks| blocks.data_ram_to_hold(Split::Train));
    settings.data_ram.0.min(all)
}

/// Evaluations get one part in this many of data-ram, if that is enough for them.
const EVALUATION_SHARE: u64 = 8;

/// Options for loading records for training and for evaluation. The two share data-ram.
pub(super) fn loader_options(
    settings: &Settings,
    set: &RecordSet,
    batch: usize,
) -> Result<(RecordLoaderOptions, Option<RecordLoaderOptions>), DataError> {
    let data_ram = settings.data_ram.0;
    let training = RecordLoaderOptions {
        order: settings.order.unwrap_or(OrderArg::Window).into(),
        workers: loader_threads(),
        ..RecordLoaderOptions::training(batch, settings.seed.0, data_ram)
    };
    if set.records(Split::Held) == 0 {
        return Ok((training, None));
    }
    let evaluation = RecordLoaderOptions::evaluation(batch, data_ram);
    let held = set.data_ram_needed(&evaluation).max(data_ram / EVALUATION_SHARE);
    let needed = held.saturating_add(set.data_ram_needed(&training));
    if needed > data_ram {
        let problem = format!(
            "{data_ram} bytes are less than the {needed} that training and evaluations need with this dataset and batch"
        );
        return Err(DataError::Option { option: "data-ram", problem });
    }
    let training = RecordLoaderOptions { data_ram: data_ram - held, ..training };
    Ok((training, Some(RecordLoaderOptions { data_ram: held, ..evaluation })))
}

/// Loaders of records for training, and for evaluation if anything is held out.
fn record_sources(
    settings: &Settings,
    set: &Arc<RecordSet>,
    batch: usize,
) -> Result<Sources, RunError> {
    let (training, evaluation) = loader_options(settings, set, batch)?;
    let train = RecordSource::new(Arc::clone(set), training)?;
    let held = evaluation.map(|options| RecordSource::new(Arc::clone(set), options)).transpose()?;
    Ok((Box::new(train), held.map(|source| Box::new(source) as Box<dyn BatchSource>)))
}

/// The path of a run's dataset: `data` itself if it is packed, else its packed copy in the run's folder.
pub(super) fn dataset_of(data: &Path, run: &Path) -> PathBuf {
    match data.join(MANIFEST).exists() {
        true => data.to_owned(),
        false => run.join("data"),
    }
}

/// The tokenizer of a dataset.
pub(super) fn tokenizer(dataset: &Dataset) -> Result<Tokenizer> {
    Ok(Tokenizer::of_dataset(dataset, &crate::data::worker()?)?)
}

fn packing(dataset: &Dataset) -> Packing {
    match dataset.manifest().kind {
        Kind::Text => Packing::Single,
        Kind::Samples => Packing::Segments,
    }
}

fn check_lengths(settings: &Settings, dataset: &Arc<Dataset>, max_positions: usize) -> Result<u64> {
    let (train, held) = token_sources(settings, dataset, 1)?;
    let parts = [(Some(&train), Split::Train), (held.as_ref(), Split::Held)];
    for (source, split) in parts {
        let Some(source) = source else { continue };
        lengths::check(source.loader(), split, settings.overlong, max_positions)?;
    }
    Ok(train.loader().rows_per_epoch())
}

fn token_sources(
    settings: &Settings,
    dataset: &Arc<Dataset>,
    batch: usize,
) -> Result<(LoaderSource, Option<LoaderSource>), RunError> {
    let options = token_options(settings, dataset, batch);
    let train = LoaderSource::new(Arc::clone(dataset), options)?;
    let of_held = settings.data_ram.0 - options.data_ram;
    if of_held == 0 {
        return Ok((train, None));
    }
    let options = LoaderOptions {
        overlong: options.overlong,
        data_ram: of_held,
        ..LoaderOptions::evaluation(batch, options.sequence)
    };
    Ok((train, Some(LoaderSource::new(Arc::clone(dataset), options)?)))
}

/// Options for loading tokens for training. The rest of data-ram is left for evaluations.
pub(super) fn token_options(settings: &Settings, dataset: &Dataset, batch: usize) -> LoaderOptions {
    let held = dataset.token_range(Split::Held);
    // The last token has no target, so one token alone is not a row.
    let is_held = held.end - held.start >= 2;
    let data_ram = settings.data_ram.0;
    let of_held = if is_held { (data_ram / EVALUATION_SHARE).max(1) } else { 0 };
    let order = match dataset.token_blocks() {
        Some(_) => settings.order.map_or(Order::Global, Into::into),
        // Memory-mapped files support only this order.
        None => Order::Global,
    };
    LoaderOptions {
        order,
        overlong: settings.overlong.into(),
        data_ram: data_ram.saturating_sub(of_held),
        workers: loader_threads(),
        ..LoaderOptions::training(batch, settings.seq.get(), settings.seed.0)
    }
}

/// Refuses options that have no effect on a dataset packed before token blocks existed. Runs that began with such a
/// dataset can still be resumed, whatever options they recorded.
fn check_mapped(settings: &Settings, dataset: &Dataset) -> Result<(), UsageError> {
    if dataset.token_blocks().is_some() {
        return Ok(());
    }
    let given = [
        ("order", settings.order == Some(OrderArg::Window)),
        ("data-ram", settings.data_ram != Given::default().resolve().data_ram),
    ];
    match given.iter().find(|(_, is_given)| *is_given) {
        None => Ok(()),
        Some((key, _)) => Err(UsageError(format!(
            "{key} is for datasets that have blocks, and {} was packed by an older version; leave it out, or pack the text \
             again",
            dataset.dir().display()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::values::Size;
    use storm_data::records::{
        Codec, RecordInput, RecordLoader, RecordPackOptions, Synthetic, pack_records,
    };
    use storm_data::{IfExists, SyntheticText, pack_synthetic_text};

    fn settings(data_ram: u64) -> Settings {
        Settings { data_ram: Size(data_ram), ..Given::default().resolve() }
    }

    fn records(folder: &Path, held_out: f64) -> Arc<RecordSet> {
        let out = folder.join(format!("{held_out}"));
        let options = RecordPackOptions {
            input: RecordInput::Synthetic(Synthetic {
                count: 500,
                shape: vec![32, 32, 3],
                classes: 10,
            }),
            out: out.clone(),
            if_exists: IfExists::Refuse,
            codec: Codec::None,
            held_out,
            skip_bad: false,
            size: None,
        };
        pack_records(&options, &|_| {}).expect("records");
        Arc::new(RecordSet::open(&out).expect("a dataset"))
    }

    #[test]
    fn training_and_evaluations_share_data_ram() {
        let folder = tempfile::tempdir().expect("a folder");
        let set = records(folder.path(), 0.1);
        // An eighth is enough for evaluations, or less than they need.
        for (data_ram, batch) in [(256 << 20, 8), (9 << 20, 8), (20 << 20, 100)] {
            let settings = settings(data_ram);
            let (training, evaluation) = loader_options(&settings, &set, batch).expect("enough");
            let evaluation = evaluation.expect("some is held out");
            assert_eq!(training.data_ram + evaluation.data_ram, data_ram);
            assert!(evaluation.data_ram >= data_ram / EVALUATION_SHARE);
            for options in [training, evaluation] {
                RecordLoader::new(Arc::clone(&set), options).expect("enough for its loader");
            }
            let data =
                RunData::Records(Arc::clone(&set), DataForm::of_records(&set).expect("pictures"));
            assert_eq!(data.loading_bytes(&settings), data_ram);
        }
        let few = loader_options(&settings(4 << 20), &set, 8).expect_err("too little for both");
        assert!(few.to_string().contains("training and evaluations"), "{few}");
        let whole = records(folder.path(), 0.0);
        let (training, evaluation) = loader_options(&settings(9 << 20), &whole, 8).expect("enough");
        assert_eq!((training.data_ram, evaluation), (9 << 20, None));
    }

    #[test]
    fn text_takes_no_more_memory_than_it_has_bytes() {
        let folder = tempfile::tempdir().expect("a folder");
        let out = folder.path().join("text");
        let options = SyntheticText { tokens: 3_000_000, out: out.clone(), codec: Codec::None };
        pack_synthetic_text(&options, &|_| {}).expect("text");
        let dataset = Arc::new(Dataset::open(&out).expect("a dataset"));
        let data = RunData::Tokens(dataset);
        let bytes = data.loading_bytes(&settings(256 << 20));
        assert!((6_000_000..8_000_000).contains(&bytes), "{bytes}");
        assert_eq!(data.loading_bytes(&settings(5 << 20)), 5 << 20);
    }
}

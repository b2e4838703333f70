//! What a run learns from.

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

/// A folder with this file is a dataset.
const MANIFEST: &str = "dataset.json";

/// What the samples of a dataset are.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum DataForm {
    /// Sequences of tokens.
    Tokens {
        /// How many different ones there are.
        vocabulary: usize,
        /// Whether they are packed. Text has at least as many different tokens as bytes have, by a tokenizer that is not
        /// known yet.
        is_packed: bool,
    },
    /// Pictures, each of a class.
    Images {
        /// Height, width and channels.
        shape: [usize; 3],
        classes: usize,
        normalization: Normalization,
    },
}

impl DataForm {
    /// What a model is made for.
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

    /// What the records of a dataset are to a model.
    ///
    /// # Errors
    /// They are not pictures with a class each.
    fn of_records(set: &RecordSet) -> Result<DataForm, UsageError> {
        let (shape, classes) = pictures_of(&set.manifest().columns, set.dir())?;
        let normalization = Normalization::of_records(set.manifest());
        Ok(DataForm::Images { shape, classes, normalization })
    }

    /// What pictures will be to a model once they are packed.
    fn of_pictures(pictures: &Pictures, data: &Path) -> Result<DataForm, UsageError> {
        let (shape, classes) = pictures_of(&pictures.outline.columns, data)?;
        Ok(DataForm::Images { shape, classes, normalization: Normalization::Unknown })
    }

    fn of_dataset(dataset: &Dataset) -> DataForm {
        let vocabulary = dataset.manifest().tokenizer.vocabulary as usize;
        DataForm::Tokens { vocabulary, is_packed: true }
    }
}

/// The shape of pictures with these columns, and the number of classes.
///
/// # Errors
/// They are not pictures with a class each.
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

/// The data of a run, open.
pub(super) enum RunData {
    Tokens(Arc<Dataset>),
    /// Pictures, in this form.
    Records(Arc<RecordSet>, DataForm),
}

/// How much data there is.
pub(super) struct Amount {
    /// Tokens or images to learn from.
    pub(super) train: u64,
    /// And held out.
    pub(super) held: u64,
}

/// Micro-batches to learn from, and to evaluate on if anything is held out.
pub(super) type Sources = (Box<dyn BatchSource>, Option<Box<dyn BatchSource>>);

impl RunData {
    /// What its samples are.
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

    /// A dataset of tokens.
    pub(super) fn tokens(&self) -> Option<&Arc<Dataset>> {
        match self {
            RunData::Tokens(dataset) => Some(dataset),
            RunData::Records(..) => None,
        }
    }

    /// A dataset of records.
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

    /// Rows of an epoch. Says how many samples are longer than a row and what becomes of them, and refuses more
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

    /// Host memory for data on its way from the disk.
    pub(super) fn loading_bytes(&self, settings: &Settings) -> u64 {
        match self {
            RunData::Tokens(dataset) => token_bytes(dataset, settings),
            RunData::Records(..) => settings.data_ram.0,
        }
    }

    /// Rows that are held out.
    pub(super) fn held_rows(&self, settings: &Settings) -> Result<u64, RunError> {
        Ok(match self {
            RunData::Tokens(dataset) => token_sources(settings, dataset, 1)?
                .1
                .map_or(0, |source| source.loader().rows_per_epoch()),
            RunData::Records(set, _) => set.records(Split::Held),
        })
    }

    /// Micro-batches of a run.
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

/// What a run is to learn, by looking at names and headers alone.
pub(super) enum Outline {
    Dataset(Arc<Dataset>),
    /// Pictures, packed or not.
    Images(DataForm),
    /// Files to be packed.
    Text(Vec<PathBuf>),
}

impl Outline {
    /// Looks at what is named, for a run in this folder. Refuses what is not there.
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

    /// What the data is, as far as that is known before it is packed: text has at least as many different tokens as
    /// bytes have.
    pub(super) fn form(&self) -> DataForm {
        match self {
            Outline::Dataset(dataset) => DataForm::of_dataset(dataset),
            Outline::Images(form) => form.clone(),
            Outline::Text(_) => DataForm::Tokens { vocabulary: BYTE_VOCABULARY, is_packed: false },
        }
    }

    /// Host memory for data on its way from the disk, as far as that is known: text that is not packed yet may be short.
    pub(super) fn loading_bytes(&self, settings: &Settings) -> u64 {
        match self {
            Outline::Dataset(dataset) => token_bytes(dataset, settings),
            Outline::Images(form) => loading_bytes_of(form, settings),
            Outline::Text(_) => 0,
        }
    }

    /// What the data will be once it is packed, by its tokenizer if that is given.
    pub(super) fn form_when_packed(&self, settings: &Settings) -> Result<DataForm> {
        let (Outline::Text(_), Some(tokenizer)) = (self, &settings.tokenizer) else {
            return Ok(self.form());
        };
        let worker = crate::data::worker()?;
        let tokenizer = Tokenizer::open(&TokenizerSource::parse(tokenizer), None, &worker)?;
        let vocabulary = tokenizer.info().vocabulary as usize;
        Ok(DataForm::Tokens { vocabulary, is_packed: true })
    }

    /// Whether rows hold several samples, as far as that is known: records may be either.
    pub(super) fn packing(&self) -> Packing {
        match self {
            Outline::Dataset(dataset) => packing(dataset),
            Outline::Images(..) => Packing::Single,
            Outline::Text(files) if files.iter().any(|file| has_records(file)) => Packing::Segments,
            Outline::Text(_) => Packing::Single,
        }
    }
}

/// Whether a file has records, by its name.
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

/// Where a run's dataset comes from.
pub(super) struct Source<'a> {
    pub(super) model: &'a Model,
    /// The run's folder.
    pub(super) run: &'a Path,
    /// Where data is packed to, if not into the run's folder.
    pub(super) scratch: Option<&'a Path>,
    pub(super) start: Start,
    pub(super) other: OtherTokenizer,
    pub(super) style: Style,
}

impl Source<'_> {
    /// Opens the dataset. Text and pictures are packed into the run's folder when the run begins, and are read from
    /// there when it resumes. A tokenizer that is chosen here is written to `given`.
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

    /// The tokenizer for text: as given, else the model's own.
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

/// Opens a dataset of either kind.
pub(super) fn open(dir: &Path) -> Result<RunData> {
    if !RecordSet::is_one(dir) {
        return Ok(RunData::Tokens(Arc::new(Dataset::open(dir)?)));
    }
    let set = Arc::new(RecordSet::open(dir)?);
    let form = DataForm::of_records(&set)?;
    Ok(RunData::Records(set, form))
}

/// Opens a dataset of pictures for a classifier that there is.
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

/// Threads that load records: half of the cores, but neither few nor many.
pub(crate) fn loader_threads() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    (cores / 2).clamp(2, 8)
}

/// Host memory for data of a form on its way from the disk, if nothing else is known.
pub(super) fn loading_bytes_of(form: &DataForm, settings: &Settings) -> u64 {
    match form {
        DataForm::Tokens { .. } => 0,
        DataForm::Images { .. } => settings.data_ram.0,
    }
}

/// Host memory for tokens on their way from the disk: no more than there are. Files that are mapped take none.
fn token_bytes(dataset: &Dataset, settings: &Settings) -> u64 {
    let all = dataset.token_blocks().map_or(0, |blocks| blocks.data_ram_to_hold(Split::Train));
    settings.data_ram.0.min(all)
}

/// The share of data-ram that evaluations take, if they need no more.
const EVALUATION_SHARE: u64 = 8;

/// How the records of a run are loaded, to learn and to evaluate: both together take data-ram.
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

/// Records to learn from, and to evaluate on if anything is held out.
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

/// The dataset of a run: `data` itself, or what it is packed to in the run's folder.
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

/// How the text of a run is loaded to learn; what is left of data-ram is for evaluations.
pub(super) fn token_options(settings: &Settings, dataset: &Dataset, batch: usize) -> LoaderOptions {
    let held = dataset.token_range(Split::Held);
    // A token without one behind it has no target.
    let is_held = held.end - held.start >= 2;
    let data_ram = settings.data_ram.0;
    let of_held = if is_held { (data_ram / EVALUATION_SHARE).max(1) } else { 0 };
    let order = match dataset.token_blocks() {
        Some(_) => settings.order.map_or(Order::Global, Into::into),
        // Files that are mapped come in no other order.
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

/// Refuses options that do nothing for a dataset that was packed before text had blocks. A run that began when they had none
/// goes on, whatever it wrote down of them.
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

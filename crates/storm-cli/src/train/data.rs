//! What a run learns from.

use super::folder::Start;
use super::model::Model;
use super::options::{Given, Settings};
use super::output::Style;
use crate::UsageError;
use crate::lengths;
use crate::model_tokenizer::{self, OtherTokenizer};
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use storm_data::{
    ChatTemplate, DataError, Dataset, IfExists, InputFormat, Kind, LoaderOptions, Order,
    PackOptions, Passes, SHARD_TOKENS_DEFAULT, SpecialTokens, Split, Tokenizer, TokenizerSource,
    pack,
};
use storm_files::open_plain;
use storm_model::Packing;
use storm_train::{LoaderSource, RunError};

/// A folder with this file is a dataset.
const MANIFEST: &str = "dataset.json";

/// What a run is to learn, by looking at names and headers alone.
pub(super) enum Outline {
    Dataset(Box<Dataset>),
    /// Files to be packed.
    Text(Vec<PathBuf>),
}

impl Outline {
    /// Looks at what is named, for a run in this folder. Refuses what is not there.
    pub(super) fn new(settings: &Settings, run: &Path, start: Start) -> Result<Outline> {
        let data = named(settings)?;
        let dataset = dataset_of(data, run);
        let is_packed = start == Start::Resume && dataset.join(MANIFEST).exists();
        if dataset == data || is_packed {
            return Ok(Outline::Dataset(Box::new(Dataset::open(&dataset)?)));
        }
        let files = files(data).with_context(|| format!("cannot read {}", data.display()))?;
        if files.is_empty() {
            let problem = format!("{} has no .txt, .jsonl or .ndjson file", data.display());
            return Err(UsageError(problem).into());
        }
        for file in &files {
            open_plain(file).map_err(|source| DataError::Io { path: file.clone(), source })?;
        }
        if let Some(tokenizer) = &settings.tokenizer {
            TokenizerSource::parse(tokenizer).sha256()?;
        }
        Ok(Outline::Text(files))
    }

    /// Distinct tokens: as the dataset has them, as the tokenizer has them if that is known, else none.
    pub(super) fn vocabulary(&self, settings: &Settings) -> Result<Option<usize>> {
        if let Outline::Dataset(dataset) = self {
            return Ok(Some(dataset.manifest().tokenizer.vocabulary as usize));
        }
        let Some(tokenizer) = &settings.tokenizer else { return Ok(None) };
        let worker = crate::data::worker()?;
        let tokenizer = Tokenizer::open(&TokenizerSource::parse(tokenizer), None, &worker)?;
        Ok(Some(tokenizer.info().vocabulary as usize))
    }

    /// Whether rows hold several samples, as far as that is known: JSONL may hold either.
    pub(super) fn packing(&self) -> Packing {
        match self {
            Outline::Dataset(dataset) => packing(dataset),
            Outline::Text(files) if files.iter().any(|file| is_json_lines(file)) => {
                Packing::Segments
            }
            Outline::Text(_) => Packing::Single,
        }
    }
}

fn is_json_lines(path: &Path) -> bool {
    let extension = path.extension();
    extension.is_some_and(|extension| extension == "jsonl" || extension == "ndjson")
}

fn named(settings: &Settings) -> Result<&Path, UsageError> {
    settings.data.as_deref().ok_or_else(|| {
        let problem = "give data: a dataset that `storm data pack` made, or text";
        UsageError(problem.to_owned())
    })
}

/// Where a run's dataset comes from.
pub(super) struct Source<'a> {
    pub(super) model: &'a Model,
    /// The run's folder.
    pub(super) run: &'a Path,
    /// Where text is packed to, if not into the run's folder.
    pub(super) scratch: Option<&'a Path>,
    pub(super) start: Start,
    pub(super) other: OtherTokenizer,
    pub(super) style: Style,
}

impl Source<'_> {
    /// Opens the dataset. Text is packed into the run's folder when the run begins, and is taken from
    /// there when it goes on. A tokenizer that is chosen here is written to `given`.
    pub(super) fn open(&self, given: &mut Given) -> Result<Arc<Dataset>> {
        let settings = given.clone().resolve();
        let data = named(&settings)?;
        let mut dataset = dataset_of(data, self.run);
        if dataset != data && (self.start != Start::Resume || !dataset.join(MANIFEST).exists()) {
            let tokenizer = self.tokenizer(&settings)?;
            given.tokenizer = Some(tokenizer.to_string());
            dataset = self.scratch.map_or(dataset, |scratch| scratch.join("data"));
            pack_text(&settings, data, tokenizer, &dataset, self.style)?;
        }
        let dataset = Arc::new(Dataset::open(&dataset)?);
        if let Some(weights) = self.model.of_tokenizer() {
            weights.check_dataset(&dataset, self.other)?;
        }
        Ok(dataset)
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

/// The dataset of a run: `data` itself, or what text is packed to in the run's folder.
pub(super) fn dataset_of(data: &Path, run: &Path) -> PathBuf {
    match data.join(MANIFEST).exists() {
        true => data.to_owned(),
        false => run.join("data"),
    }
}

fn pack_text(
    settings: &Settings,
    data: &Path,
    tokenizer: TokenizerSource,
    out: &Path,
    style: Style,
) -> Result<()> {
    style.say(&format!("packing {} …", data.display()));
    let options = PackOptions {
        inputs: files(data).with_context(|| format!("cannot read {}", data.display()))?,
        format: InputFormat::ByName,
        tokenizer,
        end_of_text: None,
        chat_template: ChatTemplate::parse(settings.chat_template.as_deref().unwrap_or("model")),
        special_tokens: SpecialTokens::Parsed,
        worker: crate::data::worker()?,
        out: out.to_owned(),
        if_exists: IfExists::Replace,
        held_out: settings.held_out,
        threads: std::thread::available_parallelism().map_or(1, usize::from),
        shard_tokens: SHARD_TOKENS_DEFAULT,
    };
    let summary = pack(&options, &|_| {})?;
    style.say(&format!(
        "packed {} tokens of {} files into {}",
        crate::model::grouped(summary.counts.tokens),
        summary.counts.input_files,
        out.display()
    ));
    Ok(())
}

/// A file, or the text files of a folder by name.
fn files(data: &Path) -> std::io::Result<Vec<PathBuf>> {
    if !data.is_dir() {
        return Ok(vec![data.to_owned()]);
    }
    let mut files = Vec::new();
    for entry in std::fs::read_dir(data)? {
        let path = entry?.path();
        let is_text = path.extension().is_some_and(|extension| {
            ["txt", "jsonl", "ndjson"].iter().any(|known| extension == *known)
        });
        if is_text {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// The tokenizer of a dataset.
pub(super) fn tokenizer(dataset: &Dataset) -> Result<Tokenizer> {
    Ok(Tokenizer::of_dataset(dataset, &crate::data::worker()?)?)
}

/// Whether rows hold several samples.
pub(super) fn packing(dataset: &Dataset) -> Packing {
    match dataset.manifest().kind {
        Kind::Text => Packing::Single,
        Kind::Samples => Packing::Segments,
    }
}

/// Says how many samples are longer than a row and what becomes of them, and refuses more positions than the model
/// has. Returns the rows of an epoch.
pub(super) fn check_lengths(
    settings: &Settings,
    dataset: &Arc<Dataset>,
    max_positions: usize,
) -> Result<u64> {
    let (train, held) = sources(settings, dataset, 1)?;
    let parts = [(Some(&train), Split::Train), (held.as_ref(), Split::Held)];
    for (source, split) in parts {
        let Some(source) = source else { continue };
        lengths::check(source.loader(), split, settings.overlong, max_positions)?;
    }
    Ok(train.loader().rows_per_epoch())
}

/// Micro-batches to learn from, and to evaluate on if anything is held out.
pub(super) fn sources(
    settings: &Settings,
    dataset: &Arc<Dataset>,
    batch: usize,
) -> Result<(LoaderSource, Option<LoaderSource>), RunError> {
    let overlong = settings.overlong.into();
    let options = LoaderOptions {
        overlong,
        ..LoaderOptions::training(batch, settings.seq.get(), settings.seed.0)
    };
    let train = LoaderSource::new(Arc::clone(dataset), options)?;
    let held = dataset.token_range(Split::Held);
    // A token without one behind it has no target.
    if held.end - held.start < 2 {
        return Ok((train, None));
    }
    let options = LoaderOptions {
        split: Split::Held,
        order: Order::Sequential,
        passes: Passes::One,
        ..options
    };
    Ok((train, Some(LoaderSource::new(Arc::clone(dataset), options)?)))
}

//! Packs text files and record files into a dataset.
//!
//! One thread reads, several encode, and the calling thread writes, all in input order. The same
//! input and options give the same bytes for any number of threads.

mod cells;
mod cut;
mod delimited;
mod encode;
mod folder;
mod format;
mod held_out;
mod input;
mod lines;
mod output;
mod pipeline;
mod record;
mod records;
mod replace;
mod skip;
mod stream;
mod synthetic;
mod table;
mod text;
mod under_way;
mod values;

pub(crate) use cells::{COLUMNS, Cell, RecordJson, no_columns};
pub(crate) use folder::holds_images;
pub(crate) use records::{RECORD_BYTES_MAX, too_long};
pub use replace::IfExists;
pub use synthetic::{SyntheticText, pack_synthetic_text};

use crate::manifest::{Manifest, TOKENIZER, TOKENIZER_BYTES_MAX, read_file, write_file};
use crate::records::{Codec, Reading};
use crate::tokenizer::{
    ChatTemplate, Served, SpecialTokens, Tokenizer, TokenizerInfo, TokenizerSource,
};
use crate::{Counts, DataError, Dataset, HeldOut, Kind, WorkerCommand};
use encode::{Encoder, Rules};
use input::Inputs;
use output::Output;
use skip::Skipped;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use storm_files::StagedDirectory;
use under_way::UnderWay;

/// Default tokens per shard: half a gigabyte or one gigabyte before compression.
pub const SHARD_TOKENS_DEFAULT: u64 = 1 << 28;

/// The format of the files to pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputFormat {
    /// By extension: `.jsonl` and `.ndjson`, `.json`, `.csv`, `.tsv`, `.parquet`, and otherwise
    /// text.
    ByName,
    /// UTF-8 text. Each file is a document, or several separated by `<|endoftext|>`.
    Text,
    /// A JSON object per line.
    Jsonl,
    /// An array of JSON objects, or a sequence of them.
    Json,
    /// A comma-separated table with a header.
    Csv,
    /// A tab-separated table with a header.
    Tsv,
    /// A table in the Parquet format.
    Parquet,
}

/// The files that [`pack`] would read for a path: the file itself, or the files of a folder and its
/// subfolders that have a known extension.
///
/// # Errors
/// A folder cannot be read, or has no such file.
pub fn files_to_pack(path: &Path) -> Result<Vec<PathBuf>, DataError> {
    match path.is_dir() {
        true => Ok(folder::find(path, InputFormat::ByName)?.used),
        false => Ok(vec![path.to_owned()]),
    }
}

/// Options of [`pack`].
#[derive(Clone, Debug)]
pub struct PackOptions {
    /// Files, folders of files, or `-` for standard input, in this order. Files may be compressed
    /// with gzip or zstd.
    pub inputs: Vec<PathBuf>,
    /// Their format.
    pub format: InputFormat,
    /// The tokenizer.
    pub tokenizer: TokenizerSource,
    /// The name of the token between documents, if it is not a common one.
    pub end_of_text: Option<String>,
    /// The template that renders chats.
    pub chat_template: ChatTemplate,
    /// How special tokens in prompts, completions and messages of samples are treated. In documents
    /// they are always text.
    pub special_tokens: SpecialTokens,
    /// Skip and count records that cannot be packed, instead of failing.
    pub skip_bad: bool,
    /// The program that runs third-party code.
    pub worker: WorkerCommand,
    /// The directory to create.
    pub out: PathBuf,
    /// What to do if it exists.
    pub if_exists: IfExists,
    /// Fraction of the data, at its end, to hold out for evaluation: at least 0 and less than 1.
    pub held_out: f64,
    /// How blocks are compressed.
    pub codec: Codec,
    /// Encoding threads.
    pub threads: usize,
    /// Approximate tokens per shard, such as [`SHARD_TOKENS_DEFAULT`].
    pub shard_tokens: u64,
}

/// Progress of [`pack`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackProgress {
    /// Bytes of input packed.
    pub bytes_done: u64,
    /// Total bytes of input, if known.
    pub bytes_total: Option<u64>,
    /// Tokens so far.
    pub tokens: u64,
    /// Documents or samples so far.
    pub samples: u64,
}

/// The result of [`pack`].
#[derive(Clone, Debug, PartialEq)]
pub struct PackSummary {
    /// A hash of the contents.
    pub id: String,
    /// What the dataset contains.
    pub kind: Kind,
    /// The tokenizer that produced its tokens.
    pub tokenizer: TokenizerInfo,
    /// What was packed and what was skipped.
    pub counts: Counts,
    /// The held-out part.
    pub held_out: HeldOut,
    /// Shards written.
    pub shards: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Compression ratio of the token blocks.
    pub ratio: f64,
    /// The first few skipped records, with the reasons.
    pub skipped: Vec<String>,
    /// Files in folders that are of unknown format.
    pub passed_over: Vec<PathBuf>,
}

/// Packs files into a dataset. It is written to a temporary directory next to `out` and renamed
/// when complete, so `out` is never a partial dataset.
///
/// # Errors
/// Names the file, and the line or row, that cannot be packed.
pub fn pack(
    options: &PackOptions,
    progress: &dyn Fn(PackProgress),
) -> Result<PackSummary, DataError> {
    check(options)?;
    let reading = Reading::from_environment()?;
    let inputs = Inputs::open(options)?;
    let json = match &options.tokenizer {
        TokenizerSource::Bytes => None,
        TokenizerSource::File(path) => Some(read_file(path, TOKENIZER_BYTES_MAX)?),
    };
    // If there is no template, the first chat reports that.
    let chat = match inputs.kind() {
        Kind::Text => None,
        Kind::Samples => {
            Some(options.chat_template.read(&options.tokenizer, options.special_tokens))
        }
    };
    let setup = chat.as_ref().and_then(|chat| chat.as_ref().ok());
    let end_of_text = options.end_of_text.as_deref();
    let open = || {
        let path = match &options.tokenizer {
            // Plain text needs no process.
            TokenizerSource::Bytes if setup.is_none() || end_of_text.is_some() => {
                return Tokenizer::open(&TokenizerSource::Bytes, end_of_text, &options.worker);
            }
            TokenizerSource::Bytes => Path::new("bytes"),
            TokenizerSource::File(path) => path,
        };
        let served = Served { path, json: json.as_deref(), end_of_text, chat: setup };
        Tokenizer::served(&served, &options.worker)
    };
    let tokenizer = open()?;
    let info = tokenizer.info().clone();
    let if_exists = options.if_exists;
    let staged =
        StagedDirectory::create(&options.out, "packing", move |dir| if_exists.may_replace(dir))
            .map_err(DataError::stage(&options.out))?;
    let kind = inputs.kind();
    let (codec, shard_tokens) = (options.codec, options.shard_tokens);
    let mut output = Output::new(staged.path(), kind, info.vocabulary, codec, shard_tokens)?;
    let inputs = Arc::new(inputs);
    let no_template = chat.as_ref().and_then(|chat| chat.as_ref().err()).map(ToString::to_string);
    let rules =
        Rules { special_tokens: options.special_tokens, no_template, skip_bad: options.skip_bad };
    let mut bytes_done = 0;
    let mut skipped = Skipped::new(options.skip_bad);
    pipeline::run(
        options.threads,
        &UnderWay::new(under_way::bytes_max(options.threads)),
        |emit| inputs.read(emit),
        // The first thread uses the open tokenizer, the others open their own.
        Encoder::new(&inputs, &rules, tokenizer, &open),
        |encoded| {
            bytes_done += encoded.input_bytes;
            output.push(&encoded.chunks)?;
            skipped.extend(encoded.skipped);
            let (bytes_total, counts) = (inputs.known_bytes(), output.counts());
            let (tokens, samples) = (counts.tokens, counts.samples);
            progress(PackProgress { bytes_done, bytes_total, tokens, samples });
            Ok(())
        },
    )?;
    let (mut counts, stored) = output.finish()?;
    if counts.tokens == 0 {
        let problem = match skipped.first() {
            Some(first) => format!("all of it was skipped; the first: {first}"),
            None => "there is nothing in it to pack".to_owned(),
        };
        return Err(DataError::input(inputs.first(), problem));
    }
    (counts.input_files, counts.input_bytes) = (inputs.count(), inputs.bytes());
    counts.skipped = skipped.count;
    let mut manifest = Manifest::new(kind, info.clone(), counts, stored);
    let written = Dataset::with_manifest(staged.path(), manifest.clone(), String::new(), reading)?;
    manifest.held_out = held_out::cut(&written, options.held_out)?;
    drop(written);
    if let Some(json) = json {
        write_file(&staged.path().join(TOKENIZER), &json)?;
    }
    let id = manifest.write(staged.path())?;
    staged.finish().map_err(DataError::stage(&options.out))?;
    Ok(PackSummary {
        id,
        kind,
        tokenizer: info,
        counts,
        held_out: manifest.held_out,
        shards: manifest.shard_count(),
        bytes: manifest.shard_bytes(),
        ratio: manifest.codec().1,
        skipped: skipped.told,
        passed_over: inputs.passed_over().to_vec(),
    })
}

fn check(options: &PackOptions) -> Result<(), DataError> {
    let refuse =
        |option, problem: &str| Err(DataError::Option { option, problem: problem.to_owned() });
    if options.inputs.is_empty() {
        return refuse("input", "name at least one file");
    }
    if !(0.0..1.0).contains(&options.held_out) {
        return refuse("held out", "a share from 0 to less than 1");
    }
    if options.threads == 0 || options.threads > 1024 {
        return refuse("threads", "between 1 and 1024");
    }
    if options.shard_tokens == 0 || options.shard_tokens > 1 << 36 {
        return refuse("shard tokens", "between 1 and 2^36");
    }
    Ok(())
}

//! `storm data pack`: text, JSON and tables to tokens, images to records.

use super::progress::{ByteProgress, Show};
use super::records::{self, codec_words};
use crate::model::grouped;
use crate::size;
use anyhow::Result;
use clap::{Args, ValueEnum};
use std::path::PathBuf;
use std::thread::available_parallelism;
use storm_data::records::{Codec, RecordInput, RecordPackOptions, Synthetic};
use storm_data::{
    ChatTemplate, DataError, IfExists, InputFormat, Kind, PackOptions, PackSummary,
    SHARD_TOKENS_DEFAULT, SpecialTokens, TokenizerSource, pack,
};

#[derive(Args)]
#[command(after_long_help = "\
JSONL has one object per line, JSON an array of objects, and tables (CSV, TSV, Parquet) have columns with these names; \
other fields are ignored:
  {\"text\": \"…\"}                                          a document
  {\"messages\": [{\"role\": \"user\", \"content\": \"…\"}, …]}  a chat, with or without \"tools\": […]
  {\"prompt\": \"…\", \"completion\": \"…\"}                   an instruction
  {\"conversations\": […]}, {\"instruction\": \"…\", …}       ShareGPT and Alpaca formats
In chats, training learns only the assistant's messages; in instructions, only the completion.

The name of a file decides its format: .jsonl or .ndjson, .json, .csv, .tsv, .parquet, each also with .gz or .zst; \
all others are text. The files of a folder are packed in order of their names. Folders of images are recognized: \
CIFAR-10, MNIST, or a subfolder for each class.

Examples: storm data pack corpus/*.txt --tokenizer bytes --held-out 0.05 --out books
          zcat dump.gz | storm data pack - --format jsonl --tokenizer bytes --out dump
          storm data pack cifar-10-batches-bin --out cifar")]
pub(crate) struct PackArgs {
    /// Files of UTF-8 text (each a document, or several separated by `<|endoftext|>`), JSON or tables; folders of such
    /// files; `-` for standard input; or a folder of images.
    #[arg(required_unless_present = "synthetic", conflicts_with = "synthetic")]
    input: Vec<PathBuf>,
    /// For text: a tokenizer.json, a folder that has one, or `bytes` (every byte is a token).
    #[arg(long)]
    tokenizer: Option<String>,
    /// Directory to write. It must not exist, unless --overwrite is given.
    #[arg(long)]
    out: PathBuf,
    /// Format of the files; `auto` goes by their names. From folders, only files of that format are packed.
    #[arg(long, value_enum, default_value_t = FormatArg::Auto)]
    format: FormatArg,
    /// Fraction of the data to hold out for evaluation, such as 0.05: the end of a text, or evenly spaced records.
    #[arg(long, default_value_t = 0.0, value_name = "SHARE")]
    held_out: f64,
    /// Token that ends a document, by its name in the tokenizer. Default: found automatically for common tokenizers.
    #[arg(long, value_name = "TOKEN")]
    end_of_text: Option<String>,
    /// Template for chats: `model` (the one that came with the tokenizer, in chat_template.jinja or
    /// tokenizer_config.json), `chatml`, `plain` (a line `role: message` for each message), or the path of a Jinja
    /// template. Default: `model`.
    #[arg(long, value_name = "TEMPLATE")]
    chat_template: Option<String>,
    /// Treat special tokens in prompts and completions as plain text. In documents they always are.
    #[arg(long)]
    plain_text: bool,
    /// Replace the output directory if it is a dataset.
    #[arg(long)]
    overwrite: bool,
    /// Compression of blocks. Default: `none`.
    #[arg(long, value_enum)]
    codec: Option<CodecArg>,
    /// Skip records and images that cannot be packed, and count them, instead of stopping.
    #[arg(long)]
    skip_bad: bool,
    /// For folders of images: resize images to SIDE or HEIGHTxWIDTH pixels, such as 32 or 32x48.
    #[arg(long, value_parser = parse_size)]
    size: Option<[usize; 2]>,
    /// Generate this many records of random bytes instead of reading input; each also has its number.
    #[arg(long, value_name = "COUNT")]
    synthetic: Option<u64>,
    /// For --synthetic: shape of a record.
    #[arg(long, value_delimiter = ',', default_value = "32,32,3", requires = "synthetic")]
    shape: Vec<usize>,
    /// For --synthetic: number of classes.
    #[arg(long, default_value_t = 10, requires = "synthetic")]
    classes: u32,
    /// Threads that tokenize text. Default: the number of processors.
    #[arg(long)]
    threads: Option<usize>,
    /// Tokens per shard of text. Default: 268435456 (2^28).
    #[arg(long)]
    shard_tokens: Option<u64>,
    /// Print only errors.
    #[arg(long, short, conflicts_with = "json")]
    quiet: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum FormatArg {
    Auto,
    Text,
    Jsonl,
    Json,
    Csv,
    Tsv,
    Parquet,
}

/// `32` or `32x48`: height and width.
fn parse_size(text: &str) -> Result<[usize; 2], String> {
    let side = |text: &str| text.parse().map_err(|_| "a side, or HEIGHTxWIDTH".to_owned());
    match text.split_once('x') {
        Some((height, width)) => Ok([side(height)?, side(width)?]),
        None => side(text).map(|side| [side, side]),
    }
}

#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum CodecArg {
    /// No compression.
    None,
    /// Smaller.
    Zstd,
    /// Faster to read.
    Lz4,
}

impl From<CodecArg> for Codec {
    fn from(codec: CodecArg) -> Codec {
        match codec {
            CodecArg::None => Codec::None,
            CodecArg::Zstd => Codec::Zstd,
            CodecArg::Lz4 => Codec::Lz4,
        }
    }
}

impl PackArgs {
    fn if_exists(&self) -> IfExists {
        if self.overwrite { IfExists::Replace } else { IfExists::Refuse }
    }

    fn show(&self) -> Show {
        if self.quiet || self.json { Show::Nothing } else { Show::Progress }
    }

    /// What records to make; none for text.
    fn records(&self) -> Result<Option<RecordInput>, DataError> {
        match self.synthetic {
            // A format is one of text, whatever a folder holds.
            None if !matches!(self.format, FormatArg::Auto) => Ok(None),
            None => RecordInput::recognize(&self.input),
            Some(count) => {
                let (shape, classes) = (self.shape.clone(), self.classes);
                Ok(Some(RecordInput::Synthetic(Synthetic { count, shape, classes })))
            }
        }
    }

    /// Refuses options that would do nothing.
    fn refuse(&self, given: &[(&'static str, bool)], problem: &str) -> Result<(), DataError> {
        match given.iter().find(|(_, is_given)| *is_given) {
            Some(&(option, _)) => Err(DataError::Option { option, problem: problem.to_owned() }),
            None => Ok(()),
        }
    }
}

pub(crate) fn run(args: &PackArgs) -> Result<()> {
    match args.records()? {
        Some(input) => pack_images(args, input),
        None => pack_text(args),
    }
}

fn pack_images(args: &PackArgs, input: RecordInput) -> Result<()> {
    let for_text = [
        ("--tokenizer", args.tokenizer.is_some()),
        ("--format", !matches!(args.format, FormatArg::Auto)),
        ("--end-of-text", args.end_of_text.is_some()),
        ("--chat-template", args.chat_template.is_some()),
        ("--plain-text", args.plain_text),
        ("--threads", args.threads.is_some()),
        ("--shard-tokens", args.shard_tokens.is_some()),
    ];
    args.refuse(&for_text, &format!("this is for text, and the input is {}", input.words()))?;
    let options = RecordPackOptions {
        input,
        out: args.out.clone(),
        if_exists: args.if_exists(),
        codec: args.codec.map_or(Codec::None, Into::into),
        held_out: args.held_out,
        skip_bad: args.skip_bad,
        size: args.size,
    };
    records::pack(&options, args.show(), args.json, args.quiet)
}

fn pack_text(args: &PackArgs) -> Result<()> {
    let for_images = [("--size", args.size.is_some())];
    args.refuse(&for_images, "this is for images, and the input is text")?;
    let Some(tokenizer) = &args.tokenizer else {
        let problem = "text needs one: name a tokenizer.json, a folder with one, or `bytes`";
        return Err(DataError::Option { option: "--tokenizer", problem: problem.to_owned() }.into());
    };
    let options = PackOptions {
        inputs: args.input.clone(),
        format: match args.format {
            FormatArg::Auto => InputFormat::ByName,
            FormatArg::Text => InputFormat::Text,
            FormatArg::Jsonl => InputFormat::Jsonl,
            FormatArg::Json => InputFormat::Json,
            FormatArg::Csv => InputFormat::Csv,
            FormatArg::Tsv => InputFormat::Tsv,
            FormatArg::Parquet => InputFormat::Parquet,
        },
        tokenizer: TokenizerSource::parse(tokenizer),
        end_of_text: args.end_of_text.clone(),
        chat_template: ChatTemplate::parse(args.chat_template.as_deref().unwrap_or("model")),
        special_tokens: if args.plain_text { SpecialTokens::AsText } else { SpecialTokens::Parsed },
        skip_bad: args.skip_bad,
        worker: super::worker()?,
        out: args.out.clone(),
        if_exists: args.if_exists(),
        held_out: args.held_out,
        codec: args.codec.map_or(Codec::None, Into::into),
        threads: args.threads.unwrap_or_else(|| available_parallelism().map_or(1, Into::into)),
        shard_tokens: args.shard_tokens.unwrap_or(SHARD_TOKENS_DEFAULT),
    };
    let summary = pack_showing(&options, args.show())?;
    if args.json {
        println!("{:#}", object(&summary, args));
    } else if !args.quiet {
        report(&summary, args);
    }
    Ok(())
}

/// Packs text, and shows progress.
pub(crate) fn pack_showing(options: &PackOptions, show: Show) -> Result<PackSummary, DataError> {
    let progress = ByteProgress::new("packing", show);
    let summary = pack(options, &|at| {
        let detail = || format!("{} tokens", grouped(at.tokens));
        match at.bytes_total {
            Some(total) => progress.set(at.bytes_done, total, detail),
            None => progress.set_unknown(at.bytes_done, detail),
        }
    });
    progress.finish();
    summary
}

fn object(summary: &PackSummary, args: &PackArgs) -> serde_json::Value {
    serde_json::json!({
        "out": args.out.display().to_string(),
        "id": summary.id,
        "kind": summary.kind,
        "tokenizer": summary.tokenizer,
        "counts": summary.counts,
        "held_out_tokens": summary.counts.tokens - summary.held_out.from_token,
        "shards": summary.shards,
        "bytes": summary.bytes,
        "codec": args.codec.map_or(Codec::None, Codec::from),
        "ratio": summary.ratio,
        "skipped": summary.skipped,
        "files_passed_over": summary.passed_over,
    })
}

fn report(summary: &PackSummary, args: &PackArgs) {
    let counts = &summary.counts;
    let things = match summary.kind {
        Kind::Text => "documents",
        Kind::Samples => "samples",
    };
    println!(
        "packed {} {things}, {} tokens, into {}: {} in {} shards, {}",
        grouped(counts.samples),
        grouped(counts.tokens),
        args.out.display(),
        size::show(summary.bytes),
        summary.shards,
        codec_words(args.codec.map_or(Codec::None, Codec::from), summary.ratio, "tokens")
    );
    if summary.kind == Kind::Samples {
        println!("  {} tokens are learned, the others masked", grouped(counts.learned_tokens));
    }
    let held = counts.tokens - summary.held_out.from_token;
    if held > 0 {
        println!("  {} tokens are held out for evaluation", grouped(held));
    }
    for (count, why) in [
        (counts.empty_samples, "were empty"),
        (counts.unlearned_samples, "had nothing to learn: no assistant, or no completion"),
    ] {
        if count > 0 {
            println!("  left out {} {things} that {why}", grouped(count));
        }
    }
    if counts.skipped > 0 {
        println!("  skipped {} that cannot be packed; the first:", grouped(counts.skipped));
        summary.skipped.iter().for_each(|problem| println!("    {problem}"));
    }
    if let Some(first) = summary.passed_over.first() {
        println!(
            "  ignored {} files of other formats in folders; the first: {}",
            summary.passed_over.len(),
            first.display()
        );
    }
    if summary.tokenizer.end_of_text.is_none() {
        println!(
            "  the tokenizer has no known end of text: documents are joined without one; --end-of-text sets it"
        );
    }
}

//! `storm data inspect`: shows what a dataset contains.

use super::progress::{ByteProgress, Show};
use super::records;
use crate::model::grouped;
use crate::size;
use anyhow::Result;
use clap::Args;
use serde_json::json;
use std::path::PathBuf;
use std::sync::Mutex;
use storm_data::{DataError, Dataset, Kind, Split, Tokenizer, TokenizerKind};

/// Number of tokens of a sample to decode.
const SHOWN_TOKENS: u64 = 64;

#[derive(Args)]
pub(crate) struct InspectArgs {
    /// Directory that `storm data pack` wrote.
    dir: PathBuf,
    /// Read all data and verify its checksums.
    #[arg(long)]
    verify: bool,
    /// Number of documents or samples of text to show the beginning of.
    #[arg(long, default_value_t = 3)]
    samples: u64,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &InspectArgs) -> Result<()> {
    let dataset = match Dataset::open(&args.dir) {
        Err(DataError::OtherKind { .. }) => {
            return records::inspect(&args.dir, args.verify, args.json);
        }
        opened => opened?,
    };
    if args.verify {
        let show = if args.json { Show::Nothing } else { Show::Progress };
        // Blocks are checked on many threads.
        let progress = Mutex::new(ByteProgress::new("verifying", show));
        let result = dataset.verify(&|at| {
            if let Ok(progress) = progress.lock() {
                progress.set(at.bytes_done, at.bytes_total, String::new);
            }
        });
        if let Ok(progress) = progress.lock() {
            progress.finish();
        }
        result?;
    }
    let samples = first_samples(&dataset, args.samples)?;
    match args.json {
        true => print_json(&dataset, &samples, args.verify),
        false => {
            print(&dataset, &samples, args.verify);
            Ok(())
        }
    }
}

/// The beginning of a document or sample.
struct Shown {
    number: u64,
    tokens: u64,
    /// Spans of text in order, and whether each is learned.
    spans: Vec<(String, bool)>,
    /// Whether all of it is shown.
    whole: bool,
}

fn first_samples(dataset: &Dataset, count: u64) -> Result<Vec<Shown>> {
    if dataset.manifest().tokenizer.is_unknown() {
        return Ok(Vec::new());
    }
    let tokenizer = Tokenizer::of_dataset(dataset, &super::worker()?)?;
    let count = count.min(dataset.manifest().counts.samples);
    Ok((0..count).map(|number| show(dataset, &tokenizer, number)).collect::<Result<_, _>>()?)
}

fn show(dataset: &Dataset, tokenizer: &Tokenizer, number: u64) -> Result<Shown, DataError> {
    let range = dataset.sample(number)?;
    let tokens = range.end - range.start;
    let count = tokens.min(SHOWN_TOKENS) as usize;
    let (mut ids, mut learned) = (vec![0; count], vec![false; count]);
    let mut bytes = Vec::new();
    dataset.read_tokens(range.start, &mut ids, &mut bytes)?;
    dataset.read_mask(range.start, &mut learned, &mut bytes)?;
    let mut spans = Vec::new();
    let mut at = 0;
    for span in learned.chunk_by(|a, b| a == b) {
        let ids: Vec<u32> = ids[at..at + span.len()].iter().map(|&id| id as u32).collect();
        spans.push((tokenizer.decode(&ids)?, span[0]));
        at += span.len();
    }
    Ok(Shown { number, tokens, spans, whole: count as u64 == tokens })
}

fn print(dataset: &Dataset, samples: &[Shown], verified: bool) {
    let manifest = dataset.manifest();
    let counts = &manifest.counts;
    let (kind, things) = match manifest.kind {
        Kind::Text => ("text: a row is a window over all documents, joined", "documents"),
        Kind::Samples => ("samples: a row is packed with whole samples", "samples"),
    };
    let line = |name: &str, value: String| println!("  {name:<12}{value}");
    println!("{} ({})", dataset.dir().display(), &dataset.id()[..16]);
    line("kind", kind.to_owned());
    for (name, total, range) in [
        (things, counts.samples, dataset.sample_range(Split::Held)),
        ("tokens", counts.tokens, dataset.token_range(Split::Held)),
    ] {
        let held = range.end - range.start;
        let split = format!("{} to train on, {} held out", grouped(total - held), grouped(held));
        line(name, format!("{} ({split})", grouped(total)));
    }
    if manifest.kind == Kind::Samples {
        let share = 100.0 * counts.learned_tokens as f64 / counts.tokens.max(1) as f64;
        line("learned", format!("{} tokens, {share:.1} %", grouped(counts.learned_tokens)));
    }
    line("tokenizer", tokenizer_words(dataset));
    let bytes = size::show(manifest.shard_bytes());
    line("shards", format!("{}, {bytes}", manifest.shard_count()));
    let (codec, ratio) = manifest.codec();
    line("codec", records::codec_words(codec, ratio, "tokens"));
    line("reading", reading_words(dataset));
    let input = size::show(counts.input_bytes);
    line("made of", format!("{} files, {input}", grouped(counts.input_files)));
    let left_out = counts.empty_samples + counts.unlearned_samples;
    if left_out > 0 {
        let (empty, unlearned) = (counts.empty_samples, counts.unlearned_samples);
        line("left out", format!("{empty} empty, {unlearned} with nothing to learn"));
    }
    if counts.skipped > 0 {
        line("skipped", format!("{} that could not be packed", grouped(counts.skipped)));
    }
    let checked = match verified {
        true => "all match",
        false => "not checked, see --verify",
    };
    line("checksums", checked.to_owned());
    for shown in samples {
        let marked = |(text, learned): &(String, bool)| match (manifest.kind, learned) {
            (Kind::Samples, true) => format!("«{}»", text.escape_debug()),
            _ => text.escape_debug().to_string(),
        };
        let text: String = shown.spans.iter().map(marked).collect();
        let more = if shown.whole { "" } else { "…" };
        println!("\n{} of {} tokens:\n  {text}{more}", shown.number, grouped(shown.tokens));
    }
    if manifest.kind == Kind::Samples && !samples.is_empty() {
        println!("\n«…» is learned");
    }
}

/// How its tokens are read.
fn reading_words(dataset: &Dataset) -> String {
    match dataset.token_blocks() {
        Some(blocks) => blocks.reading_path().to_string(),
        None => "mapped into memory: it was packed by an older version".to_owned(),
    }
}

fn tokenizer_words(dataset: &Dataset) -> String {
    let info = &dataset.manifest().tokenizer;
    let kind = match (info.kind, &info.sha256) {
        (TokenizerKind::Bytes, _) => "bytes".to_owned(),
        (TokenizerKind::HuggingFace, Some(sha256)) => {
            format!("tokenizer.json with SHA-256 {}…", sha256.chars().take(12).collect::<String>())
        }
        (TokenizerKind::HuggingFace, None) => {
            "unknown: the dataset does not say which tokenizer.json made it".to_owned()
        }
    };
    let mut words = format!("{kind}, vocabulary {}", grouped(u64::from(info.vocabulary)));
    for (name, id) in [("begin", info.begin_of_text), ("end", info.end_of_text)] {
        if let Some(id) = id {
            words += &format!(", {name} of text {id}");
        }
    }
    if info.chat.is_some() {
        words += ", has the marks of ChatML";
    }
    words
}

fn print_json(dataset: &Dataset, samples: &[Shown], verified: bool) -> Result<()> {
    let shown = |shown: &Shown| {
        let span = |(text, learned): &(String, bool)| json!({"text": text, "learned": learned});
        json!({
            "number": shown.number,
            "tokens": shown.tokens,
            "beginning": shown.spans.iter().map(span).collect::<Vec<_>>(),
        })
    };
    let value = json!({
        "dir": dataset.dir(),
        "id": dataset.id(),
        "manifest": dataset.manifest(),
        "ratio": dataset.manifest().codec().1,
        "reading_path": reading_words(dataset),
        "verified": verified,
        "samples": samples.iter().map(shown).collect::<Vec<_>>(),
    });
    println!("{}", serde_json::to_string_pretty(&value)?);
    Ok(())
}

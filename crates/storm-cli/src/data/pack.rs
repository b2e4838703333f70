//! `storm data pack`: text and JSONL to shards.

use super::progress::{ByteProgress, Show};
use crate::model::grouped;
use crate::size;
use anyhow::Result;
use clap::{Args, ValueEnum};
use std::path::PathBuf;
use std::thread::available_parallelism;
use storm_data::{
    ChatTemplate, IfExists, InputFormat, Kind, PackOptions, PackSummary, SHARD_TOKENS_DEFAULT,
    SpecialTokens, TokenizerSource, pack,
};

#[derive(Args)]
#[command(after_long_help = "\
JSONL has an object in each line, with one of these; other fields are passed over:
  {\"text\": \"…\"}                                          a document
  {\"messages\": [{\"role\": \"user\", \"content\": \"…\"}, …]}  a chat, with or without \"tools\": […]
  {\"prompt\": \"…\", \"completion\": \"…\"}                   an instruction
Of chats what the assistant says is learned, of instructions the completion.

Example: storm data pack corpus/*.txt --tokenizer bytes --held-out 0.05 --out books")]
pub(crate) struct PackArgs {
    /// Files of UTF-8 text, each a document or several with `<|endoftext|>` between them, or of JSONL.
    #[arg(required = true)]
    input: Vec<PathBuf>,
    /// A tokenizer.json, a folder with one, or `bytes`: every byte is a token.
    #[arg(long)]
    tokenizer: String,
    /// Directory to write. It must not exist, unless --overwrite is given.
    #[arg(long)]
    out: PathBuf,
    /// What the files are: by their names (.jsonl and .ndjson are JSONL), or all the same.
    #[arg(long, value_enum, default_value_t = FormatArg::Auto)]
    format: FormatArg,
    /// Share of the data, from its end, that is held out for evaluation.
    #[arg(long, default_value_t = 0.0, value_name = "SHARE")]
    held_out: f64,
    /// Token that ends a document, by its name in the tokenizer; found by itself for the usual ones.
    #[arg(long, value_name = "TOKEN")]
    end_of_text: Option<String>,
    /// How chats become text: `model`, the template that came with the tokenizer (chat_template.jinja, or in
    /// tokenizer_config.json); `chatml`; `plain`, a line of `role: message` each; or the path of a Jinja template.
    #[arg(long, default_value = "model", value_name = "TEMPLATE")]
    chat_template: String,
    /// Take special tokens that are written out in prompts and completions for text. In documents they always are.
    #[arg(long)]
    plain_text: bool,
    /// Replace the output directory if it is a dataset.
    #[arg(long)]
    overwrite: bool,
    /// Threads that encode; the number of processors if not given.
    #[arg(long)]
    threads: Option<usize>,
    /// Tokens in a shard.
    #[arg(long, default_value_t = SHARD_TOKENS_DEFAULT)]
    shard_tokens: u64,
    /// Show nothing but errors.
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
}

pub(crate) fn run(args: &PackArgs) -> Result<()> {
    let options = PackOptions {
        inputs: args.input.clone(),
        format: match args.format {
            FormatArg::Auto => InputFormat::ByName,
            FormatArg::Text => InputFormat::Text,
            FormatArg::Jsonl => InputFormat::Jsonl,
        },
        tokenizer: TokenizerSource::parse(&args.tokenizer),
        end_of_text: args.end_of_text.clone(),
        chat_template: ChatTemplate::parse(&args.chat_template),
        special_tokens: if args.plain_text { SpecialTokens::AsText } else { SpecialTokens::Parsed },
        worker: super::worker()?,
        out: args.out.clone(),
        if_exists: if args.overwrite { IfExists::Replace } else { IfExists::Refuse },
        held_out: args.held_out,
        threads: args.threads.unwrap_or_else(|| available_parallelism().map_or(1, Into::into)),
        shard_tokens: args.shard_tokens,
    };
    let show = if args.quiet || args.json { Show::Nothing } else { Show::Progress };
    let progress = ByteProgress::new("packing", show);
    let summary = pack(&options, &|at| {
        progress.set(at.bytes_done, at.bytes_total, || format!("{} tokens", grouped(at.tokens)));
    });
    progress.finish();
    let summary = summary?;
    if args.json {
        println!("{:#}", object(&summary, args));
    } else if !args.quiet {
        report(&summary, args);
    }
    Ok(())
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
    })
}

fn report(summary: &PackSummary, args: &PackArgs) {
    let counts = &summary.counts;
    let things = match summary.kind {
        Kind::Text => "documents",
        Kind::Samples => "samples",
    };
    println!(
        "packed {} {things}, {} tokens, into {}: {} in {} shards",
        grouped(counts.samples),
        grouped(counts.tokens),
        args.out.display(),
        size::show(summary.bytes),
        summary.shards
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
    if summary.tokenizer.end_of_text.is_none() {
        println!(
            "  the tokenizer has no known end of text: documents follow each other without one"
        );
    }
}

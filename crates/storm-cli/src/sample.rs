//! `storm sample`: text by a model, as it is written.

use crate::precision::DtypeArg;
use crate::size::positive;
use crate::{UsageError, data, model, model_tokenizer, streams};
use anyhow::Result;
use clap::Args;
use std::io;
use std::path::PathBuf;
use std::time::Instant;
use storm_data::{DecodeStream, Tokenizer, TokenizerSource};
use storm_model::{DecodeOptions, HfDirectory, ModelConfig};
use storm_train::{Decoder, Generator, Sampling};

#[derive(Args)]
pub(crate) struct SampleArgs {
    /// Hugging Face directory, such as the `model` of a run.
    model: PathBuf,
    /// What to go on with. Special tokens that are written out in it are tokens, and the tokenizer puts its own
    /// before it, as `transformers` has it.
    #[arg(long, default_value = "")]
    prompt: String,
    /// Take the prompt for text alone: special tokens in it are text, and none is put before it.
    #[arg(long)]
    plain_text: bool,
    /// `bytes` or the path of a tokenizer.json. If not given, the one in the model's directory; without
    /// one, bytes for a model of 257 tokens.
    #[arg(long)]
    tokenizer: Option<String>,
    /// Tokens to write at most; less if the model ends its text.
    #[arg(long, default_value_t = 256, value_parser = positive)]
    tokens: usize,
    /// Tokens that the model looks back on. If not given, all of prompt and text, up to 4096 and to the
    /// positions that the model has. When there are more, it goes on from the last half of them.
    #[arg(long, value_parser = positive)]
    seq: Option<usize>,
    /// Below 1 the likely become likelier; 0 always takes the likeliest.
    #[arg(long, default_value_t = 0.8)]
    temperature: f64,
    /// Only so many of the likeliest tokens are in question.
    #[arg(long)]
    top_k: Option<usize>,
    /// Only the likeliest tokens that have this share together are in question.
    #[arg(long)]
    top_p: Option<f64>,
    /// The same seed writes the same text.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Arithmetic. bf16 takes half of the memory, and half of the time for a large model.
    #[arg(long, value_enum, default_value_t = DtypeArg::F32)]
    dtype: DtypeArg,
    /// Say afterwards how fast it was, on standard error.
    #[arg(long)]
    timing: bool,
}

/// The longest text that the model looks back on unless asked otherwise.
const WINDOW_DEFAULT_MAX: usize = 4096;

pub(crate) fn run(args: &SampleArgs) -> Result<()> {
    let directory = model::open(&args.model)?;
    let config = directory.model();
    let tokenizer = tokenizer(args, config.vocab_size)?;
    let mut prompt = match args.plain_text {
        true => tokenizer.encode(&args.prompt)?,
        false => tokenizer.encode_prompt(&args.prompt)?,
    };
    if prompt.is_empty() {
        let Some(end_of_text) = tokenizer.info().end_of_text else {
            let problem = "give a --prompt: the tokenizer has no token that texts begin with";
            return Err(UsageError(problem.to_owned()).into());
        };
        prompt.push(end_of_text);
    }
    let all = prompt.len().saturating_add(args.tokens);
    let window = args.seq.unwrap_or_else(|| window(config, all));
    if window > config.max_positions {
        let problem =
            format!("--seq is {window}, and the model has {} positions", config.max_positions);
        return Err(UsageError(problem).into());
    }
    let options = DecodeOptions { window, dtype: args.dtype.into() };
    let mut model = Decoder::load(config, &options, &directory)?;
    let sampling = Sampling {
        temperature: args.temperature,
        top_k: args.top_k,
        top_p: args.top_p,
        seed: args.seed,
    };
    let text = tokenizer.stream_after(&prompt);
    let mut generator = Generator::new(&mut model, prompt, sampling)?;
    show(&args.prompt)?;
    let begun = Instant::now();
    let mut first = None;
    let ends = ends(&directory, &tokenizer);
    let written = write(&mut generator, text, &ends, args.tokens, |text| {
        first.get_or_insert_with(Instant::now);
        show(text)
    })?;
    show("\n")?;
    if let (true, Some(first)) = (args.timing, first) {
        let (to_first, after) = (first - begun, first.elapsed().as_secs_f64());
        let speed = written.saturating_sub(1) as f64 / after;
        eprintln!("first token after {:.3} s, then {speed:.1} tokens/s", to_first.as_secs_f64());
    }
    Ok(())
}

/// What to look back on for a text of `tokens` in all.
fn window(config: &ModelConfig, tokens: usize) -> usize {
    let reach = config.sliding_window.unwrap_or(usize::MAX).min(config.max_positions);
    tokens.min(reach).min(WINDOW_DEFAULT_MAX)
}

/// The tokens that end a text, by the tokenizer and by the model's config.
pub(crate) fn ends(directory: &HfDirectory, tokenizer: &Tokenizer) -> Vec<u32> {
    let mut ends = directory.config().end_of_text();
    ends.extend(tokenizer.info().end_of_text);
    ends
}

/// Shows up to `tokens` tokens as they come, until one of `ends`; returns how many there were.
pub(crate) fn write(
    generator: &mut Generator<'_>,
    mut text: DecodeStream<'_>,
    ends: &[u32],
    tokens: usize,
    mut show: impl FnMut(&str) -> Result<()>,
) -> Result<usize> {
    let mut written = 0;
    while written < tokens {
        let token = generator.next_token()?;
        if ends.contains(&token) {
            break;
        }
        written += 1;
        show(&text.step(token)?)?;
    }
    show(&text.finish()?)?;
    Ok(written)
}

fn tokenizer(args: &SampleArgs, vocabulary: usize) -> Result<Tokenizer> {
    let source = match &args.tokenizer {
        Some(text) => TokenizerSource::parse(text),
        None => model_tokenizer::needed(&args.model, vocabulary)?,
    };
    Ok(Tokenizer::open(&source, None, &data::worker()?)?)
}

/// The reader may stop early.
fn show(text: &str) -> Result<()> {
    match streams::model_text(text) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => std::process::exit(0),
        result => Ok(result?),
    }
}

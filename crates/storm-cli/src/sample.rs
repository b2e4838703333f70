//! `storm sample`: text by a model, as it is written.

use crate::size::positive;
use crate::{UsageError, data};
use anyhow::{Context, Result};
use clap::Args;
use std::io::{self, Write};
use std::path::PathBuf;
use storm_data::{Tokenizer, TokenizerSource};
use storm_graph::DType;
use storm_model::{BuildOptions, HfDirectory};
use storm_train::{Generator, Inference, Sampling};

#[derive(Args)]
pub(crate) struct SampleArgs {
    /// Hugging Face directory, such as the `model` of a run.
    model: PathBuf,
    /// What to go on with.
    #[arg(long, default_value = "")]
    prompt: String,
    /// `bytes` or the path of a tokenizer.json. If not given, the one in the model's directory; without
    /// one, bytes for a model of 257 tokens.
    #[arg(long)]
    tokenizer: Option<String>,
    /// Tokens to write at most.
    #[arg(long, default_value_t = 256, value_parser = positive)]
    tokens: usize,
    /// Tokens that the model looks back on.
    #[arg(long, default_value_t = 256, value_parser = positive)]
    seq: usize,
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
}

/// The bytes and an end of text.
const BYTE_VOCABULARY: usize = 257;

pub(crate) fn run(args: &SampleArgs) -> Result<()> {
    let directory = HfDirectory::open(&args.model)
        .with_context(|| format!("cannot use {}", args.model.display()))?;
    let config = directory.model().clone();
    let tokenizer = tokenizer(args, config.vocab_size)?;
    let build = BuildOptions::training(1, args.seq, DType::F32);
    let mut model = Inference::load(&config, &build, &directory)?;
    let end_of_text = tokenizer.info().end_of_text;
    let mut prompt = tokenizer.encode(&args.prompt)?;
    if prompt.is_empty() {
        let Some(end_of_text) = end_of_text else {
            let problem = "give a --prompt: the tokenizer has no token that texts begin with";
            return Err(UsageError(problem.to_owned()).into());
        };
        prompt.push(end_of_text);
    }
    let sampling = Sampling {
        temperature: args.temperature,
        top_k: args.top_k,
        top_p: args.top_p,
        seed: args.seed,
    };
    let mut generator = Generator::new(&mut model, prompt, sampling)?;
    let mut text = tokenizer.stream();
    show(&args.prompt)?;
    for _ in 0..args.tokens {
        let token = generator.next_token()?;
        if Some(token) == end_of_text {
            break;
        }
        show(&text.step(token)?)?;
    }
    show(&text.finish()?)?;
    show("\n")
}

fn tokenizer(args: &SampleArgs, vocabulary: usize) -> Result<Tokenizer> {
    let beside = args.model.join("tokenizer.json");
    let source = match &args.tokenizer {
        Some(text) => TokenizerSource::parse(text),
        None if beside.is_file() => TokenizerSource::File(beside),
        None if vocabulary == BYTE_VOCABULARY => TokenizerSource::Bytes,
        None => {
            let problem = format!(
                "{} has no tokenizer.json: give --tokenizer, the path of one",
                args.model.display()
            );
            return Err(UsageError(problem).into());
        }
    };
    Ok(Tokenizer::open(&source, None, &data::worker()?)?)
}

/// At once: people watch it being written. Whoever reads may stop early.
fn show(text: &str) -> Result<()> {
    let mut stdout = io::stdout();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => std::process::exit(0),
        result => Ok(result?),
    }
}

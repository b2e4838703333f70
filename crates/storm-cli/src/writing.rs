//! Text generation shared by `storm sample` and `storm chat`.

use crate::decoder::{self, PlaceArgs};
use crate::precision::DtypeArg;
use crate::source::ModelSource;
use crate::{UsageError, streams};
use anyhow::Result;
use clap::Args;
use std::io;
use storm_data::DecodeStream;
use storm_model::{DecodeOptions, ModelConfig};
use storm_train::{Decoder, Generator, Sampling};

/// How to generate text.
#[derive(Args)]
pub(crate) struct WritingArgs {
    /// Tokenizer: `bytes`, or the path of a tokenizer.json. Default: that of the run's data, or the one in the model's
    /// directory; without one, `bytes` if the model has 257 tokens.
    #[arg(long)]
    pub(crate) tokenizer: Option<String>,
    /// Template for chats: `model` (the one that came with the tokenizer), `chatml`, `plain` (a line `role: message`
    /// for each message), or the path of a Jinja template. Default: that of the run, or `model`.
    #[arg(long)]
    pub(crate) chat_template: Option<String>,
    /// Sampling temperature: below 1, likely tokens become likelier; 0 always takes the most likely token.
    #[arg(long, default_value_t = 0.8)]
    temperature: f64,
    /// Sample from this many of the most likely tokens only. Default: all.
    #[arg(long)]
    top_k: Option<usize>,
    /// Sample from the most likely tokens whose probabilities add up to this fraction only. Default: all.
    #[arg(long)]
    top_p: Option<f64>,
    /// Random seed; the same seed gives the same text.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Arithmetic. bf16 takes half the memory of f32 and, for a large model, half the time. Default: that of the run,
    /// or that of the model's weights.
    #[arg(long, value_enum)]
    dtype: Option<DtypeArg>,
    #[command(flatten)]
    place: PlaceArgs,
}

impl WritingArgs {
    pub(crate) fn sampling(&self) -> Sampling {
        let &WritingArgs { temperature, top_k, top_p, seed, .. } = self;
        Sampling { temperature, top_k, top_p, seed }
    }

    /// Loads a model with a context of `window` tokens.
    pub(crate) fn load(&self, source: &ModelSource, window: usize) -> Result<Decoder> {
        let config = &source.config;
        let positions = config.text_positions();
        if window > positions {
            let problem = match positions == config.max_positions {
                true => format!(
                    "--seq is {window}, and the model has {positions} positions; give a smaller --seq"
                ),
                false => format!(
                    "--seq is {window}; beyond {positions} the model's rotary scaling changes all positions as a text \
                     grows, so longer ones are not generated; give a smaller --seq"
                ),
            };
            return Err(UsageError(problem).into());
        }
        let dtype = match self.dtype {
            Some(dtype) => dtype.into(),
            None => {
                let (dtype, why) = source.own_dtype();
                eprintln!("precision {dtype}: {why}; --dtype chooses another");
                dtype
            }
        };
        let options = DecodeOptions { window, dtype };
        let loaded = decoder::load(&self.place, config, &options, &source.weights)?;
        if let Some(words) = &loaded.words {
            eprintln!("{words}");
        }
        Ok(loaded.decoder)
    }
}

/// Largest default context.
const WINDOW_DEFAULT_MAX: usize = 4096;

/// The default context for a text of `tokens` in all.
pub(crate) fn window(config: &ModelConfig, tokens: usize) -> usize {
    tokens.min(config.text_positions()).min(WINDOW_DEFAULT_MAX)
}

/// The stop conditions of a text.
pub(crate) struct Ends {
    pub(crate) tokens: Vec<u32>,
    /// Whether a line break also ends it.
    pub(crate) line: bool,
}

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Finish {
    /// The model ended it.
    End,
    /// It reached the length limit.
    Length,
}

/// The generated tokens, without the one that ended the text.
pub(crate) struct Written {
    pub(crate) tokens: Vec<u32>,
    pub(crate) finish: Finish,
}

/// Generates and prints up to `limit` tokens, until one ends the text.
pub(crate) fn write(
    generator: &mut Generator<'_>,
    mut text: DecodeStream<'_>,
    ends: &Ends,
    limit: usize,
    mut show: impl FnMut(&str) -> Result<()>,
) -> Result<Written> {
    let mut tokens = Vec::new();
    let mut finish = Finish::Length;
    while tokens.len() < limit {
        let token = generator.next_token()?;
        if ends.tokens.contains(&token) {
            finish = Finish::End;
            break;
        }
        tokens.push(token);
        let piece = text.step(token)?;
        if let Some((line, _)) = piece.split_once('\n').filter(|_| ends.line) {
            show(line)?;
            return Ok(Written { tokens, finish: Finish::End });
        }
        show(&piece)?;
    }
    show(&text.finish()?)?;
    Ok(Written { tokens, finish })
}

/// Prints text to standard output. Exits quietly if the pipe is closed.
pub(crate) fn show(text: &str) -> Result<()> {
    match streams::model_text(text) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => std::process::exit(0),
        result => Ok(result?),
    }
}

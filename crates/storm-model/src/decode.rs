//! Programs that generate text token by token, with a key-value cache.

use crate::build::{Builder, Reach, check_size};
use crate::{BuildOptions, ModelConfig, ModelError, ModelOutput, Trainable};
use storm_graph::{DType, Program};

/// Prompt tokens processed at a time: enough for efficient matrix products, few enough that padding
/// the last piece costs little.
const PROMPT_TOKENS_MAX: usize = 32;

/// How a model generates text.
#[derive(Clone, Copy, Debug)]
pub struct DecodeOptions {
    /// W: number of positions.
    pub window: usize,
    /// Storage of parameters, activations and caches.
    pub dtype: DType,
}

/// Two programs that share parameters and caches. They process one text at a time.
#[derive(Clone, Debug)]
pub struct DecodePrograms {
    /// Reads a piece of a prompt into the caches. Inputs: `prompt.tokens`, `prompt.positions` (1,
    /// T).
    pub prompt: Program,
    /// T: tokens of a piece.
    pub prompt_tokens: usize,
    /// Reads a token and returns the result `logits` (1, 1, V). Inputs: `step.tokens`,
    /// `step.positions` (1, 1).
    pub step: Program,
}

/// One program for both prompt pieces and single tokens, for streamed weights: streaming costs the
/// same for both.
#[derive(Clone, Debug)]
pub struct PieceProgram {
    /// Reads a piece of a text and returns the result `logits` (1, T, V). Inputs: `piece.tokens`,
    /// `piece.positions` (1, T).
    pub program: Program,
    /// T: tokens of a piece.
    pub tokens: usize,
}

/// Builds the programs. Each layer has a cache `attention.cache` (1, W, 2K·D).
///
/// # Errors
/// The config is not valid, or the window is longer than the model allows.
pub fn build_decoder(
    config: &ModelConfig,
    options: &DecodeOptions,
) -> Result<DecodePrograms, ModelError> {
    let DecodeOptions { window, dtype } = *options;
    let prompt_tokens = piece_tokens(config, options)?;

    let options = build_options(prompt_tokens, dtype);
    let builder = Builder::new(config, &options, Reach::Cache { window, input_prefix: "prompt" });
    let prompt = builder.program(builder.no_head())?;

    let options = build_options(1, dtype);
    let builder = Builder::new(config, &options, Reach::Cache { window, input_prefix: "step" });
    let step = builder.program(builder.head()?)?;
    Ok(DecodePrograms { prompt, prompt_tokens, step })
}

/// Builds the program for streamed weights. Caches are as in [`build_decoder`].
///
/// # Errors
/// As [`build_decoder`].
pub fn build_streamed_decoder(
    config: &ModelConfig,
    options: &DecodeOptions,
) -> Result<PieceProgram, ModelError> {
    let DecodeOptions { window, dtype } = *options;
    let tokens = piece_tokens(config, options)?;
    let options = build_options(tokens, dtype);
    let builder = Builder::new(config, &options, Reach::Cache { window, input_prefix: "piece" });
    Ok(PieceProgram { program: builder.program(builder.head()?)?, tokens })
}

/// Tokens of a piece. Checks the config and the window.
fn piece_tokens(config: &ModelConfig, options: &DecodeOptions) -> Result<usize, ModelError> {
    config.validate()?;
    let window = options.window;
    check_size(config, &build_options(window, options.dtype))?;
    let longest = config.text_positions();
    if config.rotary.is_some() && longest < window.min(config.max_positions) {
        return Err(ModelError::InvalidConfig {
            field: "window",
            value: window.to_string(),
            rule: format!(
                "at most {longest}: beyond it, the model's rotary scaling changes all positions as the text grows"
            ),
        });
    }
    Ok(window.min(PROMPT_TOKENS_MAX))
}

fn build_options(sequence: usize, dtype: DType) -> BuildOptions {
    BuildOptions {
        output: ModelOutput::Logits,
        trainable: Trainable::Where(|_| false),
        ..BuildOptions::training(1, sequence, dtype)
    }
}

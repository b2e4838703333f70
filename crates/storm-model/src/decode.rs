//! Programs that generate text token by token, with a cache of the keys and values so far.

use crate::build::{Builder, Reach, check_size};
use crate::{BuildOptions, ModelConfig, ModelError, ModelOutput, Trainable};
use storm_graph::{DType, Program};

/// Tokens of a prompt that are read at a time: enough for efficient matrix products, few enough that
/// padding the last piece costs little.
const PROMPT_TOKENS_MAX: usize = 32;

/// How a model generates text.
#[derive(Clone, Copy, Debug)]
pub struct DecodeOptions {
    /// W: number of positions.
    pub window: usize,
    /// Storage of parameters, activations and caches.
    pub dtype: DType,
}

/// Two programs over the same parameters and caches, one text at a time.
#[derive(Clone, Debug)]
pub struct DecodePrograms {
    /// Reads a piece of a prompt into the caches. Inputs: `prompt.tokens`, `prompt.positions` (1, T).
    pub prompt: Program,
    /// T: tokens of such a piece.
    pub prompt_tokens: usize,
    /// Reads a token and yields the result `logits` (1, 1, V). Inputs: `step.tokens`, `step.positions`
    /// (1, 1).
    pub step: Program,
}

/// Builds the programs. Each layer has a cache `attention.cache` (1, W, 2K·D).
///
/// # Errors
/// The config is not valid, or the window is longer than the model allows.
pub fn build_decoder(
    config: &ModelConfig,
    options: &DecodeOptions,
) -> Result<DecodePrograms, ModelError> {
    config.validate()?;
    let DecodeOptions { window, dtype } = *options;
    let build = |sequence| BuildOptions {
        output: ModelOutput::Logits,
        trainable: Trainable::Where(|_| false),
        ..BuildOptions::training(1, sequence, dtype)
    };
    check_size(config, &build(window))?;
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
    let prompt_tokens = window.min(PROMPT_TOKENS_MAX);

    let options = build(prompt_tokens);
    let builder = Builder::new(config, &options, Reach::Cache { window, input_prefix: "prompt" });
    let prompt = builder.program(builder.no_head())?;

    let options = build(1);
    let builder = Builder::new(config, &options, Reach::Cache { window, input_prefix: "step" });
    let step = builder.program(builder.head()?)?;
    Ok(DecodePrograms { prompt, prompt_tokens, step })
}

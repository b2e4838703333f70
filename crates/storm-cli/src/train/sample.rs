//! Generates sample text with the trained model.

use crate::source::{ModelSource, Which};
use crate::writing;
use anyhow::Result;
use std::path::Path;
use storm_data::Tokenizer;
use storm_device::cpu::CpuDevice;
use storm_model::DecodeOptions;
use storm_train::{Decoder, Generator, Sampling};

/// Options for generating the sample.
pub(super) struct SampleOptions<'a> {
    pub(super) prompt: &'a str,
    pub(super) tokens: usize,
    pub(super) temperature: f64,
    pub(super) seed: u64,
    /// Context length in tokens.
    pub(super) sequence: usize,
}

/// The text that a saved model generates after a prompt.
pub(super) fn write(
    directory: &Path,
    tokenizer: &Tokenizer,
    options: &SampleOptions<'_>,
) -> Result<String> {
    let source = ModelSource::open(directory, &Which::default())?;
    let decode = DecodeOptions { window: options.sequence, dtype: source.own_dtype().0 };
    let mut model = Decoder::load(&source.config, &decode, &source.weights, CpuDevice::new)?;
    let mut prompt = tokenizer.encode_prompt(options.prompt)?;
    if prompt.is_empty() {
        prompt.push(tokenizer.info().end_of_text.unwrap_or(0));
    }
    let sampling =
        Sampling { temperature: options.temperature, seed: options.seed, ..Sampling::default() };
    let text = tokenizer.stream_after(&prompt);
    let mut generator = Generator::new(&mut model, prompt, sampling)?;
    let mut written = String::new();
    let ends = source.ends(tokenizer)?;
    writing::write(&mut generator, text, &ends, options.tokens, |text| {
        written.push_str(text);
        Ok(())
    })?;
    Ok(written)
}

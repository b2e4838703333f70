//! Text by the trained model.

use anyhow::Result;
use std::path::Path;
use storm_data::Tokenizer;
use storm_graph::DType;
use storm_model::{BuildOptions, HfDirectory};
use storm_train::{Generator, Inference, Sampling};

/// How to write.
pub(super) struct SampleOptions<'a> {
    pub(super) prompt: &'a str,
    pub(super) tokens: usize,
    pub(super) temperature: f64,
    pub(super) seed: u64,
    /// The longest text that the model looks back on.
    pub(super) sequence: usize,
}

/// Lets a saved model go on with a prompt.
pub(super) fn write(
    directory: &Path,
    tokenizer: &Tokenizer,
    options: &SampleOptions<'_>,
) -> Result<String> {
    let directory = HfDirectory::open(directory)?;
    let build = BuildOptions::training(1, options.sequence, DType::F32);
    let mut model = Inference::load(directory.model(), &build, &directory)?;
    let end_of_text = tokenizer.info().end_of_text;
    let mut ids = tokenizer.encode(options.prompt)?;
    if ids.is_empty() {
        ids.push(end_of_text.unwrap_or(0));
    }
    let sampling =
        Sampling { temperature: options.temperature, seed: options.seed, ..Sampling::default() };
    let mut generator = Generator::new(&mut model, ids, sampling)?;
    let mut text = tokenizer.stream();
    let mut written = options.prompt.to_owned();
    for _ in 0..options.tokens {
        let token = generator.next_token()?;
        if Some(token) == end_of_text {
            break;
        }
        written.push_str(&text.step(token)?);
    }
    written.push_str(&text.finish()?);
    Ok(written)
}

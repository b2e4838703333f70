//! Text by the trained model.

use anyhow::Result;
use std::path::Path;
use storm_data::Tokenizer;
use storm_graph::DType;
use storm_model::{BuildOptions, HfDirectory};
use storm_train::{Batch, Inference};

/// How to write.
pub(super) struct SampleOptions<'a> {
    pub(super) prompt: &'a str,
    pub(super) tokens: usize,
    pub(super) temperature: f64,
    pub(super) seed: u64,
    /// The longest text that the model looks back on.
    pub(super) sequence: usize,
}

/// Lets a saved model go on with a prompt. Every token looks at all of the text again: for a few
/// hundred tokens of a small model that is quick enough.
pub(super) fn write(
    directory: &Path,
    tokenizer: &Tokenizer,
    options: &SampleOptions<'_>,
) -> Result<String> {
    let directory = HfDirectory::open(directory)?;
    let config = directory.model().clone();
    let build = BuildOptions::training(1, options.sequence, DType::F32);
    let mut model = Inference::load(&config, &build, &directory)?;
    let mut ids = tokenizer.encode(options.prompt)?;
    if ids.is_empty() {
        ids.push(tokenizer.info().end_of_text.unwrap_or(0));
    }
    let written_from = ids.len();
    let mut random = Random(options.seed);
    for _ in 0..options.tokens {
        let window = &ids[ids.len().saturating_sub(options.sequence)..];
        let mut tokens: Vec<i32> = window.iter().map(|&id| id as i32).collect();
        let last = tokens.len() - 1;
        // What follows is not looked at: attention is causal.
        tokens.resize(options.sequence, 0);
        let batch = Batch::new(tokens.clone(), tokens, options.sequence);
        let logits = model.logits(&batch)?; // (1, T, V)
        let row = &logits[last * config.vocab_size..(last + 1) * config.vocab_size];
        let id = choose(row, options.temperature, random.unit()) as u32;
        if Some(id) == tokenizer.info().end_of_text {
            break;
        }
        ids.push(id);
    }
    let shown = if options.prompt.is_empty() { written_from } else { 0 };
    Ok(tokenizer.decode(&ids[shown..])?)
}

/// The token whose share of the probabilities holds `at`, from 0 to 1.
fn choose(logits: &[f32], temperature: f64, at: f64) -> usize {
    let likeliest = |a: &usize, b: &usize| logits[*a].total_cmp(&logits[*b]);
    let best = (0..logits.len()).max_by(likeliest).unwrap_or(0);
    if temperature <= 0.0 {
        return best;
    }
    let weight = |logit: f32| (f64::from(logit - logits[best]) / temperature).exp();
    let total: f64 = logits.iter().map(|&logit| weight(logit)).sum();
    let mut left = at * total;
    for (token, &logit) in logits.iter().enumerate() {
        left -= weight(logit);
        if left < 0.0 {
            return token;
        }
    }
    best
}

/// SplitMix64.
struct Random(u64);

impl Random {
    /// From 0 to less than 1.
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_come_as_often_as_they_are_likely() {
        let logits = [0.0, 1.0, f32::NEG_INFINITY, 0.0];
        assert_eq!(choose(&logits, 0.0, 0.9), 1);
        let mut random = Random(1);
        let mut counts = [0; 4];
        for _ in 0..10_000 {
            counts[choose(&logits, 1.0, random.unit())] += 1;
        }
        assert_eq!(counts[2], 0);
        // e / (e + 2) of all.
        assert!((5600..5920).contains(&counts[1]), "{counts:?}");
        assert!((1900..2350).contains(&counts[0]), "{counts:?}");
    }
}

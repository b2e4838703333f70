//! Generates text token by token.

use crate::choose::choose;
use crate::{Decoder, TrainError};
use storm_graph::random::Random;

/// How the next token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Below 1, likely tokens become likelier; 0 always takes the most likely token.
    pub temperature: f64,
    /// Sample only from this many of the most likely tokens.
    pub top_k: Option<usize>,
    /// Sample only from the most likely tokens whose probabilities add up to this.
    pub top_p: Option<f64>,
    /// The same seed gives the same text.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Sampling {
        Sampling { temperature: 1.0, top_k: None, top_p: None, seed: 0 }
    }
}

/// Continues a prompt. The context is limited to the model's window. When that is full, everything but its last half is
/// dropped, so that most tokens cost only one decoding step.
pub struct Generator<'a> {
    model: &'a mut Decoder,
    tokens: Vec<u32>,
    /// The first token still in the context.
    first: usize,
    sampling: Sampling,
    random: Random,
}

impl<'a> Generator<'a> {
    /// Starts with `prompt`.
    ///
    /// # Errors
    /// The prompt is empty, or a sampling parameter is invalid.
    pub fn new(
        model: &'a mut Decoder,
        prompt: Vec<u32>,
        sampling: Sampling,
    ) -> Result<Generator<'a>, TrainError> {
        let refuse = |option: &'static str, problem: &str| {
            Err(TrainError::Option { option, problem: problem.to_owned() })
        };
        if prompt.is_empty() {
            return refuse("prompt", "there is no token to go on from");
        }
        if !(sampling.temperature >= 0.0 && sampling.temperature.is_finite()) {
            return refuse("temperature", "must be a number that is not negative");
        }
        if sampling.top_k == Some(0) {
            return refuse("top-k", "must be at least 1");
        }
        if sampling.top_p.is_some_and(|share| !(share > 0.0 && share <= 1.0)) {
            return refuse("top-p", "must be more than 0 and at most 1");
        }
        Ok(Generator { model, tokens: prompt, first: 0, random: Random(sampling.seed), sampling })
    }

    /// Samples the next token.
    ///
    /// # Errors
    /// A token is outside the model's vocabulary.
    pub fn next_token(&mut self) -> Result<u32, TrainError> {
        let window = self.model.window();
        if self.tokens.len() - self.first > window {
            self.first = self.tokens.len() - (window / 2).max(1);
        }
        let logits = self.model.logits(&self.tokens[self.first..])?; // (V)
        let token = choose(logits, &self.sampling, self.random.unit()) as u32;
        self.tokens.push(token);
        Ok(token)
    }
}

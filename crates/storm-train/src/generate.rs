//! Text by a model, token by token.

use crate::choose::choose;
use crate::{Decoder, TrainError};
use storm_graph::random::Random;

/// How the next token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Below 1 the likely become likelier; 0 always takes the likeliest.
    pub temperature: f64,
    /// Only so many of the likeliest are in question.
    pub top_k: Option<usize>,
    /// Only the likeliest that have this share together are in question.
    pub top_p: Option<f64>,
    /// The same seed writes the same text.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Sampling {
        Sampling { temperature: 1.0, top_k: None, top_p: None, seed: 0 }
    }
}

/// A model that goes on with what it was given. It looks back on the text as far as the model's window
/// reaches; when that is full it forgets all but the last half of it, so that most tokens cost one step.
pub struct Generator<'a> {
    model: &'a mut Decoder,
    tokens: Vec<u32>,
    /// The first token that the model still looks back on.
    first: usize,
    sampling: Sampling,
    random: Random,
}

impl<'a> Generator<'a> {
    /// Goes on with `prompt`.
    ///
    /// # Errors
    /// An empty prompt, or numbers that make no sense.
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

    /// Chooses the next token.
    ///
    /// # Errors
    /// A token that the model does not know.
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

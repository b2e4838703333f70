//! Text by a model, token by token.

use crate::{Decoder, TrainError};

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

/// The token whose share of the probabilities holds `at`, from 0 to 1.
fn choose(logits: &[f32], sampling: &Sampling, at: f64) -> usize {
    // Likeliest first; of equals the first.
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    let best = order[0];
    if sampling.temperature <= 0.0 {
        return best;
    }
    order.truncate(sampling.top_k.unwrap_or(usize::MAX));
    let weight =
        |token: usize| (f64::from(logits[token] - logits[best]) / sampling.temperature).exp();
    let mut weights: Vec<f64> = order.iter().map(|&token| weight(token)).collect();
    if let Some(share) = sampling.top_p {
        let enough = share * weights.iter().sum::<f64>();
        let mut sum = 0.0;
        let below = weights.iter().take_while(|&&weight| {
            sum += weight;
            sum < enough
        });
        // The one that reaches the share belongs to it.
        let count = below.count() + 1;
        weights.truncate(count);
    }
    let mut left = at * weights.iter().sum::<f64>();
    for (&token, weight) in order.iter().zip(&weights) {
        left -= weight;
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

    fn counts(sampling: Sampling) -> [usize; 4] {
        let logits = [0.0, 1.0, f32::NEG_INFINITY, 0.0];
        let mut random = Random(2);
        let mut counts = [0; 4];
        for _ in 0..10_000 {
            counts[choose(&logits, &sampling, random.unit())] += 1;
        }
        counts
    }

    #[test]
    fn tokens_come_as_often_as_they_are_likely() {
        let all = counts(Sampling::default());
        assert_eq!(all[2], 0);
        // e / (e + 2) of all.
        assert!((5600..5920).contains(&all[1]), "{all:?}");
        assert!((1900..2350).contains(&all[0]), "{all:?}");
    }

    #[test]
    fn fewer_are_in_question() {
        let only_best = [0, 10_000, 0, 0];
        assert_eq!(counts(Sampling { temperature: 0.0, ..Sampling::default() }), only_best);
        assert_eq!(counts(Sampling { top_k: Some(1), ..Sampling::default() }), only_best);
        assert_eq!(counts(Sampling { top_p: Some(0.5), ..Sampling::default() }), only_best);
        let two = counts(Sampling { top_k: Some(2), ..Sampling::default() });
        assert!(two[0] > 2000 && two[3] == 0, "{two:?}");
        assert_eq!(counts(Sampling { top_p: Some(0.7), ..Sampling::default() })[3], 0);
        let hot = counts(Sampling { temperature: 100.0, ..Sampling::default() });
        assert!(hot[0] > 3000 && hot[3] > 3000 && hot[2] == 0, "{hot:?}");
    }
}

//! Text by a model, token by token.

use crate::{Decoder, TrainError};
use std::cmp::Ordering;
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

/// Tokens that are put in order at first: few are ever in question, and vocabularies are large.
const SORTED_AT_FIRST: usize = 256;

/// The token whose share of the probabilities holds `at`, from 0 to 1.
fn choose(logits: &[f32], sampling: &Sampling, at: f64) -> usize {
    // Likeliest first; of equals the first.
    let likelier = |a: &usize, b: &usize| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b));
    let best = (0..logits.len()).min_by(likelier).unwrap_or(0);
    if sampling.temperature <= 0.0 {
        return best;
    }
    let mut tokens: Vec<usize> = (0..logits.len()).collect();
    if let Some(count) = sampling.top_k.filter(|&count| count < tokens.len()) {
        tokens.select_nth_unstable_by(count, likelier);
        tokens.truncate(count);
        tokens.sort_unstable();
    }
    let weight =
        |token: usize| (f64::from(logits[token] - logits[best]) / sampling.temperature).exp();
    let mut total = tokens.iter().map(|&token| weight(token)).sum::<f64>();
    if let Some(share) = sampling.top_p {
        let (mut sum, mut count) = (0.0, 0);
        // The one that reaches the share belongs to it.
        visit_in_order(&mut tokens, likelier, |token| {
            sum += weight(token);
            count += 1;
            sum >= share * total
        });
        tokens.truncate(count);
        total = sum;
    }
    let mut left = at * total;
    let chosen = visit_in_order(&mut tokens, likelier, |token| {
        left -= weight(token);
        left < 0.0
    });
    chosen.unwrap_or(best)
}

/// Puts tokens in order, as far as they are visited, until `enough` holds for one; returns that.
fn visit_in_order(
    tokens: &mut [usize],
    likelier: impl Fn(&usize, &usize) -> Ordering,
    mut enough: impl FnMut(usize) -> bool,
) -> Option<usize> {
    let (mut rest, mut count) = (tokens, SORTED_AT_FIRST);
    while !rest.is_empty() {
        count = count.min(rest.len());
        rest.select_nth_unstable_by(count - 1, &likelier);
        let (next, later) = rest.split_at_mut(count);
        next.sort_unstable_by(&likelier);
        if let Some(&token) = next.iter().find(|&&token| enough(token)) {
            return Some(token);
        }
        (rest, count) = (later, 4 * count);
    }
    None
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

    /// As many tokens as a vocabulary has, put in order piece by piece.
    #[test]
    fn large_vocabularies_are_walked_in_order() {
        let logits: Vec<f32> =
            (0..2000).map(|token| -((token * 7 % 2000) as f32) / 300.0).collect();
        let mut by_likelihood: Vec<usize> = (0..logits.len()).collect();
        by_likelihood.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
        let weight = |token: usize| f64::from(logits[token]).exp();
        let total: f64 = by_likelihood.iter().map(|&token| weight(token)).sum();
        for place in [0, 1, 254, 255, 256, 257, 511, 512, 700, 1999] {
            let before: f64 = by_likelihood[..place].iter().map(|&token| weight(token)).sum();
            let token = by_likelihood[place];
            let at = (before + weight(token) / 2.0) / total;
            assert_eq!(choose(&logits, &Sampling::default(), at), token, "{place}");
        }
        let top_k = Sampling { top_k: Some(300), ..Sampling::default() };
        assert_eq!(choose(&logits, &top_k, 1.0 - 1e-9), by_likelihood[299]);
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

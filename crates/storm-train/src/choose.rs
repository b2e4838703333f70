//! Samples a token from logits. This must be fast: a GPU takes a few milliseconds per token of a large model, and
//! vocabularies have more than a hundred thousand tokens.

use crate::Sampling;
use std::cmp::Ordering;

/// The token at `at`, from 0 to 1, of the cumulative distribution. Tokens are in vocabulary order, or in order of
/// decreasing probability where `top_k` or `top_p` sorts them.
pub(crate) fn choose(logits: &[f32], sampling: &Sampling, at: f64) -> usize {
    let best = likeliest(logits);
    if sampling.temperature <= 0.0 {
        return best;
    }
    let largest = logits[best];
    let weight = |token: usize| (f64::from(logits[token] - largest) / sampling.temperature).exp();
    // Most likely first; ties by index.
    let likelier = |a: &(usize, f64), b: &(usize, f64)| {
        logits[b.0].total_cmp(&logits[a.0]).then(a.0.cmp(&b.0))
    };
    let most = sampling.top_k.unwrap_or(logits.len()).min(logits.len());
    let has_limit = most < logits.len();
    if !has_limit && sampling.top_p.is_none() {
        return choose_among_all(logits, largest, sampling.temperature, at).unwrap_or(best);
    }
    let sum_of = |tokens: &[(usize, f64)]| tokens.iter().map(|(_, weight)| weight).sum::<f64>();
    // The candidates with their weights, in layers of decreasing probability.
    let mut kept: Vec<(usize, f64)> = Vec::new();
    let mut sum = 0.0;
    let wanted = match sampling.top_p {
        Some(share) if !has_limit => share * sum_of_weights(logits, largest, sampling.temperature),
        _ => f64::INFINITY,
    };
    for tokens in layers(logits, largest, sampling.temperature) {
        let from = kept.len();
        kept.extend(tokens.into_iter().map(|token| (token, weight(token))));
        sum += sum_of(&kept[from..]);
        if kept.len() >= most || sum >= wanted {
            break;
        }
    }
    if has_limit && kept.len() > most {
        kept.select_nth_unstable_by(most, likelier);
        kept.truncate(most);
    }
    if let Some(share) = sampling.top_p {
        let wanted = if has_limit { share * sum_of(&kept) } else { wanted };
        // The token that reaches the limit is included.
        let last = reaching(&mut kept, likelier, |sum| sum >= wanted);
        kept.truncate(last.map_or(kept.len(), |last| last + 1));
    }
    let place = at * sum_of(&kept);
    reaching(&mut kept, likelier, |sum| sum > place).map_or(best, |token| kept[token].0)
}

/// The index of the largest logit; of equals, the first.
fn likeliest(logits: &[f32]) -> usize {
    // Independent maxima, which compilers vectorize.
    const LANES: usize = 32;
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let whole = logits.chunks_exact(LANES);
    let rest = whole.remainder().iter().fold(f32::NEG_INFINITY, |a, &b| larger(a, b));
    for some in whole {
        for (lane, &logit) in lanes.iter_mut().zip(some) {
            *lane = larger(*lane, logit);
        }
    }
    let largest = lanes.iter().fold(rest, |a, &b| larger(a, b));
    // Checking a whole chunk at once is faster than checking each element.
    let has_it = |some: &[f32]| some.iter().fold(false, |any, &logit| any | (logit == largest));
    let Some(chunk) = logits.chunks(CHUNK).position(has_it) else { return 0 };
    let first = chunk * CHUNK;
    first + logits[first..].iter().position(|&logit| logit == largest).unwrap_or(0)
}

/// Lanes of a sum, and logits per part: few enough that sums in f32 are accurate to their last digits.
const LANES: usize = 8;
const PART: usize = 64 * LANES;

/// The token at `at` of the cumulative distribution, in vocabulary order; `None` without finite weights. Sorts nothing,
/// so a flat distribution takes no longer than a steep one.
fn choose_among_all(logits: &[f32], largest: f32, temperature: f64, at: f64) -> Option<usize> {
    let factor = factor_of(temperature);
    let sums: Vec<f64> =
        logits.chunks(PART).map(|part| sum_of_part(part, largest, factor)).collect();
    let mut left = at * sums.iter().sum::<f64>();
    let mut chosen = None;
    for (part, (&sum, logits)) in sums.iter().zip(logits.chunks(PART)).enumerate() {
        if left >= sum {
            left -= sum;
            continue;
        }
        for (place, &logit) in logits.iter().enumerate() {
            let exponent = (logit - largest) * factor;
            // Tokens whose weight vanishes are never chosen.
            if exponent >= LOWEST_POWER {
                chosen = Some(part * PART + place);
                left -= f64::from(power_of_two(exponent));
                if left < 0.0 {
                    return chosen;
                }
            }
        }
        // Sums in f32 are slightly off, so the part's last token may be left over.
        left = 0.0;
    }
    chosen
}

/// Σ exp((logit − largest) / temperature), to about seven digits.
fn sum_of_weights(logits: &[f32], largest: f32, temperature: f64) -> f64 {
    let factor = factor_of(temperature);
    logits.chunks(PART).map(|part| sum_of_part(part, largest, factor)).sum()
}

/// The factor that turns logits into exponents of two.
fn factor_of(temperature: f64) -> f32 {
    (std::f64::consts::LOG2_E / temperature) as f32
}

fn sum_of_part(part: &[f32], largest: f32, factor: f32) -> f64 {
    // Two loops, each of which compilers vectorize.
    let mut weights = [0.0f32; PART];
    for (weight, &logit) in weights.iter_mut().zip(part) {
        *weight = power_of_two((logit - largest) * factor);
    }
    let mut sums = [0.0f32; LANES];
    for lanes in weights.chunks_exact(LANES) {
        for (sum, weight) in sums.iter_mut().zip(lanes) {
            *sum += weight;
        }
    }
    sums.iter().map(|&sum| f64::from(sum)).sum()
}

const LN_2: f64 = std::f64::consts::LN_2;

/// Taylor series of 2^x for |x| ≤ 1/2: the coefficient of x⁶, and the others.
const HIGHEST: f32 = (LN_2 * LN_2 * LN_2 * LN_2 * LN_2 * LN_2 / 720.0) as f32;
const SERIES: [f32; 6] = [
    (LN_2 * LN_2 * LN_2 * LN_2 * LN_2 / 120.0) as f32,
    (LN_2 * LN_2 * LN_2 * LN_2 / 24.0) as f32,
    (LN_2 * LN_2 * LN_2 / 6.0) as f32,
    (LN_2 * LN_2 / 2.0) as f32,
    LN_2 as f32,
    1.0,
];

/// The lowest exponent of a normal f32.
const LOWEST_POWER: f32 = -126.0;

/// 2 to the power of `x`, for `x` ≤ 0, without a branch. Returns about 2⁻¹²⁶ for anything below.
#[inline]
fn power_of_two(x: f32) -> f32 {
    /// Adding this leaves the nearest integer in the lowest bits.
    const ROUNDER: f32 = 12_582_912.0;
    let x = if x < LOWEST_POWER { LOWEST_POWER } else { x };
    let rounded = x + ROUNDER;
    let exponent = (rounded.to_bits() as i32).wrapping_sub(ROUNDER.to_bits() as i32);
    let rest = x - (rounded - ROUNDER);
    let series = SERIES.iter().fold(HIGHEST, |sum, coefficient| sum * rest + coefficient);
    series * f32::from_bits((exponent.wrapping_add(127) << 23) as u32)
}

/// A layer of tokens has weights down to this fraction of the layer before.
const LAYER: f64 = 1.0 / 256.0;

/// The last layer starts where weights vanish.
const LAYERS: i32 = 6;

/// Logits that are checked at once.
const CHUNK: usize = 64;

/// Tokens in layers of decreasing probability, unsorted within a layer. Layers are computed on demand: usually the
/// first is enough.
fn layers(logits: &[f32], largest: f32, temperature: f64) -> impl Iterator<Item = Vec<usize>> {
    let lower_end = move |layer: i32| match layer {
        0 => f32::INFINITY,
        LAYERS => f32::NEG_INFINITY,
        _ => (f64::from(largest) + temperature * LAYER.ln() * f64::from(layer)) as f32,
    };
    (1..=LAYERS).map(move |layer| {
        let (above, below) = (lower_end(layer - 1), lower_end(layer));
        let mut tokens: Vec<usize> = Vec::new();
        for (chunk, some) in logits.chunks(CHUNK).enumerate() {
            // Most chunks have none: checking a whole chunk is faster than checking each element.
            if some.iter().fold(false, |any, &logit| any | (logit >= below)) {
                let first = chunk * CHUNK;
                let is_new = |logit: f32| logit >= below && (logit < above || layer == 1);
                let found = some.iter().enumerate().filter(|&(_, &logit)| is_new(logit));
                tokens.extend(found.map(|(place, _)| first + place));
            }
        }
        tokens
    })
}

/// Up to this many tokens are sorted directly.
const SORTED: usize = 64;

/// The index of the token, in sorted order, at which the cumulative weight is `enough`; `None` if the total is not.
/// Afterwards, more likely tokens are before that index. Like quickselect, it repeatedly halves the range in question,
/// so its time is linear in the number of tokens, however flat the distribution.
fn reaching(
    tokens: &mut [(usize, f64)],
    likelier: impl Fn(&(usize, f64), &(usize, f64)) -> Ordering,
    enough: impl Fn(f64) -> bool,
) -> Option<usize> {
    let (mut start, mut end) = (0, tokens.len());
    let mut before = 0.0;
    while end - start > SORTED {
        let half = (end - start) / 2;
        tokens[start..end].select_nth_unstable_by(half, &likelier);
        let upper: f64 = tokens[start..start + half].iter().map(|(_, weight)| weight).sum();
        match enough(before + upper) {
            true => end = start + half,
            false => (start, before) = (start + half, before + upper),
        }
    }
    tokens[start..end].sort_unstable_by(&likelier);
    let place = tokens[start..end].iter().position(|(_, weight)| {
        before += weight;
        enough(before)
    });
    match place {
        Some(place) => Some(start + place),
        // The upper half was enough, but summing in another order gave slightly less.
        None => (end < tokens.len()).then(|| end - 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use storm_graph::random::Random;

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

    /// As many tokens as a vocabulary has, in parts and put in order piece by piece.
    #[test]
    fn large_vocabularies_are_walked_in_order() {
        let logits: Vec<f32> =
            (0..2000).map(|token| -((token * 7 % 2000) as f32) / 300.0).collect();
        let as_they_are: Vec<usize> = (0..logits.len()).collect();
        let mut by_likelihood = as_they_are.clone();
        by_likelihood.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
        let weight = |token: usize| f64::from(logits[token]).exp();
        let total: f64 = as_they_are.iter().map(|&token| weight(token)).sum();
        let all = Sampling::default();
        // A share of all but the last bits puts tokens in order.
        let ordered = Sampling { top_p: Some(1.0 - 1e-9), ..all };
        for (sampling, order) in [(all, as_they_are), (ordered, by_likelihood.clone())] {
            for place in [0, 1, 254, 255, 256, 257, 511, 512, 513, 700, 1999] {
                let before: f64 = order[..place].iter().map(|&token| weight(token)).sum();
                let at = (before + weight(order[place]) / 2.0) / total;
                assert_eq!(choose(&logits, &sampling, at), order[place], "{sampling:?} {place}");
            }
        }
        let top_k = Sampling { top_k: Some(300), ..all };
        assert_eq!(choose(&logits, &top_k, 1.0 - 1e-9), by_likelihood[299]);
    }

    /// At the very ends of the shares, and where there is no number to go by.
    #[test]
    fn tokens_without_a_share_are_never_chosen() {
        let mut logits = vec![f32::NEG_INFINITY; 2000];
        logits[700] = 1.0;
        logits[1300] = 0.5;
        for (at, expected) in [(0.0, vec![700]), (1.0 - 1e-9, vec![1300]), (1.0, vec![700, 1300])] {
            let chosen = choose(&logits, &Sampling::default(), at);
            assert!(expected.contains(&chosen), "{at}: {chosen}");
        }
        choose(&[f32::NAN; 3], &Sampling::default(), 0.5);
        choose(&[f32::NEG_INFINITY; 3], &Sampling::default(), 0.5);
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

    /// Layers and parts of sums do not show: the choice is that of one list, sorted if there is a limit.
    #[test]
    fn choices_are_those_of_one_list() {
        let mut random = Random(5);
        for spread in [0.1f32, 3.0, 40.0] {
            let logits: Vec<f32> =
                (0..3001).map(|_| spread * (random.unit() as f32 * 2.0 - 1.0)).collect();
            for (top_k, top_p) in
                [(None, None), (Some(40), None), (None, Some(0.9)), (Some(700), Some(0.5))]
            {
                let temperature = 0.7;
                let sampling = Sampling { temperature, top_k, top_p, seed: 0 };
                for _ in 0..20 {
                    let at = random.unit();
                    let expected = by_sorting(&logits, &sampling, at);
                    assert_eq!(choose(&logits, &sampling, at), expected, "{sampling:?} {at}");
                }
            }
        }
    }

    /// Sorting would take 17 comparisons for each of so many tokens.
    #[test]
    fn flat_distributions_are_not_sorted() {
        let mut random = Random(3);
        let tokens: Vec<(usize, f64)> =
            (0..131_072).map(|token| (token, 1.0 + random.unit() / 100.0)).collect();
        let total: f64 = tokens.iter().map(|(_, weight)| weight).sum();
        let mut sorted = tokens.clone();
        sorted.sort_by(|a, b| b.1.total_cmp(&a.1));
        for share in [0.0, 0.1, 0.5, 0.9, 0.999] {
            let (mut tokens, comparisons) = (tokens.clone(), Cell::new(0));
            let likelier = |a: &(usize, f64), b: &(usize, f64)| {
                comparisons.set(comparisons.get() + 1);
                b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
            };
            let place = reaching(&mut tokens, likelier, |sum| sum > share * total);
            let place = place.expect("all together are enough");
            assert_eq!(tokens[place], sorted[place], "{share}");
            let sum: f64 = sorted[..place].iter().map(|(_, weight)| weight).sum();
            assert!((sum / total - share).abs() < 1e-4, "{share}: {sum} of {total}");
            assert!(comparisons.get() < 6 * tokens.len(), "{share}: {comparisons:?}");
        }
        assert_eq!(reaching(&mut tokens.clone(), |a, b| a.0.cmp(&b.0), |_| false), None);
        assert_eq!(reaching(&mut [], |a, b| a.0.cmp(&b.0), |_| true), None);
    }

    fn by_sorting(logits: &[f32], sampling: &Sampling, at: f64) -> usize {
        let mut order: Vec<usize> = (0..logits.len()).collect();
        let best = order.iter().copied().max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
        let largest = logits[best.expect("there are logits")];
        if sampling.top_k.is_some() || sampling.top_p.is_some() {
            order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
        }
        order.truncate(sampling.top_k.unwrap_or(logits.len()));
        let weight =
            |token: usize| (f64::from(logits[token] - largest) / sampling.temperature).exp();
        let mut weights: Vec<f64> = order.iter().map(|&token| weight(token)).collect();
        let total: f64 = weights.iter().sum();
        let mut sum = 0.0;
        let enough = |weight: &f64| {
            sum += weight;
            sum >= sampling.top_p.unwrap_or(2.0) * total
        };
        let count = weights.iter().position(enough).map_or(weights.len(), |last| last + 1);
        weights.truncate(count);
        let mut left = at * weights.iter().sum::<f64>();
        let place = weights.iter().position(|weight| {
            left -= weight;
            left < 0.0
        });
        order[place.unwrap_or(0)]
    }

    #[test]
    fn powers_of_two_have_seven_digits() {
        for step in 0..=12_600 {
            let x = -(step as f32) / 100.0;
            let (found, exact) = (f64::from(power_of_two(x)), f64::from(x).exp2());
            assert!((found / exact - 1.0).abs() < 3e-7, "{x}: {found} {exact}");
        }
        assert!(power_of_two(f32::NEG_INFINITY) < 2e-38);
    }
}

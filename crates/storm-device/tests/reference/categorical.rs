//! Categorical distributions, in block 0.

use super::Value;
use storm_graph::Op;
use storm_graph::random::{Purpose, Seed, Stream, words};

pub(super) fn evaluate(op: &Op<&Value>) -> Vec<Value> {
    let value = match *op {
        Op::Categorical { logits, classes, uniform } => {
            let uniform = f64::from(uniform);
            let of_group = |group: &[f64]| {
                let most = group.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = group.iter().map(|logit| (logit - most).exp()).sum();
                let share = |logit: &f64| (logit - most).exp() / sum;
                let mixed = |logit| (1.0 - uniform) * share(logit) + uniform / classes as f64;
                group.iter().map(mixed).collect::<Vec<f64>>()
            };
            let data = logits.data.chunks_exact(classes).flat_map(of_group).collect();
            Value::new(logits.shape.clone(), data)
        }
        Op::SampleClass { probabilities, random, classes, stream } => {
            let seed = Seed::from_words([0, 1, 2].map(|at| random.data[at] as i32));
            let stream = Stream { tensor: stream, layer: 0 };
            let of_group = |(number, group): (usize, &[f64])| {
                let word = words(seed, Purpose::Sampling, stream, number as u64 / 4)[number % 4];
                // 24 bits, as f32 holds them.
                let uniform = f64::from(word >> 8) / f64::from(1 << 24);
                let sums = (1..=classes).map(|count| group[..count].iter().sum::<f64>());
                let class = sums.into_iter().position(|sum| sum > uniform).unwrap_or(classes - 1);
                (0..classes).map(move |at| f64::from(u8::from(at == class))).collect::<Vec<f64>>()
            };
            let data = probabilities.data.chunks_exact(classes).enumerate().flat_map(of_group);
            Value::new(probabilities.shape.clone(), data.collect())
        }
        Op::Divergence { posterior, prior, free, .. } => {
            let of_row = |(q, p): (&[f64], &[f64])| {
                let sum: f64 = q.iter().zip(p).map(|(q, p)| q * (q / p).ln()).sum();
                sum.max(f64::from(free))
            };
            let data = posterior.rows().zip(prior.rows()).map(of_row).collect();
            Value::new(posterior.shape.row_shape(), data)
        }
        _ => unreachable!("not an op of distributions"),
    };
    vec![value]
}

//! Norms of gradients and updates; the updated values before they are rounded for storage.

use super::Value;
use storm_graph::Op;

pub(super) fn evaluate(op: &Op<&Value>) -> Vec<Value> {
    match op {
        Op::SumOfSquares { x } => vec![Value::scalar(x.data.iter().map(|x| x * x).sum())],
        Op::GlobalNorm { parts } => {
            vec![Value::scalar(parts.iter().map(|part| part.data[0]).sum::<f64>().sqrt())]
        }
        Op::ClipScale { norm, max_norm } => {
            let norm = norm.data[0];
            let scale = if norm.is_finite() { (f64::from(*max_norm) / norm).min(1.0) } else { 0.0 };
            vec![Value::scalar(scale)]
        }
        Op::AdamW {
            parameter,
            gradient,
            first_moment,
            second_moment,
            master,
            scalars,
            clip,
            hyper,
            ..
        } => {
            let [rate, first_correction, second_correction] = scalars.data[..] else {
                panic!("three scalars")
            };
            let clip = clip.map_or(1.0, |clip| clip.data[0]);
            let gradient = gradient.map(|g| clip * g);
            let (beta1, beta2) = (f64::from(hyper.beta1), f64::from(hyper.beta2));
            let first = first_moment.zip(&gradient, |m, g| beta1 * m + (1.0 - beta1) * g);
            let second = second_moment.zip(&gradient, |v, g| beta2 * v + (1.0 - beta2) * g * g);
            let direction = first.zip(&second, |m, v| {
                let root = (v / second_correction).sqrt() + f64::from(hyper.epsilon);
                m / first_correction / root
            });
            let decay = f64::from(hyper.weight_decay);
            let start = master.unwrap_or(*parameter);
            let updated = start.zip(&direction, |p, d| p - rate * (d + decay * p));
            let mut outputs = vec![updated.clone(), first, second];
            if master.is_some() {
                outputs.push(updated);
            }
            outputs
        }
        Op::Sgd { parameter, gradient, scalars, clip, weight_decay, .. } => {
            let rate = scalars.data[0];
            let clip = clip.map_or(1.0, |clip| clip.data[0]);
            let decay = f64::from(*weight_decay);
            vec![parameter.zip(gradient, |p, g| p - rate * (clip * g + decay * p))]
        }
        _ => unreachable!("not an optimizer op"),
    }
}

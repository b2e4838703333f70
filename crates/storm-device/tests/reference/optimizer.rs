//! Norms of gradients and updates; the updated values before they are rounded for storage.

use super::Value;
use storm_graph::{MomentumDirection, Op};

pub(super) fn evaluate(op: &Op<&Value>) -> Vec<Value> {
    match op {
        Op::SumOfSquares { x } => vec![Value::scalar(x.data.iter().map(|x| x * x).sum())],
        Op::SumOfPartials { partials } => vec![Value::scalar(partials.data.iter().sum())],
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
        Op::Sgd { parameter, gradient, momentum, master, scalars, clip, hyper, .. } => {
            let rate = scalars.data[0];
            let clip = clip.map_or(1.0, |clip| clip.data[0]);
            let (decay, share) = (f64::from(hyper.weight_decay), f64::from(hyper.momentum));
            let start = master.unwrap_or(*parameter);
            let whole = start.zip(gradient, |p, g| clip * g + decay * p);
            let moved = momentum.map(|momentum| momentum.zip(&whole, |m, g| share * m + g));
            let direction = match (&moved, hyper.direction) {
                (None, _) => whole,
                (Some(moved), MomentumDirection::Momentum) => moved.clone(),
                (Some(moved), MomentumDirection::Nesterov) => {
                    whole.zip(moved, |g, m| g + share * m)
                }
            };
            let updated = start.zip(&direction, |p, d| p - rate * d);
            let master = master.map(|_| updated.clone());
            [Some(updated), moved, master].into_iter().flatten().collect()
        }
        _ => unreachable!("not an optimizer op"),
    }
}

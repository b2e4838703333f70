//! Norms of channels over a batch.

use super::Value;
use storm_graph::{NormActivation, Op, Shape};

pub(super) fn evaluate(op: &Op<&Value>) -> Vec<Value> {
    match *op {
        Op::BatchStatistics { x, running_mean, running_variance, phase } => {
            if phase.data[0] == 0.0 {
                return vec![
                    running_mean.clone(),
                    running_variance.clone(),
                    running_variance.clone(),
                ];
            }
            let width = x.shape.width();
            let rows = x.shape.rows() as f64;
            let column = |c: usize| x.rows().map(move |row| row[c]);
            let mean: Vec<f64> = (0..width).map(|c| column(c).sum::<f64>() / rows).collect();
            let squares: Vec<f64> = (0..width)
                .map(|c| column(c).map(|x| (x - mean[c]) * (x - mean[c])).sum())
                .collect();
            let divided = |by: f64| squares.iter().map(|s| s / by).collect();
            let outputs = [mean.clone(), divided(rows), divided((rows - 1.0).max(1.0))];
            outputs.map(|data| Value::new(Shape::from([width]), data)).to_vec()
        }
        Op::BatchNorm { x, mean, variance, weight, bias, addend, epsilon, activation } => {
            let mut data = Vec::new();
            for (row, values) in x.rows().enumerate() {
                for (c, value) in values.iter().enumerate() {
                    let rstd = 1.0 / (variance.data[c] + f64::from(epsilon)).sqrt();
                    let addend = addend.map_or(0.0, |a| a.data[row * values.len() + c]);
                    let y = (value - mean.data[c]) * rstd * weight.data[c] + bias.data[c] + addend;
                    data.push(match activation {
                        NormActivation::None => y,
                        NormActivation::Relu => y.max(0.0),
                    });
                }
            }
            vec![Value::new(x.shape.clone(), data)]
        }
        Op::GroupNorm { x, weight, bias, addend, groups, epsilon, activation } => {
            let (batch, width) = (x.shape.axes()[0], x.shape.width());
            let (sample, size) = (x.data.len() / batch, width / groups);
            let (mut y, mut means, mut rstds) = (Vec::new(), Vec::new(), Vec::new());
            for values in x.data.chunks(sample) {
                for group in 0..groups {
                    let own: Vec<f64> = (0..sample)
                        .filter(|i| i % width / size == group)
                        .map(|i| values[i])
                        .collect();
                    let mean = own.iter().sum::<f64>() / own.len() as f64;
                    let squares = own.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>();
                    means.push(mean);
                    rstds.push(1.0 / (squares / own.len() as f64 + f64::from(epsilon)).sqrt());
                }
            }
            for (i, value) in x.data.iter().enumerate() {
                let (channel, group) = (i % width, i / sample * groups + i % width / size);
                let normal = (value - means[group]) * rstds[group];
                let value = normal * weight.data[channel]
                    + bias.data[channel]
                    + addend.map_or(0.0, |addend| addend.data[i]);
                y.push(if activation == NormActivation::Relu { value.max(0.0) } else { value });
            }
            let of_groups = Shape::from([batch, groups]);
            vec![
                Value::new(x.shape.clone(), y),
                Value::new(of_groups.clone(), means),
                Value::new(of_groups, rstds),
            ]
        }
        _ => unreachable!("not a norm of channels"),
    }
}

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
        _ => unreachable!("not a batch norm"),
    }
}

//! Losses of rows whose targets are numbers.

use super::Value;
use storm_graph::Op;

pub(super) fn evaluate(op: &Op<&Value>) -> Vec<Value> {
    let value = match *op {
        Op::SquaredError { x, target } => {
            let of_row = |(x, target): (&[f64], &[f64])| {
                x.iter().zip(target).map(|(x, target)| (x - target).powi(2) / 2.0).sum()
            };
            let data = x.rows().zip(target.rows()).map(of_row).collect();
            Value::new(x.shape.row_shape(), data)
        }
        Op::OutcomeLoss { heads, change, accepted } => {
            let of_row = |(row, heads): (usize, &[f64])| {
                let &[mean, log_variance, logit] = heads else { unreachable!("three heads") };
                let of_change = (change.data[row] - mean).powi(2) / log_variance.exp();
                // The probability of what happened.
                let sign = if accepted.data[row] == 1.0 { 1.0 } else { -1.0 };
                (log_variance + of_change) / 2.0 + (-sign * logit).exp().ln_1p()
            };
            let data = heads.rows().enumerate().map(of_row).collect();
            Value::new(heads.shape.row_shape(), data)
        }
        _ => unreachable!("not a loss of rows"),
    };
    vec![value]
}

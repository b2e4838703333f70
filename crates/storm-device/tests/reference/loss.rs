//! The head and its cross-entropy, all logits of a row at once.

use super::Value;
use storm_graph::{IGNORE_INDEX, Op};

pub(super) fn evaluate(op: &Op<&Value>) -> Vec<Value> {
    let Op::HeadLoss { hidden, weight, targets, denominator, .. } = *op else {
        unreachable!("not a loss op")
    };
    let row_loss = |(row, &target): (&[f64], &f64)| {
        if target == f64::from(IGNORE_INDEX) {
            return 0.0;
        }
        let logits: Vec<f64> =
            weight.rows().map(|column| row.iter().zip(column).map(|(a, b)| a * b).sum()).collect();
        let highest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = logits.iter().map(|l| (l - highest).exp()).sum();
        (highest + sum.ln() - logits[target as usize]) / denominator.data[0]
    };
    let data = hidden.rows().zip(&targets.data).map(row_loss).collect();
    vec![Value::new(targets.shape.clone(), data)]
}

//! The head and its cross-entropy, all logits of a row at once.

use super::Value;
use storm_graph::{Accuracy, IGNORE_INDEX, Op};

pub(super) fn evaluate(op: &Op<&Value>) -> Vec<Value> {
    let Op::HeadLoss { hidden, weight, targets, denominator, label_smoothing, accuracy, .. } = *op
    else {
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
        let log_sum = highest + sum.ln();
        // What is expected under the smoothed target.
        let smoothing = f64::from(label_smoothing);
        let share = |class: usize| {
            let own = if class == target as usize { 1.0 - smoothing } else { 0.0 };
            own + smoothing / logits.len() as f64
        };
        let loss: f64 = logits.iter().enumerate().map(|(i, l)| share(i) * (log_sum - l)).sum();
        loss / denominator.data[0]
    };
    let data = hidden.rows().zip(&targets.data).map(row_loss).collect();
    let mut outputs = vec![Value::new(targets.shape.clone(), data)];
    if accuracy == Accuracy::Compute {
        let is_right = |(row, &target): (&[f64], &f64)| {
            let logits: Vec<f64> = weight
                .rows()
                .map(|column| row.iter().zip(column).map(|(a, b)| a * b).sum())
                .collect();
            let highest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let first = logits.iter().position(|&l| l == highest);
            f64::from(u8::from(first == Some(target as usize) && target >= 0.0))
        };
        let data = hidden.rows().zip(&targets.data).map(is_right).collect();
        outputs.push(Value::new(targets.shape.clone(), data));
    }
    outputs
}

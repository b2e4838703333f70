//! Norms over rows and over heads.

use super::Value;
use storm_graph::{NormKind, Op, RotaryDirection};

pub(super) fn evaluate(op: &Op<&Value>) -> Vec<Value> {
    match *op {
        Op::Norm { x, delta, weight, bias, kind, epsilon } => {
            let sum = delta.map_or_else(|| x.clone(), |delta| x.zip(delta, |a, b| a + b));
            let (mut y, mut rstds, mut means) = (Vec::new(), Vec::new(), Vec::new());
            for row in sum.rows() {
                let mean = match kind {
                    NormKind::Layer => average(row.iter().copied()),
                    NormKind::Rms => 0.0,
                };
                let variance = average(row.iter().map(|x| (x - mean) * (x - mean)));
                let rstd = 1.0 / (variance + f64::from(epsilon)).sqrt();
                for (c, x) in row.iter().enumerate() {
                    let bias = bias.map_or(0.0, |bias| bias.data[c]);
                    y.push((x - mean) * rstd * weight.data[c] + bias);
                }
                rstds.push(rstd);
                means.push(mean);
            }
            let row_shape = x.shape.row_shape();
            let mut outputs =
                vec![Value::new(x.shape.clone(), y), Value::new(row_shape.clone(), rstds)];
            if kind == NormKind::Layer {
                outputs.push(Value::new(row_shape, means));
            }
            if delta.is_some() {
                outputs.push(sum);
            }
            outputs
        }
        Op::QkNorm { qkv, query_weight, key_weight, table, heads, epsilon } => {
            let mut y = qkv.data.clone();
            let mut rstds = Vec::new();
            for row in y.chunks_exact_mut(heads.qkv_width()) {
                let normed = row.chunks_exact_mut(heads.head_dim).take(heads.query_key_heads());
                for (h, head) in normed.enumerate() {
                    let weight = if h < heads.query_heads { query_weight } else { key_weight };
                    let square = average(head.iter().map(|x| x * x));
                    let rstd = 1.0 / (square + f64::from(epsilon)).sqrt();
                    head.iter_mut().zip(&weight.data).for_each(|(x, w)| *x *= rstd * w);
                    rstds.push(rstd);
                }
            }
            let rstd_shape = qkv.shape.with_width(heads.query_key_heads());
            let mut y = Value::new(qkv.shape.clone(), y);
            if let Some(table) = table {
                let direction = RotaryDirection::Forward;
                y = super::attention::evaluate(&Op::Rotary { qkv: &y, table, heads, direction })
                    .remove(0);
            }
            vec![y, Value::new(rstd_shape, rstds)]
        }
        _ => unreachable!("not a norm op"),
    }
}

fn average(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = values.len() as f64;
    values.sum::<f64>() / count
}

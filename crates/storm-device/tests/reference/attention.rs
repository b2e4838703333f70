//! Rotary embeddings and attention, the latter with the whole (T, T) matrix of one head.

use super::Value;
use storm_graph::{HeadLayout, Mask, Op, RotaryDirection, Shape};

pub(super) fn evaluate(op: &Op<&Value>) -> Vec<Value> {
    match *op {
        Op::RotaryTable { positions, ref frequencies } => {
            let mut data = Vec::new();
            let factor = f64::from(frequencies.factor);
            for &position in &positions.data {
                for &frequency in frequencies.inverse_wavelengths.iter() {
                    let angle = position * f64::from(frequency);
                    data.extend([factor * angle.cos(), factor * angle.sin()]);
                }
            }
            vec![Value::new(positions.shape.then(frequencies.pairs()).then(2), data)]
        }
        Op::Rotary { qkv, table, heads, direction } => {
            let pairs = table.shape.axes()[2];
            let sign = match direction {
                RotaryDirection::Forward => 1.0,
                RotaryDirection::Inverse => -1.0,
            };
            let mut data = qkv.data.clone();
            let rows = data.chunks_exact_mut(heads.qkv_width());
            for (row, angles) in rows.zip(table.data.chunks_exact(2 * pairs)) {
                let turned = row.chunks_exact_mut(heads.head_dim).take(heads.query_key_heads());
                for head in turned {
                    for i in 0..pairs {
                        let (cos, sin) = (angles[2 * i], sign * angles[2 * i + 1]);
                        let (a, b) = (head[i], head[i + pairs]);
                        head[i] = a * cos - b * sin;
                        head[i + pairs] = b * cos + a * sin;
                    }
                }
            }
            vec![Value::new(qkv.shape.clone(), data)]
        }
        Op::Attention { qkv, segments, heads, mask, scale } => {
            attention(qkv, segments, &heads, mask, f64::from(scale))
        }
        _ => unreachable!("not an attention op"),
    }
}

fn attention(
    qkv: &Value,
    segments: Option<&Value>,
    heads: &HeadLayout,
    mask: Mask,
    scale: f64,
) -> Vec<Value> {
    let &[batch, time, width] = qkv.shape.axes() else { panic!("qkv has three axes") };
    let (query_heads, dim) = (heads.query_heads, heads.head_dim);
    let group = query_heads / heads.key_value_heads;
    let mut y = vec![0.0; batch * time * heads.query_width()];
    let mut log_sum_exp = vec![0.0; batch * query_heads * time];
    for b in 0..batch {
        let head = |t: usize, h: usize| &qkv.data[(b * time + t) * width + h * dim..][..dim];
        let sees = |query: usize, key: usize| {
            let same = segments.is_none_or(|s| s.data[b * time + query] == s.data[b * time + key]);
            same && (mask == Mask::Full || key <= query)
                && query < key + mask.window().unwrap_or(time)
        };
        for h in 0..query_heads {
            let key_head = query_heads + h / group;
            let value_head = key_head + heads.key_value_heads;
            for query in 0..time {
                let logits: Vec<(usize, f64)> = (0..time)
                    .filter(|&key| sees(query, key))
                    .map(|key| {
                        let pairs = head(query, h).iter().zip(head(key, key_head));
                        (key, scale * pairs.map(|(q, k)| q * k).sum::<f64>())
                    })
                    .collect();
                let highest = logits.iter().fold(f64::NEG_INFINITY, |m, &(_, l)| m.max(l));
                let sum: f64 = logits.iter().map(|&(_, l)| (l - highest).exp()).sum();
                log_sum_exp[(b * query_heads + h) * time + query] = highest + sum.ln();
                let out = &mut y[((b * time + query) * query_heads + h) * dim..][..dim];
                for (key, logit) in logits {
                    let p = (logit - highest).exp() / sum;
                    out.iter_mut().zip(head(key, value_head)).for_each(|(y, v)| *y += p * v);
                }
            }
        }
    }
    vec![
        Value::new(qkv.shape.with_width(heads.query_width()), y),
        Value::new(Shape::from([batch, query_heads, time]), log_sum_exp),
    ]
}

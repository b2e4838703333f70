//! Tables, projections and sums over rows.

use super::Value;
use storm_graph::{Op, Shape};

pub(super) fn evaluate(op: &Op<&Value>) -> Vec<Value> {
    let value = match *op {
        Op::Embedding { ids, table } => {
            let width = table.shape.width();
            let rows: Vec<&[f64]> = table.rows().collect();
            let data = ids.data.iter().flat_map(|&id| rows[id as usize]).copied().collect();
            Value::new(ids.shape.then(width), data)
        }
        Op::Linear { x, weight, bias, addend } => {
            let mut data = Vec::new();
            for row in x.rows() {
                for (n, column) in weight.rows().enumerate() {
                    let dot: f64 = row.iter().zip(column).map(|(a, b)| a * b).sum();
                    let bias = bias.map_or(0.0, |bias| bias.data[n]);
                    let addend = addend.map_or(0.0, |addend| addend.data[data.len()]);
                    data.push(dot + bias + addend);
                }
            }
            Value::new(x.shape.with_width(weight.shape.rows()), data)
        }
        Op::ColumnSum { x, accumulator, .. } => {
            let width = x.shape.width();
            let mut data = accumulator.map_or(vec![0.0; width], |start| start.data.clone());
            for row in x.rows() {
                data.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
            }
            Value::new(Shape::from([width]), data)
        }
        _ => unreachable!("not a linear op"),
    };
    vec![value]
}

//! Full sums and rearrangements.

use super::Value;
use storm_graph::{Op, Shape};

pub(super) fn evaluate(op: &Op<&Value>) -> Vec<Value> {
    let value = match op {
        Op::Sum { x } => Value::scalar(x.data.iter().sum()),
        Op::Broadcast { x, shape, .. } => {
            Value::new(shape.clone(), vec![x.data[0]; shape.elements()])
        }
        Op::Fill { shape, value, .. } => {
            Value::new(shape.clone(), vec![f64::from(*value); shape.elements()])
        }
        Op::Reshape { x, shape } => Value::new(shape.clone(), x.data.clone()),
        Op::Transpose { x, axes } => transpose(x, axes),
        Op::Convert { x, .. } => (*x).clone(),
        Op::BlockMatrix { parts, places, shape, .. } => {
            let mut data = vec![0.0; shape.elements()];
            for (part, place) in parts.iter().zip(places) {
                for (row, values) in part.data.chunks(part.shape.width()).enumerate() {
                    for (column, value) in values.iter().enumerate() {
                        let at = (place.row + row) * shape.width() + place.column + column;
                        data[at] = value * f64::from(place.factor);
                    }
                }
            }
            Value::new(shape.clone(), data)
        }
        _ => unreachable!("not a reshaping op"),
    };
    vec![value]
}

fn transpose(x: &Value, axes: &[usize]) -> Value {
    let extents: Vec<usize> = axes.iter().map(|&axis| x.shape.axes()[axis]).collect();
    let shape = Shape::from(&extents[..]);
    let data = (0..shape.elements())
        .map(|to| {
            // Index along each axis of the result, placed at the axis of `x` that it comes from.
            let mut index = vec![0; axes.len()];
            let mut rest = to;
            for (&axis, &extent) in axes.iter().zip(&extents).rev() {
                index[axis] = rest % extent;
                rest /= extent;
            }
            let from =
                index.iter().zip(x.shape.axes()).fold(0, |at, (&i, &extent)| at * extent + i);
            x.data[from]
        })
        .collect();
    Value::new(shape, data)
}

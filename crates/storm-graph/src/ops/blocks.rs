//! Matrices composed of smaller ones, and their gradients.

use super::rules;
use crate::autodiff::Backward;
use crate::graph::Output;
use crate::{BlockPlace, GraphError, Op, Shape, Tensor, TensorId};

pub(super) fn infer(op: &Op<&Tensor>) -> Result<Vec<Output>, String> {
    match op {
        Op::BlockMatrix { parts, places, shape, dtype } => {
            let Some(first) = parts.first() else { return Err("`parts` is empty".to_owned()) };
            if parts.len() != places.len() {
                return Err(format!("{} parts have {} places", parts.len(), places.len()));
            }
            if shape.rank() != 2 || !dtype.is_float() {
                return Err(format!("makes an f32 or bf16 matrix, not {dtype} {shape}"));
            }
            let mut free_row = 0;
            for (part, place) in parts.iter().zip(places) {
                rules::float("parts", part)?;
                rules::dtype("parts", part, first.dtype)?;
                rules::rank("parts", part, 2)?;
                if place.row < free_row {
                    return Err(format!(
                        "a part begins at row {}, before row {free_row}, where the one before it ends",
                        place.row
                    ));
                }
                free_row = check_place(place, &part.shape, shape)?;
            }
            Ok(vec![Output::activation("", shape.clone(), *dtype)])
        }
        Op::BlockGrad { dy, accumulator, place, shape, dtype } => {
            rules::float("dy", dy)?;
            rules::rank("dy", dy, 2)?;
            if shape.rank() != 2 {
                return Err(format!("makes a matrix, not {shape}"));
            }
            rules::gradient_dtype(*dtype)?;
            check_place(place, shape, &dy.shape)?;
            rules::maybe("accumulator", accumulator.as_ref(), shape, *dtype)?;
            Ok(vec![Output::gradient("", shape.clone(), *dtype)])
        }
        _ => unreachable!("not an op of blocks"),
    }
}

/// Checks that a block lies inside a matrix, and returns the row after its last.
fn check_place(place: &BlockPlace, block: &Shape, matrix: &Shape) -> Result<usize, String> {
    let end = |first: usize, axis: usize| {
        first.checked_add(block.axes()[axis]).filter(|&end| end <= matrix.axes()[axis])
    };
    match (end(place.row, 0), end(place.column, 1)) {
        (Some(row_end), Some(_)) => Ok(row_end),
        _ => Err(format!(
            "a block of {block} at row {} and column {} does not fit {matrix}",
            place.row, place.column
        )),
    }
}

pub(super) fn backward(op: &Op<TensorId>, ctx: &mut Backward<'_>) -> Result<(), GraphError> {
    let Op::BlockMatrix { parts, places, .. } = op else { unreachable!("not a block matrix") };
    let Some(dy) = ctx.output_gradient(0) else { return Ok(()) };
    for (index, (&part, &place)) in parts.iter().zip(places).enumerate() {
        if !ctx.wants(part) {
            continue;
        }
        let (accumulator, dtype) = ctx.parameter_accumulator(part);
        let shape = ctx.tensor(part).shape.clone();
        let op = Op::BlockGrad { dy, accumulator, place, shape, dtype };
        let gradient = ctx.apply(&format!("{index}.grad"), op)?;
        ctx.set_parameter_gradient(part, gradient[0])?;
    }
    Ok(())
}

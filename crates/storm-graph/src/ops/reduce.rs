//! Sums, and the broadcast that is their gradient.

use super::rules;
use crate::autodiff::Backward;
use crate::graph::Output;
use crate::{DType, GraphError, Op, Shape, Tensor, TensorId};

/// Rows per partial sum of a column reduction. Part of the semantics: it fixes the order of
/// additions on every device and for any number of threads.
pub const ROWS_PER_PARTIAL: usize = 32;

/// Rows per partial sum in the gradient of a norm with this many rows. Also part of the semantics. A block of rows is also
/// the work of one block of threads, so few rows are divided into smaller blocks: a GPU needs a few hundred of them to
/// keep its memory busy.
pub fn norm_rows_per_partial(rows: usize) -> usize {
    (rows / NORM_BLOCKS).next_power_of_two().clamp(8, ROWS_PER_PARTIAL)
}

/// Blocks that the rows of a norm are divided into, roughly, if there are at least eight for each.
const NORM_BLOCKS: usize = 256;

/// Elements per partial sum of a full reduction. Also part of the semantics.
pub const SUM_BLOCK: usize = 1 << 16;

/// Scratch for partial sums over blocks of `rows_per_partial` of `rows` rows.
pub(super) fn partials(rows: usize, rows_per_partial: usize, width: usize) -> Output {
    let shape = Shape::from([rows.div_ceil(rows_per_partial), width]);
    Output::scratch("partials", shape, DType::F32)
}

/// Scratch for partial sums over blocks of [`SUM_BLOCK`] elements.
pub(super) fn block_partials(x: &Tensor) -> Output {
    let shape = Shape::from([x.shape.elements().div_ceil(SUM_BLOCK)]);
    Output::scratch("partials", shape, DType::F32)
}

pub(super) fn infer(op: &Op<&Tensor>) -> Result<Vec<Output>, String> {
    match op {
        Op::ColumnSum { x, accumulator, dtype } => {
            rules::float("x", x)?;
            rules::rank_at_least("x", x, 1)?;
            rules::gradient_dtype(*dtype)?;
            let columns = Shape::from([x.shape.width()]);
            rules::maybe("accumulator", accumulator.as_ref(), &columns, *dtype)?;
            Ok(vec![
                Output::gradient("", columns, *dtype),
                partials(x.shape.rows(), ROWS_PER_PARTIAL, x.shape.width()),
            ])
        }
        Op::Sum { x } => {
            rules::float("x", x)?;
            Ok(vec![Output::activation("", Shape::scalar(), DType::F32), block_partials(x)])
        }
        Op::Broadcast { x, shape, dtype } => {
            rules::scalar("x", x)?;
            if !dtype.is_float() {
                return Err(format!("cannot broadcast into {dtype}"));
            }
            Ok(vec![Output::activation("", shape.clone(), *dtype)])
        }
        _ => unreachable!("not a reduction"),
    }
}

pub(super) fn backward(op: &Op<TensorId>, ctx: &mut Backward<'_>) -> Result<(), GraphError> {
    let Some(dy) = ctx.output_gradient(0) else { return Ok(()) };
    match *op {
        Op::Sum { x } => {
            let Tensor { shape, dtype, .. } = ctx.tensor(x).clone();
            let gradient = ctx.apply("grad", Op::Broadcast { x: dy, shape, dtype })?;
            ctx.add_gradient(x, gradient[0])
        }
        Op::Broadcast { x, .. } => {
            let gradient = ctx.apply("grad", Op::Sum { x: dy })?;
            ctx.add_gradient(x, gradient[0])
        }
        // Column sums are used only in backward rules.
        Op::ColumnSum { .. } => Err(ctx.not_differentiable()),
        _ => unreachable!("not a reduction"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_rows_are_divided_into_smaller_blocks() {
        let rows = [0, 1, 1024, 2048, 2304, 4096, 8191, 8192, 1 << 20];
        assert_eq!(rows.map(norm_rows_per_partial), [8, 8, 8, 8, 16, 16, 32, 32, 32]);
    }
}

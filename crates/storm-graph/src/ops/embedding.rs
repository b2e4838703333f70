//! Embedding lookup and its sorted-segment gradient.

use super::rules;
use crate::autodiff::Backward;
use crate::graph::Output;
use crate::{DType, GraphError, Op, Shape, Tensor, TensorId};

pub(super) fn infer(op: &Op<&Tensor>) -> Result<Vec<Output>, String> {
    match op {
        Op::Embedding { ids, table } => {
            rules::dtype("ids", ids, DType::I32)?;
            rules::float("table", table)?;
            rules::rank("table", table, 2)?;
            Ok(vec![Output::activation("", ids.shape.then(table.shape.width()), table.dtype)])
        }
        Op::EmbeddingGrad { dy, ids, order, accumulator, table_rows, dtype } => {
            rules::dtype("ids", ids, DType::I32)?;
            rules::dtype("order", order, DType::I32)?;
            rules::shape("order", order, &ids.shape)?;
            rules::float("dy", dy)?;
            rules::gradient_dtype(*dtype)?;
            let width = dy.shape.width();
            rules::shape("dy", dy, &ids.shape.then(width))?;
            let table = Shape::from([*table_rows, width]);
            rules::maybe("accumulator", accumulator.as_ref(), &table, *dtype)?;
            Ok(vec![Output::gradient("", table, *dtype)])
        }
        _ => unreachable!("not an embedding op"),
    }
}

pub(super) fn backward(op: &Op<TensorId>, ctx: &mut Backward<'_>) -> Result<(), GraphError> {
    let Op::Embedding { ids, table } = *op else { unreachable!("not an embedding op") };
    let dy = ctx.output_gradient(0);
    let (true, Some(dy)) = (ctx.wants(table), dy) else { return Ok(()) };
    let order = ctx.sorted_order(ids)?;
    let table_rows = ctx.tensor(table).shape.rows();
    let (accumulator, dtype) = ctx.parameter_accumulator(table);
    let gradient = ctx.apply(
        "table.grad",
        Op::EmbeddingGrad { dy, ids, order, accumulator, table_rows, dtype },
    )?;
    ctx.set_parameter_gradient(table, gradient[0])
}

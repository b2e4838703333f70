//! Losses of rows whose targets are numbers: squared error, and the outcome of a prediction.

use super::rules;
use crate::autodiff::Backward;
use crate::graph::Output;
use crate::{DType, GraphError, Op, Shape, Tensor, TensorId};

/// Mean, log variance, logit of acceptance.
const OUTCOME_HEADS: usize = 3;

pub(super) fn infer(op: &Op<&Tensor>) -> Result<Vec<Output>, String> {
    match op {
        Op::SquaredError { x, target } => {
            let rows = check_distance(x, target)?;
            Ok(vec![Output::activation("", rows, DType::F32)])
        }
        Op::SquaredErrorGrad { d_row_loss, x, target } => {
            let rows = check_distance(x, target)?;
            check_rows("d_row_loss", d_row_loss, &rows)?;
            Ok(vec![Output::activation("", x.shape.clone(), x.dtype)])
        }
        Op::OutcomeLoss { heads, change, accepted } => {
            let rows = check_outcome(heads, change, accepted)?;
            Ok(vec![Output::activation("", rows, DType::F32)])
        }
        Op::OutcomeLossGrad { d_row_loss, heads, change, accepted } => {
            let rows = check_outcome(heads, change, accepted)?;
            check_rows("d_row_loss", d_row_loss, &rows)?;
            Ok(vec![Output::activation("", heads.shape.clone(), heads.dtype)])
        }
        _ => unreachable!("not a loss of rows"),
    }
}

fn check_distance(x: &Tensor, target: &Tensor) -> Result<Shape, String> {
    rules::float("x", x)?;
    rules::rank_at_least("x", x, 1)?;
    rules::like("target", target, "x", x)?;
    Ok(x.shape.row_shape())
}

fn check_outcome(heads: &Tensor, change: &Tensor, accepted: &Tensor) -> Result<Shape, String> {
    rules::float("heads", heads)?;
    rules::rank_at_least("heads", heads, 1)?;
    rules::shape("heads", heads, &heads.shape.with_width(OUTCOME_HEADS))?;
    let rows = heads.shape.row_shape();
    check_rows("change", change, &rows)?;
    check_rows("accepted", accepted, &rows)?;
    Ok(rows)
}

/// Checks a number for each row.
fn check_rows(role: &str, tensor: &Tensor, rows: &Shape) -> rules::Check {
    rules::shape(role, tensor, rows)?;
    rules::dtype(role, tensor, DType::F32)
}

pub(super) fn backward(op: &Op<TensorId>, ctx: &mut Backward<'_>) -> Result<(), GraphError> {
    let Some(d_row_loss) = ctx.output_gradient(0) else { return Ok(()) };
    let (operand, targets, gradient) = match *op {
        Op::SquaredError { x, target } => {
            (x, vec![target], Op::SquaredErrorGrad { d_row_loss, x, target })
        }
        Op::OutcomeLoss { heads, change, accepted } => {
            let gradient = Op::OutcomeLossGrad { d_row_loss, heads, change, accepted };
            (heads, vec![change, accepted], gradient)
        }
        _ => unreachable!("not a loss of rows"),
    };
    if targets.into_iter().any(|target| ctx.wants(target)) {
        return Err(ctx.not_differentiable());
    }
    let gradient = ctx.apply("grad", gradient)?;
    ctx.add_gradient(operand, gradient[0])
}

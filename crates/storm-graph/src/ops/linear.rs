//! Projections `x · weightᵀ` and their two gradients.

use super::rules;
use crate::autodiff::Backward;
use crate::graph::Output;
use crate::{GraphError, Op, Shape, Tensor, TensorId};

pub(super) fn infer(op: &Op<&Tensor>) -> Result<Vec<Output>, String> {
    match op {
        Op::Linear { x, weight, bias, addend } => {
            check_weight("x", x, weight, 1)?;
            let outputs = weight.shape.axes()[0];
            let y = x.shape.with_width(outputs);
            rules::maybe("bias", bias.as_ref(), &Shape::from([outputs]), weight.dtype)?;
            rules::maybe("addend", addend.as_ref(), &y, x.dtype)?;
            Ok(vec![Output::activation("", y, x.dtype)])
        }
        Op::LinearInputGrad { dy, weight, addend } => {
            check_weight("dy", dy, weight, 0)?;
            let dx = dy.shape.with_width(weight.shape.axes()[1]);
            rules::maybe("addend", addend.as_ref(), &dx, dy.dtype)?;
            Ok(vec![Output::activation("", dx, dy.dtype)])
        }
        Op::LinearWeightGrad { dy, x, accumulator, dtype } => {
            rules::float("dy", dy)?;
            rules::dtype("x", x, dy.dtype)?;
            rules::rank_at_least("dy", dy, 1)?;
            rules::shape("x", x, &dy.shape.with_width(x.shape.width()))?;
            rules::gradient_dtype(*dtype)?;
            let weight = Shape::from([dy.shape.width(), x.shape.width()]);
            rules::maybe("accumulator", accumulator.as_ref(), &weight, *dtype)?;
            Ok(vec![Output::gradient("", weight, *dtype)])
        }
        _ => unreachable!("not a linear op"),
    }
}

/// Checks that the rows of `x` match axis `axis` of `weight`.
fn check_weight(role: &str, x: &Tensor, weight: &Tensor, axis: usize) -> Result<(), String> {
    rules::float(role, x)?;
    rules::rank_at_least(role, x, 1)?;
    rules::rank("weight", weight, 2)?;
    rules::dtype("weight", weight, x.dtype)?;
    let (width, wanted) = (x.shape.width(), weight.shape.axes()[axis]);
    if width != wanted {
        return Err(format!("`{role}` is {width} wide, but `weight` takes {wanted}"));
    }
    Ok(())
}

pub(super) fn backward(op: &Op<TensorId>, ctx: &mut Backward<'_>) -> Result<(), GraphError> {
    let Op::Linear { x, weight, bias, addend } = *op else { unreachable!("not a linear op") };
    let Some(dy) = ctx.output_gradient(0) else { return Ok(()) };
    if ctx.wants(weight) {
        let (accumulator, dtype) = ctx.parameter_accumulator(weight);
        let gradient =
            ctx.apply("weight.grad", Op::LinearWeightGrad { dy, x, accumulator, dtype })?;
        ctx.set_parameter_gradient(weight, gradient[0])?;
    }
    if let Some(bias) = bias.filter(|&bias| ctx.wants(bias)) {
        let (accumulator, dtype) = ctx.parameter_accumulator(bias);
        let gradient = ctx.apply("bias.grad", Op::ColumnSum { x: dy, accumulator, dtype })?;
        ctx.set_parameter_gradient(bias, gradient[0])?;
    }
    if let Some(addend) = addend {
        ctx.add_gradient(addend, dy)?;
    }
    if ctx.wants(x) {
        let addend = ctx.take_gradient(x);
        let dx = ctx.apply("x.grad", Op::LinearInputGrad { dy, weight, addend })?;
        ctx.add_gradient(x, dx[0])?;
    }
    Ok(())
}

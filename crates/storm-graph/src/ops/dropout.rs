//! Dropout. Its mask is a function of a counter, so the gradient regenerates it.

use super::rules;
use crate::autodiff::Backward;
use crate::graph::Output;
use crate::random::DROPOUT_WORDS;
use crate::{DType, GraphError, Op, Shape, Tensor, TensorId};

pub(super) fn infer(op: &Op<&Tensor>) -> Result<Vec<Output>, String> {
    let Op::Dropout { x, random, addend, rate, .. } = op else { unreachable!("not dropout") };
    rules::float("x", x)?;
    rules::dtype("random", random, DType::I32)?;
    rules::shape("random", random, &Shape::from([DROPOUT_WORDS]))?;
    rules::maybe("addend", addend.as_ref(), &x.shape, x.dtype)?;
    if !(0.0..1.0).contains(rate) {
        return Err(format!("the rate must be at least 0 and less than 1, not {rate}"));
    }
    Ok(vec![Output::activation("", x.shape.clone(), x.dtype)])
}

pub(super) fn backward(op: &Op<TensorId>, ctx: &mut Backward<'_>) -> Result<(), GraphError> {
    let Op::Dropout { x, random, addend, rate, stream } = *op else { unreachable!("not dropout") };
    let Some(dy) = ctx.output_gradient(0) else { return Ok(()) };
    if let Some(addend) = addend {
        ctx.add_gradient(addend, dy)?;
    }
    if ctx.wants(x) {
        let addend = ctx.take_gradient(x);
        let gradient = ctx.apply("x.grad", Op::Dropout { x: dy, random, addend, rate, stream })?;
        ctx.add_gradient(x, gradient[0])?;
    }
    Ok(())
}

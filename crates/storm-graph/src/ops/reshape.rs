//! Changes of shape, order or dtype, and tensors without operands.

use super::rules;
use crate::autodiff::Backward;
use crate::graph::Output;
use crate::{DType, GraphError, Op, Shape, Tensor, TensorId};

pub(super) fn infer(op: &Op<&Tensor>) -> Result<Vec<Output>, String> {
    match op {
        Op::Reshape { x, shape } => {
            if shape.elements() != x.shape.elements() {
                return Err(format!(
                    "cannot reshape {} ({} elements) into {shape} ({} elements)",
                    x.shape,
                    x.shape.elements(),
                    shape.elements()
                ));
            }
            Ok(vec![Output::activation("", shape.clone(), x.dtype)])
        }
        Op::Transpose { x, axes } => {
            let mut sorted = axes.clone();
            sorted.sort_unstable();
            if !sorted.iter().copied().eq(0..x.shape.rank()) {
                return Err(format!("{axes:?} does not reorder the axes of {}", x.shape));
            }
            let shape: Vec<usize> = axes.iter().map(|&axis| x.shape.axes()[axis]).collect();
            Ok(vec![Output::activation("", Shape::from(&shape[..]), x.dtype)])
        }
        Op::Convert { x, dtype } => {
            rules::float("x", x)?;
            if !dtype.is_float() {
                return Err(format!("cannot convert {} to {dtype}: only f32 and bf16", x.dtype));
            }
            Ok(vec![Output::activation("", x.shape.clone(), *dtype)])
        }
        Op::BlockMatrix { .. } | Op::BlockGrad { .. } => super::blocks::infer(op),
        Op::Fill { shape, dtype, .. } => constant(shape, *dtype),
        Op::RandomNormal { random, shape, dtype, .. } => {
            rules::dtype("random", random, DType::I32)?;
            rules::shape("random", random, &Shape::from([crate::random::SEED_WORDS]))?;
            constant(shape, *dtype)
        }
        _ => unreachable!("not a reshaping op"),
    }
}

fn constant(shape: &Shape, dtype: DType) -> Result<Vec<Output>, String> {
    if !dtype.is_float() {
        return Err(format!("only f32 and bf16 tensors can be filled, not {dtype}"));
    }
    Ok(vec![Output::activation("", shape.clone(), dtype)])
}

pub(super) fn backward(op: &Op<TensorId>, ctx: &mut Backward<'_>) -> Result<(), GraphError> {
    let Some(dy) = ctx.output_gradient(0) else { return Ok(()) };
    let (x, inverse) = match op {
        Op::Reshape { x, .. } => (*x, Op::Reshape { x: dy, shape: ctx.tensor(*x).shape.clone() }),
        Op::Transpose { x, axes } => {
            let mut inverse = vec![0; axes.len()];
            for (to, &from) in axes.iter().enumerate() {
                inverse[from] = to;
            }
            (*x, Op::Transpose { x: dy, axes: inverse })
        }
        Op::Convert { x, .. } => (*x, Op::Convert { x: dy, dtype: ctx.tensor(*x).dtype }),
        _ => unreachable!("not a reshaping op"),
    };
    let gradient = ctx.apply("grad", inverse)?;
    ctx.add_gradient(x, gradient[0])
}

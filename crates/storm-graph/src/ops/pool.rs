//! The maximum or the mean of each window of images (B, H, W, C).

use super::rules;
use crate::autodiff::Backward;
use crate::graph::Output;
use crate::{GraphError, Op, Planes, Shape, Tensor, TensorId, Window};

pub(super) fn infer(op: &Op<&Tensor>) -> Result<Vec<Output>, String> {
    match op {
        Op::MaxPool { x, window } | Op::AveragePool { x, window } => {
            rules::float("x", x)?;
            let planes = check(&x.shape, *window)?;
            Ok(vec![Output::activation("", planes.output_shape(planes.channels)?, x.dtype)])
        }
        Op::MaxPoolGrad { dy, x, window } => {
            rules::float("x", x)?;
            rules::dtype("dy", dy, x.dtype)?;
            let planes = check(&x.shape, *window)?;
            rules::shape("dy", dy, &planes.output_shape(planes.channels)?)?;
            Ok(vec![Output::activation("", x.shape.clone(), x.dtype)])
        }
        Op::AveragePoolGrad { dy, window, input } => {
            rules::float("dy", dy)?;
            let planes = check(input, *window)?;
            rules::shape("dy", dy, &planes.output_shape(planes.channels)?)?;
            Ok(vec![Output::activation("", input.clone(), dy.dtype)])
        }
        _ => unreachable!("not a pool"),
    }
}

/// Checks that the padding is at most half of the kernel, as in PyTorch.
fn check(input: &Shape, window: Window) -> Result<Planes, String> {
    let planes = Planes::new(input, window)?;
    if (0..2).any(|axis| 2 * window.padding[axis] > window.kernel[axis]) {
        return Err(format!("{window:?} has padding of more than half of its kernel"));
    }
    Ok(planes)
}

pub(super) fn backward(op: &Op<TensorId>, ctx: &mut Backward<'_>) -> Result<(), GraphError> {
    let Some(dy) = ctx.output_gradient(0) else { return Ok(()) };
    let (x, op) = match *op {
        Op::MaxPool { x, window } => (x, Op::MaxPoolGrad { dy, x, window }),
        Op::AveragePool { x, window } => {
            let input = ctx.tensor(x).shape.clone();
            (x, Op::AveragePoolGrad { dy, window, input })
        }
        _ => unreachable!("not a pool"),
    };
    let gradient = ctx.apply("grad", op)?;
    ctx.add_gradient(x, gradient[0])
}

//! Convolutions of images (B, H, W, C) and their two gradients, in chunks of columns.

use super::rules;
use crate::autodiff::Backward;
use crate::graph::Output;
use crate::{
    COLUMN_CHUNK_BYTES, DType, GradientParts, GraphError, Op, Planes, Shape, Tensor, TensorId,
};

pub(super) fn infer(op: &Op<&Tensor>) -> Result<Vec<Output>, String> {
    match op {
        Op::Conv2d { x, weight, bias, window } => {
            rules::float("x", x)?;
            let planes = Planes::new(&x.shape, *window)?;
            let outputs = check_weight(weight, &planes, x.dtype)?;
            rules::maybe("bias", bias.as_ref(), &Shape::from([outputs]), weight.dtype)?;
            let y = Output::activation("", planes.output_shape(outputs)?, x.dtype);
            Ok([vec![y], columns(&planes, x.dtype), padded_weight(&planes, weight)].concat())
        }
        Op::Conv2dInputGrad { dy, weight, addend, accumulator, window, input } => {
            rules::float("dy", dy)?;
            let planes = Planes::new(input, *window)?;
            let outputs = check_weight(weight, &planes, dy.dtype)?;
            rules::shape("dy", dy, &planes.output_shape(outputs)?)?;
            rules::maybe("addend", addend.as_ref(), input, dy.dtype)?;
            rules::maybe("accumulator", accumulator.as_ref(), input, dy.dtype)?;
            if addend.is_some() && accumulator.is_some() {
                return Err("either `addend` or `accumulator` is added".into());
            }
            let dx = Output::activation("", input.clone(), dy.dtype);
            Ok([vec![dx], columns(&planes, dy.dtype), arranged_weight(&planes, weight)].concat())
        }
        Op::Conv2dWeightGrad { dy, x, accumulator, window, dtype } => {
            rules::float("x", x)?;
            rules::dtype("dy", dy, x.dtype)?;
            rules::gradient_dtype(*dtype)?;
            let planes = Planes::new(&x.shape, *window)?;
            rules::rank("dy", dy, 4)?;
            let outputs = dy.shape.width();
            rules::shape("dy", dy, &planes.output_shape(outputs)?)?;
            let weight = Shape::from([outputs, planes.covered()]);
            rules::maybe("accumulator", accumulator.as_ref(), &weight, *dtype)?;
            let gradient = Output::gradient("", weight, *dtype);
            let sum = match window.is_pointwise() {
                true => Vec::new(),
                false => {
                    let parts = match GradientParts::apply(x.dtype, &planes, outputs) {
                        true => GradientParts::new(&planes, outputs).count,
                        false => 1,
                    };
                    let shape = Shape::from([parts * outputs, planes.column_stride()]);
                    vec![Output::scratch("sum", shape, DType::F32)]
                }
            };
            Ok([vec![gradient], columns(&planes, x.dtype), sum].concat())
        }
        _ => unreachable!("not a convolution"),
    }
}

/// Checks a weight (O, KH·KW·I) and returns O.
fn check_weight(weight: &Tensor, planes: &Planes, dtype: DType) -> Result<usize, String> {
    rules::rank("weight", weight, 2)?;
    rules::dtype("weight", weight, dtype)?;
    let (width, wanted) = (weight.shape.width(), planes.covered());
    if width != wanted {
        return Err(format!(
            "a window covers {wanted} elements (kernel height · kernel width · channels), but \
             `weight` takes {width}"
        ));
    }
    Ok(weight.shape.rows())
}

/// Scratch for a chunk of columns. A pointwise convolution needs none.
fn columns(planes: &Planes, dtype: DType) -> Vec<Output> {
    if planes.window.is_pointwise() {
        return Vec::new();
    }
    let images = planes.images_per_chunk(dtype.size_bytes(), COLUMN_CHUNK_BYTES);
    let shape = Shape::from([images * planes.positions(), planes.column_stride()]);
    vec![Output::scratch("columns", shape, dtype)]
}

/// Scratch for the weight padded to the row width of columns, if its own is smaller.
fn padded_weight(planes: &Planes, weight: &Tensor) -> Vec<Output> {
    let stride = planes.column_stride();
    if planes.window.is_pointwise() || stride == planes.covered() {
        return Vec::new();
    }
    vec![Output::scratch("weight", weight.shape.with_width(stride), weight.dtype)]
}

/// Scratch for the weight in another layout: padded as above, or with channels first.
fn arranged_weight(planes: &Planes, weight: &Tensor) -> Vec<Output> {
    if planes.window.is_pointwise() {
        return Vec::new();
    }
    let shape = weight.shape.with_width(planes.column_stride());
    vec![Output::scratch("weight", shape, weight.dtype)]
}

pub(super) fn backward(op: &Op<TensorId>, ctx: &mut Backward<'_>) -> Result<(), GraphError> {
    let Op::Conv2d { x, weight, bias, window } = *op else { unreachable!("not a convolution") };
    let Some(dy) = ctx.output_gradient(0) else { return Ok(()) };
    if ctx.wants(weight) {
        let (accumulator, dtype) = ctx.parameter_accumulator(weight);
        let gradient =
            ctx.apply("weight.grad", Op::Conv2dWeightGrad { dy, x, accumulator, window, dtype })?;
        ctx.set_parameter_gradient(weight, gradient[0])?;
    }
    if let Some(bias) = bias.filter(|&bias| ctx.wants(bias)) {
        let (accumulator, dtype) = ctx.parameter_accumulator(bias);
        let gradient = ctx.apply("bias.grad", Op::ColumnSum { x: dy, accumulator, dtype })?;
        ctx.set_parameter_gradient(bias, gradient[0])?;
    }
    if ctx.wants(x) {
        let (addend, input) = (ctx.take_gradient(x), ctx.tensor(x).shape.clone());
        let op = Op::Conv2dInputGrad { dy, weight, addend, accumulator: None, window, input };
        let dx = ctx.apply("x.grad", op)?;
        ctx.add_gradient(x, dx[0])?;
    }
    Ok(())
}

//! Ops that apply to each element, or to each pair of gate and up, separately.

use super::rules;
use crate::autodiff::Backward;
use crate::graph::Output;
use crate::{
    ActivationCodec, DType, GraphError, Op, QuantizedFormat, QuantizedRow, Tensor, TensorClass,
    TensorId, Training, UnitOutput,
};

pub(super) fn infer(op: &Op<&Tensor>) -> Result<Vec<Output>, String> {
    match op {
        Op::Add { a, b } | Op::Mul { a, b } => {
            rules::float("a", a)?;
            rules::like("b", b, "a", a)?;
            Ok(vec![Output::activation("", a.shape.clone(), a.dtype)])
        }
        Op::MovingAverage { average, x, momentum } => {
            if average.class != TensorClass::Parameter(Training::Running) {
                return Err(format!("`{}` is not a running statistic", average.name));
            }
            rules::dtype("average", average, DType::F32)?;
            rules::like("x", x, "average", average)?;
            if !(0.0..=1.0).contains(momentum) {
                return Err(format!("momentum must be from 0 to 1, not {momentum}"));
            }
            let (shape, dtype, class) = (average.shape.clone(), average.dtype, average.class);
            Ok(vec![Output { suffix: "", shape, dtype, class }])
        }
        Op::Scale { x, .. } | Op::Activation { x, .. } | Op::Tanh { x } => {
            rules::float("x", x)?;
            Ok(vec![Output::activation("", x.shape.clone(), x.dtype)])
        }
        Op::ActivationGrad { dy, x, .. } => {
            rules::float("x", x)?;
            rules::like("dy", dy, "x", x)?;
            Ok(vec![Output::activation("", x.shape.clone(), x.dtype)])
        }
        Op::TanhGrad { dy, y } => {
            rules::float("y", y)?;
            rules::like("dy", dy, "y", y)?;
            Ok(vec![Output::activation("", y.shape.clone(), y.dtype)])
        }
        Op::SwiGlu { gate_up, .. } => {
            let half = half_width(gate_up)?;
            Ok(vec![Output::activation("", gate_up.shape.with_width(half), gate_up.dtype)])
        }
        Op::SwiGluGrad { dy, gate_up, .. } => {
            let half = half_width(gate_up)?;
            rules::dtype("dy", dy, gate_up.dtype)?;
            rules::shape("dy", dy, &gate_up.shape.with_width(half))?;
            Ok(vec![Output::activation("", gate_up.shape.clone(), gate_up.dtype)])
        }
        Op::SwiGluGradAndOutput { dy, gate_up, function, codec } => {
            let (dy, gate_up, function, codec) = (*dy, *gate_up, *function, *codec);
            let mut outputs = infer(&Op::SwiGluGrad { dy, gate_up, function, codec })?;
            outputs.push(Output::activation("output", dy.shape.clone(), dy.dtype));
            Ok(outputs)
        }
        Op::SwiGluCoded { gate_up, .. } => {
            let half = half_width(gate_up)?;
            let code = gate_up.shape.with_width(code_bytes(half));
            Ok(vec![
                Output::activation("", gate_up.shape.with_width(half), gate_up.dtype),
                Output::activation("code", code, DType::U8),
            ])
        }
        Op::SwiGluCodedGrad { dy, code, output, .. } => {
            rules::float("dy", dy)?;
            rules::rank_at_least("dy", dy, 1)?;
            rules::dtype("code", code, DType::U8)?;
            let half = dy.shape.width();
            rules::shape("code", code, &dy.shape.with_width(code_bytes(half)))?;
            let mut outputs = vec![Output::activation("", dy.shape.with_width(2 * half), dy.dtype)];
            if *output == UnitOutput::Compute {
                outputs.push(Output::activation("output", dy.shape.clone(), dy.dtype));
            }
            Ok(outputs)
        }
        Op::Dropout { .. } => super::dropout::infer(op),
        _ => unreachable!("not an elementwise op"),
    }
}

/// Bytes of the code of a row with halves of this width.
fn code_bytes(half: usize) -> usize {
    2 * QuantizedRow::new(QuantizedFormat::Int8, half).bytes()
}

fn half_width(gate_up: &Tensor) -> Result<usize, String> {
    rules::float("gate_up", gate_up)?;
    rules::rank_at_least("gate_up", gate_up, 1)?;
    match gate_up.shape.width() {
        width if width % 2 == 0 => Ok(width / 2),
        width => Err(format!("`gate_up` must have an even width, not {width}")),
    }
}

pub(super) fn backward(op: &Op<TensorId>, ctx: &mut Backward<'_>) -> Result<(), GraphError> {
    let Some(dy) = ctx.output_gradient(0) else { return Ok(()) };
    match *op {
        Op::Add { a, b } => {
            ctx.add_gradient(a, dy)?;
            ctx.add_gradient(b, dy)
        }
        Op::Mul { a, b } => {
            for (operand, other) in [(a, b), (b, a)] {
                if ctx.wants(operand) {
                    let gradient = ctx.apply("grad", Op::Mul { a: dy, b: other })?;
                    ctx.add_gradient(operand, gradient[0])?;
                }
            }
            Ok(())
        }
        Op::Scale { x, factor } => {
            let gradient = ctx.apply("grad", Op::Scale { x: dy, factor })?;
            ctx.add_gradient(x, gradient[0])
        }
        Op::Activation { x, function } => {
            let gradient = ctx.apply("grad", Op::ActivationGrad { dy, x, function })?;
            ctx.add_gradient(x, gradient[0])
        }
        Op::Tanh { x } => {
            let gradient = ctx.apply("grad", Op::TanhGrad { dy, y: ctx.outputs()[0] })?;
            ctx.add_gradient(x, gradient[0])
        }
        Op::SwiGlu { gate_up, function } => {
            let codec = ActivationCodec::None;
            let gradient = ctx.apply("grad", Op::SwiGluGrad { dy, gate_up, function, codec })?;
            ctx.add_gradient(gate_up, gradient[0])
        }
        _ => unreachable!("not an elementwise op"),
    }
}

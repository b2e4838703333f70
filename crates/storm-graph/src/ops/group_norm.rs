//! Norms of groups of channels of each sample.
//!
//! The statistics of a channel of a sample are computed in blocks of rows as in
//! [`super::batch_norm`], but the blocks are combined in order. The channels of a group are also
//! combined in order.

use super::batch_norm::{check_epsilon, check_parameters, check_x};
use super::rules;
use crate::autodiff::Backward;
use crate::graph::Output;
use crate::{DType, GraphError, NormActivation, Op, ParameterGradients, Shape, Tensor, TensorId};

pub(super) fn infer(op: &Op<&Tensor>) -> Result<Vec<Output>, String> {
    match op {
        Op::GroupNorm { x, weight, bias, addend, groups, epsilon, .. } => {
            let of_groups = check_norm(x, weight, bias, *groups)?;
            check_epsilon(*epsilon)?;
            rules::maybe("addend", addend.as_ref(), &x.shape, x.dtype)?;
            Ok(vec![
                Output::activation("", x.shape.clone(), x.dtype),
                Output::activation("mean", of_groups.clone(), DType::F32),
                Output::activation("rstd", of_groups, DType::F32),
                partials(x, 0),
            ])
        }
        Op::GroupNormGrad {
            dy,
            x,
            addend,
            mean,
            rstd,
            weight,
            bias,
            weight_accumulator,
            bias_accumulator,
            groups,
            activation,
            parameters,
            dtype,
        } => {
            let of_groups = check_norm(x, weight, bias, *groups)?;
            rules::gradient_dtype(*dtype)?;
            rules::like("dy", dy, "x", x)?;
            for (role, statistic) in [("mean", mean), ("rstd", rstd)] {
                rules::shape(role, statistic, &of_groups)?;
                rules::dtype(role, statistic, DType::F32)?;
            }
            rules::maybe("addend", addend.as_ref(), &x.shape, x.dtype)?;
            if addend.is_some() && *activation == NormActivation::None {
                return Err("without a ReLU the gradient of `addend` is `dy`".into());
            }
            rules::maybe("weight_accumulator", weight_accumulator.as_ref(), &weight.shape, *dtype)?;
            rules::maybe("bias_accumulator", bias_accumulator.as_ref(), &weight.shape, *dtype)?;
            let mut outputs = vec![Output::activation("", x.shape.clone(), x.dtype)];
            if *parameters == ParameterGradients::Compute {
                outputs.push(Output::gradient("weight", weight.shape.clone(), *dtype));
                outputs.push(Output::gradient("bias", weight.shape.clone(), *dtype));
            }
            // The sums of groups follow those of channels.
            outputs.push(partials(x, 2 * groups));
            if addend.is_some() {
                outputs.push(Output::activation("addend", x.shape.clone(), x.dtype));
            }
            Ok(outputs)
        }
        _ => unreachable!("not a group norm"),
    }
}

/// Scratch for two values per channel and `more` others, for each sample.
fn partials(x: &Tensor, more: usize) -> Output {
    let shape = Shape::from([x.shape.axes()[0], 2 * x.shape.width() + more]);
    Output::scratch("partials", shape, DType::F32)
}

/// Checks the operands and returns the shape of a per-group tensor.
fn check_norm(x: &Tensor, weight: &Tensor, bias: &Tensor, groups: usize) -> Result<Shape, String> {
    let channels = check_x(x)?;
    check_parameters(x, weight, bias, &channels)?;
    let width = x.shape.width();
    if groups == 0 || !width.is_multiple_of(groups) {
        return Err(format!("{width} channels cannot form {groups} groups of one size"));
    }
    Ok(Shape::from([x.shape.axes()[0], groups]))
}

pub(super) fn backward(op: &Op<TensorId>, ctx: &mut Backward<'_>) -> Result<(), GraphError> {
    let Op::GroupNorm { x, weight, bias, addend, groups, activation, .. } = *op else {
        unreachable!("not a group norm");
    };
    let Some(dy) = ctx.output_gradient(0) else { return Ok(()) };
    let (mean, rstd) = (ctx.outputs()[1], ctx.outputs()[2]);
    let masked = addend.filter(|_| activation == NormActivation::Relu);
    let (parameters, [weight_gradient, bias_gradient]) =
        ctx.parameter_accumulators([Some(weight), Some(bias)])?;
    let outputs = ctx.apply(
        "grad",
        Op::GroupNormGrad {
            dy,
            x,
            addend: masked,
            mean,
            rstd,
            weight,
            bias,
            weight_accumulator: weight_gradient.accumulator,
            bias_accumulator: bias_gradient.accumulator,
            groups,
            activation,
            parameters,
            dtype: weight_gradient.dtype,
        },
    )?;
    if parameters == ParameterGradients::Compute {
        ctx.set_parameter_gradient(weight, outputs[1])?;
        ctx.set_parameter_gradient(bias, outputs[2])?;
    }
    if let Some(addend) = addend {
        let gradient = if masked.is_some() { outputs[outputs.len() - 1] } else { dy };
        ctx.add_gradient(addend, gradient)?;
    }
    ctx.add_gradient(x, outputs[0])
}

//! Norms of channels over a batch, with a fused residual sum and ReLU.
//!
//! Sums over rows have the same order on every device. A *group* is [`STATISTICS_GROUP`] rows,
//! summed in order. The groups of a block of [`STATISTICS_ROWS`] rows are combined pairwise, the
//! results again pairwise, and so on, to one partial result per block. Lane `l` of
//! [`STATISTICS_LANES`] combines the blocks `l`, `l + STATISTICS_LANES`, … in order, and the lanes
//! are combined pairwise like groups. A statistic is a mean and a sum of squared deviations from
//! it, which combine without cancellation (Chan et al., 1979). Within a group, deviations are from
//! its first row. Since that row is one of the group, the sum of squares is at most
//! [`STATISTICS_GROUP`] + 1 times the corrected sum.

use super::rules;
use crate::autodiff::Backward;
use crate::graph::Output;
use crate::random::PHASE_WORDS;
use crate::{DType, GraphError, NormActivation, Op, ParameterGradients, Shape, Tensor, TensorId};

/// Rows of a group, which are summed in order. Part of the semantics.
pub const STATISTICS_GROUP: usize = 8;
/// Groups of a block. Part of the semantics.
pub const STATISTICS_GROUPS: usize = 32;
/// Rows of a block, which has one partial result per channel.
pub const STATISTICS_ROWS: usize = STATISTICS_GROUP * STATISTICS_GROUPS;
/// Lanes that share the blocks of a channel. Part of the semantics.
pub const STATISTICS_LANES: usize = 128;

/// Scratch for two partial results per block and channel, all first ones before the second ones.
fn partials(x: &Tensor, more_rows: usize) -> Output {
    let blocks = x.shape.rows().div_ceil(STATISTICS_ROWS);
    let shape = Shape::from([blocks + more_rows, 2 * x.shape.width()]);
    Output::scratch("partials", shape, DType::F32)
}

pub(super) fn infer(op: &Op<&Tensor>) -> Result<Vec<Output>, String> {
    match op {
        Op::BatchStatistics { x, running_mean, running_variance, phase } => {
            let channels = check_x(x)?;
            let running = [("running_mean", running_mean), ("running_variance", running_variance)];
            for (role, tensor) in running {
                rules::shape(role, tensor, &channels)?;
                rules::dtype(role, tensor, DType::F32)?;
            }
            rules::dtype("phase", phase, DType::I32)?;
            rules::shape("phase", phase, &Shape::from([PHASE_WORDS]))?;
            let statistic = |suffix| Output::activation(suffix, channels.clone(), DType::F32);
            Ok(vec![
                statistic("mean"),
                statistic("variance"),
                statistic("unbiased"),
                partials(x, 0),
            ])
        }
        Op::BatchNorm { x, mean, variance, weight, bias, addend, epsilon, .. } => {
            check_norm(x, mean, variance, weight, bias, *epsilon)?;
            rules::maybe("addend", addend.as_ref(), &x.shape, x.dtype)?;
            Ok(vec![Output::activation("", x.shape.clone(), x.dtype)])
        }
        Op::BatchNormGrad {
            dy,
            x,
            addend,
            mean,
            variance,
            weight,
            bias,
            weight_accumulator,
            bias_accumulator,
            epsilon,
            activation,
            parameters,
            dtype,
        } => {
            check_norm(x, mean, variance, weight, bias, *epsilon)?;
            rules::gradient_dtype(*dtype)?;
            rules::like("dy", dy, "x", x)?;
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
            // The final sums follow the partial ones.
            outputs.push(partials(x, 1));
            if addend.is_some() {
                outputs.push(Output::activation("addend", x.shape.clone(), x.dtype));
            }
            Ok(outputs)
        }
        _ => unreachable!("not a batch norm op"),
    }
}

/// Checks `x` and returns the shape of a per-channel tensor.
pub(super) fn check_x(x: &Tensor) -> Result<Shape, String> {
    rules::float("x", x)?;
    rules::rank_at_least("x", x, 2)?;
    if x.shape.elements() == 0 {
        return Err("`x` has no elements".into());
    }
    Ok(Shape::from([x.shape.width()]))
}

fn check_norm(
    x: &Tensor,
    mean: &Tensor,
    variance: &Tensor,
    weight: &Tensor,
    bias: &Tensor,
    epsilon: f32,
) -> Result<(), String> {
    let channels = check_x(x)?;
    for (role, statistic) in [("mean", mean), ("variance", variance)] {
        rules::shape(role, statistic, &channels)?;
        rules::dtype(role, statistic, DType::F32)?;
    }
    check_parameters(x, weight, bias, &channels)?;
    check_epsilon(epsilon)
}

/// Checks scale and offset, which have the dtype of `x`, or f32.
pub(super) fn check_parameters(
    x: &Tensor,
    weight: &Tensor,
    bias: &Tensor,
    channels: &Shape,
) -> Result<(), String> {
    rules::shape("weight", weight, channels)?;
    if weight.dtype != DType::F32 {
        rules::dtype("weight", weight, x.dtype)?;
    }
    rules::like("bias", bias, "weight", weight)
}

pub(super) fn check_epsilon(epsilon: f32) -> Result<(), String> {
    match epsilon > 0.0 && epsilon.is_finite() {
        true => Ok(()),
        false => Err(format!("epsilon must be positive, not {epsilon}")),
    }
}

pub(super) fn backward(op: &Op<TensorId>, ctx: &mut Backward<'_>) -> Result<(), GraphError> {
    let Op::BatchNorm { x, mean, variance, weight, bias, addend, epsilon, activation } = *op else {
        unreachable!("not a batch norm");
    };
    // The gradient is only valid if the statistics are those of `x`.
    match ctx.producer(mean) {
        Some((&Op::BatchStatistics { x: of, .. }, [m, v, ..]))
            if (of, *m, *v) == (x, mean, variance) => {}
        _ => return Err(ctx.not_differentiable()),
    }
    let Some(dy) = ctx.output_gradient(0) else { return Ok(()) };
    let masked = addend.filter(|_| activation == NormActivation::Relu);
    let (parameters, [weight_gradient, bias_gradient]) =
        ctx.parameter_accumulators([Some(weight), Some(bias)])?;
    let outputs = ctx.apply(
        "grad",
        Op::BatchNormGrad {
            dy,
            x,
            addend: masked,
            mean,
            variance,
            weight,
            bias,
            weight_accumulator: weight_gradient.accumulator,
            bias_accumulator: bias_gradient.accumulator,
            epsilon,
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

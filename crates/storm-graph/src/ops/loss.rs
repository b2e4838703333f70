//! The language-model head and its cross-entropy, in chunks of rows.

use super::rules;
use crate::autodiff::Backward;
use crate::graph::Output;
use crate::{Accuracy, DType, GraphError, Op, ParameterGradients, Shape, Tensor, TensorId};

pub(super) fn infer(op: &Op<&Tensor>) -> Result<Vec<Output>, String> {
    match op {
        Op::HeadLoss {
            hidden,
            weight,
            targets,
            denominator,
            chunk_rows,
            label_smoothing,
            accuracy,
        } => {
            let chunk = check_head(hidden, weight, targets, denominator, *chunk_rows)?;
            check_smoothing(*label_smoothing)?;
            let rows = hidden.shape.row_shape();
            let mut outputs = vec![Output::activation("", rows.clone(), DType::F32)];
            outputs.extend(correct(*accuracy, rows));
            outputs.push(chunk);
            Ok(outputs)
        }
        Op::HeadLossGrad {
            hidden,
            weight,
            targets,
            denominator,
            d_row_loss,
            accumulator,
            chunk_rows,
            label_smoothing,
            accuracy,
            weight_gradient,
            dtype,
        } => {
            check_smoothing(*label_smoothing)?;
            let chunk = check_head(hidden, weight, targets, denominator, *chunk_rows)?;
            let rows = hidden.shape.row_shape();
            rules::gradient_dtype(*dtype)?;
            rules::shape("d_row_loss", d_row_loss, &rows)?;
            rules::dtype("d_row_loss", d_row_loss, DType::F32)?;
            rules::maybe("accumulator", accumulator.as_ref(), &weight.shape, *dtype)?;
            let mut outputs = vec![
                Output::activation("loss", rows.clone(), DType::F32),
                Output::activation("", hidden.shape.clone(), hidden.dtype),
                chunk,
            ];
            if *weight_gradient == ParameterGradients::Compute {
                outputs.push(Output::gradient("weight", weight.shape.clone(), *dtype));
            }
            outputs.extend(correct(*accuracy, rows));
            Ok(outputs)
        }
        _ => unreachable!("not a loss op"),
    }
}

/// The output with the correct rows, if requested.
fn correct(accuracy: Accuracy, rows: Shape) -> Option<Output> {
    (accuracy == Accuracy::Compute).then(|| Output::activation("correct", rows, DType::F32))
}

fn check_smoothing(label_smoothing: f32) -> Result<(), String> {
    match (0.0..1.0).contains(&label_smoothing) {
        true => Ok(()),
        false => Err(format!(
            "label_smoothing must be at least 0 and less than 1, not {label_smoothing}"
        )),
    }
}

/// Checks the operands and returns the scratch for one chunk of logits.
fn check_head(
    hidden: &Tensor,
    weight: &Tensor,
    targets: &Tensor,
    denominator: &Tensor,
    chunk_rows: usize,
) -> Result<Output, String> {
    rules::float("hidden", hidden)?;
    rules::rank_at_least("hidden", hidden, 1)?;
    rules::rank("weight", weight, 2)?;
    rules::dtype("weight", weight, hidden.dtype)?;
    rules::shape("weight", weight, &weight.shape.with_width(hidden.shape.width()))?;
    rules::dtype("targets", targets, DType::I32)?;
    rules::shape("targets", targets, &hidden.shape.row_shape())?;
    rules::scalar("denominator", denominator)?;
    if chunk_rows == 0 {
        return Err("chunk_rows must not be zero".into());
    }
    let rows = chunk_rows.min(hidden.shape.rows());
    let chunk = Shape::from([rows, weight.shape.rows()]);
    Ok(Output::scratch("logits", chunk, hidden.dtype))
}

pub(super) fn backward(op: &Op<TensorId>, ctx: &mut Backward<'_>) -> Result<(), GraphError> {
    let Op::HeadLoss {
        hidden,
        weight,
        targets,
        denominator,
        chunk_rows,
        label_smoothing,
        accuracy,
    } = *op
    else {
        unreachable!("not a loss op")
    };
    let Some(d_row_loss) = ctx.output_gradient(0) else { return Ok(()) };
    let (weight_gradient, [gradient]) = ctx.parameter_accumulators([Some(weight)])?;
    let outputs = ctx.apply(
        "grad",
        Op::HeadLossGrad {
            hidden,
            weight,
            targets,
            denominator,
            d_row_loss,
            accumulator: gradient.accumulator,
            chunk_rows,
            label_smoothing,
            accuracy,
            weight_gradient,
            dtype: gradient.dtype,
        },
    )?;
    if weight_gradient == ParameterGradients::Compute {
        ctx.set_parameter_gradient(weight, outputs[3])?;
    }
    ctx.add_gradient(hidden, outputs[1])
}

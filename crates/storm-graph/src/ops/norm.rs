//! Layer norm and RMS norm with a fused residual sum, and the per-head norm of Qwen3.

use super::attention::check_rotary_table;
use super::reduce::{norm_rows_per_partial, partials};
use super::rules;
use crate::autodiff::Backward;
use crate::graph::Output;
use crate::{DType, GraphError, NormKind, Op, ParameterGradients, Shape, Tensor, TensorId};

pub(super) fn infer(op: &Op<&Tensor>) -> Result<Vec<Output>, String> {
    match op {
        Op::Norm { x, delta, weight, bias, kind, .. } => {
            check_norm(x, weight, bias.as_ref(), *kind)?;
            rules::maybe("delta", delta.as_ref(), &x.shape, x.dtype)?;
            let row = x.shape.row_shape();
            let mut outputs = vec![
                Output::activation("", x.shape.clone(), x.dtype),
                Output::activation("rstd", row.clone(), DType::F32),
            ];
            if *kind == NormKind::Layer {
                outputs.push(Output::activation("mean", row, DType::F32));
            }
            if delta.is_some() {
                outputs.push(Output::activation("sum", x.shape.clone(), x.dtype));
            }
            Ok(outputs)
        }
        Op::NormGrad {
            dy,
            x,
            weight,
            bias,
            rstd,
            mean,
            addend,
            weight_accumulator,
            bias_accumulator,
            kind,
            parameters,
            dtype,
        } => {
            check_norm(x, weight, bias.as_ref(), *kind)?;
            rules::gradient_dtype(*dtype)?;
            rules::like("dy", dy, "x", x)?;
            let row = x.shape.row_shape();
            rules::shape("rstd", rstd, &row)?;
            rules::dtype("rstd", rstd, DType::F32)?;
            if mean.is_some() != (*kind == NormKind::Layer) {
                return Err("`mean` goes with a layer norm, and only with it".into());
            }
            rules::maybe("mean", mean.as_ref(), &row, DType::F32)?;
            rules::maybe("addend", addend.as_ref(), &x.shape, x.dtype)?;
            rules::maybe("weight_accumulator", weight_accumulator.as_ref(), &weight.shape, *dtype)?;
            rules::maybe("bias_accumulator", bias_accumulator.as_ref(), &weight.shape, *dtype)?;
            let mut outputs = vec![Output::activation("", x.shape.clone(), x.dtype)];
            if *parameters == ParameterGradients::Compute {
                outputs.push(Output::gradient("weight", weight.shape.clone(), *dtype));
                let mut width = weight.shape.width();
                if bias.is_some() {
                    outputs.push(Output::gradient("bias", weight.shape.clone(), *dtype));
                    width *= 2;
                }
                let rows = x.shape.rows();
                outputs.push(partials(rows, norm_rows_per_partial(rows), width));
            }
            Ok(outputs)
        }
        Op::QkNorm { qkv, query_weight, key_weight, table, heads, .. } => {
            rules::packed_heads("qkv", qkv, heads)?;
            check_head_weights(qkv, query_weight, key_weight, heads.head_dim)?;
            table.map_or(Ok(()), |table| check_rotary_table(table, qkv, heads))?;
            let rstd = qkv.shape.with_width(heads.query_key_heads());
            Ok(vec![
                Output::activation("", qkv.shape.clone(), qkv.dtype),
                Output::activation("rstd", rstd, DType::F32),
            ])
        }
        Op::QkNormGrad {
            dy,
            qkv,
            query_weight,
            key_weight,
            table,
            rstd,
            query_accumulator,
            key_accumulator,
            heads,
            parameters,
            dtype,
        } => {
            rules::packed_heads("qkv", qkv, heads)?;
            rules::gradient_dtype(*dtype)?;
            rules::like("dy", dy, "qkv", qkv)?;
            check_head_weights(qkv, query_weight, key_weight, heads.head_dim)?;
            table.map_or(Ok(()), |table| check_rotary_table(table, qkv, heads))?;
            rules::dtype("rstd", rstd, DType::F32)?;
            rules::shape("rstd", rstd, &qkv.shape.with_width(heads.query_key_heads()))?;
            let weight = Shape::from([heads.head_dim]);
            rules::maybe("query_accumulator", query_accumulator.as_ref(), &weight, *dtype)?;
            rules::maybe("key_accumulator", key_accumulator.as_ref(), &weight, *dtype)?;
            let mut outputs = vec![Output::activation("", qkv.shape.clone(), qkv.dtype)];
            if *parameters == ParameterGradients::Compute {
                outputs.push(Output::gradient("query_weight", weight.clone(), *dtype));
                outputs.push(Output::gradient("key_weight", weight, *dtype));
                let (rows, width) = (qkv.shape.rows(), 2 * heads.head_dim);
                outputs.push(partials(rows, norm_rows_per_partial(rows), width));
            }
            Ok(outputs)
        }
        _ => unreachable!("not a norm op"),
    }
}

fn check_norm(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&&Tensor>,
    kind: NormKind,
) -> Result<(), String> {
    rules::float("x", x)?;
    rules::rank_at_least("x", x, 1)?;
    if x.shape.width() == 0 {
        return Err("`x` has a width of zero".into());
    }
    let row = Shape::from([x.shape.width()]);
    rules::shape("weight", weight, &row)?;
    rules::dtype("weight", weight, x.dtype)?;
    rules::maybe("bias", bias, &row, x.dtype)?;
    if kind == NormKind::Rms && bias.is_some() {
        return Err("an RMS norm has no bias".into());
    }
    Ok(())
}

fn check_head_weights(
    qkv: &Tensor,
    query_weight: &Tensor,
    key_weight: &Tensor,
    head_dim: usize,
) -> Result<(), String> {
    for (role, weight) in [("query_weight", query_weight), ("key_weight", key_weight)] {
        rules::shape(role, weight, &Shape::from([head_dim]))?;
        rules::dtype(role, weight, qkv.dtype)?;
    }
    Ok(())
}

pub(super) fn backward(op: &Op<TensorId>, ctx: &mut Backward<'_>) -> Result<(), GraphError> {
    match *op {
        Op::Norm { x, delta, weight, bias, kind, .. } => {
            let outputs = ctx.outputs().to_vec();
            let mean = (kind == NormKind::Layer).then(|| outputs[2]);
            let sum = delta.map(|_| *outputs.last().expect("a norm has outputs"));
            // The gradient of the sum itself, besides the part through the norm.
            let direct = match sum {
                Some(_) => ctx.output_gradient(outputs.len() - 1),
                None => None,
            };
            let Some(dy) = ctx.output_gradient(0) else {
                // Only the sum is used, so the norm is a plain addition here.
                let Some(direct) = direct else { return Ok(()) };
                ctx.add_gradient(x, direct)?;
                return delta.map_or(Ok(()), |delta| ctx.add_gradient(delta, direct));
            };
            let addend = if sum.is_some() { direct } else { ctx.take_gradient(x) };
            let (parameters, [weight_gradient, bias_gradient]) =
                ctx.parameter_accumulators([Some(weight), bias])?;
            let outputs = ctx.apply(
                "grad",
                Op::NormGrad {
                    dy,
                    x: sum.unwrap_or(x),
                    weight,
                    bias,
                    rstd: outputs[1],
                    mean,
                    addend,
                    weight_accumulator: weight_gradient.accumulator,
                    bias_accumulator: bias_gradient.accumulator,
                    kind,
                    parameters,
                    dtype: weight_gradient.dtype,
                },
            )?;
            if parameters == ParameterGradients::Compute {
                ctx.set_parameter_gradient(weight, outputs[1])?;
                if let Some(bias) = bias {
                    ctx.set_parameter_gradient(bias, outputs[2])?;
                }
            }
            ctx.add_gradient(x, outputs[0])?;
            delta.map_or(Ok(()), |delta| ctx.add_gradient(delta, outputs[0]))
        }
        Op::QkNorm { qkv, query_weight, key_weight, table, heads, .. } => {
            let Some(dy) = ctx.output_gradient(0) else { return Ok(()) };
            let rstd = ctx.outputs()[1];
            let (parameters, [query, key]) =
                ctx.parameter_accumulators([Some(query_weight), Some(key_weight)])?;
            let outputs = ctx.apply(
                "grad",
                Op::QkNormGrad {
                    dy,
                    qkv,
                    query_weight,
                    key_weight,
                    table,
                    rstd,
                    query_accumulator: query.accumulator,
                    key_accumulator: key.accumulator,
                    heads,
                    parameters,
                    dtype: query.dtype,
                },
            )?;
            if parameters == ParameterGradients::Compute {
                ctx.set_parameter_gradient(query_weight, outputs[1])?;
                ctx.set_parameter_gradient(key_weight, outputs[2])?;
            }
            ctx.add_gradient(qkv, outputs[0])
        }
        _ => unreachable!("not a norm op"),
    }
}

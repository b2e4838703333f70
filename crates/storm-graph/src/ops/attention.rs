//! Rotary embeddings and attention over packed heads.

use super::rules;
use crate::autodiff::Backward;
use crate::graph::Output;
use crate::{CacheParts, DType, GraphError, HeadLayout, Op, Shape, Tensor, TensorId};

pub(super) fn infer(op: &Op<&Tensor>) -> Result<Vec<Output>, String> {
    match op {
        Op::RotaryTable { positions, head_dim, frequencies } => {
            rules::dtype("positions", positions, DType::I32)?;
            if *head_dim == 0 || head_dim % 2 != 0 {
                return Err(format!("head_dim must be even and not zero, not {head_dim}"));
            }
            if !(frequencies.theta.is_finite() && frequencies.theta > 0.0) {
                return Err(format!("theta must be positive, not {}", frequencies.theta));
            }
            let table = positions.shape.then(head_dim / 2).then(2);
            Ok(vec![Output::activation("", table, DType::F32)])
        }
        Op::Rotary { qkv, table, heads, .. } => {
            rules::packed_heads("qkv", qkv, heads)?;
            if heads.head_dim % 2 != 0 {
                return Err(format!("head_dim must be even, not {}", heads.head_dim));
            }
            rules::dtype("table", table, DType::F32)?;
            let wanted = qkv.shape.row_shape().then(heads.head_dim / 2).then(2);
            rules::shape("table", table, &wanted)?;
            Ok(vec![Output::activation("", qkv.shape.clone(), qkv.dtype)])
        }
        Op::Attention { qkv, segments, heads, .. } => {
            rules::packed_heads("qkv", qkv, heads)?;
            let rows = qkv.shape.row_shape();
            rules::maybe("segments", segments.as_ref(), &rows, DType::I32)?;
            let y = qkv.shape.with_width(heads.query_width());
            Ok(vec![
                Output::activation("", y, qkv.dtype),
                Output::activation("log_sum_exp", per_query(qkv, heads), DType::F32),
            ])
        }
        Op::AttentionGrad { dy, qkv, y, log_sum_exp, segments, heads, .. } => {
            rules::packed_heads("qkv", qkv, heads)?;
            rules::shape("y", y, &qkv.shape.with_width(heads.query_width()))?;
            rules::dtype("y", y, qkv.dtype)?;
            rules::like("dy", dy, "y", y)?;
            rules::dtype("log_sum_exp", log_sum_exp, DType::F32)?;
            rules::shape("log_sum_exp", log_sum_exp, &per_query(qkv, heads))?;
            let rows = qkv.shape.row_shape();
            rules::maybe("segments", segments.as_ref(), &rows, DType::I32)?;
            Ok(vec![
                Output::activation("", qkv.shape.clone(), qkv.dtype),
                Output::scratch("delta", per_query(qkv, heads), DType::F32),
            ])
        }
        Op::CachedAttention { qkv, cache, positions, heads, .. } => {
            rules::packed_heads("qkv", qkv, heads)?;
            let rows = qkv.shape.row_shape();
            rules::dtype("positions", positions, DType::I32)?;
            rules::shape("positions", positions, &rows)?;
            rules::rank("cache", cache, 3)?;
            rules::dtype("cache", cache, qkv.dtype)?;
            let (batch, window) = (rows.axes()[0], cache.shape.axes()[1]);
            let wanted = Shape::from([batch, window, heads.key_value_width()]);
            rules::shape("cache", cache, &wanted)?;
            let tokens = rows.axes()[1];
            if tokens > window {
                return Err(format!("{tokens} new tokens do not fit a cache of {window}"));
            }
            Ok(vec![
                Output::activation("", qkv.shape.with_width(heads.query_width()), qkv.dtype),
                Output::cache("cache", wanted, qkv.dtype),
                Output::scratch("parts", parts_shape(&rows, window, heads), DType::F32),
            ])
        }
        _ => unreachable!("not an attention op"),
    }
}

/// (B, T, Q, parts, D + 2): what a query gets from each part of the keys: sums of values, the largest score, the sum of
/// the weights.
fn parts_shape(rows: &Shape, window: usize, heads: &HeadLayout) -> Shape {
    let parts = CacheParts::of(window).count;
    rows.then(heads.query_heads).then(parts).then(heads.head_dim + 2)
}

/// (B, Q, T): one number per query.
fn per_query(qkv: &Tensor, heads: &HeadLayout) -> Shape {
    let axes = qkv.shape.axes();
    Shape::from([axes[0], heads.query_heads, axes[1]])
}

pub(super) fn backward(op: &Op<TensorId>, ctx: &mut Backward<'_>) -> Result<(), GraphError> {
    let Some(dy) = ctx.output_gradient(0) else { return Ok(()) };
    match *op {
        Op::Rotary { qkv, table, heads, direction } => {
            let direction = direction.reversed();
            let gradient = ctx.apply("grad", Op::Rotary { qkv: dy, table, heads, direction })?;
            ctx.add_gradient(qkv, gradient[0])
        }
        Op::Attention { qkv, segments, heads, mask, scale } => {
            let [y, log_sum_exp] = ctx.outputs() else { unreachable!("attention has two outputs") };
            let (y, log_sum_exp) = (*y, *log_sum_exp);
            let gradient = ctx.apply(
                "grad",
                Op::AttentionGrad { dy, qkv, y, log_sum_exp, segments, heads, mask, scale },
            )?;
            ctx.add_gradient(qkv, gradient[0])
        }
        _ => unreachable!("not an attention op"),
    }
}

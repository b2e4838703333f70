//! Rotary embeddings and attention over packed heads.

use super::rules;
use crate::autodiff::Backward;
use crate::graph::Output;
use crate::{
    AttentionSums, CacheParts, DType, GraphError, HeadLayout, Mask, Op, Shape, Tensor, TensorId,
};

pub(super) fn infer(op: &Op<&Tensor>) -> Result<Vec<Output>, String> {
    match op {
        Op::RotaryTable { positions, frequencies } => {
            rules::dtype("positions", positions, DType::I32)?;
            if frequencies.pairs() == 0 {
                return Err("there must be at least one frequency".to_owned());
            }
            let mut numbers = frequencies.inverse_wavelengths.iter().chain([&frequencies.factor]);
            if let Some(wrong) = numbers.find(|x| !(x.is_finite() && **x >= 0.0)) {
                return Err(format!("frequencies and their factor must not be {wrong}"));
            }
            let table = positions.shape.then(frequencies.pairs()).then(2);
            Ok(vec![Output::activation("", table, DType::F32)])
        }
        Op::Rotary { qkv, table, heads, .. } => {
            rules::packed_heads("qkv", qkv, heads)?;
            check_rotary_table(table, qkv, heads)?;
            Ok(vec![Output::activation("", qkv.shape.clone(), qkv.dtype)])
        }
        Op::Attention { qkv, segments, heads, mask, .. } => {
            rules::packed_heads("qkv", qkv, heads)?;
            check_mask(*mask)?;
            let rows = qkv.shape.row_shape();
            rules::maybe("segments", segments.as_ref(), &rows, DType::I32)?;
            let y = qkv.shape.with_width(heads.query_width());
            Ok(vec![
                Output::activation("", y, qkv.dtype),
                Output::activation("log_sum_exp", per_query(qkv, heads), DType::F32),
            ])
        }
        Op::AttentionGrad { dy, qkv, y, log_sum_exp, segments, heads, mask, .. } => {
            rules::packed_heads("qkv", qkv, heads)?;
            check_mask(*mask)?;
            rules::shape("y", y, &qkv.shape.with_width(heads.query_width()))?;
            rules::dtype("y", y, qkv.dtype)?;
            rules::like("dy", dy, "y", y)?;
            rules::dtype("log_sum_exp", log_sum_exp, DType::F32)?;
            rules::shape("log_sum_exp", log_sum_exp, &per_query(qkv, heads))?;
            let rows = qkv.shape.row_shape();
            rules::maybe("segments", segments.as_ref(), &rows, DType::I32)?;
            let mut outputs = vec![
                Output::activation("", qkv.shape.clone(), qkv.dtype),
                Output::scratch("delta", per_query(qkv, heads), DType::F32),
            ];
            let (batch, seq) = (rows.axes()[0], rows.axes()[1]);
            let sums = AttentionSums::of(qkv.dtype, batch, seq, heads, *mask, segments.is_some());
            outputs.extend(
                sums.map(|sums| {
                    Output::scratch("sums", Shape::from([sums.elements()]), DType::F32)
                }),
            );
            Ok(outputs)
        }
        Op::CachedAttention { qkv, cache, positions, heads, mask, .. } => {
            rules::packed_heads("qkv", qkv, heads)?;
            check_mask(*mask)?;
            if !mask.is_causal() {
                return Err("over a cache, a query cannot see what comes after it".to_owned());
            }
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

/// (B, T, Q, parts, D + 2): the result of each query for each part of the keys: the weighted sum of
/// values, the largest score and the sum of weights.
fn parts_shape(rows: &Shape, window: usize, heads: &HeadLayout) -> Shape {
    let parts = CacheParts::of(window).count;
    rows.then(heads.query_heads).then(parts).then(heads.head_dim + 2)
}

fn check_mask(mask: Mask) -> Result<(), String> {
    match mask.window() {
        Some(0) => Err("a window must be of one key at least, not 0".to_owned()),
        _ => Ok(()),
    }
}

/// (B, Q, T): one value per query.
fn per_query(qkv: &Tensor, heads: &HeadLayout) -> Shape {
    let axes = qkv.shape.axes();
    Shape::from([axes[0], heads.query_heads, axes[1]])
}

/// Checks a table of angles for the heads of `qkv`.
pub(super) fn check_rotary_table(
    table: &Tensor,
    qkv: &Tensor,
    heads: &HeadLayout,
) -> Result<(), String> {
    rules::dtype("table", table, DType::F32)?;
    rules::rank("table", table, 4)?;
    let pairs = table.shape.axes()[2];
    if pairs == 0 || 2 * pairs > heads.head_dim {
        let dim = heads.head_dim;
        return Err(format!("`table` turns {pairs} pairs of heads that are {dim} wide"));
    }
    rules::shape("table", table, &qkv.shape.row_shape().then(pairs).then(2))
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

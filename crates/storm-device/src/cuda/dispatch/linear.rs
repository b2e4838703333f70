//! Projections and their gradients: matrix products.

use super::{
    Definitions, THREADS, WARP, all_types, count, kernel, launch_flat, layout, rows, types,
};
use crate::DeviceError;
use crate::cuda::KernelSource;
use crate::cuda::context::Argument;
use crate::cuda::gemm::{GemmCall, GemmRole, Operand};
use crate::cuda::plan::Planner;
use crate::placed::View;
use storm_graph::Op;

pub(super) fn plan(planner: &mut Planner<'_>) -> Result<(), DeviceError> {
    let out = &planner.node.outputs[0];
    // A convolution with a window of a single position is a projection of the pixels.
    match &planner.node.op {
        Op::Linear { x, weight, bias, addend } => {
            if rows::takes(planner, x, weight) {
                return rows::plan(planner, x, weight, bias, addend);
            }
            forward(planner, x, weight, bias, addend, out)
        }
        Op::Conv2d { x, weight, bias, .. } => forward(planner, x, weight, bias, &None, out),
        Op::LinearInputGrad { dy, weight, addend } => {
            input_grad(planner, dy, weight, addend.as_ref(), out)
        }
        Op::Conv2dInputGrad { dy, weight, addend, accumulator, .. } => {
            let addend = addend.as_ref().or(accumulator.as_ref());
            input_grad(planner, dy, weight, addend, out)
        }
        Op::LinearWeightGrad { dy, x, accumulator, .. }
        | Op::Conv2dWeightGrad { dy, x, accumulator, .. } => {
            if x.shape.rows() == 0 {
                // A sum over no rows.
                return match accumulator {
                    Some(_) => Ok(()),
                    None => layout::fill(planner, out, 0.0),
                };
            }
            let sizes = (dy.shape.width(), x.shape.width(), x.shape.rows());
            let (a, b) = (transposed(planner, dy), operand(planner, x));
            let mut call = product(planner, sizes, a, b, out, GemmRole::Whole);
            call.accumulate = accumulator.is_some();
            gemm(planner, call)
        }
        _ => unreachable!("not a linear op"),
    }
}

/// `addend` may be the tensor that `out` overwrites.
fn input_grad(
    planner: &mut Planner<'_>,
    dy: &View,
    weight: &View,
    addend: Option<&View>,
    out: &View,
) -> Result<(), DeviceError> {
    let sizes = (dy.shape.rows(), weight.shape.width(), dy.shape.width());
    let (a, b) = (operand(planner, dy), operand(planner, weight));
    let mut call = product(planner, sizes, a, b, out, GemmRole::Activation);
    call.addend = addend.map(|addend| planner.address(addend));
    gemm(planner, call)
}

fn forward(
    planner: &mut Planner<'_>,
    x: &View,
    weight: &View,
    bias: &Option<View>,
    addend: &Option<View>,
    out: &View,
) -> Result<(), DeviceError> {
    let sizes = (x.shape.rows(), weight.shape.rows(), x.shape.width());
    let (a, b) = (operand(planner, x), transposed(planner, weight));
    let mut call = product(planner, sizes, a, b, out, GemmRole::Activation);
    call.bias = bias.as_ref().map(|bias| planner.address(bias));
    call.addend = addend.as_ref().map(|addend| planner.address(addend));
    gemm(planner, call)
}

/// A tensor's rows as a matrix.
pub(super) fn operand(planner: &Planner<'_>, view: &View) -> Operand {
    Operand { address: planner.address(view), dtype: view.dtype, transposed: false }
}

pub(super) fn transposed(planner: &Planner<'_>, view: &View) -> Operand {
    Operand { transposed: true, ..operand(planner, view) }
}

fn product(
    planner: &Planner<'_>,
    sizes: (usize, usize, usize),
    a: Operand,
    b: Operand,
    out: &View,
    role: GemmRole,
) -> GemmCall {
    GemmCall::new(sizes, a, b, planner.address(out), out.dtype, role)
}

/// Adds the product, unless its result is empty.
pub(super) fn gemm(planner: &mut Planner<'_>, call: GemmCall) -> Result<(), DeviceError> {
    if call.m == 0 || call.n == 0 {
        return Ok(());
    }
    match (call.n, call.role) {
        (1, GemmRole::Activation) => single_column(planner, call),
        _ => planner.gemm(call),
    }
}

const SINGLE_COLUMN: KernelSource =
    KernelSource { name: "narrow.cu", text: include_str!("../kernels/narrow.cu"), only_for: None };

pub(super) fn kernels() -> Vec<(KernelSource, Definitions)> {
    all_types(SINGLE_COLUMN, ["A", "B"])
}

/// A product with one column. For it, the library chooses algorithms that support only some numbers
/// of rows, so none could serve all of them.
fn single_column(planner: &mut Planner<'_>, call: GemmCall) -> Result<(), DeviceError> {
    let GemmCall { m, k, a, b, out, out_dtype, .. } = call;
    let (stride, step) = if a.transposed { (1, m) } else { (k, 1) };
    let addend = if call.accumulate { Some(out) } else { call.addend };
    let pointers = [a.address, b.address, call.bias.unwrap_or(0), addend.unwrap_or(0), out];
    let mut arguments: Vec<Argument> = pointers.map(Argument::Pointer).to_vec();
    arguments.extend([m, k, stride, step].map(count));
    let choice = kernel(SINGLE_COLUMN, "single_column", types([("A", a.dtype), ("B", out_dtype)]));
    launch_flat(planner, choice, m, THREADS / WARP, arguments)
}

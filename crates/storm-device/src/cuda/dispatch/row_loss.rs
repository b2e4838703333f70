//! Losses of rows with numeric targets.

use super::{Definitions, THREADS, WARP, all_types, count, grid, kernel, launch_flat, types};
use crate::DeviceError;
use crate::cuda::KernelSource;
use crate::cuda::plan::Planner;
use storm_graph::Op;

const SOURCE: KernelSource = KernelSource {
    name: "row_loss.cu",
    text: include_str!("../kernels/row_loss.cu"),
    only_for: None,
};

pub(super) fn kernels() -> Vec<(KernelSource, Definitions)> {
    all_types(SOURCE, ["E"])
}

pub(super) fn plan(planner: &mut Planner<'_>) -> Result<(), DeviceError> {
    match &planner.node.op {
        Op::SquaredError { x, target } => {
            let (rows, width) = (x.shape.rows(), x.shape.width());
            let operands = [x, target].map(|operand| planner.pointer(operand));
            let arguments = [&operands[..], &[planner.output(0), count(rows), count(width)]];
            // A warp per row.
            let grid = grid(planner, rows.div_ceil(THREADS / WARP), 1)?;
            let choice = kernel(SOURCE, "squared_error", types([("E", x.dtype)]));
            planner.launch(choice, grid, THREADS as u32, arguments.concat())
        }
        Op::SquaredErrorGrad { d_row_loss, x, target } => {
            let (elements, width) = (x.shape.elements(), x.shape.width());
            let operands = [d_row_loss, x, target].map(|operand| planner.pointer(operand));
            let arguments = [&operands[..], &[planner.output(0), count(elements), count(width)]];
            let choice = kernel(SOURCE, "squared_error_grad", types([("E", x.dtype)]));
            launch_flat(planner, choice, elements, THREADS, arguments.concat())
        }
        Op::OutcomeLoss { heads, change, accepted } => {
            let rows = heads.shape.rows();
            let operands = [heads, change, accepted].map(|operand| planner.pointer(operand));
            let arguments = [&operands[..], &[planner.output(0), count(rows)]];
            let choice = kernel(SOURCE, "outcome_loss", types([("E", heads.dtype)]));
            launch_flat(planner, choice, rows, THREADS, arguments.concat())
        }
        Op::OutcomeLossGrad { d_row_loss, heads, change, accepted } => {
            let rows = heads.shape.rows();
            let operands =
                [d_row_loss, heads, change, accepted].map(|operand| planner.pointer(operand));
            let arguments = [&operands[..], &[planner.output(0), count(rows)]];
            let choice = kernel(SOURCE, "outcome_loss_grad", types([("E", heads.dtype)]));
            launch_flat(planner, choice, rows, THREADS, arguments.concat())
        }
        _ => unreachable!("not a loss of rows"),
    }
}

//! Matrices in 8 bits.

use super::{Definitions, PACK, THREADS, all_types, count, kernel, launch_flat, types};
use crate::DeviceError;
use crate::cuda::KernelSource;
use crate::cuda::plan::Planner;
use storm_graph::{Op, QuantizedRow};

const SOURCE: KernelSource = KernelSource {
    name: "quantized.cu",
    text: include_str!("../kernels/quantized.cu"),
    only_for: None,
};

/// Threads that quantize a group.
const WARP: usize = 32;

pub(super) fn kernels() -> Vec<(KernelSource, Definitions)> {
    all_types(SOURCE, ["E"])
}

pub(super) fn plan(planner: &mut Planner<'_>) -> Result<(), DeviceError> {
    let (node, out) = (planner.node, &planner.node.outputs[0]);
    match &node.op {
        Op::Quantize { x } => {
            let (rows, columns) = (x.shape.rows(), x.shape.width());
            let form = QuantizedRow::new(columns);
            let arguments = vec![
                planner.pointer(x),
                planner.pointer(out),
                count(rows),
                count(columns),
                count(form.groups()),
                count(form.scales_at()),
                count(form.bytes()),
            ];
            let choice = kernel(SOURCE, "quantize", types([("E", x.dtype)]));
            launch_flat(planner, choice, rows * form.groups() * WARP, THREADS, arguments)
        }
        Op::Dequantize { rows, columns, .. } => {
            let form = QuantizedRow::new(*columns);
            let (row_count, packs) = (rows.shape.rows(), columns.div_ceil(PACK));
            let arguments = vec![
                planner.pointer(rows),
                planner.pointer(out),
                count(row_count),
                count(*columns),
                count(packs),
                count(form.scales_at()),
                count(form.bytes()),
            ];
            let choice = kernel(SOURCE, "dequantize", types([("E", out.dtype)]));
            launch_flat(planner, choice, row_count * packs, THREADS, arguments)
        }
        _ => unreachable!("not an op of 8 bits"),
    }
}

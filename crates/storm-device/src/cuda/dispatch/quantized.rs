//! Matrices in 8 or 4 bits.

use super::{Definitions, PACK, THREADS, WARP, all_types, count, kernel, launch_flat, types};
use crate::DeviceError;
use crate::cuda::KernelSource;
use crate::cuda::context::{Argument, FLOATS};
use crate::cuda::plan::Planner;
use std::sync::Arc;
use storm_graph::{NF4, Op, QuantizedFormat, QuantizedRow};

const SOURCE: KernelSource = KernelSource {
    name: "quantized.cu",
    text: include_str!("../kernels/quantized.cu"),
    only_for: None,
};

pub(super) fn kernels() -> Vec<(KernelSource, Definitions)> {
    all_types(SOURCE, ["E"])
}

pub(super) fn plan(planner: &mut Planner<'_>) -> Result<(), DeviceError> {
    let (node, out) = (planner.node, &planner.node.outputs[0]);
    match &node.op {
        // A warp for each group.
        Op::Quantize { x, format } => {
            let (rows, form) = (x.shape.rows(), QuantizedRow::new(*format, x.shape.width()));
            let mut arguments = vec![
                planner.pointer(x),
                planner.pointer(out),
                count(rows),
                count(form.columns),
                count(form.groups()),
                count(form.scales_at()),
                count(form.bytes()),
            ];
            arguments.extend(points(*format));
            let name = match format {
                QuantizedFormat::Int8 => "quantize",
                QuantizedFormat::Nf4 => "quantize_nf4",
            };
            let choice = kernel(SOURCE, name, types([("E", x.dtype)]));
            launch_flat(planner, choice, rows * form.groups() * WARP, THREADS, arguments)
        }
        Op::Dequantize { rows, form, .. } => {
            let (row_count, packs) = (rows.shape.rows(), form.columns.div_ceil(PACK));
            let mut arguments = vec![
                planner.pointer(rows),
                planner.pointer(out),
                count(row_count),
                count(form.columns),
                count(packs),
                count(form.scales_at()),
                count(form.bytes()),
            ];
            arguments.extend(points(form.format));
            let name = match form.format {
                QuantizedFormat::Int8 => "dequantize",
                QuantizedFormat::Nf4 => "dequantize_nf4",
            };
            let choice = kernel(SOURCE, name, types([("E", out.dtype)]));
            launch_flat(planner, choice, row_count * packs, THREADS, arguments)
        }
        _ => unreachable!("not an op of quantized matrices"),
    }
}

/// The values of codes, if they differ from the codes themselves.
fn points(format: QuantizedFormat) -> Option<Argument> {
    let points = match format {
        QuantizedFormat::Int8 => return None,
        QuantizedFormat::Nf4 => NF4,
    };
    let mut floats = [0.0; FLOATS];
    floats[..points.len()].copy_from_slice(&points);
    Some(Argument::Floats(Arc::new(floats)))
}

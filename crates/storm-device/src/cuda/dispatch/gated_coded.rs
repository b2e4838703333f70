//! Gated units whose operand is saved for the backward pass in 8 bits.

use super::elementwise::name_of;
use super::{Definitions, PACK, THREADS, all_types, count, grid, kernel, threads_for, types};
use crate::DeviceError;
use crate::cuda::KernelSource;
use crate::cuda::plan::Planner;
use storm_graph::{Op, QuantizedFormat, QuantizedRow, UnitOutput};

const SOURCE: KernelSource = KernelSource {
    name: "gated_coded.cu",
    text: include_str!("../kernels/gated_coded.cu"),
    only_for: None,
};

pub(super) fn kernels() -> Vec<(KernelSource, Definitions)> {
    all_types(SOURCE, ["E"])
}

pub(super) fn plan(planner: &mut Planner<'_>) -> Result<(), DeviceError> {
    let (node, outputs) = (planner.node, &planner.node.outputs);
    let function = match &node.op {
        Op::SwiGluCoded { function, .. }
        | Op::SwiGluCodedGrad { function, .. }
        | Op::SwiGluGrad { function, .. }
        | Op::SwiGluGradAndOutput { function, .. } => name_of(*function),
        _ => unreachable!("not a gated unit"),
    };
    // `width` is that of a half.
    let (kind, width, mut arguments) = match &node.op {
        Op::SwiGluCoded { gate_up, .. } => {
            let pointers = [gate_up, &outputs[0], &outputs[1]].map(|view| planner.pointer(view));
            ("coded", gate_up.shape.width() / 2, pointers.to_vec())
        }
        Op::SwiGluCodedGrad { dy, code, output, .. } => {
            // If there is an output, it overwrites `dy`.
            let (kind, dy_at) = match output {
                UnitOutput::Skip => ("coded_grad", dy),
                UnitOutput::Compute => ("coded_grad_and_output", &outputs[1]),
            };
            let pointers = [dy_at, code, &outputs[0]].map(|view| planner.pointer(view));
            (kind, dy.shape.width(), pointers.to_vec())
        }
        // Overwritten operands are at the addresses of the outputs.
        Op::SwiGluGrad { dy, .. } => {
            let pointers = [dy, &outputs[0]].map(|view| planner.pointer(view));
            ("rounded_grad", dy.shape.width(), pointers.to_vec())
        }
        Op::SwiGluGradAndOutput { dy, .. } => {
            let pointers = [&outputs[1], &outputs[0]].map(|view| planner.pointer(view));
            ("rounded_grad_and_output", dy.shape.width(), pointers.to_vec())
        }
        _ => unreachable!("not a gated unit"),
    };
    arguments.push(count(width));
    if matches!(node.op, Op::SwiGluCoded { .. } | Op::SwiGluCodedGrad { .. }) {
        let form = QuantizedRow::new(QuantizedFormat::Int8, width);
        arguments.extend([count(form.scales_at()), count(form.bytes())]);
    }
    let threads = threads_for(width, THREADS);
    let rows = outputs[0].shape.rows();
    let grid = grid(planner, rows, width.div_ceil(threads as usize * PACK))?;
    let name = format!("{function}_gated_{kind}");
    let choice = kernel(SOURCE, &name, types([("E", outputs[0].dtype)]));
    planner.launch(choice, grid, threads, arguments)?;
    if matches!(node.op, Op::SwiGluCoded { .. }) {
        planner.let_begin_early();
    }
    Ok(())
}

//! The gates of a GRU.

use super::{Definitions, THREADS, all_types, count, kernel, launch_flat, types};
use crate::DeviceError;
use crate::cuda::KernelSource;
use crate::cuda::context::Argument;
use crate::cuda::plan::Planner;
use crate::placed::View;
use storm_graph::Op;

const SOURCE: KernelSource = KernelSource {
    name: "recurrent.cu",
    text: include_str!("../kernels/recurrent.cu"),
    only_for: None,
};

pub(super) fn kernels() -> Vec<(KernelSource, Definitions)> {
    all_types(SOURCE, ["E"])
}

pub(super) fn plan(planner: &mut Planner<'_>) -> Result<(), DeviceError> {
    let (name, operands): (&str, Vec<&View>) = match &planner.node.op {
        Op::GruReset { gate, hidden } => ("gru_reset", vec![gate, hidden]),
        Op::GruResetGrad { dy, gate, hidden } => ("gru_reset_grad", vec![dy, gate, hidden]),
        Op::GruState { gate, candidate, hidden } => ("gru_state", vec![gate, candidate, hidden]),
        Op::GruStateGrad { dy, gate, candidate, hidden } => {
            ("gru_state_grad", vec![dy, gate, candidate, hidden])
        }
        _ => unreachable!("not a recurrent op"),
    };
    let outputs = &planner.node.outputs;
    let (elements, dtype) = (outputs[0].shape.elements(), outputs[0].dtype);
    let tensors = operands.into_iter().chain(outputs);
    let mut arguments: Vec<Argument> = tensors.map(|tensor| planner.pointer(tensor)).collect();
    arguments.push(count(elements));
    launch_flat(planner, kernel(SOURCE, name, types([("E", dtype)])), elements, THREADS, arguments)
}

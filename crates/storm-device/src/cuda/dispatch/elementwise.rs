//! Ops on single elements, and the gated unit.

use super::{
    Definitions, PACK, THREADS, all_types, count, gated_coded, grid, kernel, launch_flat,
    threads_for, types,
};
use crate::DeviceError;
use crate::cuda::context::{Argument, Launch};
use crate::cuda::gemm::UnitKind;
use crate::cuda::modules::Kernels;
use crate::cuda::plan::Planner;
use crate::cuda::{CudaError, KernelSource};
use crate::placed::View;
use storm_graph::{ActivationCodec, ActivationFunction, DType, Op};

const SOURCE: KernelSource = KernelSource {
    name: "elementwise.cu",
    text: include_str!("../kernels/elementwise.cu"),
    only_for: None,
};

/// Elements that a block covers: two packs a thread.
const PER_BLOCK: usize = THREADS * 2 * PACK;

pub(super) fn kernels() -> Vec<(KernelSource, Definitions)> {
    all_types(SOURCE, ["E"])
}

pub(super) fn plan(planner: &mut Planner<'_>) -> Result<(), DeviceError> {
    match &planner.node.op {
        Op::Add { a, b } => flat(planner, "add", &[a, b], None),
        Op::Accumulate { x, sum } if x.dtype != sum.dtype => {
            let elements = sum.shape.elements();
            let arguments = vec![planner.pointer(x), planner.pointer(sum), count(elements)];
            let choice = kernel(SOURCE, "accumulate_in_f32", types([("E", x.dtype)]));
            launch_flat(planner, choice, elements, PER_BLOCK, arguments)
        }
        Op::Accumulate { x, .. } => flat(planner, "accumulate", &[x], None),
        Op::MovingAverage { x, momentum, .. } => {
            flat(planner, "moving_average", &[x], Some(*momentum))
        }
        Op::Mul { a, b } => flat(planner, "mul", &[a, b], None),
        Op::Scale { x, factor } => flat(planner, "scale", &[x], Some(*factor)),
        Op::Activation { x, function } => flat(planner, name_of(*function), &[x], None),
        Op::ActivationGrad { dy, function, .. } => {
            flat(planner, &format!("{}_grad", name_of(*function)), &[dy], None)
        }
        Op::Tanh { x } => flat(planner, "hyperbolic_tangent", &[x], None),
        Op::TanhGrad { dy, y } => flat(planner, "hyperbolic_tangent_grad", &[dy, y], None),
        Op::SwiGlu { gate_up, function } => {
            let name = format!("{}_gated", name_of(*function));
            gated(planner, &name, &[gate_up], gate_up.shape.width() / 2)?;
            planner.let_begin_early();
            Ok(())
        }
        Op::SwiGluGrad { codec: ActivationCodec::Int8, .. }
        | Op::SwiGluGradAndOutput { codec: ActivationCodec::Int8, .. } => {
            gated_coded::plan(planner)
        }
        Op::SwiGluGrad { dy, function, .. } => {
            let name = format!("{}_gated_grad", name_of(*function));
            gated(planner, &name, &[dy], dy.shape.width())
        }
        // Both operands are overwritten: the outputs are at their addresses.
        Op::SwiGluGradAndOutput { dy, function, .. } => {
            let output = planner.node.outputs[1].clone();
            let name = format!("{}_gated_grad_and_output", name_of(*function));
            gated(planner, &name, &[&output], dy.shape.width())
        }
        _ => unreachable!("not an elementwise op"),
    }
}

/// How the names of an activation's kernels begin.
pub(super) fn name_of(function: ActivationFunction) -> &'static str {
    match function {
        ActivationFunction::Gelu => "gelu",
        ActivationFunction::GeluTanh => "gelu_tanh",
        ActivationFunction::Relu => "relu",
        ActivationFunction::Silu => "silu",
    }
}

/// Launches a kernel whose arguments are the operands except an overwritten one, the output, the
/// number of elements, and a factor if there is one.
fn flat(
    planner: &mut Planner<'_>,
    name: &str,
    operands: &[&View],
    factor: Option<f32>,
) -> Result<(), DeviceError> {
    let out = &planner.node.outputs[0];
    let elements = out.shape.elements();
    let mut arguments: Vec<Argument> = operands.iter().map(|x| planner.pointer(x)).collect();
    arguments.extend([planner.pointer(out), count(elements)]);
    arguments.extend(factor.map(Argument::F32));
    let choice = kernel(SOURCE, name, types([("E", out.dtype)]));
    launch_flat(planner, choice, elements, PER_BLOCK, arguments)
}

/// Launches a kernel whose arguments are the operands except an overwritten one, the output, and
/// the width of a half.
fn gated(
    planner: &mut Planner<'_>,
    name: &str,
    operands: &[&View],
    width: usize,
) -> Result<(), DeviceError> {
    let out = &planner.node.outputs[0];
    let mut arguments: Vec<Argument> = operands.iter().map(|x| planner.pointer(x)).collect();
    arguments.extend([planner.pointer(out), count(width)]);
    let threads = threads_for(width, THREADS);
    let grid = grid(planner, out.shape.rows(), width.div_ceil(threads as usize * PACK))?;
    planner.launch(kernel(SOURCE, name, types([("E", out.dtype)])), grid, threads, arguments)
}

/// A gated unit with SiLU in bf16 that takes a product, for a trial.
pub(in crate::cuda) fn silu_unit(
    kernels: &Kernels,
    kind: UnitKind,
    product: u64,
    unit: u64,
    (rows, columns): (usize, usize),
) -> Result<Launch, CudaError> {
    let (name, width) = match kind {
        UnitKind::Forward => ("silu_gated", columns / 2),
        UnitKind::Gradient => ("silu_gated_grad", columns),
        UnitKind::GradientAndOutput => ("silu_gated_grad_and_output", columns),
    };
    let threads = threads_for(width, THREADS);
    Ok(Launch {
        kernel: kernels.get(&kernel(SOURCE, name, types([("E", DType::BF16)])))?,
        grid: (rows as u32, width.div_ceil(threads as usize * PACK) as u32, 1),
        block: threads,
        shared_bytes: 0,
        arguments: vec![Argument::Pointer(product), Argument::Pointer(unit), count(width)],
        begins_early: false,
        joint: None,
    })
}

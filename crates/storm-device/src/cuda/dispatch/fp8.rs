//! Operands in 8-bit floats, and products of them.

use super::linear::gemm;
use super::{Definitions, PACK, THREADS, count, grid, kernel, small, unsupported};
use crate::DeviceError;
use crate::cuda::KernelSource;
use crate::cuda::gemm::{GemmCall, GemmRole, Operand, Scales};
use crate::cuda::plan::Planner;
use crate::placed::View;
use storm_graph::{DType, FP8_PARTIALS, Fp8Form, Op};

const SOURCE: KernelSource =
    KernelSource { name: "fp8.cu", text: include_str!("../kernels/fp8.cu"), only_for: None };

/// The first cards whose tensor cores multiply 8-bit floats.
pub(in crate::cuda) const CAPABILITY: (i32, i32) = (8, 9);

/// Threads of a block that finds the largest magnitude.
const LARGEST_THREADS: usize = 512;

/// Elements of a thread that writes rows, and of a tile of columns.
const ROW_ELEMENTS: usize = 2 * PACK;
const TILE: [usize; 2] = [128, 64];

/// Enough blocks for any card. For a large tensor, each takes several parts, and computes the scale
/// once.
const BLOCKS_MAX: usize = 2048;

pub(super) fn kernels() -> Vec<(KernelSource, Definitions)> {
    vec![(SOURCE, Definitions::new())]
}

pub(super) fn plan(planner: &mut Planner<'_>) -> Result<(), DeviceError> {
    let outputs = &planner.node.outputs;
    match &planner.node.op {
        Op::ToFp8 { x, form } => codes(planner, x, *form),
        Op::Fp8Linear { x, weight, bias, addend, .. } => {
            let mut call = product(planner, x, weight, &outputs[0])?;
            call.bias = bias.as_ref().map(|bias| planner.address(bias));
            call.addend = addend.as_ref().map(|addend| planner.address(addend));
            gemm(planner, call)
        }
        Op::Fp8WeightGrad { dy, x, accumulator, .. } => {
            let mut call = product(planner, dy, x, &outputs[0])?;
            call.accumulate = accumulator.is_some();
            gemm(planner, call)
        }
        _ => unreachable!("not an op of 8-bit floats"),
    }
}

fn codes(planner: &mut Planner<'_>, x: &View, form: Fp8Form) -> Result<(), DeviceError> {
    let (height, width) = (x.shape.rows(), x.shape.width());
    let outputs = &planner.node.outputs;
    let partials = planner.pointer(&outputs[outputs.len() - 1]);
    let packs = height * width / PACK;
    let parts = packs.div_ceil(LARGEST_THREADS).min(FP8_PARTIALS);
    let arguments = vec![planner.pointer(x), count(packs), partials.clone()];
    let choice = kernel(SOURCE, "largest", Definitions::new());
    let blocks = grid(planner, parts, 1)?;
    planner.launch(choice, blocks, LARGEST_THREADS as u32, arguments)?;

    let tiles = height.div_ceil(TILE[0]) * width.div_ceil(TILE[1]);
    let (name, blocks) = match form {
        Fp8Form::Rows => ("fp8_rows", (height * width).div_ceil(ROW_ELEMENTS * THREADS)),
        Fp8Form::Columns => ("fp8_columns", tiles),
        Fp8Form::Both => ("fp8_both", tiles),
    };
    let mut arguments = vec![planner.pointer(x)];
    arguments.extend(outputs[..outputs.len() - 1].iter().map(|codes| planner.pointer(codes)));
    arguments.extend([count(height), count(width), partials, small(parts)]);
    let blocks = grid(planner, blocks.min(BLOCKS_MAX), 1)?;
    planner.launch(kernel(SOURCE, name, Definitions::new()), blocks, THREADS as u32, arguments)
}

/// `a · bᵀ` of codes. The scale of each operand follows its codes.
fn product(planner: &Planner<'_>, a: &View, b: &View, out: &View) -> Result<GemmCall, DeviceError> {
    let card = planner.card();
    if card.capability < CAPABILITY {
        let (major, minor) = card.capability;
        let reason = format!(
            "fp8 needs compute capability 8.9 or newer, and {} has {major}.{minor}; train with precision bf16-stochastic",
            card.name
        );
        return Err(unsupported(planner, reason));
    }
    let rows = |codes: &View| codes.shape.rows() - 1;
    let operand = |codes: &View, transposed: bool| Operand {
        address: planner.address(codes),
        dtype: DType::U8,
        transposed,
    };
    let scale = |codes: &View| planner.address(codes) + (rows(codes) * codes.shape.width()) as u64;
    let sizes = (rows(a), rows(b), a.shape.width());
    let out = (planner.address(out), out.dtype);
    let role = GemmRole::Whole;
    let mut call = GemmCall::new(sizes, operand(a, false), operand(b, true), out.0, out.1, role);
    call.scales = Some(Scales { a: scale(a), b: scale(b) });
    Ok(call)
}

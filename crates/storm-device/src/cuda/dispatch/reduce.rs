//! Sums over rows, over all elements, and over scalars.

use super::{
    Definitions, PACK, THREADS, WARP, all_types, count, flag, grid, kernel, small, types,
    unsupported,
};
use crate::DeviceError;
use crate::cuda::KernelSource;
use crate::cuda::context::Argument;
use crate::cuda::plan::Planner;
use crate::placed::View;
use storm_graph::{DType, Op, ROWS_PER_PARTIAL, SUM_BLOCK};

const SOURCE: KernelSource =
    KernelSource { name: "reduce.cu", text: include_str!("../kernels/reduce.cu"), only_for: None };

/// Columns that a block of `column_partials` covers.
const COLUMNS: usize = WARP * PACK;

/// Threads of a block that sums [`SUM_BLOCK`] elements.
const SUM_THREADS: u32 = 512;

/// Scalars that one launch of `global_norm` adds.
const PARTS_PER_LAUNCH: usize = 16;

pub(super) fn kernels() -> Vec<(KernelSource, Definitions)> {
    all_types(SOURCE, ["E"])
}

pub(super) fn plan(planner: &mut Planner<'_>) -> Result<(), DeviceError> {
    let outputs = &planner.node.outputs;
    match &planner.node.op {
        Op::ColumnSum { x, accumulator, .. } => {
            let (rows, width) = (x.shape.rows(), x.shape.width());
            let arguments = vec![
                planner.pointer(x),
                planner.output(1),
                count(rows),
                count(width),
                small(ROWS_PER_PARTIAL),
            ];
            let blocks = (rows.div_ceil(ROWS_PER_PARTIAL), width.div_ceil(COLUMNS));
            let grid = grid(planner, blocks.0, blocks.1)?;
            let choice = kernel(SOURCE, "column_partials", types([("E", x.dtype)]));
            planner.launch(choice, grid, THREADS as u32, arguments)?;
            let sum = Columns { first: 0, out: &outputs[0], adds: accumulator.is_some() };
            finish(planner, &outputs[1], &[sum])
        }
        Op::Sum { x } => sum(planner, "sum_partials", None, x),
        Op::SumOfSquares { x } => {
            sum(planner, "square_partials", Some("square_partials_several"), x)
        }
        Op::SumOfPartials { partials } => {
            let blocks = partials.shape.elements();
            let arguments = vec![planner.pointer(partials), planner.output(0), count(blocks)];
            let choice = kernel(SOURCE, "sum_finish", types([("E", DType::F32)]));
            planner.launch(choice, (1, 1, 1), 1024, arguments)
        }
        Op::GlobalNorm { parts } => global_norm(planner, parts),
        Op::ClipScale { norm, max_norm } => {
            let arguments =
                vec![planner.pointer(norm), planner.output(0), Argument::F32(*max_norm)];
            let choice = kernel(SOURCE, "clip_scale", types([("E", DType::F32)]));
            planner.launch(choice, (1, 1, 1), 1, arguments)
        }
        _ => unreachable!("not a reduction"),
    }
}

/// A sum of partial sums.
pub(super) struct Columns<'a> {
    /// Its first column among the partial sums.
    pub(super) first: usize,
    pub(super) out: &'a View,
    /// Whether it is added to the previous contents of `out`.
    pub(super) adds: bool,
}

/// Adds up columns of `partials`, for one or two outputs of the same size.
pub(super) fn finish(
    planner: &mut Planner<'_>,
    partials: &View,
    sums: &[Columns<'_>],
) -> Result<(), DeviceError> {
    let (one, other) = (&sums[0], &sums[sums.len() - 1]);
    let columns = one.out.shape.elements();
    assert!(sums.len() <= 2 && other.out.shape.elements() == columns, "sums of the same size");
    let mut arguments = vec![
        planner.pointer(partials),
        count(partials.shape.rows()),
        count(partials.shape.width()),
        count(columns),
    ];
    for sum in [one, other] {
        arguments.extend([planner.pointer(sum.out), count(sum.first), flag(sum.adds)]);
    }
    let grid = grid(planner, columns.div_ceil(WARP), sums.len())?;
    let choice = kernel(SOURCE, "column_finish", types([("E", one.out.dtype)]));
    planner.launch(choice, grid, (WARP * WARP) as u32, arguments)
}

fn sum(
    planner: &mut Planner<'_>,
    name: &str,
    several: Option<&str>,
    x: &View,
) -> Result<(), DeviceError> {
    let elements = x.shape.elements();
    let blocks = elements.div_ceil(SUM_BLOCK);
    let arguments = vec![planner.pointer(x), planner.output(1), count(elements), small(SUM_BLOCK)];
    let grid = grid(planner, blocks, 1)?;
    let choice = kernel(SOURCE, name, types([("E", x.dtype)]));
    planner.launch(choice, grid, SUM_THREADS, arguments)?;
    if let Some(several) = several {
        // All have the number of elements of a block in common.
        planner.let_join(kernel(SOURCE, several, types([("E", x.dtype)])), &[3])?;
    }
    let arguments = vec![planner.output(1), planner.output(0), count(blocks)];
    let choice = kernel(SOURCE, "sum_finish", types([("E", DType::F32)]));
    planner.launch(choice, (1, 1, 1), 1024, arguments)?;
    planner.let_join(kernel(SOURCE, "sum_finish_several", types([("E", DType::F32)])), &[])
}

/// The parts can be anywhere, and a launch takes few addresses. So each launch adds some parts to a
/// running sum (f64, as on the CPU) in scratch memory, and the last one takes the root.
fn global_norm(planner: &mut Planner<'_>, parts: &[View]) -> Result<(), DeviceError> {
    let Some(running) = planner.node.outputs.get(1) else {
        return Err(unsupported(planner, "it has no scratch output for the running sum"));
    };
    let launches = parts.len().div_ceil(PARTS_PER_LAUNCH);
    for (launch, parts) in parts.chunks(PARTS_PER_LAUNCH).enumerate() {
        let is_last = launch + 1 == launches;
        let norm = if is_last { planner.output(0) } else { Argument::Pointer(0) };
        let mut arguments =
            vec![planner.pointer(running), norm, flag(launch == 0), small(parts.len())];
        arguments.extend(parts.iter().map(|part| planner.pointer(part)));
        arguments.resize(4 + PARTS_PER_LAUNCH, Argument::Pointer(0));
        let choice = kernel(SOURCE, "global_norm", types([("E", DType::F32)]));
        planner.launch(choice, (1, 1, 1), 1, arguments)?;
    }
    Ok(())
}

//! Rows of a table, and their gradient.

use super::{
    Definitions, PACK, THREADS, WARP, all_types, count, grid, kernel, layout, threads_for, types,
};
use crate::DeviceError;
use crate::cuda::KernelSource;
use crate::cuda::plan::Planner;
use storm_graph::Op;

const SOURCE: KernelSource = KernelSource {
    name: "embedding.cu",
    text: include_str!("../kernels/embedding.cu"),
    only_for: None,
};

/// Threads of a block of `embedding_grad`, and the columns that it covers.
const GRAD_THREADS: u32 = 128;
const GRAD_COLUMNS: usize = WARP * PACK;

pub(super) fn kernels() -> Vec<(KernelSource, Definitions)> {
    all_types(SOURCE, ["E", "G"])
}

pub(super) fn plan(planner: &mut Planner<'_>) -> Result<(), DeviceError> {
    let out = &planner.node.outputs[0];
    match &planner.node.op {
        Op::Embedding { ids, table } => {
            let width = table.shape.width();
            let arguments = vec![
                planner.pointer(ids),
                planner.pointer(table),
                planner.pointer(out),
                count(table.shape.rows()),
                count(width),
            ];
            let definitions = types([("E", table.dtype), ("G", table.dtype)]);
            let grid = grid(planner, ids.shape.elements(), 1)?;
            let threads = threads_for(width, THREADS);
            planner.launch(kernel(SOURCE, "embedding", definitions), grid, threads, arguments)
        }
        Op::EmbeddingGrad { dy, ids, order, accumulator, table_rows, dtype } => {
            if accumulator.is_none() {
                layout::fill(planner, out, 0.0)?;
            }
            let (rows, width) = (ids.shape.elements(), dy.shape.width());
            let arguments = vec![
                planner.pointer(dy),
                planner.pointer(ids),
                planner.pointer(order),
                planner.pointer(out),
                count(rows),
                count(*table_rows),
                count(width),
            ];
            let definitions = types([("E", dy.dtype), ("G", *dtype)]);
            let grid = grid(planner, rows, width.div_ceil(GRAD_COLUMNS))?;
            let choice = kernel(SOURCE, "embedding_grad", definitions);
            planner.launch(choice, grid, GRAD_THREADS, arguments)
        }
        _ => unreachable!("not an embedding op"),
    }
}

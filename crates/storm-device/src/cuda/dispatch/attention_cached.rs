//! Attention over cached keys and values. It is computed for parts of the keys, which are then
//! combined.

use super::{Definitions, grid, small, types, unsupported};
use crate::DeviceError;
use crate::cuda::KernelSource;
use crate::cuda::context::Argument;
use crate::cuda::plan::{KernelChoice, Planner};
use storm_graph::{CacheParts, DType, HeadLayout, Op};

const SOURCE: KernelSource = KernelSource {
    name: "attention_cached.cu",
    text: include_str!("../kernels/attention_cached.cu"),
    only_for: None,
};

/// The widest head.
const DIM_MAX: usize = 256;
/// A kernel is compiled for heads of at most one, two or four times this.
const DIM_UNIT: usize = 64;
/// Queries of a block, for few queries and for more.
const QUERIES: [usize; 2] = [2, 8];
const THREADS: u32 = 256;

pub(super) fn kernels() -> Vec<(KernelSource, Definitions)> {
    let mut kernels = Vec::new();
    for dtype in [DType::F32, DType::BF16] {
        for queries in QUERIES {
            for units in [1, 2, 4] {
                kernels.push((SOURCE, definitions(dtype, queries, units)));
            }
        }
    }
    kernels
}

fn definitions(dtype: DType, queries: usize, units: usize) -> Definitions {
    let mut definitions = types([("ELEMENT", dtype)]);
    definitions.push(("QUERIES", queries.to_string()));
    definitions.push(("LANE_PACKS", units.to_string()));
    definitions
}

pub(super) fn plan(planner: &mut Planner<'_>) -> Result<(), DeviceError> {
    let node = planner.node;
    let Op::CachedAttention { qkv, cache, positions, heads, mask, scale } = &node.op else {
        unreachable!("not attention over a cache");
    };
    let HeadLayout { query_heads, key_value_heads, head_dim } = *heads;
    // The scale goes into an exponent base 2, as a positive factor.
    if scale.is_nan() || *scale <= 0.0 {
        return Err(unsupported(planner, "its scale is not positive"));
    }
    if head_dim > DIM_MAX {
        return Err(unsupported(planner, format!("heads are wider than {DIM_MAX}")));
    }
    let axes = qkv.shape.axes();
    let (batch, tokens, window) = (axes[0], axes[1], cache.shape.axes()[1]);
    let columns = tokens * (query_heads / key_value_heads.max(1));
    if batch == 0 || columns == 0 || head_dim == 0 {
        return Ok(());
    }
    let queries = if columns <= QUERIES[0] { QUERIES[0] } else { QUERIES[1] };
    let units = head_dim.div_ceil(DIM_UNIT).next_power_of_two();
    let parts = CacheParts::of(window);
    let reach = mask.window().unwrap_or(window).min(window);
    let kernel = |name| KernelChoice {
        source: SOURCE,
        name,
        definitions: definitions(qkv.dtype, queries, units),
        shared_bytes: 0,
    };

    let arguments = vec![
        planner.pointer(qkv),
        planner.pointer(positions),
        planner.output(1),
        planner.output(2),
        small(tokens),
        small(window),
        small(query_heads),
        small(key_value_heads),
        small(head_dim),
        small(parts.count),
        small(parts.keys),
        small(reach),
        Argument::F32(*scale),
    ];
    let (blocks, rows, _) = grid(planner, parts.count, columns.div_ceil(queries))?;
    let (_, heads_of_all, _) = grid(planner, 1, batch * key_value_heads)?;
    planner.launch(kernel("attention_cached"), (blocks, rows, heads_of_all), THREADS, arguments)?;
    planner.let_begin_early();

    let arguments = vec![
        planner.output(2),
        planner.pointer(positions),
        planner.output(0),
        small(query_heads),
        small(head_dim),
        small(parts.count),
        small(parts.keys),
        small(reach),
    ];
    let grid = grid(planner, batch * tokens * query_heads, 1)?;
    let threads = head_dim.next_multiple_of(super::WARP) as u32;
    planner.launch(kernel("attention_cached_sum"), grid, threads, arguments)?;
    planner.let_begin_early();
    Ok(())
}

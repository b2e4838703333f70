//! Per-head norms and rotary embeddings of packed rows.

use super::reduce::{self, Columns};
use super::{
    Definitions, PACK, THREADS, WARP, all_types, count, grid, kernel, small, types, unsupported,
};
use crate::DeviceError;
use crate::cuda::KernelSource;
use crate::cuda::context::{Argument, FLOATS};
use crate::cuda::plan::Planner;
use crate::placed::View;
use std::sync::Arc;
use storm_graph::{
    DType, HeadLayout, Op, ParameterGradients, RotaryDirection, norm_rows_per_partial,
};

const SOURCE: KernelSource =
    KernelSource { name: "heads.cu", text: include_str!("../kernels/heads.cu"), only_for: None };

/// Pairs that a rotary table can have.
const PAIRS_MAX: usize = FLOATS;

/// Threads of a block that computes rotary embeddings, if heads are not too wide for so few.
const ROTARY_THREADS: usize = 64;

/// Rows of the rotary table that a thread computes with its frequency.
const TABLE_ROWS: usize = 16;

pub(super) fn kernels() -> Vec<(KernelSource, Definitions)> {
    all_types(SOURCE, ["E"])
}

pub(super) fn plan(planner: &mut Planner<'_>) -> Result<(), DeviceError> {
    let outputs = &planner.node.outputs;
    match &planner.node.op {
        Op::QkNorm { qkv, query_weight, key_weight, table, heads, epsilon } => {
            let lanes = norm_lanes(planner, heads)?;
            let turn = NormTurn::of(planner, table.as_ref());
            let mut arguments =
                [qkv, query_weight, key_weight].map(|x| planner.pointer(x)).to_vec();
            arguments.push(turn.table.clone());
            arguments.extend([planner.output(0), planner.output(1)]);
            arguments.extend(layout(heads, lanes));
            arguments.extend([small(turn.half), Argument::F32(*epsilon)]);
            let grid = grid(planner, qkv.shape.rows(), 1)?;
            let choice = kernel(SOURCE, "qk_norm", types([("E", qkv.dtype)]));
            planner.launch(choice, grid, row_threads(heads, lanes), arguments)?;
            planner.let_begin_early();
            match turn.separate {
                Some(table) => {
                    let y = planner.output(0);
                    rotate(planner, qkv, table, heads, RotaryDirection::Forward, [y.clone(), y])
                }
                None => Ok(()),
            }
        }
        Op::QkNormGrad {
            dy,
            qkv,
            query_weight,
            key_weight,
            table,
            rstd,
            query_accumulator,
            key_accumulator,
            heads,
            parameters,
            ..
        } => {
            let lanes = norm_lanes(planner, heads)?;
            let turn = NormTurn::of(planner, table.as_ref());
            let mut dy = planner.pointer(dy);
            if let Some(table) = turn.separate {
                let dx = planner.output(0);
                let direction = RotaryDirection::Inverse;
                rotate(planner, qkv, table, heads, direction, [dy, dx.clone()])?;
                dy = dx;
            }
            let rows = qkv.shape.rows();
            let rows_per_block = norm_rows_per_partial(rows);
            let compute = *parameters == ParameterGradients::Compute;
            let partials = compute.then(|| outputs[3].clone());
            let mut arguments = vec![dy];
            arguments.extend([qkv, query_weight, key_weight].map(|x| planner.pointer(x)));
            arguments.extend([turn.table, planner.pointer(rstd), planner.output(0)]);
            arguments.extend([planner.maybe(&partials), count(rows), small(rows_per_block)]);
            arguments.extend(layout(heads, lanes));
            arguments.push(small(turn.half));
            let grid = grid(planner, rows.div_ceil(rows_per_block), 1)?;
            let choice = kernel(SOURCE, "qk_norm_grad", types([("E", qkv.dtype)]));
            planner.launch(choice, grid, THREADS as u32, arguments)?;
            planner.let_begin_early();
            if let Some(partials) = &partials {
                let dim = heads.head_dim;
                let (query, key) = (query_accumulator.is_some(), key_accumulator.is_some());
                let sums = [
                    Columns { first: 0, out: &outputs[1], adds: query },
                    Columns { first: dim, out: &outputs[2], adds: key },
                ];
                reduce::finish(planner, partials, &sums)?;
            }
            Ok(())
        }
        Op::RotaryTable { positions, frequencies } => {
            let pairs = frequencies.pairs();
            let mut of_pairs = [0.0; PAIRS_MAX];
            let Some(part) = of_pairs.get_mut(..pairs) else {
                let reason = format!("it has {pairs} pairs, and at most {PAIRS_MAX} are possible");
                return Err(unsupported(planner, reason));
            };
            part.copy_from_slice(&frequencies.inverse_wavelengths);
            let rows = positions.shape.elements();
            let arguments = vec![
                planner.pointer(positions),
                planner.output(0),
                count(rows),
                small(TABLE_ROWS),
                small(pairs),
                Argument::F32(frequencies.factor),
                Argument::Floats(Arc::new(of_pairs)),
            ];
            let threads = pairs.next_multiple_of(WARP).clamp(WARP, THREADS);
            let blocks = (rows.div_ceil(TABLE_ROWS), pairs.div_ceil(threads));
            let grid = grid(planner, blocks.0, blocks.1)?;
            let choice = kernel(SOURCE, "rotary_table", types([("E", DType::F32)]));
            planner.launch(choice, grid, threads as u32, arguments)
        }
        Op::Rotary { qkv, table, heads, direction } => {
            let places = [planner.pointer(qkv), planner.output(0)];
            rotate(planner, qkv, table, heads, *direction, places)
        }
        _ => unreachable!("not an op on heads"),
    }
}

/// How the heads that a norm reads or writes are rotated.
struct NormTurn<'a> {
    /// The table for the norm's kernel, or null.
    table: Argument,
    /// Lanes with the first elements of pairs: 0 if the norm's kernel does not rotate.
    half: usize,
    /// The table for a kernel of its own, where lanes do not have whole packs of pairs.
    separate: Option<&'a View>,
}

impl<'a> NormTurn<'a> {
    fn of(planner: &Planner<'_>, table: Option<&'a View>) -> NormTurn<'a> {
        let pairs = table.map_or(0, |table| table.shape.axes()[2]);
        let separate = table.filter(|_| !pairs.is_multiple_of(PACK));
        match (table, separate) {
            (Some(table), None) => {
                NormTurn { table: planner.pointer(table), half: pairs / PACK, separate }
            }
            _ => NormTurn { table: planner.maybe(&None), half: 0, separate },
        }
    }
}

/// Launches the kernel that rotates heads in the layout of `qkv` from one place to another, or in
/// place.
fn rotate(
    planner: &mut Planner<'_>,
    qkv: &View,
    table: &View,
    heads: &HeadLayout,
    direction: RotaryDirection,
    [from, to]: [Argument; 2],
) -> Result<(), DeviceError> {
    let pairs = table.shape.axes()[2];
    let lanes = pairs.div_ceil(PACK);
    check_lanes(planner, heads, lanes, THREADS)?;
    let sign = match direction {
        RotaryDirection::Forward => 1.0,
        RotaryDirection::Inverse => -1.0,
    };
    let mut arguments = vec![from, planner.pointer(table), to];
    arguments.extend(layout(heads, lanes));
    arguments.extend([small(pairs), Argument::F32(sign)]);
    let grid = grid(planner, qkv.shape.rows(), 1)?;
    let choice = kernel(SOURCE, "rotary", types([("E", qkv.dtype)]));
    planner.launch(choice, grid, rotary_threads(heads, lanes), arguments)?;
    planner.let_begin_early();
    Ok(())
}

/// Query heads, key heads, their width, and the threads that share a head.
fn layout(heads: &HeadLayout, lanes: usize) -> [Argument; 4] {
    [heads.query_heads, heads.key_value_heads, heads.head_dim, lanes].map(small)
}

/// Threads that share a head in a norm: a power of two, because sums are taken over neighboring
/// threads.
fn norm_lanes(planner: &Planner<'_>, heads: &HeadLayout) -> Result<usize, DeviceError> {
    let lanes = heads.head_dim.div_ceil(PACK).next_power_of_two();
    check_lanes(planner, heads, lanes, WARP)?;
    Ok(lanes)
}

fn check_lanes(
    planner: &Planner<'_>,
    heads: &HeadLayout,
    lanes: usize,
    most: usize,
) -> Result<(), DeviceError> {
    if lanes > most {
        return Err(unsupported(planner, format!("a head is {} wide", heads.head_dim)));
    }
    Ok(())
}

/// Threads of a block for one row: enough for all heads at once, up to the maximum.
fn row_threads(heads: &HeadLayout, lanes: usize) -> u32 {
    let all = heads.query_key_heads() + heads.key_value_heads;
    (all * lanes).next_multiple_of(WARP).min(THREADS) as u32
}

/// Threads of a block for one row of a rotary embedding. Few, so that each computes several heads:
/// it reads its angles once, and those take as many bytes as two heads.
fn rotary_threads(heads: &HeadLayout, lanes: usize) -> u32 {
    row_threads(heads, lanes).min(ROTARY_THREADS.max(lanes.next_multiple_of(WARP)) as u32)
}

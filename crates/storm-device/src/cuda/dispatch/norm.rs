//! Layer norm and RMS norm.

use super::reduce::{self, Columns};
use super::{
    Definitions, PACK, THREADS, WARP, all_types, count, grid, kernel, small, types, unsupported,
};
use crate::DeviceError;
use crate::cuda::KernelSource;
use crate::cuda::context::Argument;
use crate::cuda::plan::Planner;
use storm_graph::{DType, NormKind, Op, ParameterGradients, norm_rows_per_partial};

const SOURCE: KernelSource =
    KernelSource { name: "norm.cu", text: include_str!("../kernels/norm.cu"), only_for: None };

pub(super) fn kernels() -> Vec<(KernelSource, Definitions)> {
    let kinds = [NormKind::Rms, NormKind::Layer];
    let with_kind = |kind| {
        all_types(SOURCE, ["E"]).into_iter().map(move |(source, mut definitions)| {
            definitions.push(layer(kind));
            (source, definitions)
        })
    };
    kinds.into_iter().flat_map(with_kind).collect()
}

fn layer(kind: NormKind) -> (&'static str, String) {
    ("LAYER", u8::from(kind == NormKind::Layer).to_string())
}

fn definitions(dtype: DType, kind: NormKind) -> Definitions {
    let mut definitions = types([("E", dtype)]);
    definitions.push(layer(kind));
    definitions
}

/// How rows are assigned to threads.
struct Geometry {
    /// Last part of the kernels' names.
    kernel: &'static str,
    threads: u32,
    /// Rows that a block of the forward kernel takes.
    rows_per_block: usize,
}

impl Geometry {
    /// Assigns a row to one warp, with a pack or two in each lane, or to a block, with a pack or
    /// two in each thread.
    fn new(planner: &Planner<'_>, width: usize) -> Result<Geometry, DeviceError> {
        let (kernel, packs) = match width {
            0..=256 => ("warp_1", None),
            257..=512 => ("warp_2", None),
            513..=2048 => ("block_256", Some(1)),
            2049..=4096 => ("block_512", Some(1)),
            4097..=8192 => ("block_1024", Some(1)),
            8193..=16384 => ("block_1024_2", Some(2)),
            _ => {
                let reason = format!("a row is {width} wide, and at most 16384 is possible");
                return Err(unsupported(planner, reason));
            }
        };
        Ok(match packs {
            None => Geometry { kernel, threads: THREADS as u32, rows_per_block: THREADS / WARP },
            Some(packs) => {
                let threads = width.div_ceil(PACK * packs).next_multiple_of(WARP) as u32;
                Geometry { kernel, threads, rows_per_block: 1 }
            }
        })
    }
}

pub(super) fn plan(planner: &mut Planner<'_>) -> Result<(), DeviceError> {
    let outputs = &planner.node.outputs;
    match &planner.node.op {
        Op::Norm { x, delta, weight, bias, kind, epsilon } => {
            let (rows, width) = (x.shape.rows(), x.shape.width());
            let is_layer = *kind == NormKind::Layer;
            let mean = is_layer.then(|| outputs[2].clone());
            let sum = delta.is_some().then(|| outputs[if is_layer { 3 } else { 2 }].clone());
            let arguments = vec![
                planner.pointer(x),
                planner.maybe(delta),
                planner.pointer(weight),
                planner.maybe(bias),
                planner.output(0),
                planner.output(1),
                planner.maybe(&mean),
                planner.maybe(&sum),
                count(rows),
                count(width),
                Argument::F32(*epsilon),
            ];
            let geometry = Geometry::new(planner, width)?;
            let name = format!("norm_{}", geometry.kernel);
            let choice = kernel(SOURCE, &name, definitions(x.dtype, *kind));
            let grid = grid(planner, rows.div_ceil(geometry.rows_per_block), 1)?;
            planner.launch(choice, grid, geometry.threads, arguments)?;
            planner.let_begin_early();
            Ok(())
        }
        Op::NormGrad {
            dy,
            x,
            weight,
            bias,
            rstd,
            mean,
            addend,
            weight_accumulator,
            bias_accumulator,
            kind,
            parameters,
            ..
        } => {
            let (rows, width) = (x.shape.rows(), x.shape.width());
            let rows_per_block = norm_rows_per_partial(rows);
            let compute = *parameters == ParameterGradients::Compute;
            let partials = compute.then(|| outputs[outputs.len() - 1].clone());
            let partial_width = partials.as_ref().map_or(0, |partials| partials.shape.width());
            let arguments = vec![
                planner.pointer(dy),
                planner.pointer(x),
                planner.pointer(weight),
                planner.pointer(rstd),
                planner.maybe(mean),
                planner.maybe(addend),
                planner.output(0),
                planner.maybe(&partials),
                count(rows),
                count(width),
                small(rows_per_block),
                small(partial_width),
            ];
            let geometry = Geometry::new(planner, width)?;
            let name = format!("norm_grad_{}", geometry.kernel);
            let choice = kernel(SOURCE, &name, definitions(x.dtype, *kind));
            let grid = grid(planner, rows.div_ceil(rows_per_block), 1)?;
            planner.launch(choice, grid, geometry.threads, arguments)?;
            if let Some(partials) = &partials {
                let adds = weight_accumulator.is_some();
                let mut sums = vec![Columns { first: 0, out: &outputs[1], adds }];
                if bias.is_some() {
                    let adds = bias_accumulator.is_some();
                    sums.push(Columns { first: width, out: &outputs[2], adds });
                }
                reduce::finish(planner, partials, &sums)?;
            }
            Ok(())
        }
        _ => unreachable!("not a norm op"),
    }
}

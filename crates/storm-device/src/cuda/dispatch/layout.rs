//! Copies, conversions, constants and random values.

use super::{
    Definitions, PACK, THREADS, all_types, count, flag, kernel, launch_flat, stream_word, types,
    unsupported,
};
use crate::DeviceError;
use crate::cuda::KernelSource;
use crate::cuda::context::Argument;
use crate::cuda::plan::Planner;
use crate::placed::View;
use std::ops::Range;
use storm_graph::{BlockPlace, DType, Op};

const SOURCE: KernelSource =
    KernelSource { name: "layout.cu", text: include_str!("../kernels/layout.cu"), only_for: None };

/// Elements that a block covers: two packs a thread.
const PER_BLOCK: usize = THREADS * 2 * PACK;

/// The largest number of axes of a transpose.
const AXES_MAX: usize = 8;

pub(super) fn kernels() -> Vec<(KernelSource, Definitions)> {
    all_types(SOURCE, ["A", "B"])
}

pub(super) fn plan(planner: &mut Planner<'_>) -> Result<(), DeviceError> {
    let node = planner.node;
    let out = &node.outputs[0];
    let elements = out.shape.elements();
    match &node.op {
        Op::Fill { value, .. } => fill(planner, out, *value),
        Op::Broadcast { x, .. } => {
            let arguments = vec![planner.pointer(x), planner.pointer(out), count(elements)];
            let choice = kernel(SOURCE, "broadcast", written(out.dtype));
            launch_flat(planner, choice, elements, PER_BLOCK, arguments)
        }
        Op::Convert { x, dtype } => {
            let arguments = vec![planner.pointer(x), planner.pointer(out), count(elements)];
            let choice = kernel(SOURCE, "convert", types([("A", x.dtype), ("B", *dtype)]));
            launch_flat(planner, choice, elements, PER_BLOCK, arguments)
        }
        Op::BlockMatrix { parts, places, .. } => block_matrix(planner, parts, places, out),
        Op::BlockGrad { dy, accumulator, place, .. } => {
            block_grad(planner, dy, *place, accumulator.is_some(), out)
        }
        Op::Reshape { x, .. } => {
            let bytes = elements * out.dtype.size_bytes();
            let arguments = vec![planner.pointer(x), planner.pointer(out), count(bytes)];
            let choice = kernel(SOURCE, "copy_bytes", written(DType::F32));
            launch_flat(planner, choice, bytes, THREADS * 16, arguments)
        }
        Op::Transpose { x, axes } => transpose(planner, x, axes, out),
        Op::RandomNormal { random, deviation, stream, .. } => {
            let arguments = vec![
                planner.pointer(random),
                planner.pointer(out),
                count(elements),
                Argument::F32(*deviation),
                stream_word(*stream, node.layer),
            ];
            let choice = kernel(SOURCE, "random_normal", written(out.dtype));
            launch_flat(planner, choice, elements, THREADS * 4, arguments)
        }
        _ => unreachable!("not a layout op"),
    }
}

/// One launch for each part. It writes the rows of the part, and those from there to the next part.
fn block_matrix(
    planner: &mut Planner<'_>,
    parts: &[View],
    places: &[BlockPlace],
    out: &View,
) -> Result<(), DeviceError> {
    let mut first = 0;
    for (index, (part, place)) in parts.iter().zip(places).enumerate() {
        let end = places.get(index + 1).map_or(out.shape.rows(), |next| next.row);
        place_block(planner, part, *place, out, first..end)?;
        first = end;
    }
    Ok(())
}

/// Writes some rows of `out`: `part` at its place, and zeros elsewhere.
pub(super) fn place_block(
    planner: &mut Planner<'_>,
    part: &View,
    place: BlockPlace,
    out: &View,
    rows: Range<usize>,
) -> Result<(), DeviceError> {
    let width = out.shape.width();
    let elements = rows.len() * width;
    let arguments = vec![
        planner.pointer(part),
        planner.pointer_to(out, rows.start * width),
        count(elements),
        count(width),
        count(place.row - rows.start),
        count(place.column),
        count(part.shape.rows()),
        count(part.shape.width()),
        Argument::F32(place.factor),
    ];
    let choice = kernel(SOURCE, "place_block", types([("A", part.dtype), ("B", out.dtype)]));
    launch_flat(planner, choice, elements, THREADS, arguments)
}

/// Copies the block of `dy` at its place into a matrix `out`, or adds it to the contents.
pub(super) fn block_grad(
    planner: &mut Planner<'_>,
    dy: &View,
    place: BlockPlace,
    accumulate: bool,
    out: &View,
) -> Result<(), DeviceError> {
    let elements = out.shape.elements();
    let arguments = vec![
        planner.pointer(dy),
        planner.pointer(out),
        count(elements),
        count(out.shape.width()),
        count(place.row),
        count(place.column),
        count(dy.shape.width()),
        Argument::F32(place.factor),
        flag(accumulate),
    ];
    let choice = kernel(SOURCE, "block_grad", types([("A", dy.dtype), ("B", out.dtype)]));
    launch_flat(planner, choice, elements, THREADS, arguments)
}

/// Definitions for a kernel with a single type.
fn written(dtype: DType) -> Definitions {
    types([("A", dtype), ("B", dtype)])
}

/// Sets every element of a float tensor.
pub(super) fn fill(planner: &mut Planner<'_>, out: &View, value: f32) -> Result<(), DeviceError> {
    let elements = out.shape.elements();
    let arguments = vec![planner.pointer(out), count(elements), Argument::F32(value)];
    let choice = kernel(SOURCE, "fill", written(out.dtype));
    launch_flat(planner, choice, elements, PER_BLOCK, arguments)
}

fn transpose(
    planner: &mut Planner<'_>,
    x: &View,
    axes: &[usize],
    out: &View,
) -> Result<(), DeviceError> {
    if axes.len() > AXES_MAX {
        return Err(unsupported(planner, format!("it has more than {AXES_MAX} axes")));
    }
    let from = x.shape.axes();
    let (mut extents, mut strides) = ([1usize; AXES_MAX], [0usize; AXES_MAX]);
    for (i, &axis) in axes.iter().enumerate() {
        let place = AXES_MAX - axes.len() + i;
        extents[place] = from[axis];
        strides[place] = from[axis + 1..].iter().product();
    }
    let elements = out.shape.elements();
    let mut arguments = vec![planner.pointer(x), planner.pointer(out), count(elements)];
    arguments.extend(extents.into_iter().chain(strides).map(count));
    let name = match x.dtype.size_bytes() {
        1 => "transpose_1",
        2 => "transpose_2",
        _ => "transpose_4",
    };
    let choice = kernel(SOURCE, name, written(DType::F32));
    launch_flat(planner, choice, elements, THREADS, arguments)
}

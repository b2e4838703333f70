//! Max and average pooling, and what convolutions share with them: images under a window.

use super::{Definitions, PACK, THREADS, WARP, all_types, kernel, small, types, unsupported};
use crate::DeviceError;
use crate::cuda::KernelSource;
use crate::cuda::context::Argument;
use crate::cuda::plan::{KernelChoice, Planner};
use crate::placed::View;
use storm_graph::{Op, Planes, Shape, Window};

const SOURCE: KernelSource =
    KernelSource { name: "pool.cu", text: include_str!("../kernels/pool.cu"), only_for: None };

pub(super) fn kernels() -> Vec<(KernelSource, Definitions)> {
    all_types(SOURCE, ["E"])
}

pub(super) fn plan(planner: &mut Planner<'_>) -> Result<(), DeviceError> {
    match &planner.node.op {
        Op::MaxPool { x, window } => {
            let planes = planes(&x.shape, *window);
            pool(planner, "max_pool", &[x], &planes, planes.output)
        }
        Op::MaxPoolGrad { dy, x, window } => {
            let planes = planes(&x.shape, *window);
            if window.overlaps() {
                return pool(planner, "max_pool_grad", &[dy, x], &planes, planes.input);
            }
            let pixels = planes.pixels();
            if pixels > i32::MAX as usize {
                return Err(unsupported(planner, format!("{pixels} pixels are too many")));
            }
            let cells = [0, 1].map(|axis| window.cells(axis, planes.input[axis]));
            // The output overwrites `x`.
            pool(planner, "max_pool_grad_in_place", &[dy], &planes, cells)
        }
        Op::AveragePool { x, window } => {
            let planes = planes(&x.shape, *window);
            pool(planner, "average_pool", &[x], &planes, planes.output)
        }
        Op::AveragePoolGrad { dy, window, input } => {
            let planes = planes(input, *window);
            pool(planner, "average_pool_grad", &[dy], &planes, planes.input)
        }
        _ => unreachable!("not a pool"),
    }
}

/// Launches a kernel whose threads walk over `places` of each image.
fn pool(
    planner: &mut Planner<'_>,
    name: &str,
    operands: &[&View],
    planes: &Planes,
    places: [usize; 2],
) -> Result<(), DeviceError> {
    let out = &planner.node.outputs[0];
    let mut arguments: Vec<Argument> = operands.iter().map(|x| planner.pointer(x)).collect();
    arguments.push(planner.pointer(out));
    arguments.extend(geometry(planes));
    let (name, lanes) = match planes.channels.is_multiple_of(PACK) {
        true => (name.to_owned(), PACK),
        false => (format!("{name}_any"), 1),
    };
    let choice = kernel(SOURCE, &name, types([("E", out.dtype)]));
    let per_image = places[0] * places[1] * planes.channels / lanes;
    each_image(planner, choice, planes.images, per_image, arguments)
}

pub(super) fn planes(input: &Shape, window: Window) -> Planes {
    Planes::new(input, window).expect("the shape rule has checked it")
}

/// The arguments that `PLANES` in planes.cuh lists.
pub(super) fn geometry(planes: &Planes) -> impl Iterator<Item = Argument> + use<> {
    let Planes { images, input, output, channels, window } = *planes;
    let Window { kernel, stride, padding } = window;
    let pairs = [kernel, stride, padding].into_iter().flatten();
    [images].into_iter().chain(input).chain(output).chain([channels]).chain(pairs).map(small)
}

/// Launches a kernel that uses planes.cuh, with `per_image` threads for each image.
pub(super) fn each_image(
    planner: &mut Planner<'_>,
    choice: KernelChoice<'_>,
    images: usize,
    per_image: usize,
    arguments: Vec<Argument>,
) -> Result<(), DeviceError> {
    const THREADS_MAX: usize = i32::MAX as usize - THREADS;
    const ROWS_OF_BLOCKS_MAX: usize = u16::MAX as usize;
    if per_image > THREADS_MAX || images > i32::MAX as usize {
        let reason = format!("{images} images of {per_image} packs or elements are too many");
        return Err(unsupported(planner, reason));
    }
    let threads = per_image.next_multiple_of(WARP).clamp(WARP, THREADS);
    let blocks = (per_image.div_ceil(threads), images.min(ROWS_OF_BLOCKS_MAX));
    let grid = (blocks.0 as u32, blocks.1 as u32, 1);
    planner.launch(choice, grid, threads as u32, arguments)
}

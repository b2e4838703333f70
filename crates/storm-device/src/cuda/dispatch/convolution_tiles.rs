//! Convolutions of bf16 images on tensor cores, without columns in memory: `wgmma` on Hopper, `mma.sync` on other cards.

use super::pool::geometry;
use super::{Definitions, THREADS, WARP, count, flag, grid, kernel, small, types, unsupported};
use crate::DeviceError;
use crate::cuda::KernelSource;
use crate::cuda::context::Argument;
use crate::cuda::plan::{KernelChoice, Planner};
use crate::placed::View;
use storm_graph::{GradientParts, PACK, Planes};

const HOPPER: KernelSource = KernelSource {
    name: "convolution_hopper.cu",
    text: include_str!("../kernels/convolution_hopper.cu"),
    only_for: Some("sm_90a"),
};
const TENSOR_CORES: KernelSource = KernelSource {
    name: "convolution_mma.cu",
    text: include_str!("../kernels/convolution_mma.cu"),
    only_for: None,
};

/// Positions of a tile.
const TILE_ROWS: usize = 128;
/// Slabs of a tile's operands that are in shared memory at a time.
const STAGES: usize = 3;
/// Bytes of a row of a slab: 64 elements.
const ROW_BYTES: usize = 128;

pub(super) fn kernels() -> Vec<(KernelSource, Definitions)> {
    let sources = [HOPPER, TENSOR_CORES].into_iter();
    sources.flat_map(|source| [64, 128].map(|columns| (source, definitions(columns)))).collect()
}

fn definitions(tile_columns: usize) -> Definitions {
    vec![("TILE_COLUMNS", tile_columns.to_string())]
}

/// What a convolution reads and writes at each position of a plane: `WALK` in convolution_tiles.cuh. Pairs are height and
/// width.
struct Walk {
    images: usize,
    /// The plane it reads, and its channels.
    from: [usize; 2],
    channels: usize,
    /// Positions.
    positions: [usize; 2],
    step: [usize; 2],
    origin: [isize; 2],
    direction: i32,
    taps: [usize; 2],
    tap_start: usize,
    tap_step: [usize; 2],
    /// Taps of the weight, of which this uses some.
    weight_taps: usize,
    outputs: usize,
    /// The plane it writes, and where.
    to: [usize; 2],
    to_start: [usize; 2],
    to_step: [usize; 2],
}

impl Walk {
    fn arguments(&self) -> Vec<Argument> {
        let pair = |[high, wide]: [usize; 2]| [small(high), small(wide)];
        let origin = self.origin.map(|origin| Argument::I32(origin as i32));
        let mut all = vec![small(self.images)];
        all.extend(pair(self.from));
        all.push(small(self.channels));
        all.extend(pair(self.positions).into_iter().chain(pair(self.step)).chain(origin));
        all.push(Argument::I32(self.direction));
        all.extend(pair(self.taps));
        all.push(small(self.tap_start));
        all.extend(pair(self.tap_step));
        all.extend([small(self.weight_taps), small(self.outputs)]);
        all.extend(pair(self.to).into_iter().chain(pair(self.to_start)).chain(pair(self.to_step)));
        all.extend(plane_divisors(self.positions));
        all.push(tap_rows(self.taps));
        all
    }

    fn launch(
        &self,
        planner: &mut Planner<'_>,
        mut arguments: Vec<Argument>,
    ) -> Result<(), DeviceError> {
        let columns = if self.outputs > 64 { 128 } else { 64 };
        let rows = self.images * self.positions[0] * self.positions[1];
        let grid = grid(planner, rows.div_ceil(TILE_ROWS), self.outputs.div_ceil(columns))?;
        arguments.extend(self.arguments());
        let choice = KernelChoice {
            source: source(planner),
            name: "convolve",
            definitions: definitions(columns),
            shared_bytes: STAGES * (TILE_ROWS + columns) * ROW_BYTES,
        };
        planner.launch(choice, grid, THREADS as u32, arguments)
    }
}

/// Divides numbers below 2³¹ by a fixed number with a multiplication, like `Divisor` in
/// convolution_tiles.cuh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Divisor {
    factor: u32,
    shift: u32,
}

impl Divisor {
    /// # Panics
    /// If the number is 0 or above 2³¹.
    fn new(by: usize) -> Divisor {
        assert!((1..=1 << 31).contains(&by), "a divisor of {by}");
        let shift = by.next_power_of_two().trailing_zeros();
        let factor = ((1u64 << 32) * ((1 << shift) - by as u64)) / by as u64 + 1;
        Divisor { factor: factor as u32, shift }
    }

    fn arguments(self) -> [Argument; 2] {
        [self.factor, self.shift].map(|word| Argument::I32(word as i32))
    }
}

/// Divisors by the columns and by the rows of a plane.
fn plane_divisors([rows, columns]: [usize; 2]) -> impl Iterator<Item = Argument> {
    [columns, rows].into_iter().flat_map(|by| Divisor::new(by).arguments())
}

/// A bit for the first tap of each row of taps.
fn tap_rows([high, wide]: [usize; 2]) -> Argument {
    Argument::I32((0..high).fold(0, |bits, row| bits | 1 << (row * wide)))
}

fn source(planner: &Planner<'_>) -> KernelSource {
    if planner.card().capability == (9, 0) { HOPPER } else { TENSOR_CORES }
}

/// `y` = convolution of `x` with `weight` (O, KH·KW·C), plus `bias`.
pub(super) fn forward(
    planner: &mut Planner<'_>,
    planes: &Planes,
    x: &View,
    weight: &View,
    bias: &Option<View>,
    y: &View,
) -> Result<(), DeviceError> {
    let Planes { images, input, output, channels, window } = *planes;
    let walk = Walk {
        images,
        from: input,
        channels,
        positions: output,
        step: window.stride,
        origin: window.padding.map(|padding| -(padding as isize)),
        direction: 1,
        taps: window.kernel,
        tap_start: 0,
        tap_step: [window.kernel[1], 1],
        weight_taps: window.taps(),
        outputs: y.shape.width(),
        to: output,
        to_start: [0; 2],
        to_step: [1; 2],
    };
    let (x, weight) = (planner.pointer(x), planner.pointer(weight));
    let arguments = vec![x, weight, planner.maybe(bias), Argument::Pointer(0), planner.pointer(y)];
    walk.launch(planner, arguments)
}

/// The gradient of the input: each of its positions sums over the taps that cover it. Positions
/// whose remainders by the stride are equal have the same taps, so each such class is a separate
/// convolution of `dy`. `turned` is memory for the transposed weight, (C, KH·KW, O).
pub(super) fn input_grad(
    planner: &mut Planner<'_>,
    planes: &Planes,
    dy: &View,
    weight: &View,
    turned: &View,
    addend: Option<&View>,
    dx: &View,
) -> Result<(), DeviceError> {
    let Planes { images, input, output, channels, window } = *planes;
    let outputs = dy.shape.width();
    turn_weight(planner, weight, turned, (outputs, window.taps(), channels))?;
    let (dy, turned) = (planner.pointer(dy), planner.pointer(turned));
    let addend = addend.map_or(Argument::Pointer(0), |addend| planner.pointer(addend));
    let arguments = vec![dy, turned, Argument::Pointer(0), addend, planner.pointer(dx)];
    for class in 0..window.stride[0] * window.stride[1] {
        let start = [class / window.stride[1], class % window.stride[1]];
        let axes = [0, 1].map(|axis| Class::new(planes, axis, start[axis]));
        // Positions that no tap covers still get their addend, or zeros.
        let taps = match axes.iter().any(|axis| axis.taps == 0) {
            true => [0, 1],
            false => axes.map(|axis| axis.taps),
        };
        if axes.iter().any(|axis| axis.positions == 0) {
            continue;
        }
        let walk = Walk {
            images,
            from: output,
            channels: outputs,
            positions: axes.map(|axis| axis.positions),
            step: [1; 2],
            origin: axes.map(|axis| axis.origin as isize),
            direction: -1,
            taps,
            tap_start: axes[0].first_tap * window.kernel[1] + axes[1].first_tap,
            tap_step: [window.stride[0] * window.kernel[1], window.stride[1]],
            weight_taps: window.taps(),
            outputs: channels,
            to: input,
            to_start: start,
            to_step: window.stride,
        };
        walk.launch(planner, arguments.clone())?;
    }
    Ok(())
}

/// Positions of the input along one axis with the same remainder by the stride, and the taps that
/// cover them: the first tap, and every `stride`-th one after it.
#[derive(Clone, Copy)]
struct Class {
    positions: usize,
    taps: usize,
    first_tap: usize,
    /// The position of the window at which the first tap covers the first of them.
    origin: usize,
}

impl Class {
    fn new(planes: &Planes, axis: usize, start: usize) -> Class {
        let window = &planes.window;
        let (kernel, stride) = (window.kernel[axis], window.stride[axis]);
        let at = start + window.padding[axis];
        Class {
            positions: planes.input[axis].saturating_sub(start).div_ceil(stride),
            taps: kernel.saturating_sub(at % stride).div_ceil(stride),
            first_tap: at % stride,
            origin: at / stride,
        }
    }
}

fn turn_weight(
    planner: &mut Planner<'_>,
    weight: &View,
    turned: &View,
    (outputs, taps, channels): (usize, usize, usize),
) -> Result<(), DeviceError> {
    let (across, down) = (channels.div_ceil(WARP), outputs.div_ceil(WARP));
    if down > u16::MAX as usize || taps > u16::MAX as usize {
        let reason = format!("{outputs} outputs of {taps} taps are too many");
        return Err(unsupported(planner, reason));
    }
    let mut arguments = vec![planner.pointer(weight), planner.pointer(turned)];
    arguments.extend([outputs, taps, channels].map(small));
    let choice = kernel(super::convolution::SOURCE, "turn_weight", types([("E", weight.dtype)]));
    let grid = (across as u32, down as u32, taps as u32);
    planner.launch(choice, grid, THREADS as u32, arguments)
}

/// The gradient of the weight. `parts` gets sums over parts of all positions, which are then added
/// in order.
pub(super) fn weight_grad(
    planner: &mut Planner<'_>,
    planes: &Planes,
    dy: &View,
    x: &View,
    parts: &View,
    accumulate: bool,
    out: &View,
) -> Result<(), DeviceError> {
    let outputs = dy.shape.width();
    let split = GradientParts::new(planes, outputs);
    let (name, shared_bytes) = match GradientParts::tile_outputs(outputs) {
        64 => ("convolve_weight_grad_64", STAGES * (64 + 128) * ROW_BYTES),
        _ => ("convolve_weight_grad_128", STAGES * (128 + 128) * ROW_BYTES),
    };
    // These kernels are the same for any `TILE_COLUMNS`, which is for `convolve`.
    let choice =
        KernelChoice { source: source(planner), name, definitions: definitions(128), shared_bytes };
    let (dy, x) = (planner.pointer(dy), planner.pointer(x));
    let mut arguments = vec![dy, x, planner.pointer(parts), small(outputs), small(split.positions)];
    arguments.extend(plane_divisors(planes.output));
    arguments.push(tap_rows(planes.window.kernel));
    arguments.extend(geometry(planes));
    let [across, down] = GradientParts::tiles(planes, outputs);
    if down > u16::MAX as usize {
        return Err(unsupported(planner, format!("{outputs} outputs are too many")));
    }
    let grid = (across as u32, down as u32, split.count as u32);
    planner.launch(choice, grid, THREADS as u32, arguments)?;

    let elements = out.shape.elements();
    let mut arguments = vec![planner.pointer(parts), planner.pointer(out), count(elements)];
    arguments.extend([small(split.count), flag(accumulate)]);
    let choice = kernel(super::convolution::SOURCE, "sum_parts", types([("E", out.dtype)]));
    super::launch_flat(planner, choice, elements, THREADS * PACK, arguments)
}

#[cfg(test)]
mod tests {
    use super::Divisor;

    #[test]
    fn divisors_divide() {
        let exact = |x: u32, by: usize| {
            let Divisor { factor, shift } = Divisor::new(by);
            let high = ((u64::from(x) * u64::from(factor)) >> 32) as u32;
            assert_eq!((high + x) >> shift, x / by as u32, "{x} / {by}");
        };
        let numbers: [usize; 14] =
            [1, 2, 3, 5, 7, 16, 31, 32, 33, 100, 1023, 4096, 65_537, (1 << 31) - 1];
        for by in numbers {
            for near in numbers.iter().flat_map(|&other| [1, 7, 1000].map(|times| other * times)) {
                for x in [near.saturating_sub(1), near, near + 1] {
                    exact((x % (1 << 31)) as u32, by);
                }
            }
        }
    }
}

//! Projections of few rows, as in text generation. Their speed is limited by reading the weights,
//! which they read once.

use super::{Definitions, count, grid, kernel, small, unsupported};
use crate::DeviceError;
use crate::cuda::KernelSource;
use crate::cuda::plan::Planner;
use crate::placed::View;
use storm_graph::DType;

const TENSOR_CORES: KernelSource =
    KernelSource { name: "rows.cu", text: include_str!("../kernels/rows.cu"), only_for: None };
const PLAIN: KernelSource = KernelSource {
    name: "rows_f32.cu",
    text: include_str!("../kernels/rows_f32.cu"),
    only_for: None,
};

/// The most rows that these kernels take: those of a piece of a prompt. Products that a plan may
/// divide into chunks of rows have more, and so do the chunks.
const ROWS_MAX: usize = 32;

/// The widest rows that these kernels take: they count the elements of a row in 32 bits.
const WIDTH_MAX: usize = 1 << 30;

/// Rows of a tile of the tensor cores.
const TILE: usize = 8;
/// Rows of the weight that a block computes: with one tile, and with more.
const WEIGHT_ROWS: [usize; 2] = [8, 16];
/// Rows of the weight, and of x, that a block of the f32 kernel takes.
const PLAIN_WEIGHT_ROWS: usize = 4;
const PLAIN_ROWS: usize = 4;
const THREADS: u32 = 256;

pub(super) fn kernels() -> Vec<(KernelSource, Definitions)> {
    let tiles = [1, 2, 4].map(|tiles| (TENSOR_CORES, definitions(tiles)));
    tiles.into_iter().chain([(PLAIN, Definitions::new())]).collect()
}

fn definitions(tiles: usize) -> Definitions {
    vec![("TILES", tiles.to_string())]
}

/// Whether these kernels compute a product: it has few rows, and they start at multiples of 16
/// bytes. This depends on shapes alone, except for the start of an operand, which is aligned in
/// every plan.
pub(super) fn takes(planner: &Planner<'_>, x: &View, weight: &View) -> bool {
    let width = x.shape.width();
    let bytes = width * x.dtype.size_bytes();
    let is_aligned = |view: &View| planner.address(view).is_multiple_of(16);
    (1..=ROWS_MAX).contains(&x.shape.rows())
        && (1..=WIDTH_MAX).contains(&width)
        && bytes.is_multiple_of(16)
        && is_aligned(x)
        && is_aligned(weight)
}

pub(super) fn plan(
    planner: &mut Planner<'_>,
    x: &View,
    weight: &View,
    bias: &Option<View>,
    addend: &Option<View>,
) -> Result<(), DeviceError> {
    let (rows, n, k) = (x.shape.rows(), weight.shape.rows(), x.shape.width());
    let arguments = vec![
        planner.pointer(x),
        planner.pointer(weight),
        planner.maybe(bias),
        planner.maybe(addend),
        planner.output(0),
        small(rows),
        count(n),
        count(k),
    ];
    match x.dtype {
        DType::BF16 => {
            let tiles = rows.div_ceil(TILE).next_power_of_two();
            let choice = kernel(TENSOR_CORES, "rows_product", definitions(tiles));
            let weight_rows = WEIGHT_ROWS[usize::from(tiles > 1)];
            let grid = grid(planner, n.div_ceil(weight_rows), 1)?;
            planner.launch(choice, grid, THREADS, arguments)?;
        }
        DType::F32 => {
            let choice = kernel(PLAIN, "rows_product_f32", Definitions::new());
            let grid = grid(planner, n.div_ceil(PLAIN_WEIGHT_ROWS), rows.div_ceil(PLAIN_ROWS))?;
            planner.launch(choice, grid, THREADS, arguments)?;
        }
        dtype => {
            return Err(unsupported(planner, format!("there are no products of {dtype}")));
        }
    }
    planner.let_begin_early();
    Ok(())
}

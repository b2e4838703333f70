//! Products of blocks, for kernels that are themselves parallel (attention).

use super::super::matrix::{Matrix, far};
use super::kernel::{COLUMNS, Kernel, Operands, ROWS, STEP};
use super::operands::{pack_columns, rows_for_tiles};
use super::pack::{LANES, PIECE};
use half::bf16;

/// Pairs of products in a step.
pub(in super::super::super) const PAIRS_PER_STEP: usize = STEP / 2;

/// The tiles of the calling thread or their emulation, and room for a packed panel of A.
pub(in super::super::super) struct AmxBlocks<'a> {
    kernel: Kernel,
    panel: &'a mut [f32],
}

impl<'a> AmxBlocks<'a> {
    /// Elements of the panel for products of up to `depth` terms.
    pub(in super::super::super) const fn panel_len(depth: usize) -> usize {
        ROWS * (depth.next_multiple_of(STEP) + STEP) / 2
    }

    /// Configures the tiles.
    pub(in super::super::super) fn new(panel: &'a mut [f32]) -> Self {
        Self { kernel: Kernel::new(), panel }
    }

    /// C (m × n) = A · B, or C + A · B with `resume`. B is packed (see [`pack_block`]). C has rows
    /// `c_stride` apart and room for m and n rounded up to multiples of 32. The elements beyond m
    /// and n become anything.
    ///
    /// # Panics
    /// If an operand is too short for its shape.
    pub(in super::super::super) fn multiply(
        &mut self,
        a: Matrix<bf16>,
        (b, n): (&[f32], usize),
        (c, c_stride): (&mut [f32], usize),
        resume: bool,
    ) {
        let (m, k) = (a.rows(), a.cols());
        let steps = k.div_ceil(STEP);
        let (row_panels, col_panels) = (m.div_ceil(ROWS), n.div_ceil(COLUMNS));
        assert!(col_panels * steps * PIECE <= b.len(), "B is too short");
        if row_panels == 0 || col_panels == 0 {
            return;
        }
        let last = far((row_panels * ROWS - 1, c_stride), (col_panels * COLUMNS, 1));
        assert!(last <= c.len(), "C is too short");
        for row_panel in 0..row_panels {
            let first = row_panel * ROWS;
            // An extra step keeps rows from competing for one set of the first-level cache.
            let packed_row = (steps + 1) * STEP;
            let rows = first..m.min(first + ROWS);
            let (a, a_row) = rows_for_tiles(a, rows, 0..k, self.panel, packed_row);
            for col_panel in 0..col_panels {
                let sums = &mut c[first * c_stride + col_panel * COLUMNS..];
                let operands = Operands {
                    steps,
                    a,
                    a_row,
                    b: b[col_panel * steps * PIECE..].as_ptr().cast(),
                    sums: sums.as_mut_ptr(),
                    sums_row: c_stride,
                    resume,
                };
                // SAFETY: A has 32 rows of `steps` steps, packed or in its matrix. The assertions
                // above cover B and C.
                unsafe { self.kernel.multiply(&operands) };
            }
        }
    }
}

/// Packs B (k × n) for [`AmxBlocks::multiply`]. An element of `packed` holds the bits of a pair of
/// terms, the first in the low half. k is padded with zeros to a multiple of 32.
///
/// # Panics
/// If `packed` is too short.
pub(in super::super::super) fn pack_block(b: Matrix<bf16>, packed: &mut [f32]) {
    pack_columns(b, 0..b.rows(), 0..b.cols(), packed);
}

/// Where the pairs of 16 columns, from a multiple of 16 on, lie in a packed B with `steps` steps.
#[inline(always)]
pub(in super::super::super) fn pair_place(pair: usize, column: usize, steps: usize) -> usize {
    let (panel, half) = (column / COLUMNS, column / LANES % 2);
    let (step, pair) = (pair / PAIRS_PER_STEP, pair % PAIRS_PER_STEP);
    ((panel * steps + step) * 2 + half) * (PIECE / 2) + pair * LANES
}

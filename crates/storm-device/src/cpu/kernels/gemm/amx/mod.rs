//! Products of bf16 operands with the sums of AMX's `TDPBF16PS`.
//!
//! **Definition.** K is padded with zeros to a multiple of 32. Each element of C starts at 0 and
//! adds, in order, the results of each 32 products ([`emulated`] defines them). The epilogue
//! follows, as for all products. The division of rows and columns and the number of threads do not
//! affect the result.
//!
//! Structure: a task packs its part of B once per block of k and multiplies each panel of 32 rows of A
//! with all of it. Sums of 32 × 32 elements are in four tiles. Groups of full panels of A whose steps
//! of k are contiguous and whole are read in place; others are packed.

mod block;
mod emulated;
#[cfg(target_arch = "x86_64")]
mod hardware;
mod kernel;
mod operands;
mod pack;

use super::super::element::Element;
use super::super::scratch::Scratch;
use super::matrix::{Matrix, MatrixMut};
use super::partition::{Limits, Partition, ROW_BLOCK};
use super::{Epilogue, PACKED_A_LEN, PACKED_B_LEN, Problem, SCRATCH, SUMS_LEN, TILE_COLS_MAX};
pub(in super::super) use block::{AmxBlocks, PAIRS_PER_STEP, pack_block, pair_place};
use half::bf16;
use kernel::{COLUMNS, Kernel, Operands, ROWS, STEP};
pub use kernel::{amx_availability, force_emulation};
use operands::{pack_columns, rows_for_tiles};
use pack::{LANES, PIECE};
use rayon::prelude::*;
use std::ops::Range;

/// Maximum length of a block of k: the depth that the buffer for packed B has room for.
pub(super) const K_BLOCK_MAX: usize = 1024;

/// Row stride of a packed panel of A, in elements. The extra step keeps rows from competing for one
/// set of the first-level cache.
const A_ROW: usize = K_BLOCK_MAX + STEP;
const PANEL_A_LEN: usize = ROWS * A_ROW;

/// Row panels of A packed together. In a transposed A, a step of k of these 64 rows is 128 bytes: two
/// adjacent cache lines.
const GROUP_PANELS: usize = 2;

/// Cost of packing one element, in multiply-adds.
const PACK_COST: usize = 100;

const _: () =
    assert!(K_BLOCK_MAX.is_multiple_of(STEP) && GROUP_PANELS * PANEL_A_LEN <= 2 * PACKED_A_LEN);
const _: () = assert!(TILE_COLS_MAX * K_BLOCK_MAX <= 2 * PACKED_B_LEN);
const _: () = assert!(
    ROWS <= ROW_BLOCK && COLUMNS == super::PANEL_COLS && 2 * LANES == COLUMNS && 2 * LANES == ROWS
);

/// `c = a · b` with the epilogue, see the definition.
pub(super) fn gemm<C: Element>(
    threads: usize,
    a: Matrix<bf16>,
    b: Matrix<bf16>,
    mut c: MatrixMut<C>,
    epilogue: Epilogue<C>,
) {
    let (m, n) = (c.rows(), c.cols());
    let Some(problem) = Problem::new(a, b, &mut c, epilogue) else { return };
    let limits = Limits::of_depth(problem.k, K_BLOCK_MAX, PACK_COST);
    let partition = Partition::new(m, n, threads, limits);
    let run_tile = |index| {
        let (rows, cols) = partition.tile(index);
        SCRATCH.with_borrow_mut(|scratch| problem.run_amx_tile(rows, cols, scratch));
    };
    if threads == 1 {
        (0..partition.len()).for_each(run_tile);
    } else {
        (0..partition.len()).into_par_iter().with_max_len(1).for_each(run_tile);
    }
}

impl<C: Element> Problem<'_, bf16, bf16, C> {
    fn run_amx_tile(&self, rows: Range<usize>, cols: Range<usize>, scratch: &mut Scratch) {
        let [packed_a, packed_b, sums, bias] =
            scratch.split([PACKED_A_LEN, PACKED_B_LEN, SUMS_LEN, TILE_COLS_MAX]);
        let bias = self.epilogue.widen_bias(cols.clone(), bias);
        let kernel = Kernel::new();
        let (panels, col_panels) = (rows.len().div_ceil(ROWS), cols.len().div_ceil(COLUMNS));
        // At least one block, so that K = 0 gives zeros. All but the last have whole steps.
        let k_blocks = self.k.div_ceil(K_BLOCK_MAX).max(1);
        let block = self.k.div_ceil(k_blocks).next_multiple_of(STEP);
        for k_block in 0..k_blocks {
            let k = (k_block * block).min(self.k)..((k_block + 1) * block).min(self.k);
            let steps = k.len().div_ceil(STEP);
            pack_columns(self.b, k.clone(), cols.clone(), packed_b);
            let (mut group_a, mut a_row) = (std::ptr::null(), 0);
            for panel in 0..panels {
                let first = panel * ROWS;
                let first_row = rows.start + first;
                if panel % GROUP_PANELS == 0 {
                    let group = first_row..rows.end.min(first_row + GROUP_PANELS * ROWS);
                    (group_a, a_row) = rows_for_tiles(self.a, group, k.clone(), packed_a, A_ROW);
                }
                let a = group_a.wrapping_add(panel % GROUP_PANELS * ROWS * a_row);
                let height = ROWS.min(rows.len() - first);
                for col_panel in 0..col_panels {
                    // With a single block of k, sums need not be kept, so all panels share one
                    // place in the first-level cache.
                    let place = match k_blocks {
                        1 => 0,
                        _ => (panel * col_panels + col_panel) * ROWS * COLUMNS,
                    };
                    let sums = &mut sums[place..place + ROWS * COLUMNS];
                    let operands = Operands {
                        steps,
                        a,
                        a_row,
                        b: packed_b
                            .as_ptr()
                            .cast::<bf16>()
                            .wrapping_add(col_panel * steps * 2 * PIECE),
                        sums: sums.as_mut_ptr(),
                        sums_row: COLUMNS,
                        resume: k_block > 0,
                    };
                    // SAFETY: A has 32 rows and B has 32 columns of `steps` steps. A is packed or
                    // in its matrix, and B is packed.
                    unsafe { kernel.multiply(&operands) };
                    if k_block + 1 == k_blocks {
                        let first_col = col_panel * COLUMNS;
                        let width = COLUMNS.min(cols.len() - first_col);
                        let bias = bias.map(|bias| &bias[first_col..]);
                        let sums = &mut sums[..height * COLUMNS];
                        let corner = (first_row, cols.start + first_col);
                        // SAFETY: the sums belong to the task's own part of C.
                        unsafe {
                            let c = (self.c, self.c_row_stride);
                            self.epilogue.store(sums, width, bias, corner, c);
                        }
                    }
                }
            }
        }
    }
}

//! Matrix multiplication: `C = op(A) · op(B)` with a fused epilogue.
//!
//! **Definition.** Each element of C is one sequential chain of f32 fused multiply-adds over
//! k = 0..K starting from 0, then `· scale`, then `+ bias`, then `+ addend`, then `+ old C`, then
//! one rounding to the type of C. The implementation (packing, tiles, threads, instruction set)
//! does not affect the result: it has the bits of three nested loops.
//!
//! Structure, after BLIS: the output is divided into tiles, one task each (`partition`). A task
//! loops over blocks of k. Per block it packs its part of B once, then panels of a few rows of A, a
//! group at a time. Each panel of B is multiplied with the whole group (`micro`), so B is read
//! from an outer cache or memory once per group, and the group from the second-level cache. Between blocks of k, sums stay in
//! a per-thread f32 buffer. After the last, the kernels write results to C themselves if it is of
//! f32. A single row has a separate path (`row`).
//!
//! Products of bf16 operands may have different sums, those of AMX (`amx/`). [`Bf16Products`]
//! selects them.

mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod block;
mod epilogue;
mod matrix;
mod micro;
mod pack;
mod partition;
mod products;
mod row;
#[cfg(target_arch = "x86_64")]
mod turn;

use std::cell::RefCell;
use std::ops::Range;

use rayon::prelude::*;

use super::element::Element;
use super::scratch::Scratch;
use super::shared::SharedMut;
pub(super) use amx::{AmxBlocks, PAIRS_PER_STEP, pack_block, pair_place};
pub use amx::{amx_availability, force_emulation};
pub(super) use block::pack_transposed;
pub use block::{BlockA, block_gemm};
pub use epilogue::{Accumulate, Bias, Epilogue};
pub use matrix::{Matrix, MatrixMut};
use micro::{Kernels, PANEL_COLS, PANEL_ROWS_MAX, Panels, Tile};
use pack::{LANES, Source, Strip, pack};
use partition::{Limits, Partition, TILE_COLS_MAX};
pub use products::Bf16Products;

/// Maximum length of a block of k. Packed groups of A of this depth (192 KiB) and a panel of B
/// (48 KiB) stay in a second-level cache.
const K_BLOCK_MAX: usize = 384;

/// Below this many multiply-adds, a second thread costs more time than it saves.
const PARALLEL_MIN: usize = 1 << 16;

/// Cost of packing one element, in multiply-adds: a core does 32 per cycle, and packing takes about
/// a third of a cycle.
const PACK_COST: usize = 10;

/// Row panels of A packed together: enough to use whole cache lines of a transposed A while they
/// are in the cache.
const GROUP_PANELS: usize = 8;

const PACKED_A_LEN: usize = GROUP_PANELS * PANEL_ROWS_MAX * K_BLOCK_MAX;
const PACKED_B_LEN: usize = TILE_COLS_MAX
    * if K_BLOCK_MAX > amx::K_BLOCK_MAX / 2 { K_BLOCK_MAX } else { amx::K_BLOCK_MAX / 2 };

/// Sums of a task that are kept between blocks of k.
const SUMS_LEN: usize = 512 * 512;

/// Elements of a thread's buffers.
pub(in crate::cpu) const SCRATCH_LEN: usize =
    PACKED_A_LEN + PACKED_B_LEN + SUMS_LEN + TILE_COLS_MAX;

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch::new(SCRATCH_LEN));
}

/// Creates the calling thread's packing buffers.
pub(super) fn touch_scratch() {
    SCRATCH.with_borrow_mut(Scratch::touch);
}

/// `c = a · b` with the epilogue, see the module's definition. Uses the current rayon pool.
///
/// # Panics
/// If shapes do not match.
pub fn gemm<A: Element, B: Element, C: Element>(
    a: Matrix<A>,
    b: Matrix<B>,
    c: MatrixMut<C>,
    epilogue: Epilogue<C>,
) {
    Bf16Products::Fma.gemm(a, b, c, epilogue);
}

fn gemm_with<A: Element, B: Element, C: Element>(
    threads: usize,
    a: Matrix<A>,
    b: Matrix<B>,
    mut c: MatrixMut<C>,
    epilogue: Epilogue<C>,
) {
    let (m, n) = (c.rows(), c.cols());
    let Some(problem) = Problem::new(a, b, &mut c, epilogue) else { return };
    if problem.run_row(n, threads).is_some() {
        return;
    }
    let limits = Limits::of_depth(problem.k, K_BLOCK_MAX, PACK_COST);
    let partition = Partition::new(m, n, threads, limits);
    let run_tile = |index| {
        let (rows, cols) = partition.tile(index);
        SCRATCH.with_borrow_mut(|scratch| problem.run_tile(rows, cols, scratch));
    };
    if threads == 1 {
        (0..partition.len()).for_each(run_tile);
    } else {
        (0..partition.len()).into_par_iter().with_max_len(1).for_each(run_tile);
    }
}

/// The products of a task over one block of k.
struct Pass<'a> {
    /// Row panels have as many rows as these compute.
    kernels: &'static Kernels,
    /// Length of the block.
    depth: usize,
    is_first: bool,
    is_last: bool,
    /// The upper left corner of the task's part of C.
    corner: (usize, usize),
    cols: usize,
    /// For each of these columns.
    bias: Option<&'a [f32]>,
}

/// A checked call.
struct Problem<'a, A, B, C> {
    a: Matrix<'a, A>,
    b: Matrix<'a, B>,
    c: SharedMut<'a, C>,
    c_row_stride: usize,
    epilogue: Epilogue<'a, C>,
    k: usize,
}

impl<'a, A: Element, B: Element, C: Element> Problem<'a, A, B, C> {
    /// None if C has no elements.
    ///
    /// # Panics
    /// If shapes do not match.
    fn new(
        a: Matrix<'a, A>,
        b: Matrix<'a, B>,
        c: &'a mut MatrixMut<'_, C>,
        epilogue: Epilogue<'a, C>,
    ) -> Option<Self> {
        let (m, n, k) = (c.rows(), c.cols(), a.cols());
        assert_eq!(a.rows(), m, "rows of A and C");
        assert_eq!(b.cols(), n, "columns of B and C");
        assert_eq!(b.rows(), k, "columns of A and rows of B");
        epilogue.check(m, n);
        let c_row_stride = c.row_stride();
        (m > 0 && n > 0).then(|| Problem { a, b, c_row_stride, c: c.shared(), epilogue, k })
    }

    fn run_tile(&self, rows: Range<usize>, cols: Range<usize>, scratch: &mut Scratch) {
        let [packed_a, packed_b, sums, bias] =
            scratch.split([PACKED_A_LEN, PACKED_B_LEN, SUMS_LEN, TILE_COLS_MAX]);
        let bias = self.epilogue.widen_bias(cols.clone(), bias);
        // For the whole task: the instruction set may be switched meanwhile.
        let kernels = Kernels::current();
        let panels = Panels::new(rows.len(), kernels.by_rows.len());
        // At least one block, so that K = 0 gives zeros.
        let k_blocks = self.k.div_ceil(K_BLOCK_MAX).max(1);
        for k_block in 0..k_blocks {
            let k = self.k * k_block / k_blocks..self.k * (k_block + 1) / k_blocks;
            let pass = Pass {
                kernels,
                depth: k.len(),
                is_first: k_block == 0,
                is_last: k_block + 1 == k_blocks,
                corner: (rows.start, cols.start),
                cols: cols.len(),
                bias,
            };
            self.pack_b(k.clone(), cols.clone(), packed_b);
            // Sums lie in the order in which tiles are computed.
            let mut rest = &mut sums[..];
            for first in (0..panels.count).step_by(GROUP_PANELS) {
                let group = first..panels.count.min(first + GROUP_PANELS);
                self.pack_a(rows.start, panels, group.clone(), k.clone(), packed_a);
                self.multiply_group(&pass, panels, group, (packed_a, packed_b), &mut rest);
            }
        }
    }

    /// Multiplies a packed group of row panels of A with the packed B. Takes its sums from `sums`.
    fn multiply_group(
        &self,
        pass: &Pass,
        panels: Panels,
        group: Range<usize>,
        (packed_a, packed_b): (&[f32], &[f32]),
        sums: &mut &mut [f32],
    ) {
        let b_panels = packed_b.chunks(PANEL_COLS * pass.depth.max(1));
        for (first_col, b) in (0..pass.cols).step_by(PANEL_COLS).zip(b_panels) {
            let width = PANEL_COLS.min(pass.cols - first_col);
            let bias = pass.bias.map(|bias| &bias[first_col..]);
            let a_panels = packed_a.chunks(PANEL_ROWS_MAX * pass.depth.max(1));
            for (panel, a) in group.clone().zip(a_panels) {
                let rows = panels.rows(panel);
                let corner = (pass.corner.0 + rows.start, pass.corner.1 + first_col);
                let c = (self.c, self.c_row_stride);
                // Sums of a single block of k need not be kept, so all tiles share one place in the
                // first-level cache.
                let tile_sums = match pass.is_first && pass.is_last {
                    true => &mut sums[..rows.len() * PANEL_COLS],
                    false => sums.split_off_mut(..rows.len() * PANEL_COLS).expect("room"),
                };
                let finish = match pass.is_last && width == PANEL_COLS {
                    true => self.epilogue.finish(rows.len(), bias, corner, c),
                    false => None,
                };
                assert!(a.len() >= PANEL_ROWS_MAX * pass.depth);
                assert!(b.len() >= PANEL_COLS * pass.depth);
                let tile = Tile {
                    k: pass.depth,
                    a: a.as_ptr(),
                    a_row: 1,
                    a_k: PANEL_ROWS_MAX,
                    b: b.as_ptr(),
                    b_k: PANEL_COLS,
                    c: tile_sums.as_mut_ptr(),
                    c_row: PANEL_COLS,
                    resume: !pass.is_first,
                    finish,
                };
                // SAFETY: A and B are packed for `depth` steps, the sums and what `finish` writes,
                // in the task's own part of C, have as many rows as the kernel, and this machine
                // can run the kernels of `Kernels::current`, which these were.
                unsafe { (pass.kernels.by_rows[rows.len() - 1])(&tile) };
                if pass.is_last && finish.is_none() {
                    // SAFETY: the tile is inside the task's own part of C.
                    unsafe { self.epilogue.store(tile_sums, width, bias, corner, c) };
                }
            }
        }
    }

    /// Packs a group of row panels of A: lane = row.
    fn pack_a(
        &self,
        first_row: usize,
        panels: Panels,
        group: Range<usize>,
        k: Range<usize>,
        packed: &mut [f32],
    ) {
        if k.is_empty() {
            return;
        }
        let depth = k.len();
        let source = Source {
            start: self.a.at(first_row, k.start),
            lane_stride: self.a.row_stride(),
            k_stride: self.a.col_stride(),
            readable: self.a.readable(first_row, k.start),
        };
        let strip = |i| {
            let rows = panels.rows(group.start + i);
            Strip { lane: rows.start, lanes: rows.len(), offset: i * PANEL_ROWS_MAX * depth }
        };
        assert!(group.len() * PANEL_ROWS_MAX * depth <= packed.len());
        // SAFETY: the ranges are in the matrix, whose view was checked. The target is long enough.
        unsafe {
            pack(source, depth, group.len(), strip, packed.as_mut_ptr(), PANEL_ROWS_MAX);
        }
    }

    /// Packs columns of B in panels of two strips: lane = column.
    fn pack_b(&self, k: Range<usize>, cols: Range<usize>, packed: &mut [f32]) {
        if k.is_empty() {
            return;
        }
        let depth = k.len();
        let source = Source {
            start: self.b.at(k.start, cols.start),
            lane_stride: self.b.col_stride(),
            k_stride: self.b.row_stride(),
            readable: self.b.readable(k.start, cols.start),
        };
        let strip = |i| Strip {
            lane: i * LANES,
            lanes: LANES.min(cols.len() - i * LANES),
            offset: i / 2 * PANEL_COLS * depth + i % 2 * LANES,
        };
        let strips = cols.len().div_ceil(LANES);
        assert!(strips.next_multiple_of(2) * LANES * depth <= packed.len());
        // SAFETY: as for A.
        unsafe {
            pack(source, depth, strips, strip, packed.as_mut_ptr(), PANEL_COLS);
        }
    }
}

//! The innermost loop: a few rows of C, 32 columns wide, stay in registers over a block of k.
//!
//! Every kernel computes, for each element, the same chain of fused multiply-adds in ascending k.
//! So the kernel's height and instruction set never affect the result.

use super::super::simd::{Isa, isa};

/// Columns that a kernel computes, on every instruction set: the width of a packed B panel.
pub(super) const PANEL_COLS: usize = 32;

/// Lanes of a packed panel of A per step of k, so that steps stay aligned. No kernel has more rows.
pub(super) const PANEL_ROWS_MAX: usize = 16;

/// Operands of one kernel call. Strides are in elements.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    /// Length of the chain.
    pub(super) k: usize,
    /// A(r, p) = `a[r * a_row + p * a_k]`.
    pub(super) a: *const f32,
    pub(super) a_row: usize,
    pub(super) a_k: usize,
    /// B(p, j) = `b[p * b_k + j]`, 32 columns.
    pub(super) b: *const f32,
    pub(super) b_k: usize,
    /// C(r, j) = `c[r * c_row + j]`, 32 columns.
    pub(super) c: *mut f32,
    pub(super) c_row: usize,
    /// Start the chains from the values in C instead of 0.
    pub(super) resume: bool,
    /// Write results to a matrix instead of sums to C.
    pub(super) finish: Option<Finish>,
}

/// An epilogue that kernels apply themselves, so that sums of a matrix of f32 go from registers to
/// their place: sum · scale, + bias, + addend, + old value, in this order. A null address means that
/// there is no such term.
#[derive(Clone, Copy)]
pub(super) struct Finish {
    /// Result (r, j) = `out[r * out_row + j]`, 32 columns.
    pub(super) out: *mut f32,
    pub(super) out_row: usize,
    pub(super) scale: f32,
    /// 32 values.
    pub(super) bias: *const f32,
    /// Addend (r, j) = `addend[r * addend_row + j]`.
    pub(super) addend: *const f32,
    pub(super) addend_row: usize,
    /// Add the old values of the result.
    pub(super) adds_old: bool,
}

/// Computes a tile. The number of rows follows from the kernel's position in [`Kernels::by_rows`].
///
/// # Safety
/// All addresses that the tile's strides reach must be valid: those of C if chains start from it or
/// there is no `finish`. What is written must not overlap A or B, and the machine must have the
/// kernel's instruction set.
pub(super) type Kernel = unsafe fn(&Tile);

/// The kernels of one instruction set.
pub(super) struct Kernels {
    /// Kernel for `i + 1` rows at index `i`.
    pub(super) by_rows: &'static [Kernel],
}

impl Kernels {
    /// The kernels of the instruction set in use.
    pub(super) fn current() -> &'static Kernels {
        match isa() {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => &super::avx512::KERNELS,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => &super::avx2::KERNELS,
            _ => &PORTABLE,
        }
    }
}

/// A division of rows into nearly equal panels. Equal heights matter because a panel with few rows
/// has too few independent chains to fill the pipeline.
#[derive(Clone, Copy)]
pub(super) struct Panels {
    rows: usize,
    /// Number of panels.
    pub(super) count: usize,
}

impl Panels {
    /// The fewest panels with at most `height_max` rows.
    pub(super) fn new(rows: usize, height_max: usize) -> Self {
        Self { rows, count: rows.div_ceil(height_max) }
    }

    /// Rows of a panel.
    #[inline(always)]
    pub(super) fn rows(&self, panel: usize) -> std::ops::Range<usize> {
        self.rows * panel / self.count..self.rows * (panel + 1) / self.count
    }
}

static PORTABLE: Kernels =
    Kernels { by_rows: &[portable::<1>, portable::<2>, portable::<3>, portable::<4>] };

/// Plain Rust, for targets without a special kernel. LLVM vectorizes the loop over columns if the
/// target has fused multiply-add.
///
/// # Safety
/// See [`Kernel`].
unsafe fn portable<const R: usize>(tile: &Tile) {
    // 8 columns at a time keep the sums in registers on 128-bit machines.
    const COLS: usize = 8;
    for first in (0..PANEL_COLS).step_by(COLS) {
        let mut sums = [[0.0f32; COLS]; R];
        // SAFETY: the caller guarantees every address of the tile, and all of these are in it.
        unsafe {
            if tile.resume {
                for (r, row) in sums.iter_mut().enumerate() {
                    *row = tile.c.add(r * tile.c_row + first).cast::<[f32; COLS]>().read();
                }
            }
            for p in 0..tile.k {
                let b = tile.b.add(p * tile.b_k + first).cast::<[f32; COLS]>().read();
                for (r, row) in sums.iter_mut().enumerate() {
                    let a = *tile.a.add(r * tile.a_row + p * tile.a_k);
                    for (sum, b) in row.iter_mut().zip(b) {
                        *sum = a.mul_add(b, *sum);
                    }
                }
            }
            let (mut out, mut out_row) = (tile.c.add(first), tile.c_row);
            if let Some(finish) = &tile.finish {
                (out, out_row) = (finish.out.add(first), finish.out_row);
                for (r, row) in sums.iter_mut().enumerate() {
                    for (j, sum) in row.iter_mut().enumerate() {
                        *sum *= finish.scale;
                        if !finish.bias.is_null() {
                            *sum += *finish.bias.add(first + j);
                        }
                        if !finish.addend.is_null() {
                            *sum += *finish.addend.add(r * finish.addend_row + first + j);
                        }
                        if finish.adds_old {
                            *sum += *out.add(r * out_row + j);
                        }
                    }
                }
            }
            for (r, row) in sums.iter().enumerate() {
                out.add(r * out_row).cast::<[f32; COLS]>().write(*row);
            }
        }
    }
}

//! One row times a matrix whose columns are contiguous: a token through a projection.
//!
//! Each element of the matrix is used once, so packing it would cost more than the product. Squares of
//! it are turned in registers and multiplied there: memory is read once, in order, and nothing is
//! written but the result. Each element's chain is that of the module's definition.

use std::ops::Range;

use rayon::prelude::*;

use super::super::element::Element;
use super::super::scratch::Scratch;
#[cfg(target_arch = "x86_64")]
use super::super::simd::{Isa, isa};
use super::micro::PANEL_COLS;
#[cfg(target_arch = "x86_64")]
use super::turn::{turn_8, turn_16};
use super::{PACKED_A_LEN, Problem, SCRATCH};

/// Pieces of work per thread, so that none waits long for the last.
const TASKS_PER_THREAD: usize = 8;

/// How far ahead of use memory is asked for.
#[cfg(target_arch = "x86_64")]
const PREFETCH_BYTES: usize = 512;

/// Where the columns of a panel begin. Columns beyond the last repeat it: constant trip counts keep
/// everything in registers.
type Columns<T> = [*const T; PANEL_COLS];

/// Sums the products of a row and each column of a panel.
///
/// # Safety
/// The columns must be as long as the row, and the machine must have the kernel's instruction set.
type RowKernel<T> = unsafe fn(&[f32], &Columns<T>, &mut [f32; PANEL_COLS]);

/// The kernel of the instruction set in use, if it has one.
fn kernel<T: Element>() -> Option<RowKernel<T>> {
    #[cfg(target_arch = "x86_64")]
    match isa() {
        Isa::Avx512 => return Some(avx512),
        Isa::Avx2 => return Some(avx2),
        Isa::Portable => {}
    }
    None
}

impl<A: Element, B: Element, C: Element> Problem<'_, A, B, C> {
    /// Computes an output of one row, `columns` wide, if this way suits it.
    pub(super) fn run_row(&self, columns: usize, threads: usize) -> Option<()> {
        let kernel = kernel::<B>()?;
        // The row is widened into the buffer of packed rows.
        if self.a.rows() != 1 || self.b.row_stride() != 1 || !(1..=PACKED_A_LEN).contains(&self.k) {
            return None;
        }
        let panels = columns.div_ceil(PANEL_COLS);
        let tasks = if threads == 1 { 1 } else { panels.min(threads * TASKS_PER_THREAD) };
        let cut = |task: usize| (panels * task / tasks * PANEL_COLS).min(columns);
        let run_task = |task: usize| {
            SCRATCH.with_borrow_mut(|scratch| {
                self.run_row_part(kernel, cut(task)..cut(task + 1), scratch);
            });
        };
        if threads == 1 {
            run_task(0);
        } else {
            (0..tasks).into_par_iter().with_max_len(1).for_each(run_task);
        }
        Some(())
    }

    fn run_row_part(&self, kernel: RowKernel<B>, part: Range<usize>, scratch: &mut Scratch) {
        let [row] = scratch.split([self.k]);
        for (p, value) in row.iter_mut().enumerate() {
            // SAFETY: the row of A is as long as the chain.
            *value = unsafe { *self.a.at(0, p) }.to_f32();
        }
        let mut bias = [0.0; PANEL_COLS];
        let mut sums = [0.0; PANEL_COLS];
        for first in part.clone().step_by(PANEL_COLS) {
            let width = PANEL_COLS.min(part.end - first);
            let bias = self.epilogue.widen_bias(first..first + width, &mut bias);
            let columns = std::array::from_fn(|i| self.b.at(0, first + i.min(width - 1)));
            // SAFETY: columns of B are contiguous and as long as the row, whose view was checked;
            // `kernel` chose what this machine has. The panel is the task's own part of C.
            unsafe {
                kernel(row, &columns, &mut sums);
                let c = (self.c, self.c_row_stride);
                self.epilogue.store(&mut sums, width, bias, (0, first), c);
            }
        }
    }
}

/// Goes on with the chains from step `first` to the end of the row.
///
/// # Safety
/// See [`RowKernel`].
#[inline(always)]
unsafe fn finish<T: Element>(
    row: &[f32],
    columns: &Columns<T>,
    first: usize,
    sums: &mut [f32; PANEL_COLS],
) {
    for (p, &value) in row.iter().enumerate().skip(first) {
        for (sum, column) in sums.iter_mut().zip(columns) {
            // SAFETY: the column is as long as the row.
            *sum = value.mul_add(unsafe { *column.add(p) }.to_f32(), *sum);
        }
    }
}

/// # Safety
/// See [`RowKernel`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn avx512<T: Element>(row: &[f32], columns: &Columns<T>, sums: &mut [f32; PANEL_COLS]) {
    use std::arch::x86_64::*;
    const LANES: usize = 16;
    let steps = LANES * T::PER_WORD;
    let whole = row.len() / steps * steps;
    let mut chains = [_mm512_setzero_ps(); PANEL_COLS / LANES];
    for p in (0..whole).step_by(steps) {
        for (chain, columns) in chains.iter_mut().zip(columns.as_chunks::<LANES>().0) {
            // Lane i of word j: words of column i, turned to one word of each column.
            let words = turn_16(columns.map(|column| {
                let at = column.wrapping_add(p).cast::<i8>();
                _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(PREFETCH_BYTES));
                // SAFETY: 64 bytes of the column from step `p` on.
                _mm512_castsi512_ps(unsafe { _mm512_loadu_si512(at.cast()) })
            }));
            for (word, row) in words.into_iter().zip(row[p..].chunks_exact(T::PER_WORD)) {
                if T::PER_WORD == 1 {
                    *chain = _mm512_fmadd_ps(_mm512_set1_ps(row[0]), word, *chain);
                } else {
                    let word = _mm512_castps_si512(word);
                    let low = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(word));
                    let mask = _mm512_set1_epi32(-1 << 16);
                    let high = _mm512_castsi512_ps(_mm512_and_si512(word, mask));
                    *chain = _mm512_fmadd_ps(_mm512_set1_ps(row[0]), low, *chain);
                    *chain = _mm512_fmadd_ps(_mm512_set1_ps(row[1]), high, *chain);
                }
            }
        }
    }
    for (chain, sums) in chains.into_iter().zip(sums.as_chunks_mut::<LANES>().0) {
        // SAFETY: 16 sums are a vector.
        unsafe { _mm512_storeu_ps(sums.as_mut_ptr(), chain) };
    }
    // SAFETY: the caller's promise.
    unsafe { finish(row, columns, whole, sums) };
}

/// # Safety
/// See [`RowKernel`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn avx2<T: Element>(row: &[f32], columns: &Columns<T>, sums: &mut [f32; PANEL_COLS]) {
    use std::arch::x86_64::*;
    const LANES: usize = 8;
    let steps = LANES * T::PER_WORD;
    let whole = row.len() / steps * steps;
    let mut chains = [_mm256_setzero_ps(); PANEL_COLS / LANES];
    for p in (0..whole).step_by(steps) {
        for (chain, columns) in chains.iter_mut().zip(columns.as_chunks::<LANES>().0) {
            let words = turn_8(columns.map(|column| {
                let at = column.wrapping_add(p).cast::<i8>();
                _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(PREFETCH_BYTES));
                // SAFETY: 32 bytes of the column from step `p` on.
                _mm256_castsi256_ps(unsafe { _mm256_loadu_si256(at.cast()) })
            }));
            for (word, row) in words.into_iter().zip(row[p..].chunks_exact(T::PER_WORD)) {
                if T::PER_WORD == 1 {
                    *chain = _mm256_fmadd_ps(_mm256_set1_ps(row[0]), word, *chain);
                } else {
                    let word = _mm256_castps_si256(word);
                    let low = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(word));
                    let mask = _mm256_set1_epi32(-1 << 16);
                    let high = _mm256_castsi256_ps(_mm256_and_si256(word, mask));
                    *chain = _mm256_fmadd_ps(_mm256_set1_ps(row[0]), low, *chain);
                    *chain = _mm256_fmadd_ps(_mm256_set1_ps(row[1]), high, *chain);
                }
            }
        }
    }
    for (chain, sums) in chains.into_iter().zip(sums.as_chunks_mut::<LANES>().0) {
        // SAFETY: 8 sums are a vector.
        unsafe { _mm256_storeu_ps(sums.as_mut_ptr(), chain) };
    }
    // SAFETY: the caller's promise.
    unsafe { finish(row, columns, whole, sums) };
}

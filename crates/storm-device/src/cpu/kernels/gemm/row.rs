//! One row times a matrix whose columns are contiguous, as in the projection of a single token.
//!
//! Each element of the matrix is used once, so packing it would cost more than the product. Squares
//! of the matrix are transposed in registers and multiplied there: memory is read once, in order,
//! and only the result is written. Each element's chain is that of the module's definition.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;
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

/// Tasks per thread: enough that all threads finish at about the same time.
const TASKS_PER_THREAD: usize = 8;

/// Addresses of the columns of a panel. Columns beyond the last repeat it, since constant trip
/// counts keep everything in registers.
type Columns<T> = [*const T; PANEL_COLS];

/// Sums the products of a row and each column of a panel.
///
/// # Safety
/// The columns must be as long as the row, and the machine must have the kernel's instruction set.
type RowKernel<T> = unsafe fn(&[f32], &Columns<T>, &mut [f32; PANEL_COLS]);

/// The kernel for the instruction set in use, if there is one.
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
    /// Computes an output of one row, `columns` wide, if this path supports the operands.
    pub(super) fn run_row(&self, columns: usize, threads: usize) -> Option<()> {
        let kernel = kernel::<B>()?;
        // The row is widened into the buffer for packed A, which limits k.
        let has_kernel = B::PER_WORD <= 2;
        if !has_kernel
            || self.a.rows() != 1
            || self.b.row_stride() != 1
            || !(1..=PACKED_A_LEN).contains(&self.k)
        {
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
            // SAFETY: the row of A has `k` elements.
            *value = unsafe { *self.a.at(0, p) }.to_f32();
        }
        let mut bias = [0.0; PANEL_COLS];
        let mut sums = [0.0; PANEL_COLS];
        for first in part.clone().step_by(PANEL_COLS) {
            let width = PANEL_COLS.min(part.end - first);
            let bias = self.epilogue.widen_bias(first..first + width, &mut bias);
            let columns = std::array::from_fn(|i| self.b.at(0, first + i.min(width - 1)));
            // SAFETY: columns of B are contiguous and as long as the row, by the checks of the
            // views. This machine can run `kernel`. The panel is the task's own part of C.
            unsafe {
                kernel(row, &columns, &mut sums);
                let c = (self.c, self.c_row_stride);
                self.epilogue.store(&sums, width, bias, (0, first), c);
            }
        }
    }
}

/// Continues the chains from step `first` to the end of the row.
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

/// A kernel for vectors of `$lanes` lanes. A panel's chains stay in registers. A separate function
/// transposes and multiplies each square of weights, because otherwise the compiler interleaves the
/// squares and spills registers.
#[cfg(target_arch = "x86_64")]
macro_rules! row_kernel {
    (
        $kernel:ident, $square:ident, $features:literal, $lanes:literal, $turn:ident, $vector:ty,
        $zero:ident, $load:ident, $store:ident, $broadcast:ident, $multiply_add:ident,
        $as_integers:ident, $as_floats:ident, $shift_left:ident, $and:ident, $repeat:ident
    ) => {
        /// # Safety
        /// See [`RowKernel`].
        #[target_feature(enable = $features)]
        unsafe fn $kernel<T: Element>(
            row: &[f32],
            columns: &Columns<T>,
            sums: &mut [f32; PANEL_COLS],
        ) {
            let steps = $lanes * T::PER_WORD;
            let whole = row.len() / steps * steps;
            let mut chains = [$zero(); PANEL_COLS / $lanes];
            for p in (0..whole).step_by(steps) {
                for (chain, columns) in chains.iter_mut().zip(columns.as_chunks().0) {
                    // SAFETY: all columns and the row have `steps` values from step `p` on.
                    *chain = unsafe { $square(*chain, row.as_ptr().add(p), columns, p) };
                }
            }
            for (chain, sums) in chains.into_iter().zip(sums.as_chunks_mut::<$lanes>().0) {
                // SAFETY: there is one sum for each lane of a vector.
                unsafe { $store(sums.as_mut_ptr(), chain) };
            }
            // SAFETY: the caller's promise.
            unsafe { finish(row, columns, whole, sums) };
        }

        /// Continues the chains of some columns with a vector of each, starting at step `p`, which
        /// is the start of `row`.
        ///
        /// # Safety
        /// `row`, and each column from step `p`, must have lanes × `T::PER_WORD` values.
        #[inline(never)]
        #[target_feature(enable = $features)]
        unsafe fn $square<T: Element>(
            mut chain: $vector,
            row: *const f32,
            columns: &[*const T; $lanes],
            p: usize,
        ) -> $vector {
            let mut words = [$zero(); $lanes];
            for (word, column) in words.iter_mut().zip(columns) {
                // SAFETY: the caller's promise.
                *word = unsafe { $load(column.add(p).cast()) };
            }
            // Transposed, a vector has one word of each column.
            for (i, word) in $turn(words).into_iter().enumerate() {
                // SAFETY: the caller's promise.
                let value = |step| unsafe { *row.add(i * T::PER_WORD + step) };
                if T::PER_WORD == 1 {
                    chain = $multiply_add($broadcast(value(0)), word, chain);
                } else {
                    let halves = $as_integers(word);
                    let first = $as_floats($shift_left::<16>(halves));
                    let second = $as_floats($and(halves, $repeat(-1 << 16)));
                    chain = $multiply_add($broadcast(value(0)), first, chain);
                    chain = $multiply_add($broadcast(value(1)), second, chain);
                }
            }
            chain
        }
    };
}

#[cfg(target_arch = "x86_64")]
row_kernel!(
    avx512,
    square_avx512,
    "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma",
    16,
    turn_16,
    __m512,
    _mm512_setzero_ps,
    _mm512_loadu_ps,
    _mm512_storeu_ps,
    _mm512_set1_ps,
    _mm512_fmadd_ps,
    _mm512_castps_si512,
    _mm512_castsi512_ps,
    _mm512_slli_epi32,
    _mm512_and_si512,
    _mm512_set1_epi32
);

#[cfg(target_arch = "x86_64")]
row_kernel!(
    avx2,
    square_avx2,
    "avx2,fma",
    8,
    turn_8,
    __m256,
    _mm256_setzero_ps,
    _mm256_loadu_ps,
    _mm256_storeu_ps,
    _mm256_set1_ps,
    _mm256_fmadd_ps,
    _mm256_castps_si256,
    _mm256_castsi256_ps,
    _mm256_slli_epi32,
    _mm256_and_si256,
    _mm256_set1_epi32
);

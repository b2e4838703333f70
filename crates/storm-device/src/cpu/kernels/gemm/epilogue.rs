//! What is done to a finished sum before it is stored.

use std::ops::Range;

use half::bf16;

use super::super::element::Element;
use super::super::shared::SharedMut;
use super::matrix::Matrix;
use super::micro::{Finish, PANEL_COLS};
use crate::simd_dispatch;

/// What to do with the old contents of C.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Accumulate {
    /// Ignore them.
    #[default]
    Replace,
    /// Add them, before the one rounding.
    Add,
}

/// One value per column of C, in its own storage type.
#[derive(Clone, Copy)]
pub enum Bias<'a> {
    /// Stored as f32.
    F32(&'a [f32]),
    /// Stored as bf16.
    Bf16(&'a [bf16]),
}

impl<'a> From<&'a [f32]> for Bias<'a> {
    fn from(values: &'a [f32]) -> Self {
        Bias::F32(values)
    }
}

impl<'a> From<&'a [bf16]> for Bias<'a> {
    fn from(values: &'a [bf16]) -> Self {
        Bias::Bf16(values)
    }
}

/// The factor of each sum, and the terms added to it, in this order: bias, addend, old C.
#[derive(Clone, Copy)]
pub struct Epilogue<'a, C> {
    /// Multiplies the sum.
    pub scale: f32,
    /// Added to every row.
    pub bias: Option<Bias<'a>>,
    /// A matrix of the shape of C with contiguous rows.
    pub addend: Option<Matrix<'a, C>>,
    /// What to do with the old contents of C.
    pub accumulate: Accumulate,
}

impl<C> Default for Epilogue<'_, C> {
    fn default() -> Self {
        Self { scale: 1.0, bias: None, addend: None, accumulate: Accumulate::Replace }
    }
}

impl<C: Element> Epilogue<'_, C> {
    /// Panics unless the terms fit an m × n output.
    pub(super) fn check(&self, m: usize, n: usize) {
        match self.bias {
            Some(Bias::F32(bias)) => assert_eq!(bias.len(), n, "length of the bias"),
            Some(Bias::Bf16(bias)) => assert_eq!(bias.len(), n, "length of the bias"),
            None => {}
        }
        if let Some(addend) = self.addend {
            assert_eq!((addend.rows(), addend.cols()), (m, n), "shape of the addend");
            assert!(addend.col_stride() == 1 || n <= 1, "addend rows must be contiguous");
        }
    }

    /// The bias of some columns as f32, in `buffer`.
    pub(super) fn widen_bias<'b>(
        &self,
        cols: Range<usize>,
        buffer: &'b mut [f32],
    ) -> Option<&'b [f32]> {
        let buffer = &mut buffer[..cols.len()];
        match self.bias? {
            Bias::F32(bias) => buffer.copy_from_slice(&bias[cols]),
            Bias::Bf16(bias) => {
                for (wide, narrow) in buffer.iter_mut().zip(&bias[cols]) {
                    *wide = Element::to_f32(*narrow);
                }
            }
        }
        Some(buffer)
    }

    /// How kernels write a tile of 32 columns and `height` rows to C themselves, with its upper left
    /// corner at `(row, col)`. `None` unless C is of f32. `bias` starts at the tile's first column.
    pub(super) fn finish(
        &self,
        height: usize,
        bias: Option<&[f32]>,
        (row, col): (usize, usize),
        (c, row_stride): (SharedMut<C>, usize),
    ) -> Option<Finish> {
        let first = row * row_stride + col;
        let last = first + (height - 1) * row_stride + PANEL_COLS;
        let bias = bias.map(|bias| &bias[..PANEL_COLS]);
        let addend = match self.addend {
            Some(addend) => C::as_f32_address(addend.at(row, col).cast_mut())?.cast_const(),
            None => std::ptr::null(),
        };
        Some(Finish {
            out: C::as_f32_address(c.address(first..last))?,
            out_row: row_stride,
            scale: self.scale,
            bias: bias.map_or(std::ptr::null(), <[f32]>::as_ptr),
            addend,
            addend_row: self.addend.map_or(0, |addend| addend.row_stride()),
            adds_old: self.accumulate == Accumulate::Add,
        })
    }

    /// Finishes the first `width` columns of a tile of sums (rows of 32) and writes them to C with
    /// their upper left corner at `(row, col)`. `bias` starts at the tile's first column.
    ///
    /// # Safety
    /// The tile must be inside C, and no other thread may touch that part of C.
    pub(super) unsafe fn store(
        &self,
        sums: &[f32],
        width: usize,
        bias: Option<&[f32]>,
        (row, col): (usize, usize),
        (c, row_stride): (SharedMut<C>, usize),
    ) {
        let part = Part { c, first: row * row_stride + col, row_stride };
        let addend = self
            .addend
            .map(|addend| Addend { first: addend.at(row, col), row_stride: addend.row_stride() });
        let terms = Terms { scale: self.scale, bias, addend, accumulate: self.accumulate };
        store_rows(sums, width, terms, part);
    }
}

/// The part of C that a tile of sums is written to. Only one task accesses it.
#[derive(Clone, Copy)]
struct Part<'a, C> {
    c: SharedMut<'a, C>,
    first: usize,
    row_stride: usize,
}

/// The part of an addend that belongs to a tile. Its rows are contiguous.
#[derive(Clone, Copy)]
struct Addend<C> {
    first: *const C,
    row_stride: usize,
}

/// The epilogue of a tile.
#[derive(Clone, Copy)]
struct Terms<'a, C> {
    scale: f32,
    bias: Option<&'a [f32]>,
    addend: Option<Addend<C>>,
    accumulate: Accumulate,
}

simd_dispatch! {
    /// The rows of [`Epilogue::store`], whose caller guarantees all addresses.
    fn store_rows[C: Element](sums: &[f32], width: usize, terms: Terms<C>, part: Part<C>) {
        // With a constant width, loops over columns compile to a few vector operations.
        if width == PANEL_COLS {
            each_row(sums, PANEL_COLS, terms, part);
        } else {
            each_row(sums, width, terms, part);
        }
    }
}

#[inline(always)]
fn each_row<C: Element>(sums: &[f32], width: usize, terms: Terms<C>, part: Part<C>) {
    for (r, sums) in sums.chunks_exact(PANEL_COLS).enumerate() {
        let addend = terms.addend.map(|addend| {
            // SAFETY: `check` proved that the addend has C's shape and contiguous rows.
            unsafe { std::slice::from_raw_parts(addend.first.add(r * addend.row_stride), width) }
        });
        let start = part.first + r * part.row_stride;
        // SAFETY: the caller of `store` guarantees that no other thread accesses this part of C.
        let out = unsafe { part.c.piece(start..start + width) };
        store_row(&sums[..width], terms, addend, out);
    }
}

/// Stores one row: whole vectors, then the rest one by one.
#[inline(always)]
fn store_row<C: Element>(sums: &[f32], terms: Terms<C>, addend: Option<&[C]>, out: &mut [C]) {
    let whole = sums.len() / VECTOR * VECTOR;
    for at in (0..whole).step_by(VECTOR) {
        store_vector(vector(sums, at), terms, addend, out, at);
    }
    for at in whole..sums.len() {
        let mut sum = sums[at] * terms.scale;
        if let Some(bias) = terms.bias {
            sum += bias[at];
        }
        if let Some(addend) = addend {
            sum += addend[at].to_f32();
        }
        if terms.accumulate == Accumulate::Add {
            sum += out[at].to_f32();
        }
        out[at] = C::from_f32(sum);
    }
}

/// Elements of a vector.
const VECTOR: usize = 16;

/// The vector at this place.
#[inline(always)]
fn vector<T: Copy>(values: &[T], at: usize) -> [T; VECTOR] {
    *values[at..].first_chunk().expect("a whole vector")
}

/// Stores a vector at this place of a row. Sums stay in a register: loops that add terms to sums in
/// memory would not be vectorized.
#[inline(always)]
fn store_vector<C: Element>(
    mut sums: [f32; VECTOR],
    terms: Terms<C>,
    addend: Option<&[C]>,
    out: &mut [C],
    at: usize,
) {
    if terms.scale != 1.0 {
        sums = sums.map(|sum| sum * terms.scale);
    }
    let mut add = |terms: [f32; VECTOR]| {
        for (sum, term) in sums.iter_mut().zip(terms) {
            *sum += term;
        }
    };
    if let Some(bias) = terms.bias {
        add(vector(bias, at));
    }
    if let Some(addend) = addend {
        add(C::widen(vector(addend, at)));
    }
    if terms.accumulate == Accumulate::Add {
        add(C::widen(vector(out, at)));
    }
    for (out, sum) in out[at..at + VECTOR].iter_mut().zip(sums) {
        *out = C::from_f32(sum);
    }
}

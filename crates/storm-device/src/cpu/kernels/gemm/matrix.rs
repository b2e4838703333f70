//! Strided views of matrices.

use super::super::element::Element;
use super::super::shared::SharedMut;
use half::bf16;

/// A read-only matrix with arbitrary strides: element (r, c) is
/// `data[r * row_stride + c * col_stride]`.
#[derive(Clone, Copy)]
pub struct Matrix<'a, T> {
    data: &'a [T],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a, T: Element> Matrix<'a, T> {
    /// A view with the given strides, in elements.
    ///
    /// # Panics
    /// If an element would lie outside `data`.
    pub fn new(
        data: &'a [T],
        rows: usize,
        cols: usize,
        row_stride: usize,
        col_stride: usize,
    ) -> Self {
        assert!(
            rows == 0
                || cols == 0
                || far((rows - 1, row_stride), (cols - 1, col_stride)) < data.len(),
            "a {rows}×{cols} matrix with strides {row_stride}, {col_stride} does not fit {} elements",
            data.len()
        );
        Self { data, rows, cols, row_stride, col_stride }
    }

    /// A dense row-major view.
    pub fn row_major(data: &'a [T], rows: usize, cols: usize) -> Self {
        Self::new(data, rows, cols, cols, 1)
    }

    /// The transposed view of the same data.
    pub fn transposed(self) -> Self {
        Self {
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
            ..self
        }
    }

    /// The same view if its elements are bf16.
    pub(super) fn as_bf16(self) -> Option<Matrix<'a, bf16>> {
        let Self { data, rows, cols, row_stride, col_stride } = self;
        Some(Matrix { data: T::as_bf16(data)?, rows, cols, row_stride, col_stride })
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Elements from (row, col) to the end of the data.
    pub(super) fn readable(&self, row: usize, col: usize) -> usize {
        self.data.len() - row * self.row_stride - col * self.col_stride
    }

    /// Elements from one row to the next.
    pub(super) fn row_stride(&self) -> usize {
        self.row_stride
    }

    /// Elements from one column to the next.
    pub(super) fn col_stride(&self) -> usize {
        self.col_stride
    }

    /// Address of element (row, col).
    pub(super) fn at(&self, row: usize, col: usize) -> *const T {
        debug_assert!(row < self.rows && col < self.cols);
        self.data.as_ptr().wrapping_add(row * self.row_stride + col * self.col_stride)
    }
}

/// Distance of steps along two axes, (count, stride) each. Saturates, because sizes that wrapped
/// around could pass a check that `unsafe` code relies on.
pub(super) fn far(a: (usize, usize), b: (usize, usize)) -> usize {
    a.0.saturating_mul(a.1).saturating_add(b.0.saturating_mul(b.1))
}

/// A writable matrix with contiguous rows: element (r, c) is `data[r * row_stride + c]`.
pub struct MatrixMut<'a, T> {
    data: &'a mut [T],
    rows: usize,
    cols: usize,
    row_stride: usize,
}

impl<'a, T: Element> MatrixMut<'a, T> {
    /// A view with the given row stride, in elements.
    ///
    /// # Panics
    /// If an element would lie outside `data` or rows would overlap.
    pub fn new(data: &'a mut [T], rows: usize, cols: usize, row_stride: usize) -> Self {
        assert!(row_stride >= cols || rows <= 1, "rows overlap");
        assert!(
            rows == 0 || cols == 0 || far((rows - 1, row_stride), (cols, 1)) <= data.len(),
            "a {rows}×{cols} matrix with row stride {row_stride} does not fit {} elements",
            data.len()
        );
        Self { data, rows, cols, row_stride }
    }

    /// A dense view.
    pub fn row_major(data: &'a mut [T], rows: usize, cols: usize) -> Self {
        Self::new(data, rows, cols, cols)
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Elements from one row to the next.
    pub(super) fn row_stride(&self) -> usize {
        self.row_stride
    }

    /// The data, for several threads that write tiles of it.
    pub(super) fn shared(&mut self) -> SharedMut<'_, T> {
        SharedMut::new(self.data)
    }
}

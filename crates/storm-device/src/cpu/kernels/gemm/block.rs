//! Products of blocks that are already in f32 scratch memory, for kernels that are themselves
//! parallel (attention).

use super::super::element::Element;
use super::matrix::far;
use super::micro::{Kernels, PANEL_COLS, Panels, Tile};
use super::pack::{LANES, Source, Strip, pack};

/// The left operand of [`block_gemm`]: element (r, p) is `data[r * row_stride + p * k_stride]`.
#[derive(Clone, Copy)]
pub struct BlockA<'a> {
    /// The elements.
    pub data: &'a [f32],
    /// Elements between rows.
    pub row_stride: usize,
    /// Elements between steps of k.
    pub k_stride: usize,
}

/// Multiplies on the calling thread, without packing: C (rows × cols) = A · B. With `resume`, it is
/// C + A · B: each element's chain of fused multiply-adds continues from the value in C.
///
/// B (k × cols) and C have contiguous rows `b_stride` and `c_stride` apart. `cols` must be a
/// multiple of 32: pad blocks with zeros.
///
/// # Panics
/// If an operand is too short for its shape.
#[allow(clippy::too_many_arguments)]
pub fn block_gemm(
    (rows, cols, k): (usize, usize, usize),
    a: BlockA,
    b: &[f32],
    b_stride: usize,
    c: &mut [f32],
    c_stride: usize,
    resume: bool,
) {
    if rows == 0 || cols == 0 {
        return;
    }
    assert!(cols.is_multiple_of(PANEL_COLS), "columns must be padded to 32");
    assert!(far((rows - 1, c_stride), (cols, 1)) <= c.len(), "C is too short");
    if k > 0 {
        assert!(far((k - 1, b_stride), (cols, 1)) <= b.len(), "B is too short");
        let last = far((rows - 1, a.row_stride), (k - 1, a.k_stride));
        assert!(last < a.data.len(), "A is too short");
    }
    let kernels = Kernels::current();
    let panels = Panels::new(rows, kernels.by_rows.len());
    for panel in 0..panels.count {
        let panel_rows = panels.rows(panel);
        let kernel = kernels.by_rows[panel_rows.len() - 1];
        for col in (0..cols).step_by(PANEL_COLS) {
            let tile = Tile {
                k,
                a: a.data.as_ptr().wrapping_add(panel_rows.start * a.row_stride),
                a_row: a.row_stride,
                a_k: a.k_stride,
                b: b.as_ptr().wrapping_add(col),
                b_k: b_stride,
                c: c.as_mut_ptr().wrapping_add(panel_rows.start * c_stride + col),
                c_row: c_stride,
                resume,
                finish: None,
            };
            // SAFETY: the assertions above cover every address of the panel.
            unsafe { kernel(&tile) };
        }
    }
}

/// Transposes `rows × cols` elements, rows `row_stride` apart in `source`, into rows of `target`
/// that are `target_stride` apart. Up to 15 values beyond each target row's end are overwritten.
///
/// # Panics
/// If an operand is too short.
pub(in super::super) fn pack_transposed<T: Element>(
    source: &[T],
    row_stride: usize,
    (rows, cols): (usize, usize),
    target: &mut [f32],
    target_stride: usize,
) {
    if rows == 0 || cols == 0 {
        return;
    }
    let strips = rows.div_ceil(LANES);
    assert!(far((rows - 1, row_stride), (cols, 1)) <= source.len(), "source is too short");
    assert!(strips * LANES <= target_stride, "target rows would overlap");
    assert!(cols.saturating_mul(target_stride) <= target.len(), "target is too short");
    let source = Source {
        start: source.as_ptr(),
        lane_stride: row_stride,
        k_stride: 1,
        readable: source.len(),
    };
    let strip =
        |i| Strip { lane: i * LANES, lanes: LANES.min(rows - i * LANES), offset: i * LANES };
    // SAFETY: the assertions above cover every address.
    unsafe { pack(source, cols, strips, strip, target.as_mut_ptr(), target_stride) };
}

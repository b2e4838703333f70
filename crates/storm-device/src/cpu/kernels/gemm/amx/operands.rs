//! Operands of whole panels: rows of A, read in place where tiles can be loaded from there, and
//! columns of B in the order of tiles.

use super::super::matrix::Matrix;
use super::super::pack::Source;
use super::kernel::{COLUMNS, ROWS, STEP};
use super::pack::{LANES, Order, PIECE, pack_piece};
use half::bf16;
use std::ops::Range;

/// The address of rows of A, a multiple of 32 with padding, and their stride. They are in the matrix
/// if tiles can be loaded from there, else packed with the stride `packed_row`.
pub(super) fn rows_for_tiles(
    a: Matrix<bf16>,
    rows: Range<usize>,
    k: Range<usize>,
    packed: &mut [f32],
    packed_row: usize,
) -> (*const bf16, usize) {
    assert!(k.len().next_multiple_of(STEP) <= packed_row);
    assert!(rows.len().next_multiple_of(ROWS) * packed_row <= 2 * packed.len());
    let packed: *mut bf16 = packed.as_mut_ptr().cast();
    if k.is_empty() {
        return (packed, 0);
    }
    let start = a.at(rows.start, k.start);
    if a.col_stride() == 1 && rows.len().is_multiple_of(ROWS) && k.len().is_multiple_of(STEP) {
        return (start, a.row_stride());
    }
    let source = Source {
        start,
        lane_stride: a.row_stride(),
        k_stride: a.col_stride(),
        readable: a.readable(rows.start, k.start),
    };
    for step in (0..k.len()).step_by(STEP) {
        for lane in (0..rows.len()).step_by(LANES) {
            let size = (LANES.min(rows.len() - lane), STEP.min(k.len() - step));
            // SAFETY: the piece is in the matrix, whose view was checked. By the assertion above,
            // the buffer has room for all rows.
            unsafe {
                let target = packed.add(lane * packed_row + step);
                pack_piece(source.from(lane, step), size, Order::ByLane, target, packed_row);
            }
        }
    }
    (packed, packed_row)
}

/// Packs columns of B, panel by panel.
pub(super) fn pack_columns(
    b: Matrix<bf16>,
    k: Range<usize>,
    cols: Range<usize>,
    packed: &mut [f32],
) {
    let steps = k.len().div_ceil(STEP);
    let panels = cols.len().div_ceil(COLUMNS);
    assert!(panels * steps * 2 * PIECE <= 2 * packed.len());
    if k.is_empty() {
        return;
    }
    let packed: *mut bf16 = packed.as_mut_ptr().cast();
    let source = Source {
        start: b.at(k.start, cols.start),
        lane_stride: b.col_stride(),
        k_stride: b.row_stride(),
        readable: b.readable(k.start, cols.start),
    };
    let piece = |strip: usize, step: usize| {
        let lane = strip * LANES;
        let size = (LANES.min(cols.len() - lane), STEP.min(k.len() - step * STEP));
        let place = ((strip / 2 * steps + step) * 2 + strip % 2) * PIECE;
        // SAFETY: the piece is in the matrix, whose view was checked. By the assertion above, the
        // buffer has room for it.
        unsafe {
            let source = source.from(lane, step * STEP);
            pack_piece(source, size, Order::ByPair, packed.add(place), STEP);
        }
    };
    // In the order of B's memory.
    let strips = cols.len().div_ceil(LANES);
    if source.k_stride == 1 {
        (0..strips).for_each(|strip| (0..steps).for_each(|step| piece(strip, step)));
    } else {
        (0..steps).for_each(|step| (0..strips).for_each(|strip| piece(strip, step)));
    }
}

//! Embeddings: copies rows of a table, and sums their gradients over sorted segments.

use super::element::Element;
use super::gemm::Accumulate;
use rayon::prelude::*;
use std::ops::Range;

/// Rows copied per task.
const ROWS: usize = 64;
/// Table rows whose gradients one task computes.
const TABLE_ROWS: usize = 256;
/// Columns summed together, on the stack.
const COLUMNS: usize = 64;

/// Copies row `ids[i]` of `table` to row `i` of `out`.
///
/// # Panics
/// If an id is not a row of the table.
pub fn embedding<E: Element>(ids: &[i32], table: &[E], width: usize, out: &mut [E]) {
    out.par_chunks_mut(ROWS * width).zip(ids.par_chunks(ROWS)).for_each(|(out, ids)| {
        for (out, &id) in out.chunks_mut(width).zip(ids) {
            let start = row_of(id) * width;
            out.copy_from_slice(&table[start..start + width]);
        }
    });
}

fn row_of(id: i32) -> usize {
    usize::try_from(id).unwrap_or_else(|_| panic!("id {id} is not a row of an embedding table"))
}

/// Sums the rows of `dy` by id. `order` lists rows sorted by (id, row). The rows of one id are a
/// run of it, and are added in that order.
pub fn embedding_grad<E: Element, G: Element>(
    dy: &[E],
    ids: &[i32],
    order: &[i32],
    width: usize,
    accumulate: Accumulate,
    table: &mut [G],
) {
    table.par_chunks_mut(TABLE_ROWS * width).enumerate().for_each(|(task, rows)| {
        if accumulate == Accumulate::Replace {
            rows.fill(G::from_f32(0.0));
        }
        let first = task * TABLE_ROWS;
        let id_at = |place: i32| row_of(ids[row_of(place)]);
        let mut next = order.partition_point(|&place| id_at(place) < first);
        while next < order.len() && id_at(order[next]) < first + rows.len() / width {
            let id = id_at(order[next]);
            let run = order[next..].partition_point(|&place| id_at(place) == id);
            let segment = &order[next..next + run];
            let target = (id - first) * width;
            for columns in tiles(width) {
                let out = &mut rows[target + columns.start..target + columns.end];
                add_segment(dy, segment, width, columns, out);
            }
            next += run;
        }
    });
}

fn tiles(width: usize) -> impl Iterator<Item = Range<usize>> {
    (0..width).step_by(COLUMNS).map(move |start| start..width.min(start + COLUMNS))
}

/// Adds some columns of the segment's rows to `out`, rounding once.
fn add_segment<E: Element, G: Element>(
    dy: &[E],
    segment: &[i32],
    width: usize,
    columns: Range<usize>,
    out: &mut [G],
) {
    let mut sums = [0.0f32; COLUMNS];
    for &row in segment {
        let start = row_of(row) * width;
        let row = &dy[start + columns.start..start + columns.end];
        for (sum, value) in sums.iter_mut().zip(row) {
            *sum += value.to_f32();
        }
    }
    for (out, sum) in out.iter_mut().zip(sums) {
        *out = G::from_f32(sum + out.to_f32());
    }
}

//! How the output is divided into tiles, one task each.
//!
//! The division never affects the result, since each element is a separate chain. So it may depend
//! on the number of threads.

use super::SUMS_LEN;
use super::micro::PANEL_COLS;

/// Maximum rows of a tile. With so many, packing B is a small share of a product.
const TILE_ROWS_MAX: usize = 4096;
/// Maximum columns of a tile. With the depth of a block of k, it bounds the buffer for the packed B.
pub(super) const TILE_COLS_MAX: usize = 512;

/// Rows that kernels compute at once, at most.
pub(super) const ROW_BLOCK: usize = 32;

/// Limits and costs of the kernels.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Maximum rows of a tile.
    pub(super) rows_max: usize,
    /// Maximum elements of a tile, in whole blocks of 32 × 32.
    pub(super) sums_max: usize,
    /// Cost of packing one element, in multiply-adds.
    pub(super) pack_cost: usize,
}

impl Limits {
    /// The limits for sums of `k` products, in blocks of at most `k_block_max`.
    pub(super) fn of_depth(k: usize, k_block_max: usize, pack_cost: usize) -> Limits {
        // Sums that are complete after a single block need not be kept.
        let sums_max = if k <= k_block_max { usize::MAX } else { SUMS_LEN };
        Limits { rows_max: TILE_ROWS_MAX, sums_max, pack_cost }
    }
}

/// Maximum tiles per thread in the search for a better balance.
const TILES_PER_THREAD: usize = 4;

/// A grid of nearly equal tiles.
#[derive(Clone, Copy, Debug)]
pub(super) struct Partition {
    rows: usize,
    cols: usize,
    row_tiles: usize,
    col_tiles: usize,
}

impl Partition {
    /// The grid with the least estimated time: tiles of the busiest thread × cost of a tile.
    /// Smaller tiles cost more in total for packing.
    pub(super) fn new(rows: usize, cols: usize, threads: usize, limits: Limits) -> Self {
        let panels = cols.div_ceil(PANEL_COLS);
        let col_tiles_min = cols.div_ceil(TILE_COLS_MAX);
        let cols_of = |col_tiles| panels.div_ceil(col_tiles) * PANEL_COLS;
        let row_tiles_min = |col_tiles| {
            let rows_max = limits.sums_max / cols_of(col_tiles) / ROW_BLOCK * ROW_BLOCK;
            rows.div_ceil(rows_max.min(limits.rows_max))
        };
        let mut best = (usize::MAX, row_tiles_min(col_tiles_min), col_tiles_min);
        // Beyond a few tiles per thread, their number hardly matters. This also bounds the search,
        // which runs in every call.
        let tiles_max = TILES_PER_THREAD * threads;
        for col_tiles in col_tiles_min..=panels.min(tiles_max) {
            for row_tiles in row_tiles_min(col_tiles)..=rows.min(tiles_max / col_tiles) {
                let (tile_rows, tile_cols) = (rows.div_ceil(row_tiles), cols_of(col_tiles));
                let rounds = (row_tiles * col_tiles).div_ceil(threads);
                let tile_cost = tile_rows * tile_cols + limits.pack_cost * (tile_rows + tile_cols);
                let cost = rounds * tile_cost;
                if cost < best.0 {
                    best = (cost, row_tiles, col_tiles);
                }
            }
        }
        Self { rows, cols, row_tiles: best.1, col_tiles: best.2 }
    }

    /// Number of tiles.
    pub(super) fn len(&self) -> usize {
        self.row_tiles * self.col_tiles
    }

    /// Rows and columns of a tile. Tiles start at panel boundaries of the columns.
    pub(super) fn tile(&self, index: usize) -> (std::ops::Range<usize>, std::ops::Range<usize>) {
        let (row, col) = (index / self.col_tiles, index % self.col_tiles);
        let row_cut = |i: usize| self.rows * i / self.row_tiles;
        let panels = self.cols.div_ceil(PANEL_COLS);
        let col_cut = |i: usize| (panels * i / self.col_tiles * PANEL_COLS).min(self.cols);
        (row_cut(row)..row_cut(row + 1), col_cut(col)..col_cut(col + 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_the_output_once_within_the_limits() {
        let sizes = [1, 31, 32, 33, 384, 500, 1152, 1536, 5000, 50_257];
        for (rows, cols) in sizes.into_iter().flat_map(|rows| sizes.map(|cols| (rows, cols))) {
            for (threads, k) in [(1, 8), (2, 100), (7, 101), (64, 5000)] {
                let limits = Limits::of_depth(k, 100, 10);
                let partition = Partition::new(rows, cols, threads, limits);
                let mut elements = 0;
                for index in 0..partition.len() {
                    let (tile_rows, tile_cols) = partition.tile(index);
                    elements += tile_rows.len() * tile_cols.len();
                    assert!(tile_rows.end <= rows && tile_cols.end <= cols);
                    assert!(tile_rows.len() <= limits.rows_max && tile_cols.len() <= TILE_COLS_MAX);
                    let blocks =
                        tile_rows.len().div_ceil(ROW_BLOCK) * tile_cols.len().div_ceil(PANEL_COLS);
                    let fits = blocks * ROW_BLOCK * PANEL_COLS <= SUMS_LEN;
                    assert!(k <= 100 || fits, "{rows} × {cols}");
                }
                assert_eq!(elements, rows * cols, "{rows} × {cols} on {threads} threads");
            }
        }
    }
}

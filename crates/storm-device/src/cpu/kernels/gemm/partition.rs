//! How the output is divided into tiles, one task each.
//!
//! The division never affects the result, since each element is a separate chain. So it may depend
//! on the number of threads.

use super::micro::PANEL_COLS;

/// Maximum rows of a tile whose sums are kept between blocks of k. It bounds the per-thread buffer
/// of sums.
pub(super) const TILE_ROWS_MAX: usize = 512;
/// Maximum columns of a tile. With the depth of a block of k, it bounds the packed B, which should
/// stay in the second-level cache.
pub(super) const TILE_COLS_MAX: usize = 512;

/// Limits and costs of the kernels.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Maximum rows of a tile.
    pub(super) rows_max: usize,
    /// Cost of packing one element, in multiply-adds.
    pub(super) pack_cost: usize,
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
        let row_tiles_min = rows.div_ceil(limits.rows_max);
        let col_tiles_min = cols.div_ceil(TILE_COLS_MAX);
        let mut best = (usize::MAX, row_tiles_min, col_tiles_min);
        // Beyond a few tiles per thread, their number hardly matters. This also bounds the search,
        // which runs in every call.
        let tiles_max = TILES_PER_THREAD * threads;
        for row_tiles in row_tiles_min..=rows.min(tiles_max / col_tiles_min) {
            for col_tiles in col_tiles_min..=panels.min(tiles_max / row_tiles) {
                let tile_rows = rows.div_ceil(row_tiles);
                let tile_cols = panels.div_ceil(col_tiles) * PANEL_COLS;
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

//! How the output is cut into tiles, one task each.
//!
//! The cut never shows in the result (each element is one chain of its own), so it may follow the
//! number of threads.

use super::micro::PANEL_COLS;

/// Most rows of a tile whose sums wait for further blocks of k; bounds the per-thread buffer of sums.
pub(super) const TILE_ROWS_MAX: usize = 512;
/// Most columns of a tile; with the depth of a k block it bounds the packed B, which should stay in
/// the second-level cache.
pub(super) const TILE_COLS_MAX: usize = 512;

/// What kernels can do.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Most rows of a tile.
    pub(super) rows_max: usize,
    /// Cost of packing one element, in multiply-adds.
    pub(super) pack_cost: usize,
}

/// Where the search for a better balance stops.
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
    /// The grid with the least estimated time: tiles of the busiest thread × cost of a tile, where
    /// small tiles pay more for packing.
    pub(super) fn new(rows: usize, cols: usize, threads: usize, limits: Limits) -> Self {
        let panels = cols.div_ceil(PANEL_COLS);
        let row_tiles_min = rows.div_ceil(limits.rows_max);
        let col_tiles_min = cols.div_ceil(TILE_COLS_MAX);
        let mut best = (usize::MAX, row_tiles_min, col_tiles_min);
        // With a few tiles per thread their number hardly matters any more; this also bounds the
        // search, which runs in every call.
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

    /// Rows and columns of a tile. Column cuts fall on panel boundaries.
    pub(super) fn tile(&self, index: usize) -> (std::ops::Range<usize>, std::ops::Range<usize>) {
        let (row, col) = (index / self.col_tiles, index % self.col_tiles);
        let row_cut = |i: usize| self.rows * i / self.row_tiles;
        let panels = self.cols.div_ceil(PANEL_COLS);
        let col_cut = |i: usize| (panels * i / self.col_tiles * PANEL_COLS).min(self.cols);
        (row_cut(row)..row_cut(row + 1), col_cut(col)..col_cut(col + 1))
    }
}

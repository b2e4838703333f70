//! What matrix products lose when they are small.
//!
//! A product with few rows has few tiles, so multiprocessors are idle in the last or only wave. The prologue and
//! epilogue of a tile, where it reads and writes the result, weigh more the shorter its sums are.

use super::GemmKind;

/// Tiles that one multiprocessor computes at a time: rows, columns, and speed relative to the best.
const TILES: [(u64, u64, f64); 3] = [(128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.85)];

/// A matrix product: (rows, inner) times (inner, columns).
#[derive(Clone, Copy, Debug)]
pub(super) struct Product {
    pub(super) kind: GemmKind,
    pub(super) rows: u64,
    pub(super) columns: u64,
    pub(super) inner: u64,
}

/// The hardware that a product runs on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Multiprocessors {
    pub(super) count: u64,
    /// Floating-point operations per second, of all together.
    pub(super) flops: f64,
    /// Bytes per second.
    pub(super) bandwidth: f64,
    /// Of one element of the result.
    pub(super) element_bytes: f64,
}

impl Product {
    /// How far apart the extents of two products are, in logarithms: in total, and at most.
    pub(super) fn distance(&self, other: &Product) -> (f64, f64) {
        let pairs =
            [(self.rows, other.rows), (self.columns, other.columns), (self.inner, other.inner)];
        pairs
            .map(|(a, b)| (a.max(1) as f64 / b.max(1) as f64).ln().abs())
            .into_iter()
            .fold((0.0, 0.0f64), |(sum, most), d| (sum + d, most.max(d)))
    }

    /// How many times as long the product takes as its arithmetic at full speed.
    pub(super) fn waste(&self, on: &Multiprocessors) -> f64 {
        self.idle(on.count) * (1.0 + self.ends(on))
    }

    /// The ratio of all multiprocessors to busy ones, with the best-suited tiles.
    fn idle(&self, multiprocessors: u64) -> f64 {
        if self.kind == GemmKind::WeightGradient {
            // Its sums are long and may be split into as many tiles as needed.
            return 1.0;
        }
        let (rows, columns) = (self.rows.max(1), self.columns.max(1));
        let of_tile = |(tile_rows, tile_columns, speed): (u64, u64, f64)| {
            let tiles = rows.div_ceil(tile_rows) * columns.div_ceil(tile_columns);
            let places = tiles.div_ceil(multiprocessors) * multiprocessors;
            let computed = places as f64 * (tile_rows * tile_columns) as f64;
            computed / speed / (rows as f64 * columns as f64)
        };
        TILES.into_iter().map(of_tile).fold(f64::INFINITY, f64::min)
    }

    /// The time to read and write an element of the result, relative to the time of its sum.
    fn ends(&self, on: &Multiprocessors) -> f64 {
        let moves = match self.kind {
            // Added to the existing value.
            GemmKind::WeightGradient => 2.0,
            GemmKind::Forward | GemmKind::InputGradient => 1.0,
        };
        let sum_seconds = 2.0 * self.inner.max(1) as f64 / on.flops;
        moves * on.element_bytes / on.bandwidth / sum_seconds
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// About an H200 in bf16.
    const CARD: Multiprocessors =
        Multiprocessors { count: 132, flops: 665e12, bandwidth: 4.3e12, element_bytes: 2.0 };

    fn waste(kind: GemmKind, [rows, columns, inner]: [u64; 3]) -> f64 {
        Product { kind, rows, columns, inner }.waste(&CARD)
    }

    #[test]
    fn few_rows_leave_multiprocessors_idle() {
        let of_rows = |rows| waste(GemmKind::Forward, [rows, 2048, 2048]);
        assert!(of_rows(1024) > 1.15 * of_rows(4096), "{} {}", of_rows(1024), of_rows(4096));
        assert!(of_rows(4096) < 1.05 * of_rows(32768), "{} {}", of_rows(4096), of_rows(32768));
        // One row takes as long as a tile of rows.
        assert!((of_rows(1) / of_rows(128) / 128.0 - 1.0).abs() < 1e-9);
    }

    #[test]
    fn short_sums_weigh_their_ends() {
        let of_inner = |inner| waste(GemmKind::WeightGradient, [2048, 8192, inner]);
        assert!((0.2..0.4).contains(&(of_inner(1024) - 1.0)), "{}", of_inner(1024));
        assert!(of_inner(16384) < 1.03, "{}", of_inner(16384));
    }
}

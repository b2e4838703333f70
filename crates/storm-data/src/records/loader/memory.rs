//! Divides `data_ram`.

use super::RecordLoaderOptions;
use super::recent::AT_HAND;
use crate::DataError;
use crate::records::layout::PAGE_BYTES;
use crate::records::order::{Order, WINDOW_BLOCKS_MIN};
use crate::records::set::RecordSet;

/// Maximum block reads in flight per worker. Each is long, so more gain nothing.
const BLOCKS_IN_FLIGHT: u64 = 16;
/// Maximum batches ahead per worker.
const BATCHES_AHEAD: u64 = 8;
/// Maximum single-record reads in flight per worker.
const RECORDS_IN_FLIGHT: u64 = 64;

/// Each of two windows gets 7/16, batches ahead get 1/16, and compressed blocks in flight get 1/16.
/// The window size depends only on `data_ram` and the dataset, because it is part of the order.
#[derive(Clone, Copy, Debug)]
pub(in crate::records) struct Memory {
    /// Blocks in a window.
    pub(super) window_blocks: u64,
    /// Blocks kept in memory in global order.
    pub(super) cached_blocks: usize,
    /// Whether the whole part fits.
    pub(in crate::records) fits: bool,
    pub(in crate::records) workers: usize,
    /// Queue depth per worker.
    pub(in crate::records) in_flight: usize,
    /// Batches ahead, initially and at most.
    pub(super) depth: usize,
    pub(in crate::records) depth_max: usize,
    /// Maximum bytes of blocks in memory.
    pub(in crate::records) block_bytes: u64,
}

/// Bytes of a block in memory.
fn block_bytes(set: &RecordSet) -> u64 {
    let page = PAGE_BYTES as u64;
    (set.block_bytes_max() as u64).next_multiple_of(page) + page
}

/// The `data_ram` with which this many blocks like those of `set` stay in memory.
pub(in crate::records) fn data_ram_to_hold(set: &RecordSet, blocks: u64) -> u64 {
    16 * blocks.saturating_mul(block_bytes(set)).div_ceil(14)
}

/// The amount of data to load.
#[derive(Clone, Copy, Debug)]
pub(in crate::records) struct Load {
    /// Blocks of the part, of the same size as in the dataset.
    pub(in crate::records) blocks: u64,
    /// Bytes of a row in a batch.
    pub(super) row_bytes: u64,
    /// Blocks of a group, including those that its rows extend into.
    pub(super) group_blocks: u64,
    /// Whether batches ahead must fit into their share. Batches of tokens may be larger, and then
    /// only one is prepared.
    pub(super) is_bounded: bool,
}

impl Load {
    /// This many blocks, whose records are rows.
    pub(in crate::records) fn records(set: &RecordSet, blocks: u64) -> Load {
        let row_bytes = record_bytes(set);
        Load { blocks, row_bytes, group_blocks: WINDOW_BLOCKS_MIN, is_bounded: true }
    }
}

impl Load {
    /// Bytes of a row in a batch.
    pub(in crate::records) fn row_bytes(&self) -> u64 {
        self.row_bytes
    }

    fn batch_bytes(&self, options: &RecordLoaderOptions) -> u64 {
        self.row_bytes.saturating_mul(options.batch as u64)
    }

    /// The minimum `data_ram`.
    pub(in crate::records) fn needed(&self, set: &RecordSet, options: &RecordLoaderOptions) -> u64 {
        let block = block_bytes(set);
        let batch = if self.is_bounded { self.batch_bytes(options) } else { 0 };
        let blocks = match options.order {
            Order::Global => block,
            Order::Window | Order::Sequential => self.group_blocks * block / 7 + 1,
        };
        16 * batch.max(blocks)
    }
}

fn record_bytes(set: &RecordSet) -> u64 {
    let counts = &set.manifest().counts;
    counts.raw_bytes.div_ceil(counts.records.max(1))
}

impl Memory {
    /// Fraction of records in global order whose block is already in memory, for a part of this
    /// many blocks.
    pub(in crate::records) fn share_in_memory(&self, set: &RecordSet, blocks: u64) -> f64 {
        match set.has_single_records() {
            true => 0.0,
            // A block that is already being read also counts.
            false => ((self.cached_blocks + self.in_flight) as f64 / blocks.max(1) as f64).min(1.0),
        }
    }

    /// Divides the memory for a part of a dataset.
    pub(in crate::records) fn new(
        set: &RecordSet,
        load: &Load,
        options: &RecordLoaderOptions,
    ) -> Result<Memory, DataError> {
        let page = PAGE_BYTES as u64;
        let block = block_bytes(set);
        let record = record_bytes(set);
        let Load { blocks, group_blocks, .. } = *load;
        let batch = load.batch_bytes(options);
        let needed = load.needed(set, options);
        let given = options.data_ram;
        if needed > given {
            let problem = format!(
                "{given} bytes are less than the {needed} that this dataset and batch need"
            );
            return Err(DataError::Option { option: "data-ram", problem });
        }
        let sixteenth = given / 16;
        let window_blocks = (7 * sixteenth / block).max(group_blocks);
        let all_blocks = (14 * sixteenth / block).max(1);
        let fits = blocks <= all_blocks;
        let single = options.order == Order::Global && set.has_single_records() && !fits;
        let recent = options.order == Order::Global && !single && !fits;
        // Compressed blocks in flight need memory of their own. Others are read into their windows,
        // if there are any.
        let on_their_way = match set.is_compressed() || recent {
            true => (sixteenth / block).max(1),
            false => u64::MAX,
        };
        let workers = options.workers.min(usize::try_from(on_their_way).unwrap_or(usize::MAX));
        let depth_max = (sixteenth / batch.max(1)).clamp(1, BATCHES_AHEAD * workers as u64);
        let depth = depth_max.min(2 * workers as u64 + 2);
        let in_flight = match single {
            true => (sixteenth / (record + 2 * page) / workers as u64).clamp(1, RECORDS_IN_FLIGHT),
            false => (on_their_way / workers as u64).clamp(1, BLOCKS_IN_FLIGHT),
        };
        // Blocks held by workers count too.
        let at_hand = workers as u64 * in_flight * AT_HAND as u64;
        let cached_blocks = all_blocks.saturating_sub(at_hand).max(1);
        let resident = match options.order {
            _ if fits => blocks,
            Order::Global if set.has_single_records() => 0,
            Order::Global => all_blocks,
            Order::Window | Order::Sequential => 2 * window_blocks,
        };
        Ok(Memory {
            window_blocks,
            cached_blocks: cached_blocks as usize,
            fits,
            workers,
            in_flight: in_flight as usize,
            depth: depth as usize,
            depth_max: depth_max as usize,
            block_bytes: resident * block,
        })
    }
}

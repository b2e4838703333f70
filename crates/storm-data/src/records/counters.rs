//! Counters of reader threads. Each thread updates its own. Other threads may read them at any
//! time.

use std::ops::{Add, Sub};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Counters of one thread.
#[derive(Debug, Default)]
pub(super) struct ReadCounters([AtomicU64; COUNTS]);

/// What is counted.
#[derive(Clone, Copy, Debug)]
pub(super) enum Count {
    /// Blocks and single records read.
    Reads,
    /// Bytes read from disk.
    Bytes,
    /// Sum of the pending reads, sampled at each wait.
    InFlight,
    /// Nanoseconds of waiting for the disk.
    ReadingNs,
    /// Nanoseconds spent on checksums and decompression.
    DecodingNs,
    /// Bytes produced by decompression.
    DecodedBytes,
    /// Wanted blocks that were already in memory.
    Found,
    /// Nanoseconds spent assembling batches, including their prefetch.
    WorkingNs,
    /// Nanoseconds of the slowest batch since this was last read.
    LongestNs,
}

const COUNTS: usize = Count::LongestNs as usize + 1;

impl ReadCounters {
    pub(super) fn add(&self, what: Count, count: u64) {
        self.0[what as usize].fetch_add(count, Ordering::Relaxed);
    }

    pub(super) fn add_time(&self, what: Count, time: Duration) {
        self.add(what, u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    }

    pub(super) fn raise(&self, what: Count, time: Duration) {
        let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.0[what as usize].fetch_max(ns, Ordering::Relaxed);
    }

    pub(super) fn take(&self, what: Count) -> u64 {
        self.0[what as usize].swap(0, Ordering::Relaxed)
    }

    pub(super) fn get(&self, what: Count) -> u64 {
        self.0[what as usize].load(Ordering::Relaxed)
    }
}

/// Loading statistics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoaderStatistics {
    /// Batches returned.
    pub batches: u64,
    /// Batches that were not ready when requested.
    pub stalls: u64,
    /// Nanoseconds that the caller waited for batches.
    pub stalled_ns: u64,
    /// Blocks and single records read.
    pub reads: u64,
    /// Wanted blocks that were already in memory. Counted only where blocks are looked up per
    /// record.
    pub found: u64,
    /// Bytes read from disk.
    pub read_bytes: u64,
    /// Sum of the reads in flight, sampled whenever a worker waited for one.
    pub in_flight: u64,
    /// Nanoseconds that workers waited for the disk, summed over workers.
    pub reading_ns: u64,
    /// Nanoseconds that workers spent on checksums and decompression, summed over workers.
    pub decoding_ns: u64,
    /// Bytes produced by decompression.
    pub decoded_bytes: u64,
    /// Nanoseconds that workers spent assembling batches, summed over workers.
    pub working_ns: u64,
    /// Batches currently prepared ahead.
    pub ahead: u64,
    /// Nanoseconds of the slowest batch in the last measurement that set `ahead`.
    pub longest_ns: u64,
    /// Nanoseconds that the caller used each batch in that measurement. 0 before the first.
    pub interval_ns: u64,
}

impl LoaderStatistics {
    /// Adds the counters of threads.
    pub(super) fn of<'a>(
        mut self,
        counters: impl Iterator<Item = &'a ReadCounters>,
    ) -> LoaderStatistics {
        for thread in counters {
            self.reads += thread.get(Count::Reads);
            self.found += thread.get(Count::Found);
            self.read_bytes += thread.get(Count::Bytes);
            self.in_flight += thread.get(Count::InFlight);
            self.reading_ns += thread.get(Count::ReadingNs);
            self.decoding_ns += thread.get(Count::DecodingNs);
            self.decoded_bytes += thread.get(Count::DecodedBytes);
            self.working_ns += thread.get(Count::WorkingNs);
        }
        self
    }

    /// Fraction of wanted blocks that were already in memory.
    pub fn found_share(&self) -> f64 {
        self.found as f64 / (self.found + self.reads).max(1) as f64
    }

    /// Average reads in flight per worker, including the one it waited for.
    pub fn mean_in_flight(&self) -> f64 {
        self.in_flight as f64 / self.reads.max(1) as f64
    }

    /// Decoding throughput of one worker, in bytes per second.
    pub fn decoding_bytes_per_second(&self) -> f64 {
        1e9 * self.decoded_bytes as f64 / self.decoding_ns.max(1) as f64
    }
}

/// Adds the counts. Other fields are taken from `other`.
impl Add for LoaderStatistics {
    type Output = LoaderStatistics;

    fn add(self, other: LoaderStatistics) -> LoaderStatistics {
        LoaderStatistics {
            batches: self.batches + other.batches,
            stalls: self.stalls + other.stalls,
            stalled_ns: self.stalled_ns + other.stalled_ns,
            reads: self.reads + other.reads,
            found: self.found + other.found,
            read_bytes: self.read_bytes + other.read_bytes,
            in_flight: self.in_flight + other.in_flight,
            reading_ns: self.reading_ns + other.reading_ns,
            decoding_ns: self.decoding_ns + other.decoding_ns,
            decoded_bytes: self.decoded_bytes + other.decoded_bytes,
            working_ns: self.working_ns + other.working_ns,
            ..other
        }
    }
}

/// Subtracts the counts. Other fields are taken from `self`.
impl Sub for LoaderStatistics {
    type Output = LoaderStatistics;

    fn sub(self, before: LoaderStatistics) -> LoaderStatistics {
        LoaderStatistics {
            batches: self.batches - before.batches,
            stalls: self.stalls - before.stalls,
            stalled_ns: self.stalled_ns - before.stalled_ns,
            reads: self.reads - before.reads,
            found: self.found - before.found,
            read_bytes: self.read_bytes - before.read_bytes,
            in_flight: self.in_flight - before.in_flight,
            reading_ns: self.reading_ns - before.reading_ns,
            decoding_ns: self.decoding_ns - before.decoding_ns,
            decoded_bytes: self.decoded_bytes - before.decoded_bytes,
            working_ns: self.working_ns - before.working_ns,
            ..self
        }
    }
}

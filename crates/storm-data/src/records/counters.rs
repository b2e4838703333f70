//! What a thread that reads has done. It counts; any other may look meanwhile.

use std::ops::{Add, Sub};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Counts of one thread.
#[derive(Debug, Default)]
pub(super) struct ReadCounters([AtomicU64; COUNTS]);

/// What is counted.
#[derive(Clone, Copy, Debug)]
pub(super) enum Count {
    /// Blocks and single records that were read.
    Reads,
    /// Bytes of them on disk.
    Bytes,
    /// Reads in flight whenever one was waited for, added up.
    InFlight,
    /// Nanoseconds of waiting for the disk.
    ReadingNs,
    /// Nanoseconds in checksums and decompression.
    DecodingNs,
    /// Bytes that came of these.
    DecodedBytes,
    /// Wanted blocks that were in memory already.
    Found,
    /// Nanoseconds from beginning a batch to its end, and in reading along with it.
    WorkingNs,
    /// Nanoseconds of the slowest batch since the counters were last read.
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

/// What loading has cost so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoaderStatistics {
    /// Batches returned.
    pub batches: u64,
    /// Of those, the ones that were not ready.
    pub stalls: u64,
    /// Nanoseconds that the caller waited for them.
    pub stalled_ns: u64,
    /// Blocks and single records that were read.
    pub reads: u64,
    /// Wanted blocks that were in memory already, where each record's block is wanted by itself.
    pub found: u64,
    /// Bytes read from disk.
    pub read_bytes: u64,
    /// Reads in flight whenever a worker waited for one, added up over all reads.
    pub in_flight: u64,
    /// Nanoseconds that workers waited for the disk, all together.
    pub reading_ns: u64,
    /// Nanoseconds of workers in checksums and decompression, all together.
    pub decoding_ns: u64,
    /// Bytes that came of checksums and decompression.
    pub decoded_bytes: u64,
    /// Nanoseconds that workers had a batch to make, all together.
    pub working_ns: u64,
    /// Batches that are prepared ahead now.
    pub ahead: u64,
    /// Nanoseconds of the slowest batch among those that decided how many are prepared ahead.
    pub longest_ns: u64,
    /// Nanoseconds for which the caller used each of them; 0 before the first measurement.
    pub interval_ns: u64,
}

impl LoaderStatistics {
    /// With what threads have counted.
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

    /// The share of wanted blocks that were in memory already.
    pub fn found_share(&self) -> f64 {
        self.found as f64 / (self.found + self.reads).max(1) as f64
    }

    /// Reads that each worker had in flight on average, the one that it waited for included.
    pub fn mean_in_flight(&self) -> f64 {
        self.in_flight as f64 / self.reads.max(1) as f64
    }

    /// Bytes per second that one worker decodes.
    pub fn decoding_bytes_per_second(&self) -> f64 {
        1e9 * self.decoded_bytes as f64 / self.decoding_ns.max(1) as f64
    }
}

/// Both together; what is not a count is that of the other.
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

/// What was added since; what is not a count stays as it is.
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

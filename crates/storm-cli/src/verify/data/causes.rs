//! What a loader did in global order, compared with what the estimate assumed, so that a gap shows
//! its cause.

use super::rate::Global;
use crate::model::grouped;
use crate::size;
use serde_json::{Value, json};
use storm_data::records::{LoaderStatistics, RecordEstimate};

/// Each figure as it was estimated or measured alone, and as measured in training.
pub(super) struct Causes<'a> {
    global: &'a Global,
}

/// Shares of the time in which workers had batches to make.
struct Times {
    waiting: f64,
    decoding: f64,
    /// On submitting reads and copying rows.
    other: f64,
}

impl Times {
    fn of(done: &LoaderStatistics) -> Times {
        let of_all = |ns: u64| ns as f64 / done.working_ns.max(1) as f64;
        let (waiting, decoding) = (of_all(done.reading_ns), of_all(done.decoding_ns));
        Times { waiting, decoding, other: (1.0 - waiting - decoding).max(0.0) }
    }
}

impl Causes<'_> {
    pub(super) fn new(global: &Global) -> Causes<'_> {
        Causes { global }
    }

    fn reads_per_second(&self) -> f64 {
        self.global.measured * self.reads_per_record()
    }

    fn reads_per_record(&self) -> f64 {
        self.global.done.reads as f64 / self.global.records.max(1) as f64
    }

    fn bytes_per_read(&self) -> f64 {
        self.global.done.read_bytes as f64 / self.global.done.reads.max(1) as f64
    }

    pub(super) fn lines(&self) -> [String; 2] {
        let Global { estimate, rates, done, .. } = self.global;
        let RecordEstimate { workers, in_flight, found_share, .. } = estimate;
        let Times { waiting, decoding, other } = Times::of(done);
        let gigabytes = |rate: f64| format!("{:.2} GB/s", rate / 1e9);
        [
            format!(
                "  estimated: {} reads/s, {:.1} % of blocks in memory, {workers} threads with at most {in_flight} reads in \
                 flight, each decodes {}",
                grouped(rates.random_reads_per_second as u64),
                100.0 * found_share,
                gigabytes(rates.decoding_bytes_per_second),
            ),
            format!(
                "  in training: {} reads/s of {}, {:.1} % of blocks in memory, {:.1} reads in flight, each decodes {}; threads \
                 wait {:.0} % of their time for the disk, decode {:.0} %, and submit and copy {:.0} %",
                grouped(self.reads_per_second() as u64),
                size::show(self.bytes_per_read() as u64),
                100.0 * done.found_share(),
                done.mean_in_flight(),
                gigabytes(done.decoding_bytes_per_second()),
                100.0 * waiting,
                100.0 * decoding,
                100.0 * other,
            ),
        ]
    }

    pub(super) fn object(&self) -> Value {
        let Global { estimate, rates, done, .. } = self.global;
        let Times { waiting, decoding, other } = Times::of(done);
        json!({
            "workers": estimate.workers,
            "expected_reads_per_second": rates.random_reads_per_second,
            "reads_per_second": self.reads_per_second(),
            "bytes_per_read": self.bytes_per_read(),
            "expected_found_share": estimate.found_share,
            "found_share": done.found_share(),
            "in_flight_max": estimate.in_flight,
            "in_flight": done.mean_in_flight(),
            "expected_decoding_bytes_per_second": rates.decoding_bytes_per_second,
            "decoding_bytes_per_second": done.decoding_bytes_per_second(),
            "waiting_share": waiting, "decoding_share": decoding, "submitting_and_copying_share": other,
        })
    }
}

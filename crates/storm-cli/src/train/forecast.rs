//! What a run's data is expected to do, and what it did.

use super::data::{self, RunData};
use super::setup::Setup;
use crate::model::grouped;
use crate::size;
use anyhow::Result;
use storm_data::Split;
use storm_data::records::{
    LoaderStatistics, RecordDemand, RecordEstimate, RecordRates, estimate_records,
};
use storm_plan::Link;

/// A disk that is not asked for anything.
const UNLIMITED: RecordRates = RecordRates {
    sequential_bytes_per_second: f64::INFINITY,
    random_reads_per_second: f64::INFINITY,
    decoding_bytes_per_second: f64::INFINITY,
};

/// What was estimated for the records of a run before its first step.
pub(super) struct Forecast {
    estimate: RecordEstimate,
    reading_path: String,
}

impl Forecast {
    /// Reads parts of the dataset for a second, unless all of it stays in memory; none for text.
    pub(super) fn new(setup: &Setup) -> Result<Option<Forecast>> {
        let RunData::Records(set, _) = &setup.data else { return Ok(None) };
        let plan = setup.launch.plan();
        let (options, _) = data::loader_options(&setup.settings, set, plan.batch)?;
        let images = (plan.batch * plan.accumulate) as f64;
        let demand = RecordDemand {
            records: set.records(Split::Train),
            rate: Some(images / plan.predicted_seconds()),
            bus_bytes_per_second: Some(setup.launch.profile().link(Link::HOST_TO_DEVICE).bandwidth),
        };
        let rates = match set.data_ram_to_hold(Split::Train) <= options.data_ram {
            true => UNLIMITED,
            false => RecordRates::measure(set, &options)?,
        };
        let estimate = estimate_records(set, &options, &rates, &demand)?;
        Ok(Some(Forecast { estimate, reading_path: set.reading_path().to_string() }))
    }

    /// What each stage should supply.
    pub(super) fn predicted(&self) -> String {
        let mut words = format!("read by {}", self.reading_path);
        if self.estimate.is_resident {
            words.push_str(" once, then all in memory");
        }
        for stage in &self.estimate.stages {
            words.push_str(&format!(", {} {}/s", stage.name, grouped(stage.rate as u64)));
        }
        if let Some(slowest) = self.estimate.stages.first() {
            words.push_str(&format!("; the slowest is {}", slowest.name));
        }
        words
    }

    /// What loading did.
    pub(super) fn measured(statistics: &LoaderStatistics) -> String {
        let LoaderStatistics { batches, stalls, stalled_ns, reads, read_bytes, .. } = *statistics;
        let seconds = |ns: u64| ns as f64 / 1e9;
        format!(
            "{} in {} reads; threads waited {:.2} s for the disk and decoded for {:.2} s; steps waited {:.2} s for {} \
             of {} batches",
            size::show(read_bytes),
            grouped(reads),
            seconds(statistics.reading_ns),
            seconds(statistics.decoding_ns),
            seconds(stalled_ns),
            grouped(stalls),
            grouped(batches)
        )
    }
}

//! What a run's data is expected to do, and what it did.

use super::data::{self, RunData};
use super::setup::Setup;
use crate::model::grouped;
use crate::size;
use anyhow::Result;
use std::sync::Arc;
use storm_data::estimator_of_text;
use storm_data::records::{Estimator, LoaderStatistics, RecordDemand, RecordEstimate, RecordRates};
use storm_plan::Link;

/// What was estimated for the data of a run before its first step.
pub(super) struct Forecast {
    estimate: RecordEstimate,
    reading_path: String,
    /// Images, or the tokens of a row.
    units_per_row: usize,
}

impl Forecast {
    /// Reads parts of the dataset for a second, unless all of it stays in memory; none for text that is mapped.
    pub(super) fn new(setup: &Setup) -> Result<Option<Forecast>> {
        let plan = setup.launch.plan();
        let (estimator, units_per_row) = match &setup.data {
            RunData::Records(set, _) => {
                let (options, _) = data::loader_options(&setup.settings, set, plan.batch)?;
                (Estimator::of_records(Arc::clone(set), options)?, 1)
            }
            RunData::Tokens(dataset) => {
                let options = data::token_options(&setup.settings, dataset, plan.batch);
                let Some(estimator) = estimator_of_text(dataset, &options)? else {
                    return Ok(None);
                };
                (estimator, options.sequence)
            }
        };
        let rows = (plan.batch * plan.accumulate) as f64;
        let demand = RecordDemand {
            records: estimator.rows(),
            rate: Some(rows / plan.predicted_seconds()),
            bus_bytes_per_second: Some(setup.launch.profile().link(Link::HOST_TO_DEVICE).bandwidth),
        };
        let rates = match estimator.is_resident()? {
            true => RecordRates::UNLIMITED,
            false => estimator.measure()?,
        };
        let estimate = estimator.estimate(&rates, &demand)?;
        let reading_path = estimator.reading_path().to_string();
        Ok(Some(Forecast { estimate, reading_path, units_per_row }))
    }

    /// What each stage should supply.
    pub(super) fn predicted(&self) -> String {
        let mut words = format!("read by {}", self.reading_path);
        if self.estimate.is_resident {
            words.push_str(" once, then all in memory");
        }
        for stage in &self.estimate.stages {
            let rate = stage.rate * self.units_per_row as f64;
            words.push_str(&format!(", {} {}/s", stage.name, grouped(rate as u64)));
        }
        let ahead = self.estimate.ahead;
        words.push_str(&format!(", {ahead} batches prepared ahead"));
        if let Some(slowest) = self.estimate.stages.first() {
            words.push_str(&format!("; the slowest is {}", slowest.name));
        }
        words
    }

    /// What loading did.
    pub(super) fn measured(statistics: &LoaderStatistics) -> String {
        let LoaderStatistics { batches, stalls, stalled_ns, reads, read_bytes, ahead, .. } =
            *statistics;
        let seconds = |ns: u64| ns as f64 / 1e9;
        let mut words = format!(
            "{} in {} reads; threads waited {:.2} s for the disk and decoded for {:.2} s; steps waited {:.2} s for {} \
             of {} batches; {ahead} batches prepared ahead",
            size::show(read_bytes),
            grouped(reads),
            seconds(statistics.reading_ns),
            seconds(statistics.decoding_ns),
            seconds(stalled_ns),
            grouped(stalls),
            grouped(batches)
        );
        if statistics.longest_ns > 0 {
            words.push_str(&format!(
                ", since one took up to {:.1} ms to make and is used for {:.1} ms",
                1e3 * seconds(statistics.longest_ns),
                1e3 * seconds(statistics.interval_ns)
            ));
        }
        words
    }
}

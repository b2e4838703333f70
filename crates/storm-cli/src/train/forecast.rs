//! Data loading throughput: predicted before a run, measured after it.

use super::data::{self, RunData};
use super::setup::Setup;
use crate::model::grouped;
use crate::size;
use anyhow::Result;
use std::sync::Arc;
use storm_data::estimator_of_text;
use storm_data::records::{Estimator, LoaderStatistics, RecordDemand, RecordEstimate, RecordRates};
use storm_model::Unit;
use storm_plan::Link;
use storm_train::Part;

/// The predicted loading throughput.
pub(super) struct Forecast {
    estimate: RecordEstimate,
    reading_path: String,
    /// 1 for images, the tokens per row for text.
    units_per_row: usize,
    unit: Unit,
}

impl Forecast {
    /// Reads samples of the dataset for about a second, unless all of it stays in memory. `None` for memory-mapped
    /// text.
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
        let unit = setup.model.config.unit();
        Ok(Some(Forecast { estimate, reading_path, units_per_row, unit }))
    }

    /// The predicted throughput of each stage, slowest first.
    pub(super) fn predicted(&self) -> String {
        let RecordEstimate { stages, ahead, is_resident, .. } = &self.estimate;
        let mut words = match is_resident {
            true => format!("read once by {}, then kept in memory", self.reading_path),
            false => format!("read by {}", self.reading_path),
        };
        for (number, stage) in stages.iter().enumerate() {
            let rate = grouped((stage.rate * self.units_per_row as f64) as u64);
            let slowest = if number == 0 { " (the slowest)" } else { "" };
            let separator = if number == 0 { ";" } else { "," };
            words.push_str(&format!("{separator} {} {rate} {}/s{slowest}", stage.name, self.unit));
        }
        words.push_str(&format!("; {}", in_advance(*ahead)));
        words
    }

    /// The measured throughput and stalls of this part of the run.
    pub(super) fn measured(&self, statistics: &LoaderStatistics, part: &Part) -> String {
        let LoaderStatistics { batches, stalls, stalled_ns, reads, read_bytes, ahead, .. } =
            *statistics;
        let seconds = |ns: u64| ns as f64 / 1e9;
        let mut words = part.units_per_second().map_or(String::new(), |rate| {
            format!("trained on {} {}/s; ", grouped(rate.round() as u64), self.unit)
        });
        words.push_str(&format!(
            "read {} in {} reads; threads that load waited {:.2} s for the disk and decoded for {:.2} s; reading \
             ahead waited {:.2} s for {} of {} batches, steps waited {:.2} s; {}",
            size::show(read_bytes),
            grouped(reads),
            seconds(statistics.reading_ns),
            seconds(statistics.decoding_ns),
            seconds(stalled_ns),
            grouped(stalls),
            grouped(batches),
            part.data_wait_seconds(),
            in_advance(ahead as usize)
        ));
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

fn in_advance(ahead: usize) -> String {
    let batches = if ahead == 1 { "batch" } else { "batches" };
    format!("{ahead} {batches} prepared ahead")
}

//! Decides where the held-out part starts.

use crate::{DataError, Dataset, HeldOut, Kind};

/// Holds out the last samples, or the end of the text. Text is split between two documents if that
/// changes the size of the held-out part by no more than a quarter.
pub(super) fn cut(dataset: &Dataset, share: f64) -> Result<HeldOut, DataError> {
    let counts = &dataset.manifest().counts;
    let held = |total: u64| ((total as f64 * share).round() as u64).min(total);
    match dataset.manifest().kind {
        Kind::Samples => {
            let from_sample = counts.samples - held(counts.samples);
            Ok(HeldOut { from_token: dataset.sample_start(from_sample)?, from_sample })
        }
        Kind::Text => {
            let held = held(counts.tokens);
            let wanted = counts.tokens - held;
            // The first document that starts at or after the target.
            let after = first_from(dataset, wanted)?;
            for sample in [after, after.saturating_sub(1)] {
                let start = dataset.sample_start(sample)?;
                if held > 0 && start.abs_diff(wanted) <= held / 4 {
                    return Ok(HeldOut { from_token: start, from_sample: sample });
                }
            }
            Ok(HeldOut { from_token: wanted, from_sample: after })
        }
    }
}

fn first_from(dataset: &Dataset, token: u64) -> Result<u64, DataError> {
    let (mut low, mut high) = (0, dataset.manifest().counts.samples);
    while low < high {
        let middle = low.midpoint(high);
        match dataset.sample_start(middle)? < token {
            true => low = middle + 1,
            false => high = middle,
        }
    }
    Ok(low)
}

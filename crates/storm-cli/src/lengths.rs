//! Checks for samples longer than a row, and for rows longer than the model supports.

use crate::UsageError;
use crate::model::grouped;
use crate::train::OverlongArg;
use storm_data::{Kind, Loader, Split};

/// Warns about samples longer than a row. Refuses rows with more positions than the model has.
pub(crate) fn check(
    loader: &Loader,
    split: Split,
    overlong: OverlongArg,
    max_positions: usize,
) -> Result<(), UsageError> {
    let report = loader.report();
    let sequence = loader.position().sequence;
    let (count, longest) = (report.overlong_samples, report.longest_sample);
    if count > 0 {
        let samples = loader.dataset().sample_range(split);
        let fate = match overlong {
            OverlongArg::Drop => "are left out (overlong = drop)",
            OverlongArg::Truncate => "are cut off at the end (overlong = truncate)",
            OverlongArg::Split => "are split into several (overlong = split)",
            OverlongArg::Error => "are an error (overlong = error)",
        };
        eprintln!(
            "warning: {} of {} {} samples are longer than seq = {sequence} and {fate}; seq = {longest} would hold all \
             of them",
            grouped(count),
            grouped(samples.end - samples.start),
            split.name()
        );
    }
    // Positions restart with each sample in a row.
    let positions = match loader.dataset().manifest().kind {
        Kind::Text => sequence,
        Kind::Samples => sequence.min(usize::try_from(longest).unwrap_or(usize::MAX)),
    };
    check_positions(sequence, positions, max_positions)
}

/// Refuses rows with more positions than the model has.
pub(crate) fn check_positions(
    sequence: usize,
    positions: usize,
    max_positions: usize,
) -> Result<(), UsageError> {
    match positions > max_positions {
        true => Err(UsageError(format!(
            "seq = {sequence} needs {positions} positions, and the model has {max_positions}; give a shorter --seq"
        ))),
        false => Ok(()),
    }
}

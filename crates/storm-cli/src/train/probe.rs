//! The held-out rows that judge predictions: the last ones, because evaluations read the first. Between them are those
//! of a test.

use crate::UsageError;
use crate::predict::PredictArg;
use anyhow::Result;
use serde_json::json;
use std::ops::Range;
use storm_train::{AnyBatch, BatchSource, RunError};

/// The first row that predictions use, of `held` held-out rows of which evaluations read the first `evaluated`.
///
/// # Errors
/// There are too few rows: predictions and evaluations would overlap.
pub(super) fn first_row(
    predict: &PredictArg,
    batch: usize,
    evaluated: u64,
    held: u64,
) -> Result<u64, UsageError> {
    let needed = predict.held_out_rows(batch);
    match needed.checked_add(evaluated).is_some_and(|all| all <= held) {
        true => Ok(held - needed),
        false => Err(UsageError(format!(
            "predict takes {needed} held-out rows and evaluations look at {evaluated}, but {held} are held out: they would \
             overlap; hold more of the data out, or lower probe-batches, eval-steps or batch"
        ))),
    }
}

/// The rows of a test: of `held` held-out rows, those behind the ones that evaluations read, without the last `leave`.
/// Only whole steps are read, unless the last row is among them. Predictions must not read any of them.
///
/// # Errors
/// Too little is left, or predictions read more rows than are left out.
pub(super) fn test_rows(
    [evaluated, predicted, leave]: [u64; 3],
    held: u64,
    rows_per_step: u64,
) -> Result<Range<u64>, UsageError> {
    if leave < predicted {
        return Err(UsageError(format!(
            "test-leave is {leave}, but predictions read the last {predicted} held-out rows; raise it, or leave it out"
        )));
    }
    let left = held.saturating_sub(evaluated).saturating_sub(leave);
    let rows = match leave {
        0 => left,
        _ => left / rows_per_step.max(1) * rows_per_step,
    };
    if rows == 0 {
        let least = if leave == 0 { "no row is left" } else { "less than one step is left" };
        return Err(UsageError(format!(
            "{least} to test on: of {held} held-out rows, evaluations look at the first {evaluated} and {leave} are left \
             out at the end, and a step takes {rows_per_step}; hold more of the data out, or lower eval-steps or test-leave"
        )));
    }
    Ok(evaluated..evaluated + rows)
}

/// Moves held-out data to a row.
pub(super) fn from_row(
    mut source: Box<dyn BatchSource>,
    row: u64,
) -> Result<Box<dyn BatchSource>, RunError> {
    let mut position = source.position();
    position["row"] = json!(row);
    source.resume(&position)?;
    Ok(source)
}

/// Reads micro-batches of held-out data, starting at a row.
pub(super) fn read(
    source: Box<dyn BatchSource>,
    first_row: u64,
    count: usize,
) -> Result<Vec<AnyBatch>, RunError> {
    let mut source = from_row(source, first_row)?;
    let mut batches = vec![AnyBatch::default(); count];
    for batch in &mut batches {
        source.next_batch(batch)?;
    }
    Ok(batches)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_predictions_and_evaluations_do_not_overlap() {
        let predict: PredictArg =
            "direction=\"last-update\", probe-batches=3".parse().expect("a table");
        assert_eq!(first_row(&predict, 4, 16, 40).expect("they fit"), 16);
        assert_eq!(first_row(&predict, 4, 16, 100).expect("they fit"), 76);
        for (evaluated, held) in [(17, 40), (16, 39), (0, 0), (u64::MAX, u64::MAX)] {
            let error = first_row(&predict, 4, evaluated, held).expect_err("too few").to_string();
            assert!(error.contains("24 held-out rows") && error.contains("overlap"), "{error}");
        }
    }

    #[test]
    fn a_test_reads_what_nothing_else_does() {
        // Whole steps, and without rows to leave out all of the rest.
        assert_eq!(test_rows([16, 24, 24], 100, 8).expect("rows are left"), 16..72);
        assert_eq!(test_rows([16, 0, 24], 48, 8).expect("rows are left"), 16..24);
        assert_eq!(test_rows([16, 0, 0], 100, 8).expect("rows are left"), 16..100);
        assert_eq!(test_rows([16, 0, 0], 17, 8).expect("a row is left"), 16..17);
        let refused = |rows, held| test_rows(rows, held, 8).expect_err("too few").to_string();
        assert_eq!(
            refused([16, 24, 23], 100),
            "test-leave is 23, but predictions read the last 24 held-out rows; raise it, or leave it out"
        );
        assert_eq!(
            refused([16, 0, 24], 47),
            "less than one step is left to test on: of 47 held-out rows, evaluations look at the first 16 and 24 are \
             left out at the end, and a step takes 8; hold more of the data out, or lower eval-steps or test-leave"
        );
        assert!(refused([u64::MAX, 0, 1], 40).starts_with("less than one step is left to test on"));
        assert!(refused([0, 0, 0], 0).starts_with("no row is left to test on"));
    }
}

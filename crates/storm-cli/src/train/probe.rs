//! The held-out rows that judge predictions: the last ones, because evaluations read the first. Between them are those
//! of a test.

use crate::UsageError;
use crate::predict::PredictArg;
use anyhow::Result;
use serde_json::json;
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

/// How many training steps would read the rows of a test: of `held` held-out rows, those behind the ones that
/// evaluations read, without the last `leave`. Predictions must not read any of them.
///
/// # Errors
/// No whole step is left, or predictions read more rows than are left out.
pub(super) fn test_steps(
    [evaluated, predicted, leave]: [u64; 3],
    held: u64,
    rows_per_step: u64,
) -> Result<u64, UsageError> {
    if leave < predicted {
        return Err(UsageError(format!(
            "test-leave is {leave}, but predictions read the last {predicted} held-out rows; raise it, or leave it out"
        )));
    }
    match held.saturating_sub(evaluated).saturating_sub(leave) / rows_per_step.max(1) {
        0 => Err(UsageError(format!(
            "nothing is left to test on: {held} rows are held out, evaluations look at {evaluated}, {leave} are left out              at the end, and a step takes {rows_per_step}; hold more of the data out, or lower eval-steps or test-leave"
        ))),
        steps => Ok(steps),
    }
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
        assert_eq!(test_steps([16, 24, 24], 100, 8).expect("rows are left"), 7);
        assert_eq!(test_steps([16, 0, 24], 48, 8).expect("rows are left"), 1);
        let refused = |rows, held| test_steps(rows, held, 8).expect_err("too few").to_string();
        assert!(refused([16, 24, 23], 100).contains("last 24 held-out rows"));
        for (rows, held) in [([16, 0, 24], 47), ([u64::MAX, 0, 1], 40), ([0, 0, 0], 0)] {
            assert!(refused(rows, held).contains("nothing is left to test on"));
        }
    }
}

//! The held-out rows that judge predictions: the last ones, because evaluations read the first.

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
    let needed = (predict.held_out_batches() as u64).saturating_mul(batch as u64);
    match needed.checked_add(evaluated).is_some_and(|all| all <= held) {
        true => Ok(held - needed),
        false => Err(UsageError(format!(
            "predict takes {needed} held-out rows and evaluations look at {evaluated}, but {held} are held out: they would \
             overlap; hold more of the data out, or lower probe-batches, eval-steps or batch"
        ))),
    }
}

/// Reads micro-batches of held-out data, starting at a row.
pub(super) fn read(
    mut source: Box<dyn BatchSource>,
    first_row: u64,
    count: usize,
) -> Result<Vec<AnyBatch>, RunError> {
    let mut position = source.position();
    position["row"] = json!(first_row);
    source.resume(&position)?;
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
}

//! Finds the tensor behind a non-finite number.

use crate::{StepReport, TrainError, Trainer};
use storm_device::PlanDevice;

/// Describes the first bad tensor: a parameter in forward order, or else a gradient in the order of the backward pass.
pub(super) fn first_bad<D: PlanDevice>(
    trainer: &mut Trainer<D>,
    report: StepReport,
) -> Result<String, TrainError> {
    // Read these before anything is flushed: they belong to the failed step.
    let squares = trainer.gradient_squares()?;
    // After a partial update, bad gradients have already reached parameters, so only the gradients are conclusive.
    let names: Vec<String> = match trainer.is_partly_updated() {
        true => Vec::new(),
        false => trainer.parameter_names().map(str::to_owned).collect(),
    };
    for name in names {
        let values = trainer.read(&name)?;
        if let Some(at) = values.iter().position(|value| !value.is_finite()) {
            let value = values[at];
            return Ok(format!("the parameter `{name}` has {value} at element {at}"));
        }
    }
    if !report.loss.is_finite() && !trainer.is_partly_updated() {
        let problem = "all parameters are finite, so an activation or the loss itself overflowed";
        return Ok(problem.to_owned());
    }
    let bad = squares.into_iter().find(|(_, squares)| !squares.is_finite());
    Ok(match bad {
        Some((name, squares)) => {
            format!(
                "the first gradient that is not finite is `{name}`, whose squares add up to {squares}"
            )
        }
        None => "every gradient is finite, but the sum of their squares is not".to_owned(),
    })
}

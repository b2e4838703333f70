//! Finds the tensor behind a non-finite number.

use crate::{StepReport, TrainError, Trainer};
use storm_device::PlanDevice;

/// The first bad tensor, in words: a parameter in the order of the forward pass, or else a gradient in
/// the order in which the backward pass made them.
pub(super) fn first_bad<D: PlanDevice>(
    trainer: &mut Trainer<D>,
    report: StepReport,
) -> Result<String, TrainError> {
    // Before anything is flushed: these are of the step that failed.
    let squares = trainer.gradient_squares()?;
    // Gradients that were applied have made parameters what they are.
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

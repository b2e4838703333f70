//! The results of a run under its last plan, next to the predictions.

use super::setup::Setup;
use crate::size;
use storm_plan::Tier;
use storm_train::Part;

/// The predicted and measured numbers as lines. All cover the part of the run since it last started or changed its
/// plan.
pub(super) fn lines(setup: &Setup, part: &Part, host_bytes: u64) -> Vec<String> {
    let plan = setup.launch.plan();
    let prediction = &plan.planned.prediction;
    let off = |measured: f64, predicted: f64| 100.0 * (measured - predicted) / predicted.max(1e-12);
    let (Some(median), Some(speed)) = (part.median_step_seconds(), part.units_per_second()) else {
        return vec!["no steps were left to run".to_owned()];
    };
    let mut lines = vec![format!(
        "{:<10} {:>12} {:>12} {:>8} {:>12}",
        "", "predicted", "measured", "off", "budget"
    )];
    let predicted = prediction.step_seconds;
    lines.push(format!(
        "{:<10} {predicted:>10.3} s {median:>10.3} s {:>+7.1}%",
        "step",
        off(median, predicted)
    ));
    let units = plan.batch * plan.accumulate * setup.launch.options().sequence;
    let unit = part.unit().name();
    lines.push(format!("{unit:<10} {:>10.0}/s {speed:>10.0}/s", units as f64 / predicted));
    // Memory for threads and batches is in use throughout the run, so it counts in both columns.
    let beside = setup.request.beside_bytes;
    for (name, predicted, measured, budget) in [
        (
            "device",
            prediction.peak_bytes[Tier::DEVICE],
            part.device_bytes_peak(),
            setup.launch.budget()[Tier::DEVICE],
        ),
        (
            "host",
            prediction.peak_bytes[Tier::HOST] + beside,
            host_bytes + beside,
            setup.request.ram.bytes,
        ),
    ] {
        lines.push(format!(
            "{name:<10} {:>12} {:>12} {:>+7.1}% {:>12} {}",
            size::show(predicted),
            size::show(measured),
            off(measured as f64, predicted as f64),
            size::show(budget),
            if measured <= budget { "within" } else { "OVER" },
        ));
    }
    lines.push(time(part));
    lines
}

/// How the time was spent.
fn time(part: &Part) -> String {
    let mut words = format!("{:<10} {:.1} s for {} steps", "time", part.seconds(), part.steps());
    for (seconds, what) in [
        (part.evaluation_seconds(), "for evaluation"),
        (part.paused_seconds(), "waiting for checkpoints"),
    ] {
        if seconds > 0.0 {
            words.push_str(&format!(", {seconds:.1} s {what}"));
        }
    }
    if part.written_seconds() > 0.0 {
        let seconds = part.written_seconds();
        words.push_str(&format!("; beside the steps, {seconds:.1} s of writing checkpoints"));
    }
    words
}

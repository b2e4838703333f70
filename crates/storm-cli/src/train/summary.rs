//! What a run came to, beside what was predicted.

use super::setup::Setup;
use crate::size;
use storm_plan::Tier;
use storm_train::History;

/// Predicted and measured, in lines.
pub(super) fn lines(setup: &Setup, history: &History, host_bytes: u64) -> Vec<String> {
    let plan = setup.launch.plan();
    let prediction = &plan.planned.prediction;
    let off = |measured: f64, predicted: f64| 100.0 * (measured - predicted) / predicted.max(1e-12);
    let mut lines = vec![format!(
        "{:<10} {:>12} {:>12} {:>8} {:>12}",
        "", "predicted", "measured", "off", "budget"
    )];
    if let Some(median) = history.median_step_seconds() {
        let predicted = prediction.step_seconds;
        lines.push(format!(
            "{:<10} {predicted:>10.3} s {median:>10.3} s {:>+7.1}%",
            "step",
            off(median, predicted)
        ));
        let tokens = plan.batch * plan.accumulate * setup.launch.options().sequence;
        let speed = |seconds: f64| format!("{:.0}/s", tokens as f64 / seconds);
        lines.push(format!("{:<10} {:>12} {:>12}", "tokens", speed(predicted), speed(median)));
    }
    // Threads and tokens are there as long as the run is.
    let beside = setup.request.beside_bytes;
    for (name, predicted, measured, budget) in [
        ("device", setup.vram_bytes_planned, history.device_bytes_peak(), setup.vram_bytes_allowed),
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
    lines
}

//! Output lines about predictions.

use serde_json::{Value, json};
use storm_train::{Judgement, Jump, Prediction};

/// Describes one jump that was tried.
pub(super) fn jumped(step: u64, jump: &Jump) -> String {
    let Jump { tau, loss_before, loss, verdict, .. } = jump;
    let verdict = verdict.name();
    if loss_before.is_nan() {
        return format!("step {step} predict: jump of {tau}, {verdict}");
    }
    format!(
        "step {step} predict: jump of {tau}, probe loss {loss_before:.4} to {loss:.4}, {verdict}"
    )
}

pub(super) fn jumped_object(step: u64, jump: &Jump) -> Value {
    let Jump { tau, distance, loss_before, loss, noise, verdict, expected } = jump;
    json!({
        "event": "jumped", "step": step, "tau": tau, "distance": distance,
        "loss_before": loss_before, "loss": loss, "noise": noise, "verdict": verdict.name(),
        "expected": expected,
    })
}

/// Describes all jumps between two steps.
pub(super) fn predicted(step: u64, prediction: &Prediction) -> String {
    let Prediction { accepted, made, tau, loss_before, loss, .. } = prediction;
    match accepted {
        _ if *made == 0 => format!("step {step}: no jump is expected to help"),
        _ if loss_before.is_nan() => format!("step {step}: predicted, {accepted} of {made} jumps"),
        0 => format!("step {step}: predicted nothing; probe loss stays {loss_before:.4}"),
        _ => format!(
            "step {step}: predicted, {accepted} of {made} jumps accepted, {tau} in all; probe loss {loss_before:.4} to \
             {loss:.4}"
        ),
    }
}

pub(super) fn predicted_object(step: u64, prediction: &Prediction) -> Value {
    let Prediction { accepted, made, tau, loss_before, loss, seconds, device_bytes } = prediction;
    json!({
        "event": "predicted", "step": step, "accepted": accepted, "made": made, "tau": tau,
        "loss_before": loss_before, "loss": loss, "seconds": seconds,
        "device_bytes": device_bytes,
    })
}

/// Describes the judgement after a correction.
pub(super) fn judged(step: u64, judgement: &Judgement) -> String {
    let Judgement { loss, expected, kept, .. } = judgement;
    let found = format!("held-out loss {loss:.4}, expected {expected:.4}");
    match kept {
        true => format!("step {step}: jumps kept; {found}"),
        false => format!("step {step}: jumps undone, with the steps after them; {found}"),
    }
}

pub(super) fn judged_object(step: u64, judgement: &Judgement) -> Value {
    let Judgement { loss, expected, kept, seconds } = judgement;
    json!({
        "event": "prediction_judged", "step": step, "loss": loss, "expected": expected,
        "kept": kept, "seconds": seconds,
    })
}

//! Steps that show whether a prediction holds.

use crate::{Made, trainer, trainer_on};
use storm_device::cpu::{CpuPlanDevice, CpuPlanOptions};
use storm_plan::{HardwareProfile, UpdateTime, simulate};
use storm_train::{AnyBatch, BatchSource, try_plan};

/// Shorter than any step.
const NO_TIME: f64 = 1e-9;

fn batches() -> Vec<AnyBatch> {
    let mut batch = AnyBatch::default();
    Made { next: 0, end: None }.next_batch(&mut batch).expect("a batch");
    vec![batch]
}

#[test]
fn a_profile_that_promises_too_much_is_corrected() {
    let device = CpuPlanOptions { threads: Some(1), trace: true, ..CpuPlanOptions::default() };
    let mut trainer = trainer_on::<CpuPlanDevice>(UpdateTime::NextStep, device);
    let mut profile = HardwareProfile::builtin("h200").expect("built in");
    // Only what a step measures determines how long it takes.
    (profile.kernel_seconds, profile.launch_seconds) = (0.0, 0.0);
    profile.multiprocessors = None;
    let before = simulate(trainer.plan(), &profile).step_seconds;
    let trial = try_plan(&mut trainer, &batches(), 1, &profile, NO_TIME).expect("a trial");
    assert!(trial.step_seconds > NO_TIME);
    let corrected = trial.corrected.expect("it was off");
    let after = simulate(trainer.plan(), &corrected).step_seconds;
    assert!(after > before, "a CPU is no H200: {before} and {after}");
}

#[test]
fn without_a_recording_nothing_is_corrected() {
    let mut trainer = trainer(UpdateTime::NextStep);
    let profile = HardwareProfile::builtin("h200").expect("built in");
    let trial = try_plan(&mut trainer, &batches(), 0, &profile, NO_TIME).expect("a trial");
    assert_eq!(trial.corrected, None);
}

//! Some steps under a plan before the run relies on it: do they take as long as predicted?

use crate::{MicroBatch, TrainError, Trainer};
use storm_device::{PlanDevice, Span};
use storm_plan::{HardwareProfile, Plan, Tier};

/// A step that takes longer or shorter than predicted by more than this shows that the profile is off.
const OFF_MAX: f64 = 0.10;

/// Short steps vary: so many of them are timed, but not for longer than this.
const TIMED_STEPS_MAX: usize = 5;
const TIMED_SECONDS_MAX: f64 = 1.0;

/// A run of fewer steps is over before a trial pays.
const TRIED_FROM_STEPS: u64 = 50;

/// From so many steps on, one more size of micro-batches is tried.
const MORE_SPLITS_FROM_STEPS: u64 = 200;

/// How a plan is tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrialOptions {
    /// Steps before the timed ones.
    pub warm_up: u32,
    /// How many sizes of micro-batches are tried at most, where the step is given in tokens.
    pub splits: usize,
}

impl TrialOptions {
    /// For a run of so many steps; none if it is too short.
    pub fn of_run(steps: u64) -> Option<TrialOptions> {
        let splits = if steps < MORE_SPLITS_FROM_STEPS { 2 } else { 3 };
        (steps >= TRIED_FROM_STEPS).then_some(TrialOptions { warm_up: 1, splits })
    }
}

/// What some steps showed.
#[derive(Clone, Debug)]
pub struct Trial {
    /// What a step took, the median of them.
    pub step_seconds: f64,
    /// The profile as a recorded step corrects it; none if the prediction was right.
    pub corrected: Option<HardwareProfile>,
}

/// Makes `warm_up_steps` steps that do not count, one more if none are given and the plan uses a disk, then times some. If they are not as predicted, records
/// one and corrects the profile by it; the device must have been asked to record.
///
/// The trainer is not where it was afterwards: its parameters have moved.
///
/// # Errors
/// As [`Trainer::step`].
pub fn try_plan<D: PlanDevice>(
    trainer: &mut Trainer<D>,
    batches: &[impl MicroBatch],
    warm_up_steps: u32,
    profile: &HardwareProfile,
    predicted_seconds: f64,
) -> Result<Trial, TrainError> {
    trainer.set_recording(false);
    for _ in 0..untimed_steps(trainer.plan(), warm_up_steps) {
        step(trainer, batches)?;
    }
    let mut times = vec![step(trainer, batches)?];
    while times.len() < TIMED_STEPS_MAX && times.iter().sum::<f64>() < TIMED_SECONDS_MAX {
        times.push(step(trainer, batches)?);
    }
    times.sort_by(f64::total_cmp);
    let step_seconds = times[times.len() / 2];
    let is_off = (step_seconds / predicted_seconds - 1.0).abs() > OFF_MAX;
    let corrected = match is_off {
        true => corrected(trainer, batches, profile, step_seconds)?,
        false => None,
    };
    Ok(Trial { step_seconds, corrected })
}

/// How many steps come before the timed ones. With a disk it is at least one: the first step reads places of the disk
/// that were never written, and a file system returns zeros for these without reading anything.
fn untimed_steps(plan: &Plan, wanted: u32) -> u32 {
    wanted.max(u32::from(plan.bytes[Tier::DISK] > 0))
}

/// One step; how long it took on the device's clock.
fn step<D: PlanDevice>(
    trainer: &mut Trainer<D>,
    batches: &[impl MicroBatch],
) -> Result<f64, TrainError> {
    let start = trainer.device().now();
    // Small enough to change little, large enough not to be skipped.
    trainer.step(batches, 1e-6)?;
    trainer.synchronize()?;
    Ok(trainer.device().now().saturating_sub(start).as_secs_f64())
}

/// The profile as a recorded step corrects it, where one that is not recorded takes `step_seconds`; none if
/// the device does not record.
fn corrected<D: PlanDevice>(
    trainer: &mut Trainer<D>,
    batches: &[impl MicroBatch],
    profile: &HardwareProfile,
    step_seconds: f64,
) -> Result<Option<HardwareProfile>, TrainError> {
    trainer.set_recording(true);
    let recorded_seconds = step(trainer, batches)?;
    let trace = trainer.trace()?;
    trainer.set_recording(false);
    // Recording takes time itself, which is much where kernels are short.
    let share = (step_seconds / recorded_seconds).min(1.0);
    let seconds =
        |span: &Span| (span.instruction, share * (span.end_ns - span.start_ns) as f64 / 1e9);
    Ok(trace.map(|trace| {
        let measured: Vec<_> = trace.spans.iter().map(seconds).collect();
        profile.refined(trainer.plan(), &measured)
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use storm_plan::PerTier;

    #[test]
    fn the_first_step_with_a_disk_is_not_timed() {
        let mut plan = Plan::default();
        assert_eq!([0, 1, 2].map(|wanted| untimed_steps(&plan, wanted)), [0, 1, 2]);
        plan.bytes = PerTier::new(1, 1).with(Tier::DISK, 1);
        assert_eq!([0, 1, 2].map(|wanted| untimed_steps(&plan, wanted)), [1, 1, 2]);
    }
}

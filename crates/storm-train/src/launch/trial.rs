//! Times some steps of a plan before the run relies on it, and compares them with the prediction.

use crate::{MicroBatch, TrainError, Trainer};
use storm_device::{PlanDevice, Span};
use storm_plan::{HardwareProfile, InstructionId, Plan, Queue, Tier, simulate};

/// A relative error above this shows that the profile is wrong.
const OFF_MAX: f64 = 0.10;

/// Short steps vary, so time up to this many of them, but stop after this many seconds.
const TIMED_STEPS_MAX: usize = 5;
const TIMED_SECONDS_MAX: f64 = 1.0;

/// How often the times of kernels are adapted until they explain the time of the step.
const ROUNDS: usize = 3;

/// Shorter runs are over before a trial pays off.
const TRIED_FROM_STEPS: u64 = 50;

/// Runs of at least this many steps try one more micro-batch size.
const MORE_SPLITS_FROM_STEPS: u64 = 200;

/// Options of a trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrialOptions {
    /// Steps before the timed ones.
    pub warm_up: u32,
    /// Most micro-batch sizes to try, if the step size is given in tokens.
    pub splits: usize,
}

impl TrialOptions {
    /// Options for a run of this many steps; `None` if it is too short for a trial.
    pub fn of_run(steps: u64) -> Option<TrialOptions> {
        let splits = if steps < MORE_SPLITS_FROM_STEPS { 2 } else { 3 };
        (steps >= TRIED_FROM_STEPS).then_some(TrialOptions { warm_up: 1, splits })
    }
}

/// The result of a trial.
#[derive(Clone, Debug)]
pub struct Trial {
    /// Median time of a step.
    pub step_seconds: f64,
    /// The profile corrected with a recorded step; `None` if the prediction was right.
    pub corrected: Option<HardwareProfile>,
}

/// Runs `warm_up_steps` untimed steps (at least one if the plan uses a disk), then times some. If they differ from the
/// prediction, records one step and corrects the profile with it; the device must be created with recording enabled.
///
/// This changes the trainer's parameters.
///
/// # Errors
/// Like [`Trainer::step`].
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

/// The number of steps before the timed ones. With a disk it is at least one: the first step reads parts of the scratch
/// file that were never written, and a file system returns zeros for those without reading anything.
fn untimed_steps(plan: &Plan, wanted: u32) -> u32 {
    wanted.max(u32::from(plan.bytes[Tier::DISK] > 0))
}

/// Runs one step and returns its time on the device's clock.
fn step<D: PlanDevice>(
    trainer: &mut Trainer<D>,
    batches: &[impl MicroBatch],
) -> Result<f64, TrainError> {
    let start = trainer.device().now();
    // A rate that changes little, but is not zero: a zero update might be skipped.
    trainer.step(batches, 1e-6)?;
    trainer.synchronize()?;
    Ok(trainer.device().now().saturating_sub(start).as_secs_f64())
}

/// Records a step and corrects the profile with it, scaled to `step_seconds`, the time without recording. `None` if the
/// device does not record.
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
    // Recording adds overhead, which is large for short kernels, so scale its times down.
    let share = (step_seconds / recorded_seconds).min(1.0);
    let seconds =
        |span: &Span| (span.instruction, share * (span.end_ns - span.start_ns) as f64 / 1e9);
    Ok(trace.map(|trace| {
        let measured: Vec<_> = trace.spans.iter().map(seconds).collect();
        explaining(trainer.plan(), &measured, profile, step_seconds)
    }))
}

/// The profile corrected by these times of instructions, under which the whole step takes as long as measured. Time
/// between kernels belongs to none of them, and recording does not add the same to each. So kernels are taken to be
/// longer or shorter, by one factor, where that brings the prediction closer. Where a step waits for copies, it does not.
fn explaining(
    plan: &Plan,
    measured: &[(InstructionId, f64)],
    profile: &HardwareProfile,
    step_seconds: f64,
) -> HardwareProfile {
    let refined = |factor: f64| {
        let factor_of = |id| if plan.queue(id) == Queue::COMPUTE { factor } else { 1.0 };
        let scaled: Vec<_> =
            measured.iter().map(|&(id, seconds)| (id, factor_of(id) * seconds)).collect();
        let refined = profile.refined(plan, &scaled);
        let ratio = simulate(plan, &refined).step_seconds / step_seconds;
        (refined, ratio)
    };
    let mut factor = 1.0;
    let (mut best, mut ratio) = refined(factor);
    for _ in 0..ROUNDS {
        factor /= ratio;
        let (other, other_ratio) = refined(factor);
        if (other_ratio - 1.0).abs() >= (ratio - 1.0).abs() {
            break;
        }
        (best, ratio) = (other, other_ratio);
    }
    best
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

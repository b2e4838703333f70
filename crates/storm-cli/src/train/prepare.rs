//! A trainer for a run: planned, tried, and planned anew where something is not as thought.

use super::data;
use super::device::Trains;
use super::setup::Setup;
use crate::plan::{Answer, StepSize};
use crate::size;
use anyhow::Result;
use std::sync::Arc;
use storm_plan::{PlanError, Tier, simulate};
use storm_train::{
    Alarm, Batch, BatchSource, Notice, OnAlarm, Preparation, Prepared, TrainError, Trainer,
    prepare, try_plan,
};

/// A run of fewer steps is over before a trial pays.
const TRIED_FROM_STEPS: u64 = 50;

/// A trial that takes longer is announced.
const ANNOUNCED_SECONDS: f64 = 2.0;

/// Steps of a trial, about: it is announced by them.
const TRIAL_STEPS: f64 = 4.0;

/// A trainer under the plan that was shown; or under a better one, if some steps show that the device is
/// not what its profile says.
pub(super) fn first<D: Trains>(setup: &mut Setup) -> Result<Trainer<D>> {
    let mut trainer = committed::<D>(setup, None)?;
    if setup.settings.steps.get() >= TRIED_FROM_STEPS {
        trainer = tried(setup, trainer)?;
    }
    note_peak(setup);
    Ok(trainer)
}

fn note_peak(setup: &mut Setup) {
    let planned = setup.answer.planned.prediction.peak_bytes[Tier::DEVICE];
    setup.vram_bytes_planned = setup.vram_bytes_planned.max(planned);
}

/// Puts the plan that was shown on a device. Where the machine has less than was hoped for, plans anew.
fn committed<D: Trains>(
    setup: &mut Setup,
    mut before: Option<D>,
) -> Result<Trainer<D>, TrainError> {
    let plan = Arc::new(setup.answer.planned.plan.clone());
    let device = D::options(setup, before.take());
    match Trainer::new(&setup.model.config, setup.train_options.clone(), plan, device) {
        Err(TrainError::Exec(error)) => eprintln!("warning: {error}; planning anew"),
        trainer => return trainer,
    }
    let preparation = Preparation {
        config: &setup.model.config,
        options: &setup.train_options,
        accumulate: setup.answer.accumulate,
        profile: &setup.request.profile,
        budget: setup.request.budget(),
        forced: &setup.request.forced,
    };
    let device = || D::options(setup, None);
    let Prepared { trainer, prediction, .. } = prepare(&preparation, device, |notice| {
        if let Notice::Refused { reason, budget } = notice {
            let vram = size::show(budget[Tier::DEVICE]);
            let ram = size::show(budget[Tier::HOST]);
            eprintln!("warning: {reason}; planning with {vram} of device and {ram} of host memory");
        }
    })?;
    setup.answer.planned.prediction = prediction;
    Ok(trainer)
}

/// Makes some steps to see whether the prediction holds. They are not part of the run: it gets a trainer
/// that has made none.
fn tried<D: Trains>(setup: &mut Setup, mut trainer: Trainer<D>) -> Result<Trainer<D>> {
    let predicted = setup.answer.planned.prediction.step_seconds;
    if predicted * TRIAL_STEPS > ANNOUNCED_SECONDS {
        setup.style.say("trying the plan with some steps …");
    }
    let (mut source, _) = data::sources(&setup.settings, &setup.dataset, setup.answer.batch)?;
    let mut batches = vec![Batch::new(Vec::new(), Vec::new(), 1); trainer.micro_batches()];
    for batch in &mut batches {
        source.next_batch(batch)?;
    }
    let first = try_plan(&mut trainer, &batches, 1, &setup.request.profile, predicted)?;
    let Some(corrected) = first.corrected else {
        return Ok(committed(setup, Some(trainer.into_device()))?);
    };
    setup.request.profile = corrected;
    let before = plan_anew(setup)?;
    let said = format!(
        "a step took {:.3} s where {predicted:.3} s were predicted: corrected by what was measured, ",
        first.step_seconds
    );
    let again = setup.answer.planned.prediction.step_seconds;
    let mut trainer = committed(setup, Some(trainer.into_device()))?;
    if setup.answer.planned.decisions == before.planned.decisions {
        setup.style.say(&format!("{said}{again:.3} s are, by the same plan"));
        return Ok(trainer);
    }
    let second = try_plan(&mut trainer, &batches, 1, &setup.request.profile, again)?;
    if second.step_seconds <= first.step_seconds {
        setup.style.say(&format!("{said}and planned anew for {again:.3} s"));
    } else {
        // What the profile does not know of decides: the plan that was faster stays.
        let simulated = simulate(&before.planned.plan, &setup.request.profile).step_seconds;
        setup.answer = before;
        setup.answer.planned.prediction.step_seconds = simulated;
        setup.style.say(&format!("{said}{simulated:.3} s are; no other plan was faster"));
    }
    Ok(committed(setup, Some(trainer.into_device()))?)
}

/// A trainer for a run that was saved because device memory got short: under a plan that takes less, if there
/// is one. Says what the run should do when it gets short again.
pub(super) fn within_less<D: Trains>(
    setup: &mut Setup,
    trainer: Trainer<D>,
    alarm: Alarm,
) -> Result<(Trainer<D>, OnAlarm)> {
    let device = trainer.into_device();
    let before = setup.request.vram.bytes;
    let planned = setup.answer.planned.prediction.peak_bytes[Tier::DEVICE];
    setup.request.vram.bytes = alarm.smaller_budget(planned, before);
    let on_alarm = match plan_anew(setup) {
        Ok(_) => {
            let bytes = size::show(setup.request.vram.bytes);
            setup.style.say(&format!("{alarm}: planned anew for {bytes} of device memory"));
            OnAlarm::Stop
        }
        Err(TrainError::Plan(PlanError::TooSmall(_))) => {
            setup.request.vram.bytes = before;
            eprintln!("warning: {alarm}, and the run cannot do with less: it goes on as it is");
            OnAlarm::GoOn
        }
        Err(error) => return Err(error.into()),
    };
    let trainer = committed(setup, Some(device))?;
    note_peak(setup);
    Ok((trainer, on_alarm))
}

/// Plans the same step again, with the profile and the limits as they are now; returns what was planned before.
fn plan_anew(setup: &mut Setup) -> Result<Answer, TrainError> {
    // A run keeps its micro-batches.
    setup.request.options.batch = setup.answer.batch;
    setup.request.step = StepSize::MicroBatches(setup.answer.accumulate);
    let answer = setup.request.plan()?;
    Ok(std::mem::replace(&mut setup.answer, answer))
}

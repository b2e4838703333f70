//! Whole runs over synthetic batches: evaluation, early stopping, numbers that are not finite.

mod guard;
mod metrics;
mod reading;
mod saving;
mod trial;

use serde_json::{Value, json};
use std::collections::BTreeMap;
use storm_device::PlanDevice;
use storm_device::cpu::{CpuPlanDevice, CpuPlanOptions};
use storm_host::allocation::AllocationMeter;
use storm_model::{ModelConfig, preset};
use storm_plan::{Budget, Forced, HardwareProfile, UpdateTime, plan};
use storm_train::{
    Alarm, AnyBatch, Batch, BatchSource, Checkpoints, Decay, Disk, Event, Observed, Observer,
    Precision, Retention, Run, RunError, RunOptions, Schedule, StepEvent, Stop, StopReason,
    TrainOptions, Trainer, training_task,
};
use tempfile::TempDir;

#[global_allocator]
static METER: AllocationMeter = AllocationMeter;

const SEQUENCE: usize = 6;

fn tiny() -> ModelConfig {
    let mut config = preset("mistral-7b").expect("a preset");
    config.vocab_size = 19;
    config.hidden_size = 8;
    config.layer_count = 3;
    config.query_heads = 2;
    config.kv_heads = 2;
    config.head_dim = 4;
    config.intermediate_size = 12;
    config.max_positions = 8;
    config.initializer_range = 0.2;
    config
}

fn trainer(update: UpdateTime) -> Trainer<CpuPlanDevice> {
    let device = CpuPlanOptions { threads: Some(1), ..CpuPlanOptions::default() };
    trainer_on(update, device)
}

fn trainer_on<D: PlanDevice>(update: UpdateTime, device: D::Options) -> Trainer<D> {
    trainer_of(update, 1, device)
}

fn trainer_of<D: PlanDevice>(
    update: UpdateTime,
    micro_batches: usize,
    device: D::Options,
) -> Trainer<D> {
    let options = TrainOptions { seed: 3, ..TrainOptions::new(2, SEQUENCE, Precision::F32) };
    let task = training_task(tiny(), &options, micro_batches).expect("a valid model");
    let profile = HardwareProfile::builtin("reference").expect("built in");
    let budget = Budget::new(1 << 40, 1 << 40);
    let forced = Forced { update: Some(update), ..Forced::default() };
    let planned = plan(&task, &profile, budget, &forced).expect("a plan");
    Trainer::new(tiny(), options, planned.plan.into(), device).expect("a trainer")
}

/// Batches that are a function of their number. They end at `end`, if it is given.
struct Made {
    next: u64,
    end: Option<u64>,
}

impl BatchSource for Made {
    fn next_batch(&mut self, batch: &mut AnyBatch) -> Result<usize, RunError> {
        let is_over = self.end.is_some_and(|end| self.next >= end);
        let token = |i: u64| ((self.next * 5 + i * i) % 19) as i32;
        let targets = (1..13).map(|i| if is_over { storm_graph::IGNORE_INDEX } else { token(i) });
        *batch.as_tokens() = Batch::new((0..12).map(token).collect(), targets.collect(), SEQUENCE);
        self.next += u64::from(!is_over);
        Ok(if is_over { 0 } else { 2 })
    }

    fn position(&self) -> Value {
        json!(self.next)
    }

    fn resume(&mut self, position: &Value) -> Result<(), RunError> {
        self.next = position.as_u64().expect("a number");
        Ok(())
    }
}

#[derive(Default)]
struct Heard {
    steps: Vec<u64>,
    evaluations: Vec<(u64, f64)>,
    /// Rows and loss.
    tests: Vec<([u64; 2], f64)>,
    saved: Vec<u64>,
    /// Of these, the ones that were reported only after a later step.
    saved_later: Vec<u64>,
    skipped: Vec<u64>,
    alarms: Vec<(u64, Alarm)>,
}

impl Observer for Heard {
    fn step(&mut self, step: &StepEvent, _: &mut dyn Observed) -> Result<(), RunError> {
        self.steps.push(step.step);
        Ok(())
    }

    fn event(&mut self, event: &Event<'_>) -> Result<(), RunError> {
        match event {
            Event::Evaluated { step, loss, .. } => self.evaluations.push((*step, *loss)),
            Event::Tested { rows, loss, .. } => self.tests.push((*rows, *loss)),
            Event::Saved { step, .. } => {
                self.saved.push(*step);
                self.saved_later.extend(self.steps.last().filter(|last| *last > step));
            }
            Event::CheckpointSkipped { step, .. } => self.skipped.push(*step),
            Event::MemoryAlarm { step, alarm, .. } => self.alarms.push((*step, *alarm)),
            _ => {}
        }
        Ok(())
    }
}

fn options(steps: u64, rate: f64) -> RunOptions {
    RunOptions {
        steps,
        schedule: Schedule::new(rate, rate, 0, steps, Decay::Constant).expect("a schedule"),
        evaluate_every: Some(2),
        evaluation_steps: 4,
        patience: None,
        save_every: Some(3),
        retention: Retention { last: 2, every: None },
        keep_best: true,
        settings: BTreeMap::new(),
        device: "cpu".to_owned(),
    }
}

fn run<D: PlanDevice>(folder: &TempDir, trainer: Trainer<D>, options: RunOptions) -> Run<D> {
    run_over(folder, trainer, Box::new(Made { next: 0, end: None }), options)
}

fn run_over<D: PlanDevice>(
    folder: &TempDir,
    trainer: Trainer<D>,
    data: Box<dyn BatchSource>,
    options: RunOptions,
) -> Run<D> {
    let checkpoints = Checkpoints::open(folder.path(), Disk).expect("a folder");
    let held_out = Box::new(Made { next: 1000, end: Some(1003) });
    Run::new(trainer, data, Some(held_out), checkpoints, options).expect("a run")
}

#[test]
fn evaluations_look_at_the_same_data_and_the_best_model_comes_back() {
    let folder = TempDir::new().expect("a folder");
    let mut run = run(&folder, trainer(UpdateTime::EndOfStep), options(9, 0.05));
    let mut heard = Heard::default();
    let finished = run.train(&Stop::new(), &mut heard).expect("a run");
    assert_eq!((finished.reason, finished.step), (StopReason::Completed, 9));
    assert_eq!(heard.steps, (1..=9).collect::<Vec<_>>());
    let evaluated: Vec<u64> = heard.evaluations.iter().map(|(step, _)| *step).collect();
    assert_eq!(evaluated, [2, 4, 6, 8, 9]);
    // A test on the same rows has the same loss. All of them are read, also those of a step that is not whole.
    let mut rows = Made { next: 1000, end: Some(1003) };
    run.test(&mut rows, 10..16, &mut heard).expect("a test");
    assert_eq!(heard.tests, [([10, 16], heard.evaluations[4].1)]);
    let mut nothing = Made { next: 0, end: Some(0) };
    let error = run.test(&mut nothing, 16..18, &mut heard).expect_err("no targets").to_string();
    assert!(
        error.starts_with("the held-out rows of the test") && error.ends_with("leave out test"),
        "{error}"
    );
    let best = finished.best.expect("a best");
    let least = heard.evaluations.iter().map(|(_, loss)| *loss).fold(f64::MAX, f64::min);
    assert_eq!(best.loss, least);
    assert!(run.take_best().expect("a checkpoint"));
    // The mean over three batches of equal size, each evaluated alone.
    let mut held_out = Made { next: 1000, end: None };
    let mut batch = AnyBatch::default();
    let mut sum = 0.0;
    for _ in 0..3 {
        held_out.next_batch(&mut batch).expect("a batch");
        sum +=
            f64::from(run.trainer().evaluate(std::slice::from_ref(&batch)).expect("a loss").loss);
    }
    assert_eq!(sum / 3.0, best.loss);
}

#[test]
fn a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew() {
    let folder = TempDir::new().expect("a folder");
    let every = RunOptions { keep_best: false, ..options(9, 0.05) };
    let mut first = run(&folder, trainer(UpdateTime::EndOfStep), every.clone());
    first.train(&Stop::new(), &mut Heard::default()).expect("a run");
    for step in ["step-00000006", "step-00000009"] {
        let path = folder.path().join(step).join("manifest.json");
        std::fs::write(path, "{}").expect("a file");
    }
    let mut again = run(&folder, trainer(UpdateTime::EndOfStep), every);
    let mut heard = Heard::default();
    let error = again.resume(&mut heard).expect_err("nothing to go on from").to_string();
    assert!(
        error.contains("none of the 2 checkpoints") && error.contains("--begin-anew"),
        "{error}"
    );
    assert_eq!(heard.skipped, [9, 6], "each is told of");
}

#[test]
fn a_step_that_is_rehearsed_changes_nothing() {
    for update in [UpdateTime::EndOfStep, UpdateTime::NextStep] {
        let losses = |rehearsed: bool| {
            let folder = TempDir::new().expect("a folder");
            let mut run = run(&folder, trainer(update), options(4, 0.05));
            if rehearsed {
                run.rehearse().expect("a step");
            }
            let mut heard = Heard::default();
            let finished = run.train(&Stop::new(), &mut heard).expect("a run");
            if rehearsed {
                run.rehearse().expect("a step");
            }
            let parameter = run.trainer().read("layers.1.mlp.down.weight").expect("a parameter");
            (finished.loss, heard.evaluations, run.progress().clone(), parameter)
        };
        assert_eq!(losses(true), losses(false));
    }
}

#[test]
fn a_request_ends_the_run_with_a_checkpoint() {
    let folder = TempDir::new().expect("a folder");
    let mut run = run(&folder, trainer(UpdateTime::NextStep), options(9, 0.05));
    let stop = Stop::new();
    assert!(!stop.request());
    assert!(stop.request(), "it was asked before");
    let mut heard = Heard::default();
    let finished = run.train(&stop, &mut heard).expect("a run");
    assert_eq!((finished.reason, finished.step), (StopReason::Requested, 0));
    assert_eq!(heard.saved, [0]);
}

#[test]
fn patience_ends() {
    let folder = TempDir::new().expect("a folder");
    let patient = RunOptions { patience: Some(2), ..options(50, 0.0) };
    let mut run = run(&folder, trainer(UpdateTime::EndOfStep), patient);
    let finished = run.train(&Stop::new(), &mut Heard::default()).expect("a run");
    // Best at 2, no better at 4 and 6.
    assert_eq!((finished.reason, finished.step), (StopReason::NoGain, 6));
}

/// A run whose third step cannot be computed, and its error.
fn broken(update: UpdateTime, parameter: &str, change: fn(f32) -> f32) -> (String, Vec<u64>) {
    let folder = TempDir::new().expect("a folder");
    let every_step = RunOptions { save_every: Some(1), steps: 2, ..options(9, 0.01) };
    let mut sound = run(&folder, trainer(update), every_step.clone());
    sound.train(&Stop::new(), &mut Heard::default()).expect("a run");
    let mut run = run(&folder, trainer(update), RunOptions { steps: 9, ..every_step });
    let mut heard = Heard::default();
    run.resume(&mut heard).expect("a checkpoint");
    let values = run.trainer().read(parameter).expect("a parameter");
    let values: Vec<f32> = values.into_iter().map(change).collect();
    run.trainer().write(parameter, &values).expect("a parameter");
    let error = run.train(&Stop::new(), &mut heard).expect_err("not finite");
    let RunError::NotFinite { step, ref checkpoint, .. } = error else { panic!("{error}") };
    assert_eq!(step, 3);
    let checkpoint = checkpoint.as_ref().expect("a checkpoint");
    assert!(checkpoint.ends_with("step-00000002") && checkpoint.is_dir());
    // Nothing was updated, and nothing was saved.
    let now = run.trainer().read(parameter).expect("a parameter");
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&now), bits(&values));
    (error.to_string(), heard.saved)
}

#[test]
fn the_first_bad_tensor_is_named() {
    for update in [UpdateTime::EndOfStep, UpdateTime::NextStep] {
        let (error, saved) = broken(update, "layers.1.mlp.down.weight", |_| f32::NAN);
        assert!(error.contains("`layers.1.mlp.down.weight` has NaN at element 0"), "{error}");
        assert!(saved.is_empty());
        // Finite logits and a finite loss, but gradients whose squares are not.
        let (error, _) = broken(update, "head.weight", |value| value * 1e25);
        assert!(error.contains("gradient that is not finite is `final_norm.weight"), "{error}");
    }
}

//! Data is read while the previous step computes, which changes nothing else.

use crate::{Heard, Made, options, run_over, tiny, trainer_of};
use serde_json::{Value, json};
use std::sync::{Arc, Mutex};
use storm_device::cpu::{CpuPlanDevice, CpuPlanOptions};
use storm_plan::{Decisions, HardwareProfile, Lowering, Queue, UpdateTime, check};
use storm_train::{
    AnyBatch, Batch, BatchSource, Precision, Run, RunError, RunOptions, Stop, TrainError,
    TrainOptions, Trainer, training_task,
};
use tempfile::TempDir;

/// Micro-batches of a step.
const MICRO_BATCHES: u64 = 3;

/// A source that records which micro-batches were requested, and fails at `fails_at`.
struct Watched {
    made: Made,
    asked: Arc<Mutex<Vec<u64>>>,
    fails_at: Option<u64>,
}

impl BatchSource for Watched {
    fn next_batch(&mut self, batch: &mut AnyBatch) -> Result<usize, RunError> {
        let number = self.made.next;
        self.asked.lock().expect("a list").push(number);
        if self.fails_at == Some(number) {
            return Err(RunError::Position { problem: format!("no micro-batch {number}") });
        }
        self.made.next_batch(batch)
    }

    fn position(&self) -> Value {
        self.made.position()
    }

    fn resume(&mut self, position: &Value) -> Result<(), RunError> {
        self.made.resume(position)
    }
}

fn watched(fails_at: Option<u64>) -> (Box<Watched>, Arc<Mutex<Vec<u64>>>) {
    let asked = Arc::new(Mutex::new(Vec::new()));
    let made = Made { next: 0, end: None };
    (Box::new(Watched { made, asked: Arc::clone(&asked), fails_at }), asked)
}

fn device(seed: Option<u64>) -> CpuPlanOptions {
    CpuPlanOptions { threads: Some(1), chaos_seed: seed, ..CpuPlanOptions::default() }
}

/// A run whose micro-batches run one by one, so that some are read while those of the previous step
/// compute.
fn run(
    folder: &TempDir,
    source: Box<Watched>,
    steps: u64,
    seed: Option<u64>,
) -> Run<CpuPlanDevice> {
    let trainer = trainer_of(UpdateTime::NextStep, MICRO_BATCHES as usize, device(seed));
    let options = RunOptions { keep_best: false, ..options(steps, 0.05) };
    run_over(folder, trainer, source, options)
}

/// The micro-batches of a step, starting with this one.
fn given(first: u64) -> Vec<AnyBatch> {
    let mut made = Made { next: first, end: None };
    let mut batches = vec![AnyBatch::default(); MICRO_BATCHES as usize];
    for batch in &mut batches {
        made.next_batch(batch).expect("a batch");
    }
    batches
}

fn all_of(run: &mut Run<CpuPlanDevice>) -> Vec<u32> {
    let names: Vec<String> = run.trainer().parameter_names().map(str::to_owned).collect();
    let values = names.iter().flat_map(|name| run.trainer().read(name).expect("a parameter"));
    values.map(f32::to_bits).collect()
}

#[test]
fn a_checkpoint_is_where_its_step_was_and_not_where_reading_is() {
    let whole = TempDir::new().expect("a folder");
    let (source, asked) = watched(None);
    let mut run_whole = run(&whole, source, 6, None);
    run_whole.train(&Stop::new(), &mut Heard::default()).expect("a run");
    assert_eq!(run_whole.progress().data, json!(6 * MICRO_BATCHES));
    // Each once, and none after the last step.
    assert_eq!(*asked.lock().expect("a list"), (0..6 * MICRO_BATCHES).collect::<Vec<_>>());

    for seed in [None, Some(5), Some(6)] {
        let folder = TempDir::new().expect("a folder");
        let (source, asked) = watched(None);
        let mut first = run(&folder, source, 6, seed);
        // The checkpoint of step 3 is written while step 4 is in its slots or being read.
        let mut heard = StopAt { stop: Stop::new(), at: 4, heard: Heard::default() };
        let stop = heard.stop.clone();
        first.train(&stop, &mut heard).expect("a run");
        assert_eq!(first.progress().data, json!(4 * MICRO_BATCHES));
        assert_eq!(asked.lock().expect("a list").len() as u64, 5 * MICRO_BATCHES, "read ahead");
        drop(first);
        std::fs::remove_dir_all(folder.path().join("step-00000004")).expect("a checkpoint");
        let (source, asked) = watched(None);
        let mut second = run(&folder, source, 6, seed);
        assert_eq!(second.resume(&mut Heard::default()).expect("a checkpoint"), Some(3));
        second.train(&Stop::new(), &mut Heard::default()).expect("a run");
        let rest = (3 * MICRO_BATCHES..6 * MICRO_BATCHES).collect::<Vec<_>>();
        assert_eq!(*asked.lock().expect("a list"), rest);
        assert_eq!(all_of(&mut second), all_of(&mut run_whole), "{seed:?}");
    }
}

/// Requests the end after a step.
struct StopAt {
    stop: Stop,
    at: u64,
    heard: Heard,
}

impl storm_train::Observer for StopAt {
    fn step(
        &mut self,
        step: &storm_train::StepEvent,
        observed: &mut dyn storm_train::Observed,
    ) -> Result<(), RunError> {
        if step.step == self.at {
            self.stop.request();
        }
        self.heard.step(step, observed)
    }

    fn event(&mut self, event: &storm_train::Event<'_>) -> Result<(), RunError> {
        self.heard.event(event)
    }
}

/// A read error ends the step that needs the data, not the one during which it was read.
#[test]
fn an_error_of_the_source_ends_the_step_that_needs_the_data() {
    for fails_at in [0, 2, 4 * MICRO_BATCHES, 4 * MICRO_BATCHES + 1] {
        let folder = TempDir::new().expect("a folder");
        let (source, _) = watched(Some(fails_at));
        let mut run = run(&folder, source, 6, None);
        let mut heard = Heard::default();
        let error = run.train(&Stop::new(), &mut heard).expect_err("a source that fails");
        assert!(matches!(error, RunError::Position { .. }), "{error}");
        assert!(error.to_string().contains(&format!("micro-batch {fails_at}")), "{error}");
        let steps = fails_at / MICRO_BATCHES;
        assert_eq!(heard.steps, (1..=steps).collect::<Vec<_>>());
        assert_eq!(run.progress().data, json!(steps * MICRO_BATCHES));
    }
}

/// A batch that does not fit the model is refused at the step that would train on it.
#[test]
fn a_batch_that_does_not_fit_ends_its_own_step() {
    struct Wrong(Watched);
    impl BatchSource for Wrong {
        fn next_batch(&mut self, batch: &mut AnyBatch) -> Result<usize, RunError> {
            let is_bad = self.0.made.next == 2 * MICRO_BATCHES + 1;
            let rows = self.0.next_batch(batch)?;
            if is_bad {
                *batch = Batch::new(vec![99; 12], vec![0; 12], crate::SEQUENCE).into();
            }
            Ok(rows)
        }

        fn position(&self) -> Value {
            self.0.position()
        }

        fn resume(&mut self, position: &Value) -> Result<(), RunError> {
            self.0.resume(position)
        }
    }
    let folder = TempDir::new().expect("a folder");
    let trainer: Trainer<CpuPlanDevice> =
        trainer_of(UpdateTime::EndOfStep, MICRO_BATCHES as usize, device(None));
    let source = Box::new(Wrong(*watched(None).0));
    let mut run = run_over(&folder, trainer, source, options(6, 0.05));
    let mut heard = Heard::default();
    let error = run.train(&Stop::new(), &mut heard).expect_err("a token that is none");
    let RunError::Train(TrainError::Batch { problem }) = &error else { panic!("{error}") };
    assert!(problem.contains("`tokens` has 99"), "{problem}");
    assert_eq!(heard.steps, [1, 2]);
}

/// A step over given batches takes nothing from the source, and what was read ahead comes next.
#[test]
fn a_step_in_between_leaves_the_source_where_it_was() {
    let folder = TempDir::new().expect("a folder");
    let (source, asked) = watched(None);
    let mut run = run(&folder, source, 6, None);
    let mut heard = StopAt { stop: Stop::new(), at: 2, heard: Heard::default() };
    let stop = heard.stop.clone();
    run.train(&stop, &mut heard).expect("a run");
    let given = given(500);
    let loss = run.trainer().step(&given, 0.0).expect("a step").loss;
    let evaluated = run.trainer().evaluate(&given).expect("a loss").loss;
    assert_eq!(loss.to_bits(), evaluated.to_bits(), "the data of the step itself");
    asked.lock().expect("a list").clear();
    run.train(&Stop::new(), &mut Heard::default()).expect("a run");
    let rest = (2 * MICRO_BATCHES..6 * MICRO_BATCHES).collect::<Vec<_>>();
    assert_eq!(*asked.lock().expect("a list"), rest);
}

/// Reads of the next step run beside the kernels of this one, in a queue that a trace shows.
#[test]
fn a_trace_shows_the_data_queue() {
    let options = TrainOptions { seed: 3, ..TrainOptions::new(2, 6, Precision::F32) };
    let task = training_task(tiny(), &options, MICRO_BATCHES as usize).expect("a valid model");
    let profile = HardwareProfile::builtin("reference").expect("built in");
    let lowering = Lowering::new(&task, &profile).expect("a task that can be lowered");
    let plan = lowering.lower_with_evaluation(&Decisions::resident(&task)).expect("decisions");
    let budget = plan.bytes;
    let plan = Arc::new(check(plan, budget).expect("a sound plan"));
    let device = CpuPlanOptions { trace: true, ..device(None) };
    let trainer: Trainer<CpuPlanDevice> =
        Trainer::new(tiny(), options, Arc::clone(&plan), device).expect("a trainer");
    let folder = TempDir::new().expect("a folder");
    let (source, asked) = watched(None);
    let unevaluated = RunOptions { evaluate_every: None, ..crate::options(6, 0.05) };
    let mut run = run_over(&folder, trainer, source, unevaluated);
    let mut heard = StopAt { stop: Stop::new(), at: 2, heard: Heard::default() };
    let stop = heard.stop.clone();
    run.train(&stop, &mut heard).expect("a run");
    assert_eq!(asked.lock().expect("a list").len() as u64, 3 * MICRO_BATCHES);
    run.trainer().step(&given(0), 0.0).expect("a step");
    let trace = run.trainer().trace().expect("a trace").expect("it records");
    let summary = storm_exec::trace::summarize(&plan, &trace);
    let named = |name: &str| {
        let queue = summary.queues.iter().find(|queue| queue.name == name);
        queue.unwrap_or_else(|| panic!("no {name} queue")).instructions as u64
    };
    assert_eq!((named("data"), named("staging")), (MICRO_BATCHES, MICRO_BATCHES));
    // Kernels wait for copies, copies for fetches, and nothing in the step waits for a read.
    let reads = plan.ids().filter(|&id| Some(plan.queue(id)) == plan.links.data_queue());
    let reads: Vec<_> = reads.collect();
    let waits = plan.instructions.iter().flat_map(|instruction| &instruction.waits);
    assert!(!reads.is_empty() && waits.into_iter().all(|wait| !reads.contains(wait)));
    assert!(plan.ids().any(|id| plan.queue(id) == Queue::HOST_TO_DEVICE));
}

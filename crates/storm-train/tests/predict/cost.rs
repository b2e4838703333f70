//! Times that a run reports: they do not overlap. What the controller that learns costs beside steps of a real size is
//! printed, with `STORM_LONG_TESTS=1`.

use crate::support::{Case, CpuRun, F32, RSSM, end, predict, run_options, train_options};
use serde_json::{Value, json};
use std::time::Instant;
use storm_device::cpu::CpuPlanOptions;
use storm_model::{ModelConfig, preset};
use storm_plan::{Budget, Forced, HardwareProfile, plan};
use storm_train::{
    AnyBatch, Batch, BatchSource, Checkpoints, Direction, Disk, Event, Observed, Observer,
    PhaseLengths, Precision, PredictOptions, Run, RunError, RunOptions, StepEvent, Stop,
    TrainOptions, Trainer, training_task,
};

const STEPS: u64 = 60;
const CASE: Case = Case { observes: true, learning_rate: 1e-3, ..F32 };

/// That of examples/predict-quickstart.toml has five layers.
fn model(layer_count: usize) -> ModelConfig {
    ModelConfig {
        vocab_size: 256,
        hidden_size: 128,
        layer_count,
        query_heads: 4,
        kv_heads: 4,
        head_dim: 32,
        intermediate_size: 352,
        max_positions: 128,
        ..preset("qwen3-0.6b").expect("a preset")
    }
}

struct Squares(u64);

impl BatchSource for Squares {
    fn next_batch(&mut self, batch: &mut AnyBatch) -> Result<usize, RunError> {
        let first = self.0 * 977;
        let token = |at: u64| ((first + at).pow(2) / 7 % 256) as i32;
        let tokens = |from: u64| (from..from + 512).map(token).collect();
        *batch.as_tokens() = Batch::new(tokens(0), tokens(1), 128);
        self.0 += 1;
        Ok(4)
    }

    fn position(&self) -> Value {
        json!(self.0)
    }

    fn resume(&mut self, position: &Value) -> Result<(), RunError> {
        self.0 = position.as_u64().expect("a number");
        Ok(())
    }
}

/// Milliseconds of steps, of what follows them in every fourth, and of predictions without a jump.
#[derive(Default)]
struct Times {
    steps: Vec<f64>,
    lessons: Vec<f64>,
    decisions: Vec<f64>,
}

impl Observer for Times {
    fn step(&mut self, step: &StepEvent, _: &mut dyn Observed) -> Result<(), RunError> {
        self.steps.push(1e3 * step.seconds);
        Ok(())
    }

    fn event(&mut self, event: &Event<'_>) -> Result<(), RunError> {
        match *event {
            Event::PredictionPrepared { step, seconds } if step % 4 == 0 => {
                self.lessons.push(1e3 * seconds);
            }
            Event::Predicted { prediction, .. } if prediction.made == 0 => {
                self.decisions.push(1e3 * prediction.seconds);
            }
            _ => {}
        }
        Ok(())
    }
}

fn run(folder: &std::path::Path, layers: usize, predict: Option<PredictOptions>) -> CpuRun {
    let optimizer = train_options(&CASE).optimizer;
    let options = TrainOptions { optimizer, ..TrainOptions::new(4, 128, Precision::F32) };
    let task = training_task(model(layers), &options, 1).expect("a valid model");
    let profile = HardwareProfile::builtin("reference").expect("built in");
    let budget = Budget::new(1 << 40, 1 << 40);
    let planned = plan(&task, &profile, budget, &Forced::default()).expect("a plan");
    let trainer =
        Trainer::new(model(layers), options, planned.plan.into(), CpuPlanOptions::default())
            .expect("a trainer");
    let checkpoints = Checkpoints::open(folder, Disk).expect("a folder");
    let options = RunOptions { evaluate_every: None, ..run_options(&CASE, STEPS) };
    let mut run =
        Run::new(trainer, Box::new(Squares(0)), None, checkpoints, options).expect("a run");
    if let Some(predict) = predict {
        let mut batches = vec![AnyBatch::default(); 8];
        let mut source = Squares(9000);
        batches.iter_mut().for_each(|batch| {
            source.next_batch(batch).expect("a batch");
        });
        run.predict(predict, batches, None).expect("predictions");
    }
    run
}

/// Adds up all times that a run reports, and how long the run took until the last of them.
#[derive(Default)]
struct Sum {
    begun: Option<Instant>,
    reported: f64,
    taken: f64,
    predictions: usize,
}

impl Sum {
    fn add(&mut self, seconds: f64) {
        self.reported += seconds;
        self.taken = self.begun.map_or(0.0, |begun| begun.elapsed().as_secs_f64());
    }
}

impl Observer for Sum {
    fn step(&mut self, step: &StepEvent, _: &mut dyn Observed) -> Result<(), RunError> {
        self.add(step.seconds);
        Ok(())
    }

    fn event(&mut self, event: &Event<'_>) -> Result<(), RunError> {
        match *event {
            Event::Started { .. } => self.begun = Some(Instant::now()),
            Event::PredictionPrepared { seconds, .. } => self.add(seconds),
            Event::Predicted { prediction, .. } => {
                self.add(prediction.seconds);
                self.predictions += 1;
            }
            Event::PredictionJudged { judgement, .. } => self.add(judgement.seconds),
            _ => {}
        }
        Ok(())
    }
}

/// No time is counted twice, whatever is prepared in the step of a prediction.
#[test]
fn times_of_a_run_do_not_overlap() {
    let learned = PredictOptions { controller: RSSM, ..predict(Direction::LastUpdate) };
    for options in [learned, predict(Direction::Average { window: 3 })] {
        let folder = tempfile::tempdir().expect("a folder");
        let mut run = run(folder.path(), 1, Some(options));
        let mut sum = Sum::default();
        run.train(&Stop::new(), &mut sum).expect("a run");
        assert!(sum.predictions > 3, "{} predictions", sum.predictions);
        assert!(sum.reported <= sum.taken, "{} s in {} s", sum.reported, sum.taken);
    }
}

#[test]
fn the_controller_takes_little_beside_a_step_and_changes_no_bit() {
    if std::env::var_os("STORM_LONG_TESTS").is_none() {
        return;
    }
    // Lessons follow other steps than copies and decisions do. No jump is accepted.
    let predict = PredictOptions {
        lengths: PhaseLengths { warm_up: 2, full: 4, correct: 5 },
        controller: RSSM,
        noise: 1e9,
        ..predict(Direction::LastUpdate)
    };
    let mut times = Times::default();
    let [plain, found] = [None, Some(predict)].map(|predict| {
        let folder = tempfile::tempdir().expect("a folder");
        let mut run = run(folder.path(), 5, predict);
        times = Times::default();
        run.train(&Stop::new(), &mut times).expect("a run");
        end(&mut run)
    });
    assert!(found.state == plain.state);
    let of = |mut times: Vec<f64>| {
        times.sort_by(f64::total_cmp);
        assert!(!times.is_empty());
        (times[0], times[times.len() / 2])
    };
    let (steps, lessons, decisions) = (of(times.steps), of(times.lessons), of(times.decisions));
    println!("least and median milliseconds: {steps:.1?} of a step, {lessons:.1?} of a lesson");
    println!("{decisions:.1?} of a decision");
}

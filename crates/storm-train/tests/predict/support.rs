//! Tiny runs that predict, and their results.

use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use storm_device::cpu::{CpuPlanDevice, CpuPlanOptions};
use storm_graph::{AdamWParameters, QuantizedFormat};
use storm_model::{Adapters, BaseFormat, LoraOptions, ModelConfig, preset};
use storm_plan::{Budget, Forced, HardwareProfile, UpdateTime, plan};
use storm_train::{
    Accept, AnyBatch, Batch, BatchSource, Checkpoints, Controller, Decay, Direction, Disk, Event,
    Judgement, Jump, Moments, Observed, Observer, OptimizerMethod, OptimizerOptions, PhaseLengths,
    Precision, PredictOptions, Prediction, PredictionCost, ProbeDevice, ProbeWeights, Progress,
    Retention, Run, RunError, RunOptions, Schedule, StepEvent, Stop, TrainOptions, Trainer,
    TrainingState, UpdatesSeen, training_task,
};

pub(crate) type CpuRun = Run<CpuPlanDevice>;

const SEQUENCE: usize = 6;
const MICRO_BATCHES: usize = 2;
pub(crate) const STEPS: u64 = 24;

/// What to train, and under which plan.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Case {
    pub(crate) precision: Precision,
    pub(crate) update: UpdateTime,
    pub(crate) device_bytes: u64,
    pub(crate) lora: bool,
    pub(crate) learning_rate: f64,
    /// Whether updates are observed, for a controller that learns.
    pub(crate) observes: bool,
    pub(crate) int8: bool,
    /// Whether the weights beside adapters are int8, in steps and in probes.
    pub(crate) int8_base: bool,
    pub(crate) decays: bool,
    /// Width of the model.
    pub(crate) hidden: usize,
}

/// A controller that learns.
pub(crate) const RSSM: Controller = Controller::Rssm { tau: 1.0, cost: PredictionCost::Counted };

pub(crate) const F32: Case = Case {
    precision: Precision::F32,
    update: UpdateTime::EndOfStep,
    device_bytes: 1 << 40,
    lora: false,
    learning_rate: 0.01,
    observes: false,
    int8: false,
    int8_base: false,
    decays: true,
    hidden: 8,
};

/// Every precision, both times of an update, with and without adapters.
pub(crate) fn cases() -> Vec<Case> {
    let (precision, update) = (Precision::Bf16Stochastic, UpdateTime::NextStep);
    vec![
        F32,
        Case { update, ..F32 },
        Case { precision: Precision::Bf16Master, ..F32 },
        Case { precision, update, ..F32 },
        Case { lora: true, precision, ..F32 },
        Case { lora: true, update, ..F32 },
        Case { lora: true, int8_base: true, precision, update, ..F32 },
    ]
}

pub(crate) fn tiny(case: &Case) -> ModelConfig {
    let mut config = preset("mistral-7b").expect("a preset");
    config.vocab_size = 19;
    config.hidden_size = case.hidden;
    config.layer_count = 3;
    config.query_heads = 2;
    config.kv_heads = 2;
    config.head_dim = case.hidden / 2;
    config.intermediate_size = case.hidden + case.hidden / 2;
    config.max_positions = 8;
    config.initializer_range = 0.2;
    if case.int8_base {
        config.base = BaseFormat::Quantized(QuantizedFormat::Int8);
    }
    if case.lora {
        let adapters = Adapters::new(&config, LoraOptions::new(3, 6.0)).expect("they fit");
        config.adapters = Some(adapters);
    }
    config
}

pub(crate) fn train_options(case: &Case) -> TrainOptions {
    // Low enough that gradients are clipped.
    let OptimizerMethod::AdamW(usual) = OptimizerOptions::default().method else {
        unreachable!("it is the default")
    };
    let weight_decay = if case.decays { usual.weight_decay } else { 0.0 };
    let optimizer = OptimizerOptions {
        method: OptimizerMethod::AdamW(AdamWParameters { weight_decay, ..usual }),
        max_norm: Some(0.5),
        observes: case.observes,
        moments: if case.int8 { Moments::Int8 } else { Moments::Full },
        ..OptimizerOptions::default()
    };
    TrainOptions { seed: 3, optimizer, ..TrainOptions::new(2, SEQUENCE, case.precision) }
}

pub(crate) fn trainer(case: &Case) -> Trainer<CpuPlanDevice> {
    let (config, options) = (tiny(case), train_options(case));
    let task = training_task(&config, &options, MICRO_BATCHES).expect("a valid model");
    let budget = Budget::new(case.device_bytes, 1 << 40);
    let forced = Forced { update: Some(case.update), ..Forced::default() };
    let planned = plan(&task, &profile(), budget, &forced).expect("a plan");
    let device = CpuPlanOptions { threads: Some(1), ..CpuPlanOptions::default() };
    Trainer::new(config, options, planned.plan.into(), device).expect("a trainer")
}

/// Batches of a sequence that is easy to learn. `shift` selects another one.
pub(crate) struct Made {
    pub(crate) next: u64,
    pub(crate) shift: u64,
}

impl BatchSource for Made {
    fn next_batch(&mut self, batch: &mut AnyBatch) -> Result<usize, RunError> {
        let token = |i: u64| ((self.next * 7 + i * 3) % 19) as i32;
        let target = |i: u64| ((self.next * 7 + i * 3 + 3 + self.shift) % 19) as i32;
        *batch.as_tokens() =
            Batch::new((0..12).map(token).collect(), (0..12).map(target).collect(), SEQUENCE);
        self.next += 1;
        Ok(2)
    }

    fn position(&self) -> Value {
        json!(self.next)
    }

    fn resume(&mut self, position: &Value) -> Result<(), RunError> {
        self.next = position.as_u64().expect("a number");
        Ok(())
    }
}

/// Held-out batches: some for jumps, and as many for corrections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeldOut {
    /// Both are like the training data.
    Alike,
    /// Those of corrections have other targets: the better the model, the worse its loss there, and
    /// a jump makes it worse than the trend does.
    Opposed,
}

impl HeldOut {
    pub(crate) fn batches(self) -> Vec<AnyBatch> {
        let shift = if self == HeldOut::Opposed { 5 } else { 0 };
        let of = |mut source: Made| {
            std::iter::repeat_with(move || {
                let mut batch = AnyBatch::default();
                source.next_batch(&mut batch).expect("a batch");
                batch
            })
            .take(4)
        };
        let probe = of(Made { next: 1000, shift: 0 });
        probe.chain(of(Made { next: 2000, shift })).collect()
    }
}

pub(crate) fn predict(direction: Direction) -> PredictOptions {
    PredictOptions {
        lengths: PhaseLengths { warm_up: 3, full: 4, correct: 2 },
        direction,
        controller: Controller::LineSearch { tau: 1.0, growth: 2.0, jumps: 3 },
        accept: Accept::IfLower,
        probe_weights: ProbeWeights::AsTrained,
        noise: 0.0,
        margin: 0.1,
    }
}

/// The same with matrices in 8 bits where losses are measured.
pub(crate) fn in_int8(options: PredictOptions) -> PredictOptions {
    PredictOptions { probe_weights: ProbeWeights::Int8, ..options }
}

/// The device of probes, if these options need one.
pub(crate) fn probe_device(options: &PredictOptions) -> Option<ProbeDevice<CpuPlanDevice>> {
    let device = CpuPlanOptions { threads: Some(1), ..CpuPlanOptions::default() };
    match options.probe_weights {
        ProbeWeights::AsTrained => None,
        ProbeWeights::Int8 => {
            Some(ProbeDevice { profile: profile(), options: device, budget_bytes: u64::MAX })
        }
    }
}

fn profile() -> HardwareProfile {
    HardwareProfile {
        overhead_bytes: 0,
        ..HardwareProfile::builtin("reference").expect("built in")
    }
}

/// As an outer optimizer: a jump of a fixed length after each full phase, without losses.
pub(crate) fn always(direction: Direction, tau: f32) -> PredictOptions {
    PredictOptions {
        lengths: PhaseLengths { warm_up: 3, full: 4, correct: 0 },
        controller: Controller::Constant { tau },
        accept: Accept::Always,
        ..predict(direction)
    }
}

pub(crate) const DIRECTIONS: [Direction; 8] = [
    Direction::LastUpdate,
    Direction::Average { window: 3 },
    Direction::WeightAverage { window: 2 },
    Direction::Difference { window: 4 },
    Direction::Dmd { window: 4 },
    Direction::Outer { window: 3, momentum: 0.5 },
    Direction::None { window: 2 },
    Direction::Random { window: 2 },
];

pub(crate) fn run_options(case: &Case, steps: u64) -> RunOptions {
    let rate = case.learning_rate;
    RunOptions {
        steps,
        schedule: Schedule::new(rate, rate, 0, STEPS, Decay::Constant).expect("a schedule"),
        evaluate_every: Some(5),
        evaluation_steps: 1,
        patience: None,
        save_every: None,
        retention: Retention { last: 2, every: None },
        keep_best: false,
        settings: BTreeMap::new(),
        device: "cpu".to_owned(),
    }
}

/// A run at its beginning.
pub(crate) fn run(
    folder: &Path,
    case: &Case,
    options: RunOptions,
    predict: Option<(PredictOptions, HeldOut)>,
) -> CpuRun {
    let checkpoints = Checkpoints::open(folder, Disk).expect("a folder");
    let source = |next| Box::new(Made { next, shift: 0 });
    let mut run = Run::new(trainer(case), source(0), Some(source(3000)), checkpoints, options)
        .expect("a run");
    if let Some((options, held_out)) = predict {
        let device = probe_device(&options);
        run.predict(options, held_out.batches(), device).expect("predictions");
    }
    run
}

/// What a run reported, and when it is to stop or to fail.
#[derive(Default)]
pub(crate) struct Heard {
    pub(crate) phases: Vec<(u64, &'static str)>,
    pub(crate) jumps: Vec<(u64, Jump)>,
    pub(crate) predictions: Vec<(u64, Prediction)>,
    pub(crate) judgements: Vec<(u64, Judgement)>,
    pub(crate) updates: Vec<(u64, UpdatesSeen)>,
    pub(crate) stop: Stop,
    pub(crate) stop_after: Option<u64>,
    /// Steps and events left until it fails.
    pub(crate) fail_after: Option<usize>,
}

impl Heard {
    fn hear(&mut self) -> Result<(), RunError> {
        match &mut self.fail_after {
            Some(0) => Err(RunError::NothingHeldOut),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    pub(crate) fn kept(&self) -> usize {
        self.judgements.iter().filter(|(_, judgement)| judgement.kept).count()
    }
}

impl Observer for Heard {
    fn step(&mut self, step: &StepEvent, _: &mut dyn Observed) -> Result<(), RunError> {
        self.phases.extend(step.phase.map(|phase| (step.step, phase.name())));
        if self.stop_after == Some(step.step) {
            self.stop.request();
        }
        self.hear()
    }

    fn event(&mut self, event: &Event<'_>) -> Result<(), RunError> {
        match *event {
            Event::Jumped { step, jump } => self.jumps.push((step, jump)),
            Event::UpdatesSeen { step, updates } => self.updates.push((step, updates)),
            Event::Predicted { step, prediction } => self.predictions.push((step, prediction)),
            Event::PredictionJudged { step, judgement } => self.judgements.push((step, judgement)),
            _ => {}
        }
        self.hear()
    }
}

/// Every byte of state, and how far the run has come.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct End {
    pub(crate) state: Vec<(String, Vec<u8>)>,
    pub(crate) progress: Progress,
}

pub(crate) fn end(run: &mut CpuRun) -> End {
    let progress = run.progress().clone();
    let trainer = run.trainer();
    let state = TrainingState::tensors(trainer)
        .into_iter()
        .map(|tensor| {
            let mut bytes = vec![0; tensor.size_bytes()];
            TrainingState::read(trainer, &tensor.name, 0, &mut bytes).expect("a tensor");
            (tensor.name, bytes)
        })
        .collect();
    End { state, progress }
}

/// A run to its end.
pub(crate) fn whole(
    case: &Case,
    steps: u64,
    predict: Option<(PredictOptions, HeldOut)>,
) -> (End, Heard) {
    let folder = tempfile::tempdir().expect("a folder");
    let mut run = run(folder.path(), case, run_options(case, steps), predict);
    let mut heard = Heard::default();
    run.train(&Stop::new(), &mut heard).expect("a run");
    (end(&mut run), heard)
}

//! A tiny model under a plan, and its saved state.

use std::collections::BTreeMap;
use std::path::PathBuf;
use storm_device::cpu::{CpuPlanDevice, CpuPlanOptions};
use storm_graph::{MomentumDirection, SgdParameters};
use storm_model::{ModelConfig, preset};
use storm_plan::{Budget, Forced, HardwareProfile, UpdateTime, plan};
use storm_train::{
    Batch, Checkpoints, Moments, OptimizerMethod, OptimizerOptions, Precision, Progress, Storage,
    TrainError, TrainOptions, Trainer, TrainingState, training_task,
};

pub(crate) type CpuTrainer = Trainer<CpuPlanDevice>;

const SEQUENCE: usize = 6;
const MICRO_BATCHES: usize = 2;

pub(crate) fn tiny() -> ModelConfig {
    let mut config = preset("gpt2").expect("a preset");
    config.vocab_size = 19;
    config.hidden_size = 8;
    config.layer_count = 2;
    config.query_heads = 2;
    config.kv_heads = 2;
    config.head_dim = 4;
    config.intermediate_size = 12;
    config.max_positions = 8;
    config.initializer_range = 0.2;
    config
}

pub(crate) fn trainer(precision: Precision, update: UpdateTime) -> CpuTrainer {
    trainer_of(&tiny(), precision, update)
}

pub(crate) fn trainer_of(
    config: &ModelConfig,
    precision: Precision,
    update: UpdateTime,
) -> CpuTrainer {
    let options = TrainOptions { seed: 3, ..TrainOptions::new(2, SEQUENCE, precision) };
    trainer_with(config, options, update)
}

/// bf16 with moments in 8 bits.
pub(crate) fn int8_trainer(update: UpdateTime) -> CpuTrainer {
    let precision = Precision::Bf16Stochastic;
    let optimizer = OptimizerOptions { moments: Moments::Int8, ..OptimizerOptions::default() };
    let options = TrainOptions { seed: 3, optimizer, ..TrainOptions::new(2, SEQUENCE, precision) };
    trainer_with(&tiny(), options, update)
}

/// Gradient descent with Nesterov's momentum.
pub(crate) fn sgd_trainer(precision: Precision, update: UpdateTime) -> CpuTrainer {
    let direction = MomentumDirection::Nesterov;
    let sgd = SgdParameters { momentum: 0.9, direction, weight_decay: 5e-4 };
    let method = OptimizerMethod::Sgd(sgd);
    let optimizer = OptimizerOptions { method, ..OptimizerOptions::default() };
    let options = TrainOptions { seed: 3, optimizer, ..TrainOptions::new(2, SEQUENCE, precision) };
    trainer_with(&tiny(), options, update)
}

fn trainer_with(config: &ModelConfig, options: TrainOptions, update: UpdateTime) -> CpuTrainer {
    let task = training_task(config, &options, MICRO_BATCHES).expect("a valid model");
    let profile = HardwareProfile {
        overhead_bytes: 0,
        ..HardwareProfile::builtin("reference").expect("built in")
    };
    let budget = Budget::new(1 << 30, 1 << 30);
    let forced = Forced { update: Some(update), ..Forced::default() };
    let planned = plan(&task, &profile, budget, &forced).expect("a plan");
    let device = CpuPlanOptions { threads: Some(1), ..CpuPlanOptions::default() };
    Trainer::new(config, options, planned.plan.into(), device).expect("a trainer")
}

/// The batches of a step: a function of its number.
pub(crate) fn batches(step: u64) -> Vec<Batch> {
    let token = |i: u64| ((step * 31 + i * i * 7 + i) % 19) as i32;
    (0..MICRO_BATCHES as u64)
        .map(|part| {
            let at = |row: u64| 100 * part + row;
            let tokens = (0..12).map(|row| token(at(row))).collect();
            let targets = (0..12).map(|row| token(at(row) + 1)).collect();
            Batch::new(tokens, targets, SEQUENCE)
        })
        .collect()
}

/// Losses and norms of these steps, as bits.
pub(crate) fn train(trainer: &mut CpuTrainer, steps: std::ops::Range<u64>) -> Vec<(u32, u32)> {
    steps
        .map(|step| {
            let report = trainer.step(&batches(step), 0.01).expect("a step");
            (report.loss.to_bits(), report.gradient_norm.to_bits())
        })
        .collect()
}

pub(crate) fn progress(step: u64, trainer: &CpuTrainer) -> Progress {
    Progress {
        step,
        updates: trainer.updates(),
        units: step * 24,
        data: serde_json::json!({"epoch": 1, "sample": step}),
        best: None,
        evaluations_without_gain: 0,
        settings: BTreeMap::from([("seed".to_owned(), "3".to_owned())]),
        device: "cpu".to_owned(),
        predict: None,
    }
}

/// Every byte of state.
pub(crate) fn state(trainer: &mut CpuTrainer) -> Vec<(String, Vec<u8>)> {
    let tensors = TrainingState::tensors(trainer);
    tensors
        .into_iter()
        .map(|tensor| {
            let mut bytes = vec![0; tensor.size_bytes()];
            TrainingState::read(trainer, &tensor.name, 0, &mut bytes).expect("a tensor");
            (tensor.name, bytes)
        })
        .collect()
}

/// Saves the state as that after `step` steps.
pub(crate) fn save<S: Storage>(
    checkpoints: &Checkpoints<S>,
    trainer: &mut CpuTrainer,
    step: u64,
) -> Result<PathBuf, TrainError> {
    let progress = progress(step, trainer);
    checkpoints.save(trainer, &progress)
}

//! Device memory between steps: what evaluations do not use is released and reclaimed, and no bit
//! changes.

use crate::exactness::reference;
use crate::support::{learning_rate, options, sized_batches, tiny};
use storm_device::PlanDevice;
use storm_device::cpu::{CpuPlanDevice, CpuPlanOptions};
use storm_model::ModelConfig;
use storm_plan::{Budget, Forced, Idle, Plan, TensorKind, Tier, UpdateTime, plan};
use storm_train::{Batch, Precision, TrainOptions, Trainer, training_task};

const MICRO_BATCHES: usize = 2;

/// Large enough for pages to matter.
fn case() -> (ModelConfig, TrainOptions) {
    let config = ModelConfig { max_positions: 64, layer_count: 6, ..tiny("llama-3.2-1b") };
    let options = TrainOptions { batch: 8, sequence: 64, ..options(Precision::F32) };
    (config, options)
}

fn trainer(update: UpdateTime, device: CpuPlanOptions) -> Trainer<CpuPlanDevice> {
    let (config, options) = case();
    let task = training_task(&config, &options, MICRO_BATCHES).expect("a model");
    let forced = Forced { update: Some(update), ..Forced::default() };
    let budget = Budget::new(1 << 40, 1 << 40);
    let planned = plan(&task, &reference(), budget, &forced).expect("it fits");
    Trainer::new(config, options, planned.plan.into(), device).expect("a trainer")
}

fn data(step: usize) -> Vec<Batch> {
    let (config, options) = case();
    sized_batches(&config, [options.batch, options.sequence], MICRO_BATCHES, step)
}

/// Device memory of what a step saves for its backward pass.
fn saved_bytes(plan: &Plan) -> usize {
    let on_device = plan.regions.iter().filter(|region| region.tier == Tier::DEVICE);
    let saved = on_device.filter(|region| region.kind == TensorKind::Activations);
    saved.map(|region| region.bytes).sum()
}

#[test]
fn at_least_the_saved_activations_are_released() {
    for update in [UpdateTime::EndOfStep, UpdateTime::NextStep] {
        let mut all = trainer(update, CpuPlanOptions::default());
        let mut less = trainer(update, CpuPlanOptions::default());
        let in_use = |trainer: &Trainer<CpuPlanDevice>| {
            trainer.device().memory_in_use_bytes().expect("a CPU knows")
        };
        for step in 0..4 {
            let rate = learning_rate(step);
            for trainer in [&mut all, &mut less] {
                trainer.step(&data(step), rate).expect("a step");
            }
            let full = in_use(&less);
            assert_eq!(full as usize, less.plan().bytes[Tier::DEVICE]);
            let released = less.release_idle(Idle::BesideEvaluation).expect("it is idle");
            let found = less.evaluate(&data(9)).expect("an evaluation").loss;
            assert_eq!(found.to_bits(), all.evaluate(&data(9)).expect("the same").loss.to_bits());
            // Measured after the evaluation, which touches pages.
            let (rest, saved) = (in_use(&less), saved_bytes(less.plan()));
            assert!(saved > 1 << 20 && rest as usize + saved <= full as usize, "{rest} {saved}");
            assert_eq!(full - rest, released);
            if step % 2 == 0 {
                less.reclaim_idle().expect("there is memory");
                assert_eq!(in_use(&less), full);
            }
        }
        let names: Vec<String> = all.parameter_names().map(str::to_owned).collect();
        for name in names {
            assert_eq!(all.read(&name).expect("a tensor"), less.read(&name).expect("a tensor"));
        }
    }
}

/// Nothing reads parameters whose memory was released before all of them are written.
#[test]
fn released_parameters_must_be_written_first() {
    for update in [UpdateTime::EndOfStep, UpdateTime::NextStep] {
        let [mut all, mut less] = [(); 2].map(|()| trainer(update, CpuPlanOptions::default()));
        for trainer in [&mut all, &mut less] {
            trainer.step(&data(0), 0.01).expect("a step");
        }
        let names: Vec<String> = all.parameter_names().map(str::to_owned).collect();
        let weights: Vec<Vec<f32>> =
            names.iter().map(|name| all.read(name).expect("a parameter")).collect();
        assert!(less.release_idle(Idle::WithParameters).expect("it is idle") > 0);
        let refused = |trainer: &mut Trainer<CpuPlanDevice>, parameter: &str| {
            let errors = [
                trainer.step(&data(1), 0.01).expect_err("a step").to_string(),
                trainer.evaluate(&data(1)).expect_err("an evaluation").to_string(),
                trainer.read(parameter).expect_err("a read").to_string(),
            ];
            for error in errors {
                let what = format!("the memory of `{parameter}` was released");
                assert!(error.contains(&what) && error.contains("write all parameters"), "{error}");
            }
        };
        let sorted: std::collections::BTreeSet<&String> = names.iter().collect();
        let last = sorted.last().expect("a parameter").as_str();
        refused(&mut less, sorted.first().expect("a parameter"));
        less.reclaim_idle().expect("there is memory");
        for (name, values) in names.iter().zip(&weights).filter(|(name, _)| *name != last) {
            less.write(name, values).expect("a parameter");
        }
        refused(&mut less, last);
        let values = names.iter().position(|name| name == last).expect("it is there");
        less.write(last, &weights[values]).expect("a parameter");
        for trainer in [&mut all, &mut less] {
            trainer.step(&data(1), 0.01).expect("a step");
        }
        for name in &names {
            assert_eq!(all.read(name).expect("a tensor"), less.read(name).expect("a tensor"));
        }
    }
}

#[test]
fn memory_that_is_gone_is_an_error_and_state_is_whole() {
    let device = CpuPlanOptions { refuses_reclaim: true, ..CpuPlanOptions::default() };
    let mut trainer = trainer(UpdateTime::EndOfStep, device);
    trainer.step(&data(0), 0.01).expect("a step");
    let name = trainer.parameter_names().next().expect("a parameter").to_owned();
    let before = trainer.read(&name).expect("a tensor");
    trainer.release_idle(Idle::BesideEvaluation).expect("it is idle");
    for _ in 0..2 {
        let error = trainer.step(&data(1), 0.01).expect_err("it is gone").to_string();
        assert!(error.contains("refused on purpose"), "{error}");
    }
    assert_eq!(trainer.read(&name).expect("a tensor"), before);
    assert_eq!(trainer.updates(), 1);
    trainer.evaluate(&data(1)).expect("what is left is enough for it");
}

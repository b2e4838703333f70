//! Lanes on several ranks: whatever their number, every bit is that of one rank with the same lanes.

use crate::exactness::reference;
use crate::lora::adapted;
use crate::support::{batches, options, tiny};
use std::thread;
use storm_device::cpu::{CpuPlanDevice, CpuPlanOptions};
use storm_model::{LoraOptions, ModelConfig};
use storm_plan::{Lowering, UpdateTime, check, random_decisions};
use storm_ranks::in_process;
use storm_train::{
    Heard, Moments, Precision, Ranks, ReferenceTrainer, TrainError, TrainOptions, Trainer,
    training_task,
};

/// A trainer of a rank, under a random plan for one lane.
fn of_rank(
    config: &ModelConfig,
    options: &TrainOptions,
    micro_batches: usize,
    seed: u64,
) -> Trainer<CpuPlanDevice> {
    let lane = TrainOptions { lanes: 1, ..options.clone() };
    let task = training_task(config, &lane, micro_batches / options.lanes).expect("a valid model");
    let mut decisions = random_decisions(&task, seed);
    decisions.update = UpdateTime::NextStep;
    let profile = reference();
    let lowering = Lowering::new(&task, &profile).expect("a task that can be lowered");
    let plan = lowering.lower_with_evaluation(&decisions).expect("decisions that work");
    let budget = plan.bytes;
    let plan = check(plan, budget).expect("a safe plan");
    let device =
        CpuPlanOptions { threads: Some(1), chaos_seed: Some(seed), ..CpuPlanOptions::default() };
    Trainer::new(config, options.clone(), plan.into(), device).expect("a trainer")
}

/// Runs `lead` on the first of some ranks, each of which has a plan of its own.
fn on_ranks<T>(
    ranks: u32,
    (config, options, micro_batches): (&ModelConfig, &TrainOptions, usize),
    lead: impl FnOnce(&mut Trainer<CpuPlanDevice>) -> T,
) -> T {
    thread::scope(|scope| {
        let mut engines = in_process::connect(ranks).into_iter();
        let first = Ranks::new(Box::new(engines.next().expect("at least one")));
        let mut others = Vec::new();
        for (rank, engine) in (1..).zip(engines) {
            others.push(scope.spawn(move || {
                let ranks = Ranks::new(Box::new(engine));
                assert_eq!(ranks.hear().expect("a message"), Heard::Message(b"begin".to_vec()));
                of_rank(config, options, micro_batches, 100 + rank).follow(&ranks)
            }));
        }
        first.say(b"begin").expect("all are there");
        let mut trainer = of_rank(config, options, micro_batches, 7);
        trainer.lead(first.clone()).expect("a plan for one lane");
        assert_eq!(trainer.micro_batches(), micro_batches);
        let made = lead(&mut trainer);
        first.end(9).expect("all are there");
        for other in others {
            let code = other.join().expect("no panic").expect("no error");
            assert_eq!(code, 9);
        }
        made
    })
}

/// Losses, norms and all parameters after some steps, with an evaluation and a change by hand between them.
fn run_on_ranks(
    ranks: u32,
    config: &ModelConfig,
    options: &TrainOptions,
    micro_batches: usize,
) -> Vec<u32> {
    on_ranks(ranks, (config, options, micro_batches), |trainer| {
        let mut bits = Vec::new();
        for step in 0..4 {
            let given = batches(config, micro_batches, step);
            if step == 2 {
                trainer.evaluate(&given).expect("an evaluation");
                let name = trainer.parameter_names().next().expect("a parameter").to_owned();
                let values = trainer.read(&name).expect("values");
                let half: Vec<f32> = values.iter().map(|x| x / 2.0).collect();
                trainer.write(&name, &half).expect("the same number");
            }
            let report = trainer.step(&given, 0.01).expect("a step");
            bits.extend([report.loss.to_bits(), report.gradient_norm.to_bits()]);
        }
        let names: Vec<String> = trainer.parameter_names().map(str::to_owned).collect();
        for name in names {
            for name in [name.clone(), format!("{name}.second_moment")] {
                let values = trainer.read(&name);
                bits.extend(values.into_iter().flatten().map(f32::to_bits));
            }
        }
        bits
    })
}

/// The same by the reference, with everything resident.
fn run_alone(config: &ModelConfig, options: &TrainOptions, micro_batches: usize) -> Vec<u32> {
    let mut trainer = ReferenceTrainer::new(config, options.clone()).expect("a valid model");
    let mut bits = Vec::new();
    for step in 0..4 {
        if step == 2 {
            let name = trainer.parameter_names().next().expect("a parameter").to_owned();
            let values = trainer.read(&name).expect("values");
            let half: Vec<f32> = values.iter().map(|x| x / 2.0).collect();
            trainer.write(&name, &half).expect("the same number");
        }
        let report = trainer.step(&batches(config, micro_batches, step), 0.01).expect("a step");
        bits.extend([report.loss.to_bits(), report.gradient_norm.to_bits()]);
    }
    let names: Vec<String> = trainer.parameter_names().map(str::to_owned).collect();
    for name in names {
        for name in [name.clone(), format!("{name}.second_moment")] {
            bits.extend(trainer.read(&name).into_iter().flatten().map(f32::to_bits));
        }
    }
    bits
}

#[test]
fn any_number_of_ranks_gives_the_bits_of_one() {
    let dropping = LoraOptions { dropout: 0.3, ..LoraOptions::new(3, 6.0) };
    let (full, int8) = (Moments::Full, Moments::Int8);
    for (config, precision, moments, micro_batches, lanes) in [
        (tiny("gpt2"), Precision::F32, full, 8, 4),
        (tiny("llama-3.2-1b"), Precision::Bf16Stochastic, int8, 4, 4),
        (tiny("mistral-7b"), Precision::Bf16Master, full, 8, 4),
        (adapted("qwen3-0.6b", dropping), Precision::Bf16Stochastic, full, 4, 4),
    ] {
        let mut options = TrainOptions { lanes, ..options(precision) };
        options.optimizer.moments = moments;
        let expected = run_alone(&config, &options, micro_batches);
        for ranks in [1, 2, 4] {
            let found = run_on_ranks(ranks, &config, &options, micro_batches);
            assert!(found == expected, "{:?} {precision:?}, {ranks} ranks", config.family);
        }
    }
}

/// A gradient that is not finite changes nothing, on no rank.
#[test]
fn ranks_agree_on_a_step_that_is_not_finite() {
    let config = tiny("mistral-7b");
    let options = TrainOptions { lanes: 2, ..options(Precision::F32) };
    let after = |poison: bool| {
        on_ranks(2, (&config, &options, 2), |trainer| {
            let name = trainer.parameter_names().last().expect("a parameter").to_owned();
            if poison {
                let values = trainer.read(&name).expect("values");
                trainer.write(&name, &vec![f32::MAX; values.len()]).expect("values");
                let report = trainer.step(&batches(&config, 2, 5), 0.01).expect("a step");
                assert!(!report.gradient_norm.is_finite(), "{report:?}");
                trainer.write(&name, &values).expect("values");
            }
            let report = trainer.step(&batches(&config, 2, 0), 0.01).expect("a step");
            (report.loss.to_bits(), report.gradient_norm.to_bits(), trainer.updates())
        })
    };
    assert_eq!(after(true), after(false));
}

#[test]
fn what_ranks_cannot_share_is_refused() {
    let config = tiny("mistral-7b");
    let options = TrainOptions { lanes: 3, ..options(Precision::F32) };
    let mut trainer = of_rank(&config, &options, 3, 1);
    let engine = in_process::connect(2).swap_remove(0);
    let error = trainer.lead(Ranks::new(Box::new(engine))).expect_err("3 lanes on 2 ranks");
    assert!(matches!(error, TrainError::Option { option: "lanes", .. }), "{error}");
}

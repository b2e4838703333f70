//! Tiny models of every family, seeded batches, and a fingerprint of a training run.

use storm_device::PlanDevice;
use storm_device::cpu::{Bf16Products, CpuDevice, CpuPlanDevice, CpuPlanOptions};
use storm_graph::IGNORE_INDEX;
pub(crate) use storm_graph::random::Random;
use storm_model::{ModelConfig, Packing, build, preset};
use storm_train::{Batch, Precision, ReferenceTrainer, TrainOptions, Trainer};

pub(crate) const SEQUENCE: usize = 9;
pub(crate) const BATCH: usize = 2;
pub(crate) const STEPS: usize = 10;

/// One small odd-shaped model of a family.
pub(crate) fn tiny(name: &str) -> ModelConfig {
    let mut config = preset(name).expect("a preset");
    config.vocab_size = 37;
    config.hidden_size = 16;
    config.layer_count = 3;
    config.query_heads = 4;
    config.kv_heads = if name == "gpt2" { 4 } else { 2 };
    config.head_dim = if config.family.has_query_key_norm() { 6 } else { 4 };
    config.intermediate_size = 28;
    config.max_positions = 40;
    config.initializer_range = 0.2;
    config
}

/// The micro-batches of a step. About one target in five is ignored.
pub(crate) fn batches(config: &ModelConfig, count: usize, step: usize) -> Vec<Batch> {
    sized_batches(config, [BATCH, SEQUENCE], count, step)
}

/// The same, of another size.
pub(crate) fn sized_batches(
    config: &ModelConfig,
    [batch, sequence]: [usize; 2],
    count: usize,
    step: usize,
) -> Vec<Batch> {
    let mut random = Random((step * 1000 + count) as u64);
    let rows = batch * sequence;
    (0..count)
        .map(|_| {
            let tokens = (0..rows).map(|_| random.below(config.vocab_size) as i32).collect();
            let targets = (0..rows)
                .map(|_| match random.below(5) {
                    0 => IGNORE_INDEX,
                    _ => random.below(config.vocab_size) as i32,
                })
                .collect();
            Batch::new(tokens, targets, sequence)
        })
        .collect()
}

pub(crate) fn options(precision: Precision) -> TrainOptions {
    // A chunk that does not divide the rows.
    TrainOptions {
        packing: Packing::Single,
        chunk_rows: 7,
        seed: 5,
        ..TrainOptions::new(BATCH, SEQUENCE, precision)
    }
}

/// Every bit that a run of a few steps produces: losses, norms, parameters and state at the end.
#[derive(Debug, PartialEq)]
pub(crate) struct Fingerprint {
    pub(crate) steps: Vec<(u32, u32)>,
    pub(crate) tensors: Vec<(String, u64)>,
}

pub(crate) fn learning_rate(step: usize) -> f32 {
    0.01 / (1.0 + step as f32)
}

/// Names of parameters and their state.
fn tensor_names<'a>(
    parameters: impl Iterator<Item = &'a str>,
    precision: Precision,
) -> Vec<String> {
    let mut names = Vec::new();
    for name in parameters {
        names.push(name.to_owned());
        for moment in ["first_moment", "second_moment"] {
            names.push(format!("{name}.{moment}"));
        }
        if precision.has_master() {
            names.push(format!("{name}.master"));
        }
    }
    names
}

fn hash(values: &[f32]) -> u64 {
    values.iter().fold(0xcbf2_9ce4_8422_2325, |hash, value| {
        (hash ^ u64::from(value.to_bits())).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// The baseline: everything in device memory, all defaults.
pub(crate) fn resident(
    config: &ModelConfig,
    options: &TrainOptions,
    micro_batches: usize,
) -> Fingerprint {
    resident_with(config, options, micro_batches, Bf16Products::Fma)
}

/// The same with other sums of bf16 products.
pub(crate) fn resident_with(
    config: &ModelConfig,
    options: &TrainOptions,
    micro_batches: usize,
    products: Bf16Products,
) -> Fingerprint {
    let program = build(config, &options.build_options()).expect("a valid model");
    let open = |bytes| CpuDevice::with_products(bytes, products);
    let mut trainer = ReferenceTrainer::on_device(config, options.clone(), program, |_| {}, open)
        .expect("a valid model");
    let mut steps = Vec::new();
    for step in 0..STEPS {
        let size = [options.batch, options.sequence];
        let batches = sized_batches(config, size, micro_batches, step);
        let report = trainer.step(&batches, learning_rate(step)).expect("a step");
        steps.push((report.loss.to_bits(), report.gradient_norm.to_bits()));
    }
    let names = tensor_names(trainer.parameter_names(), options.precision);
    let tensors = names
        .into_iter()
        .filter_map(|name| {
            // Frozen parameters have no state.
            let values = trainer.read(&name).ok()?;
            Some((name, hash(&values)))
        })
        .collect();
    Fingerprint { steps, tensors }
}

/// The same under a plan. Now and then the pending update is applied early, as for a checkpoint,
/// and the model is evaluated.
pub(crate) fn planned(
    config: &ModelConfig,
    options: &TrainOptions,
    plan: storm_plan::CheckedPlan,
    chaos_seed: Option<u64>,
) -> Fingerprint {
    let device = CpuPlanOptions { threads: Some(1), chaos_seed, ..CpuPlanOptions::default() };
    planned_on(config, options, plan, device)
}

/// The same on a device with other options.
pub(crate) fn planned_on(
    config: &ModelConfig,
    options: &TrainOptions,
    plan: storm_plan::CheckedPlan,
    device: CpuPlanOptions,
) -> Fingerprint {
    let chaos_seed = device.chaos_seed;
    let mut trainer: Trainer<CpuPlanDevice> =
        Trainer::new(config, options.clone(), plan.into(), device).expect("a trainer");
    let flush_at = chaos_seed.unwrap_or(0) as usize % (2 * STEPS);
    let steps = run(&mut trainer, config, flush_at);
    let names = tensor_names(trainer.parameter_names(), options.precision);
    let tensors = names
        .into_iter()
        .filter_map(|name| {
            // Frozen parameters have no state.
            let values = trainer.read(&name).ok()?;
            Some((name, hash(&values)))
        })
        .collect();
    Fingerprint { steps, tensors }
}

/// Whether steps use dropout, which evaluations do not.
fn drops(config: &ModelConfig) -> bool {
    config.adapters.as_ref().is_some_and(|adapters| adapters.options.dropout > 0.0)
}

fn run<D: PlanDevice>(
    trainer: &mut Trainer<D>,
    config: &ModelConfig,
    flush_at: usize,
) -> Vec<(u32, u32)> {
    let count = trainer.micro_batches();
    let size = [trainer.options().batch, trainer.options().sequence];
    (0..STEPS)
        .map(|step| {
            let batches = sized_batches(config, size, count, step);
            let mut evaluated = None;
            if step == flush_at {
                trainer.flush().expect("a flush");
            }
            if step == flush_at / 2 {
                if !flush_at.is_multiple_of(3) {
                    trainer
                        .release_idle(storm_plan::Idle::BesideEvaluation)
                        .expect("memory that is not needed");
                }
                evaluated = Some(trainer.evaluate(&batches).expect("an evaluation").loss);
            }
            let report = trainer.step(&batches, learning_rate(step)).expect("a step");
            if let Some(loss) = evaluated.filter(|_| !drops(config)) {
                assert_eq!(loss.to_bits(), report.loss.to_bits(), "forward passes are the same");
            }
            (report.loss.to_bits(), report.gradient_norm.to_bits())
        })
        .collect()
}

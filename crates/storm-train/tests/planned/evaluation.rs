//! Forward-only plans: the loss of a model has the same bits, whatever the decisions and however
//! little memory.

use crate::support::{BATCH, SEQUENCE, batches, options, tiny};
use storm_device::cpu::{CpuPlanDevice, CpuPlanOptions};
use storm_graph::DType;
use storm_model::{BuildOptions, HfDirectory, ModelConfig, ModelOutput, SaveOptions, WeightDtype};
use storm_plan::{
    Budget, CheckedPlan, Forced, HardwareProfile, Lowering, PlanError, Tier, check, plan,
    random_decisions,
};
use storm_train::{
    Batch, Evaluation, Precision, ReferenceTrainer, Trainer, evaluation_task, training_task,
};

const MICRO_BATCHES: usize = 4;
const PLANS: u64 = 40;

/// A saved model and its loss.
struct Case {
    config: ModelConfig,
    build: BuildOptions,
    directory: tempfile::TempDir,
    batches: Vec<Batch>,
    expected: u32,
}

impl Case {
    fn new(name: &str, precision: Precision) -> Case {
        let (config, options) = (tiny(name), options(precision));
        let batches = batches(&config, MICRO_BATCHES, 0);
        let mut reference = ReferenceTrainer::new(&config, options.clone()).expect("a model");
        let directory = tempfile::tempdir().expect("a folder");
        let model = directory.path().join("model");
        let (dtype, saved) = match precision {
            Precision::F32 => (DType::F32, WeightDtype::F32),
            _ => (DType::BF16, WeightDtype::Bf16),
        };
        let saving = SaveOptions { dtype: saved, ..SaveOptions::default() };
        reference.save(&model, &saving).expect("it can be saved");
        let expected = reference.step(&batches, 0.01).expect("a step").loss.to_bits();
        let build = BuildOptions {
            output: ModelOutput::Loss { chunk_rows: options.chunk_rows },
            ..BuildOptions::training(BATCH, SEQUENCE, dtype)
        };
        Case { config, build, directory, batches, expected }
    }

    /// The bits of the loss under a plan, with random delays.
    fn loss(&self, plan: CheckedPlan, chaos_seed: Option<u64>) -> u32 {
        let directory = HfDirectory::open(&self.directory.path().join("model")).expect("a model");
        let device = CpuPlanOptions { threads: Some(1), chaos_seed, ..CpuPlanOptions::default() };
        let mut evaluation: Evaluation<CpuPlanDevice> =
            Evaluation::load(&self.config, &self.build, &directory, plan.into(), device)
                .expect("it fits");
        assert_eq!(evaluation.micro_batches(), MICRO_BATCHES);
        evaluation.add(&self.batches).expect("a forward pass");
        let loss = evaluation.losses().loss().expect("some targets");
        (loss as f32).to_bits()
    }
}

fn reference() -> HardwareProfile {
    HardwareProfile::builtin("reference").expect("built in")
}

#[test]
fn random_forward_only_plans_are_exact() {
    let profile = reference();
    for (name, precision) in [
        ("gpt2", Precision::F32),
        ("qwen2.5-0.5b", Precision::Bf16Master),
        ("qwen3-0.6b", Precision::F32),
    ] {
        let case = Case::new(name, precision);
        let task = evaluation_task(&case.config, &case.build, MICRO_BATCHES).expect("a model");
        let lowering = Lowering::new(&task, &profile).expect("a task that can be lowered");
        for seed in 0..PLANS {
            let decisions = random_decisions(&task, seed);
            let plan = lowering.lower(&decisions).expect("decisions that work");
            let budget = plan.bytes;
            let plan = check(plan, budget)
                .unwrap_or_else(|error| panic!("{name} seed {seed}: {error}\n{decisions:?}"));
            assert_eq!(case.loss(plan, Some(seed)), case.expected, "{name} {seed} {decisions:?}");
        }
    }
}

/// The planner's own plans take less than the minimum of a training step, down to a part of the
/// weights.
#[test]
fn a_model_larger_than_the_budget_is_evaluated() {
    let case = Case::new("mistral-7b", Precision::F32);
    let profile = HardwareProfile { overhead_bytes: 0, ..reference() };
    let task = evaluation_task(&case.config, &case.build, MICRO_BATCHES).expect("a model");
    let of = |vram_bytes: u64| {
        plan(&task, &profile, Budget::new(vram_bytes, 1 << 30), &Forced::default())
    };
    let Err(PlanError::TooSmall(least)) = of(0) else { panic!("nothing fits nothing") };
    let least = least.min_bytes[Tier::DEVICE];
    let options = options(Precision::F32);
    let training = training_task(&case.config, &options, MICRO_BATCHES).expect("a model");
    let none = Budget::new(0, 1 << 30);
    let Err(PlanError::TooSmall(needs)) = plan(&training, &profile, none, &Forced::default())
    else {
        panic!("nothing fits nothing")
    };
    assert!(least < needs.min_bytes[Tier::DEVICE], "{least}: no less than training");
    for vram_bytes in [least, 2 * least, 1 << 30] {
        let planned = of(vram_bytes).expect("it fits");
        assert!(planned.prediction.peak_bytes[Tier::DEVICE] <= vram_bytes);
        assert_eq!(case.loss(planned.plan, None), case.expected, "{vram_bytes} bytes");
    }
}

/// An incomplete group is padded with a batch that does not count.
#[test]
fn any_number_of_batches_is_evaluated() {
    let (config, options) = (tiny("llama-3.2-1b"), options(Precision::F32));
    let profile = reference();
    let budget = Budget::new(1 << 30, 1 << 30);
    let forced = Forced { group: Some(MICRO_BATCHES), ..Forced::default() };
    let task = training_task(&config, &options, MICRO_BATCHES).expect("a model");
    let plan = plan(&task, &profile, budget, &forced).expect("it fits").plan;
    let mut trainer: Trainer<CpuPlanDevice> =
        Trainer::new(&config, options.clone(), plan.into(), CpuPlanOptions::default())
            .expect("a trainer");
    for count in 1..=2 * MICRO_BATCHES + 1 {
        let batches = batches(&config, count, 3);
        let mut reference = ReferenceTrainer::new(&config, options.clone()).expect("a model");
        let expected = reference.step(&batches, 0.01).expect("a step").loss;
        let found = trainer.evaluate(&batches).expect("an evaluation").loss;
        assert_eq!(found.to_bits(), expected.to_bits(), "{count} batches");
    }
}

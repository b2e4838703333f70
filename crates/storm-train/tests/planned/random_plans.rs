//! The comparison shared by tests of random plans: decisions are lowered, checked, and run with
//! delays. Every bit must be that of everything resident.

use crate::support::{planned_on, resident_with};
use storm_device::cpu::{Bf16Products, CpuPlanOptions};
use storm_model::ModelConfig;
use storm_plan::{Decisions, HardwareProfile, Lowering, Plan, Task, check};
use storm_train::{TrainOptions, training_task};

/// What to train.
pub(crate) struct Case<'a> {
    /// For messages.
    pub(crate) name: &'a str,
    pub(crate) config: &'a ModelConfig,
    pub(crate) options: &'a TrainOptions,
    pub(crate) micro_batches: usize,
    pub(crate) products: Bf16Products,
}

impl Case<'_> {
    /// Compares the plans of some decisions with everything resident. Calls `see` with each before
    /// it runs, which may change the device.
    pub(crate) fn compare(
        &self,
        profile: &HardwareProfile,
        seeds: impl Iterator<Item = u64>,
        decide: impl Fn(&Task, u64) -> Decisions,
        mut see: impl FnMut(u64, &Decisions, &Plan, &mut CpuPlanOptions),
    ) {
        let Case { name, config, options, micro_batches, products } = *self;
        let expected = resident_with(config, options, micro_batches, products);
        let task = training_task(config, options, micro_batches).expect("a valid model");
        let lowering = Lowering::new(&task, profile).expect("a task that can be lowered");
        for seed in seeds {
            let decisions = decide(&task, seed);
            let plan = lowering.lower_with_evaluation(&decisions).expect("decisions that work");
            let mut device = CpuPlanOptions {
                threads: Some(1),
                chaos_seed: Some(seed),
                products,
                ..CpuPlanOptions::default()
            };
            see(seed, &decisions, &plan, &mut device);
            let budget = plan.bytes;
            let plan = check(plan, budget)
                .unwrap_or_else(|error| panic!("{name} seed {seed}: {error}\n{decisions:?}"));
            let found = planned_on(config, options, plan, device);
            let (precision, moments) = (options.precision, options.optimizer.moments);
            assert_eq!(
                found, expected,
                "{name} {precision:?} {moments:?} seed {seed}: {decisions:?}"
            );
        }
    }
}

//! After its first step, no thread of a trainer allocates in a step: neither the one that provides
//! batches nor those that fetch them. A separate binary, because it counts the allocations of the
//! whole process.

use std::sync::Arc;
use storm_device::cpu::{CpuPlanDevice, CpuPlanOptions};
use storm_host::allocation::{AllocationMeter, count_of_all_threads};
use storm_model::preset;
use storm_plan::{Decisions, HardwareProfile, Lowering, check};
use storm_train::{Batch, Precision, TrainOptions, Trainer, training_task};

#[global_allocator]
static METER: AllocationMeter = AllocationMeter;

const SEQUENCE: usize = 6;
const MICRO_BATCHES: usize = 3;

fn batch(seed: i32) -> Batch {
    let token = |i: i32| (seed * 5 + i * i) % 19;
    Batch::new((0..12).map(token).collect(), (1..13).map(token).collect(), SEQUENCE)
}

#[test]
fn a_step_that_fetches_allocates_nothing() {
    let mut config = preset("mistral-7b").expect("a preset");
    config.vocab_size = 19;
    config.hidden_size = 8;
    config.layer_count = 2;
    config.query_heads = 2;
    config.kv_heads = 2;
    config.head_dim = 4;
    config.intermediate_size = 12;
    config.max_positions = 8;
    let options = TrainOptions::new(2, SEQUENCE, Precision::F32);
    let task = training_task(&config, &options, MICRO_BATCHES).expect("a valid model");
    let profile = HardwareProfile::builtin("reference").expect("built in");
    let lowering = Lowering::new(&task, &profile).expect("a task that can be lowered");
    let plan = lowering.lower(&Decisions::streamed(&task)).expect("decisions that work");
    assert!(plan.links.data_queue().is_some(), "it fetches");
    let budget = plan.bytes;
    let plan = Arc::new(check(plan, budget).expect("a sound plan"));
    let device = CpuPlanOptions { threads: Some(1), ..CpuPlanOptions::default() };
    let mut trainer: Trainer<CpuPlanDevice> =
        Trainer::new(&config, options, plan, device).expect("a trainer");
    let batches: Vec<Batch> = (0..MICRO_BATCHES as i32).map(batch).collect();
    let mut step = || {
        let before = count_of_all_threads();
        trainer.step(&batches, 1e-3).expect("a step");
        trainer.synchronize().expect("a step");
        count_of_all_threads() - before
    };
    step();
    // The test harness's thread may allocate in between, but not in every round.
    let fewest = (0..20).map(|_| step()).min();
    assert_eq!(fewest, Some(0));
}

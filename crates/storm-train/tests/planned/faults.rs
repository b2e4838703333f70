//! A failure in any queue stops all of them, with an error that names it.

use crate::support::{batches, options, tiny};
use storm_device::cpu::{CpuPlanDevice, CpuPlanOptions, Fault, FaultKind};
use storm_plan::{Decisions, HardwareProfile, Lowering, check};
use storm_train::{Precision, Trainer, training_task};

#[test]
fn a_failure_in_any_queue_is_named_and_stops_the_training() {
    let (config, options) = (tiny("qwen2.5-0.5b"), options(Precision::Bf16Stochastic));
    let profile = HardwareProfile::builtin("reference").expect("built in");
    let task = training_task(&config, &options, 2).expect("a valid model");
    let lowering = Lowering::new(&task, &profile).expect("a task that can be lowered");
    // Everything is streamed.
    let plan = lowering.lower(&Decisions::streamed(&task)).expect("decisions that work");
    let budget = plan.bytes;
    let plan = std::sync::Arc::new(check(plan, budget).expect("a sound plan"));
    for queue in plan.queues() {
        // A step takes data twice.
        let moments = if plan.links.is_data(queue) { [0, 1, 5] } else { [0, 7, 60] };
        for kind in [FaultKind::Error, FaultKind::Panic] {
            for after in moments {
                let fault = Some(Fault { queue, after, kind });
                let device = CpuPlanOptions { fault, ..CpuPlanOptions::default() };
                let mut trainer: Trainer<CpuPlanDevice> =
                    Trainer::new(&config, options.clone(), plan.clone(), device)
                        .expect("a trainer");
                let outcome = (0..3).try_for_each(|step| {
                    trainer.step(&batches(&config, 2, step), 1e-3).map(|_| ())
                });
                let outcome = outcome.and_then(|()| trainer.synchronize());
                let message = outcome.expect_err("the fault").to_string();
                assert!(message.contains(&plan.links.queue_name(queue)), "{message}");
                assert!(message.contains('`'), "names a tensor: {message}");
                let again = trainer.step(&batches(&config, 2, 0), 1e-3).expect_err("it stopped");
                assert_eq!(again.to_string(), message);
            }
        }
    }
}

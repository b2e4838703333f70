//! What is reported of a plan adds up to the plan.

use crate::models::{FAMILIES, profile, tiny, tiny_task};
use storm_plan::{Lowering, Queue, TensorKind, Tier, random_decisions, simulate};

#[test]
fn everything_is_held_and_moved_by_some_kind() {
    let profile = profile("reference");
    for name in FAMILIES {
        let task = tiny_task(&tiny(name), 4);
        let lowering = Lowering::new(&task, &profile).expect("a task that can be lowered");
        for seed in 0..50 {
            let plan = lowering.lower(&random_decisions(&task, seed)).expect("decisions that work");
            let simulation = simulate(&plan, &profile);
            let holdings = plan.holdings();
            assert!(holdings.iter().map(|holding| holding.kind).eq(TensorKind::ALL));
            let sum = |field: &dyn Fn(&storm_plan::Holding) -> u64| {
                holdings.iter().map(field).sum::<u64>()
            };
            assert_eq!(
                sum(&|h| h.bytes[Tier::DEVICE]),
                plan.bytes[Tier::DEVICE] as u64,
                "{name} {seed}"
            );
            assert_eq!(
                sum(&|h| h.bytes[Tier::HOST]),
                plan.bytes[Tier::HOST] as u64,
                "{name} {seed}"
            );
            let [into, out] = [Queue::HOST_TO_DEVICE, Queue::DEVICE_TO_HOST];
            assert_eq!(sum(&|h| h.copied_bytes[into]), simulation.bytes(into));
            assert_eq!(sum(&|h| h.copied_bytes[out]), simulation.bytes(out));
        }
    }
}

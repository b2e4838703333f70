//! The reported holdings of a plan add up to the plan.

use crate::models::{FAMILIES, profile, tiny, tiny_task};
use storm_graph::TensorClass;
use storm_plan::{
    Decisions, Lowering, PerQueue, Plan, Queue, Storage, TensorKind, Tier, Work, random_decisions,
    simulate,
};

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

/// Groups of a step share memory, so a place may hold saved tensors in one group and inputs of
/// layers in another.
#[test]
fn copies_are_of_the_kind_that_they_copy() {
    let profile = profile("reference");
    let mut differing = 0;
    for name in FAMILIES {
        let task = tiny_task(&tiny(name), 4);
        let lowering = Lowering::new(&task, &profile).expect("a task that can be lowered");
        for seed in 0..50 {
            let decisions = random_decisions(&task, seed);
            differing += usize::from(decisions.groups.len() > 1);
            check_classes(&lowering.lower(&decisions).expect("decisions that work"));
            for kind in [TensorKind::Activations, TensorKind::LayerInputs] {
                let kept = without_offloading(&decisions, kind);
                let plan = lowering.lower(&kept).expect("decisions that work");
                let copied = plan.holdings()[kind as usize].copied_bytes;
                assert_eq!(copied, PerQueue::default(), "{name} {seed} {kind:?}");
            }
        }
    }
    assert!(differing > 10, "in {differing} plans the first group differs");
}

/// The same decisions, except that all tensors of a kind are kept where they were offloaded.
fn without_offloading(decisions: &Decisions, kind: TensorKind) -> Decisions {
    let mut decisions = decisions.clone();
    for stage in decisions.groups.iter_mut().flat_map(|group| &mut group.stages) {
        let storages: Vec<&mut Storage> = match kind {
            TensorKind::Activations => stage.saved.iter_mut().flatten().collect(),
            _ => stage.inputs.iter_mut().collect(),
        };
        for storage in storages {
            if *storage == Storage::Offload {
                *storage = Storage::Keep;
            }
        }
    }
    decisions
}

fn check_classes(plan: &Plan) {
    for instruction in &plan.instructions {
        let Work::Copy(copy) = &instruction.work else { continue };
        for operand in &copy.values {
            let value = plan.value(operand.value);
            let is_right = match value.class {
                TensorClass::Parameter(_) => copy.kind == TensorKind::Weights,
                TensorClass::Gradient => copy.kind == TensorKind::Gradients,
                _ => !matches!(copy.kind, TensorKind::Weights | TensorKind::Gradients),
            };
            assert!(is_right, "{} as {:?}", value.name, copy.kind);
        }
    }
}

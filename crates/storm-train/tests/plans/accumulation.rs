//! A step of many micro-batches costs no more to plan than one of few.

use crate::models::{budget, gib, planned, profile, real_task, tiny, tiny_task};
use storm_plan::{Decisions, GroupDecisions, Lowering, Storage, Streaming, Tier, UpdateTime};

#[test]
fn plans_do_not_grow_with_the_accumulation() {
    let profile = profile("reference");
    let sizes = [8, 512, 100_000].map(|micro_batches| {
        let task = tiny_task(&tiny("mistral-7b"), micro_batches);
        let streamed = Streaming { pinned: 0, ring: 2 };
        let mut decisions =
            Decisions { update: UpdateTime::NextStep, state_ring: 2, ..Decisions::resident(&task) };
        // A first group with its own size, then groups of two.
        let mut usual = decisions.groups[0].clone();
        usual.input_ring = 2;
        usual.stages[1].inputs.fill(Storage::Offload);
        let first = GroupDecisions { micro_batches: 4, times: 1, ..usual.clone() };
        usual = GroupDecisions { micro_batches: 2, times: (micro_batches - 4) / 2, ..usual };
        decisions.groups = vec![first, usual];
        let layers = &mut decisions.stages[1];
        (layers.weights, layers.gradients) = (streamed, streamed);
        layers.states_pinned = 0;
        let lowering = Lowering::new(&task, &profile).expect("a task that can be lowered");
        let plan = lowering.lower(&decisions).expect("decisions that work");
        (
            plan.instructions.len(),
            plan.values.len(),
            plan.bytes[Tier::DEVICE],
            plan.bytes[Tier::HOST],
        )
    });
    assert_eq!(sizes[0], sizes[1]);
    assert_eq!(sizes[0], sizes[2]);
}

/// The planner may group differently, so its own plans are measured per micro-batch of a group.
#[test]
fn the_planner_takes_any_accumulation() {
    let profile = profile("reference");
    for micro_batches in [4, 4096] {
        let task = real_task("qwen2.5-0.5b", 2, micro_batches);
        let planned = planned(&task, &profile, budget(gib(4), gib(32)));
        // First, middle and last group, each through all blocks and back, and an evaluation.
        let passes = 7 * task.forward.block_count() * planned.decisions.group_max();
        let length = planned.plan.instructions.len();
        assert!(length < 60 * passes, "{micro_batches} micro-batches: {length} instructions");
    }
}

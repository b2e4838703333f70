//! Stretches of the compute queue: what a device issues as one must be safe as one.

mod support;

use std::collections::BTreeSet;
use storm_plan::{InstructionId, Plan, Queue, SegmentId, Work, verify};
use support::toy::toy_plan;
use support::{oracle, tight_budget};

fn segments(plan: &Plan) -> impl Iterator<Item = SegmentId> + use<> {
    (0..plan.segments.len() as u32).map(SegmentId)
}

/// The plan as a device issues it that gives each stretch to its queue in place of the first instruction.
fn issued_as_one(plan: &Plan) -> Plan {
    let mut order: Vec<InstructionId> = Vec::new();
    for segment in segments(plan) {
        let mut stretches = plan.stretches(segment).into_iter();
        let mut issued = BTreeSet::new();
        for index in plan.segment(segment).instructions.clone() {
            let id = InstructionId(index as u32);
            if plan.queue(id) != Queue::COMPUTE {
                order.push(id);
            } else if !issued.contains(&id) {
                let stretch = stretches.next().expect("every instruction is in a stretch");
                assert_eq!(stretch.instructions[0], id);
                issued.extend(stretch.instructions.iter().copied());
                order.extend(stretch.instructions);
            }
        }
        assert!(stretches.next().is_none());
    }
    let mut position = vec![InstructionId(0); order.len()];
    for (new, old) in order.iter().enumerate() {
        position[old.index()] = InstructionId(new as u32);
    }
    let moved = |ids: &mut Vec<InstructionId>| {
        ids.iter_mut().for_each(|id| *id = position[id.index()]);
    };
    let mut issued = plan.clone();
    issued.instructions = order.iter().map(|&old| plan.instruction(old).clone()).collect();
    issued.instructions.iter_mut().for_each(|instruction| moved(&mut instruction.waits));
    for input in &mut issued.inputs {
        moved(&mut input.copies);
        moved(&mut input.fetches);
    }
    issued.results.iter_mut().for_each(|result| moved(&mut result.copies));
    issued
}

#[test]
fn a_plan_is_as_safe_with_each_stretch_issued_at_once() {
    let mut longer = 0;
    for seed in 0..300 {
        let plan = toy_plan(seed);
        let issued = issued_as_one(&plan);
        longer += usize::from(issued != plan);
        verify(&issued, tight_budget(&issued)).unwrap_or_else(|e| panic!("plan {seed}: {e}"));
        oracle::judge(&issued).unwrap_or_else(|e| panic!("plan {seed}: {e}"));
    }
    assert!(longer > 50, "only {longer} plans are issued in another order");
}

#[test]
fn stretches_end_where_other_queues_wait_and_begin_where_they_are_awaited() {
    for seed in 0..100 {
        let plan = toy_plan(seed);
        let awaited: BTreeSet<InstructionId> =
            plan.instructions.iter().flat_map(|instruction| instruction.waits.clone()).collect();
        for segment in segments(&plan) {
            let stretches = plan.stretches(segment);
            let all: Vec<InstructionId> =
                stretches.iter().flat_map(|stretch| stretch.instructions.clone()).collect();
            let range = plan.segment(segment).instructions.clone();
            let computes =
                |index: &usize| matches!(plan.instructions[*index].work, Work::Compute(_));
            let wanted: Vec<InstructionId> =
                range.filter(computes).map(|index| InstructionId(index as u32)).collect();
            assert_eq!(all, wanted, "plan {seed}");
            for stretch in &stretches {
                let ids = &stretch.instructions;
                let (first, last) = (ids[0], ids[ids.len() - 1]);
                for &id in ids {
                    assert!(id == first || plan.instruction(id).waits.is_empty(), "plan {seed}");
                    assert!(id == last || !awaited.contains(&id), "plan {seed}");
                }
            }
            // Two neighbours that could be one are.
            for pair in stretches.windows(2) {
                let last = pair[0].instructions[pair[0].instructions.len() - 1];
                let next = pair[1].instructions[0];
                assert!(
                    awaited.contains(&last) || !plan.instruction(next).waits.is_empty(),
                    "plan {seed}: {last:?} and {next:?} are apart for nothing"
                );
            }
        }
    }
}

//! Plans that the checker refuses because of how they are put together.

mod support;

use storm_graph::TensorClass;
use storm_plan::{
    CheckError, InstructionId, Operand, PerTier, Plan, Segment, Tier, ValueId, check,
};
use support::base::{ADD, BRING_W, TAKE_Y, W, Y, base, compute, copy_of, damaged, refused};
use support::small::{BLOCK, Kernel, empty, kernel, lasting, segment, value};

#[test]
fn tiers_have_an_end_and_a_budget() {
    let error = damaged(|plan| plan.bytes[Tier::DEVICE] -= 1);
    assert!(matches!(error, CheckError::OutOfBounds { tier: Tier::DEVICE, size: 767, .. }));
    let error = damaged(|plan| plan.bytes[Tier::HOST] -= 1);
    assert!(matches!(error, CheckError::OutOfBounds { tier: Tier::HOST, .. }));
    let error = damaged(|plan| copy_of(plan, BRING_W).to.offset = usize::MAX - 100);
    assert!(matches!(error, CheckError::OutOfBounds { tier: Tier::DEVICE, .. }));
    let plan = base();
    let budget = PerTier::new(767, 768);
    let error = check(plan, budget).unwrap_err();
    assert_eq!(error.to_string(), "the plan needs 768 device bytes, the budget is 767");
}

#[test]
fn places_must_be_aligned() {
    let error = damaged(|plan| {
        plan.bytes[Tier::DEVICE] += BLOCK;
        let add = compute(plan);
        (add.places[2], add.writes[0].offset) = (2 * BLOCK + 64, 2 * BLOCK + 64);
    });
    assert!(matches!(error, CheckError::Misaligned { offset: 576, alignment: 256, .. }), "{error}");
    let error = damaged(|plan| plan.lasting[0].places[0].offset = 300);
    assert!(matches!(error, CheckError::Misaligned { offset: 300, .. }), "{error}");
}

#[test]
fn everything_that_is_needed_has_an_address() {
    let error = damaged(|plan| {
        compute(plan).places.pop();
    });
    assert!(matches!(error, CheckError::NoAddress { .. }), "{error}");
    let error = damaged(|plan| {
        compute(plan).reads.remove(1);
    });
    assert!(error.to_string().ends_with("has no address for byte 0 of operand `b`"), "{error}");
    let error = damaged(|plan| plan.lasting[0].places.clear());
    assert!(matches!(error, CheckError::NoAddress { .. }), "{error}");
    let error = damaged(|plan| plan.lasting[0].pieces.push(W));
    assert!(error.to_string().contains("exactly its 256 bytes"), "{error}");
}

#[test]
fn values_must_make_up_what_is_touched() {
    let problem = |damage: &dyn Fn(&mut Plan)| match damaged(damage) {
        CheckError::BadCoverage { problem, .. } => problem,
        other => panic!("{other}"),
    };
    let extra = |plan: &mut Plan| {
        let read = Operand { value: Y, offset: 2 * BLOCK };
        compute(plan).reads.push(read);
    };
    assert_eq!(problem(&extra), "`y` is part of none of its tensors");
    let long = |plan: &mut Plan| {
        plan.values[Y.index()].size_bytes += BLOCK;
        copy_of(plan, TAKE_Y).bytes += BLOCK;
        plan.bytes[Tier::DEVICE] += BLOCK;
        plan.bytes[Tier::HOST] += BLOCK;
    };
    assert_eq!(problem(&long), "its values go beyond output `add`");
    assert_eq!(problem(&|plan| copy_of(plan, BRING_W).bytes -= 1), "`w` goes beyond the 255 bytes");
    assert_eq!(problem(&|plan| copy_of(plan, BRING_W).values.clear()), "it carries no value");
    let twice = |plan: &mut Plan| {
        let values = &mut copy_of(plan, BRING_W).values;
        values.push(values[0]);
    };
    assert_eq!(problem(&twice), "`w` lies over the value before it");
}

#[test]
fn a_kernel_may_overwrite_only_what_its_op_overwrites() {
    let error = damaged(|plan| {
        let add = compute(plan);
        (add.places[2], add.writes[0].offset) = (0, 0);
    });
    assert!(matches!(error, CheckError::Aliasing { must_share: false, .. }), "{error}");
    let mut plan = empty(4, 0);
    let [x, sum, partials] =
        ["x", "sum", "partials"].map(|name| value(&mut plan, name, TensorClass::Gradient));
    kernel(&mut plan, Kernel::Accumulate, &[(x, 0), (sum, 1)], &[(sum, 2), (partials, 3)], &[]);
    segment(&mut plan, "body", 1);
    lasting(&mut plan, x, &[(Tier::DEVICE, 0)]);
    lasting(&mut plan, sum, &[(Tier::DEVICE, 1)]);
    let error = refused(&plan);
    assert!(matches!(error, CheckError::Aliasing { must_share: true, .. }), "{error}");
}

#[test]
fn host_memory_of_inputs_and_results_is_theirs() {
    let problem = |damage: &dyn Fn(&mut Plan)| match damaged(damage) {
        CheckError::HostMemory { problem, .. } => problem,
        other => panic!("{other}"),
    };
    let unlisted = |plan: &mut Plan| plan.inputs[0].copies.clear();
    assert!(problem(&unlisted).ends_with("uses it, but is not one of its copies"));
    let never = |plan: &mut Plan| plan.results[0].copies.clear();
    assert_eq!(problem(&never), "no copy brings the result");
    let other = |plan: &mut Plan| plan.inputs[0].copies.push(InstructionId(TAKE_Y as u32));
    assert!(problem(&other).ends_with("is listed, but does not move it"));
    let overlap = |plan: &mut Plan| {
        let mut second = plan.inputs[0].clone();
        second.copies.clear();
        plan.inputs.push(second);
    };
    assert_eq!(problem(&overlap), "it overlaps that of `x`");
    let size = |plan: &mut Plan| plan.inputs[0].tensor.shape = storm_graph::Shape::scalar();
    assert_eq!(problem(&size), "its value `x` has 256 bytes");
}

#[test]
fn references_must_exist() {
    let what = |damage: &dyn Fn(&mut Plan)| match damaged(damage) {
        CheckError::Unknown { what, .. } => what,
        other => panic!("{other}"),
    };
    assert_eq!(what(&|plan| compute(plan).reads[0].value = ValueId(9)), "value");
    assert_eq!(what(&|plan| compute(plan).node = 9), "node");
    assert_eq!(what(&|plan| compute(plan).graph.0 = 9), "graph");
    assert_eq!(what(&|plan| plan.instructions[ADD].waits[0].0 = 9), "instruction");
    assert_eq!(what(&|plan| copy_of(plan, TAKE_Y).values[0].value = ValueId(9)), "value");
    assert_eq!(what(&|plan| plan.step[0].segment.0 = 9), "segment");
    assert_eq!(what(&|plan| plan.flush = Some(storm_plan::SegmentId(9))), "segment");
    assert_eq!(what(&|plan| plan.lasting[0].pieces[0] = ValueId(9)), "value");
    assert_eq!(what(&|plan| plan.inputs[0].copies[0].0 = 9), "instruction");
    assert_eq!(what(&|plan| plan.results[0].value = ValueId(9)), "value");
}

#[test]
fn every_instruction_runs_as_part_of_one_segment() {
    let problem = |damage: &dyn Fn(&mut Plan)| match damaged(damage) {
        CheckError::Segments { problem, .. } => problem,
        other => panic!("{other}"),
    };
    assert_eq!(problem(&|plan| plan.segments[0].instructions.end = 9), "instructions 0..9 of 4");
    assert_eq!(
        problem(&|plan| plan.segments[0].instructions.end = 3),
        "instruction 3 belongs to no segment"
    );
    assert_eq!(problem(&|plan| plan.step[0].times = 0), "never runs");
    let double = |plan: &mut Plan| {
        let segment = Segment { name: "again", ..plan.segments[0].clone() };
        plan.segments.push(segment);
    };
    assert_eq!(problem(&double), "shares instructions with another segment");
}

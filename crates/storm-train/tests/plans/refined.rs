//! A measured step corrects a profile that is off.

use crate::models::{budget, gib, planned, profile, real_task};
use storm_graph::Op;
use storm_plan::{
    HardwareProfile, InstructionId, LinkProfile, Plan, Work, instruction_seconds, simulate,
};

/// The time of each instruction of a step on that machine.
fn measured(plan: &Plan, machine: &HardwareProfile) -> Vec<(InstructionId, f64)> {
    let seconds = instruction_seconds(plan, machine);
    let segments = plan.step.iter().flat_map(|run| std::iter::repeat_n(run.segment, run.times));
    segments
        .flat_map(|segment| plan.segment(segment).instructions.clone())
        .map(|index| (InstructionId(index as u32), seconds[index]))
        .collect()
}

#[test]
fn a_step_corrects_the_profile() {
    let reference = profile("reference");
    let task = real_task("qwen2.5-0.5b", 4, 4);
    let plan = planned(&task, &reference, budget(gib(3), gib(64))).plan;
    let bus = reference.links[0];
    let machine = HardwareProfile {
        gemm_flops: reference.gemm_flops * 0.6,
        attention_forward_flops: reference.attention_forward_flops * 1.3,
        attention_backward_flops: reference.attention_backward_flops * 0.5,
        memory_bandwidth: reference.memory_bandwidth * 0.7,
        links: vec![LinkProfile {
            to_near_bandwidth: bus.to_near_bandwidth * 0.4,
            to_far_bandwidth: bus.to_far_bandwidth * 0.5,
            duplex_bandwidth: bus.duplex_bandwidth * 0.45,
            ..bus
        }],
        ..reference.clone()
    };
    let real = simulate(&plan, &machine).step_seconds;
    let before = simulate(&plan, &reference).step_seconds;
    assert!(real > 1.3 * before, "{real} and {before}");
    let refined = reference.refined(&plan, &measured(&plan, &machine));
    let after = simulate(&plan, &refined).step_seconds;
    assert!((after / real - 1.0).abs() < 0.02, "{after} s predicted, {real} s real");
    // Nothing changes if nothing was off.
    let same = reference.refined(&plan, &measured(&plan, &reference));
    let again = simulate(&plan, &same).step_seconds;
    assert!((again / before - 1.0).abs() < 1e-6, "{again} and {before}");
}

/// A step during which the machine stalled changes the profile only within bounds.
#[test]
fn a_disturbed_step_is_bounded() {
    let reference = profile("reference");
    let task = real_task("qwen2.5-0.5b", 1, 2);
    let plan = planned(&task, &reference, budget(gib(3), gib(64))).plan;
    let mut steps = measured(&plan, &reference);
    steps.iter_mut().for_each(|(_, seconds)| *seconds *= 1e6);
    let refined = reference.refined(&plan, &steps);
    assert!(refined.gemm_flops > reference.gemm_flops / 200.0);
    assert!(HardwareProfile::from_json(&refined.to_json()).is_ok());
}

/// A unit that the product before it computes takes no time. That says nothing about units that are computed alone.
#[test]
fn units_within_products_are_not_fast() {
    let reference = profile("reference");
    let task = real_task("qwen2.5-0.5b", 1, 2);
    let plan = planned(&task, &reference, budget(gib(3), gib(64))).plan;
    let is_unit = |id: InstructionId| {
        let Work::Compute(compute) = &plan.instruction(id).work else { return false };
        let nodes = plan.graphs[compute.graph.0 as usize].nodes();
        matches!(nodes[compute.node as usize].op, Op::SwiGlu { .. })
    };
    let units = |profile: &HardwareProfile| -> f64 {
        let seconds = instruction_seconds(&plan, profile);
        let ids = (0..seconds.len()).map(|index| InstructionId(index as u32));
        ids.filter(|&id| is_unit(id)).map(|id| seconds[id.index()]).sum()
    };
    let mut steps = measured(&plan, &reference);
    steps.iter_mut().for_each(|(id, seconds)| *seconds *= if is_unit(*id) { 0.01 } else { 0.5 });
    let refined = reference.refined(&plan, &steps);
    assert!(units(&reference) > 0.0);
    assert_eq!(units(&refined), units(&reference));
    // Units of their own are as fast as measured.
    let mut steps = measured(&plan, &reference);
    steps.iter_mut().for_each(|(_, seconds)| *seconds *= 0.5);
    assert!(units(&reference.refined(&plan, &steps)) < 0.6 * units(&reference));
}

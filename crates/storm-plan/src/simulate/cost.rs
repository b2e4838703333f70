//! What does not depend on when things happen: durations, bytes, work per queue.

use super::queues::Waited;
use super::{CLASSES, DIRECTIONS, Transfer};
use crate::plan::{Copy, Direction, Plan, Queue, Work};
use crate::profile::HardwareProfile;
use storm_graph::{Graph, Tensor, TensorClass};

/// By instruction: how long it takes on that hardware, copies slowed by those of the other direction
/// that they may meet in a step.
///
/// # Panics
/// If the plan refers to something that it does not have.
pub fn instruction_seconds(plan: &Plan, profile: &HardwareProfile) -> Vec<f64> {
    let slowdown = duplex_slowdown(plan, profile);
    let mut known: Vec<Vec<Option<f64>>> =
        plan.graphs.iter().map(|graph| vec![None; graph.nodes().len()]).collect();
    let seconds = plan.instructions.iter().map(|instruction| match &instruction.work {
        Work::Compute(compute) => {
            let (graph, node) = (compute.graph.0 as usize, compute.node as usize);
            *known[graph][node]
                .get_or_insert_with(|| node_seconds(profile, &plan.graphs[graph], node))
        }
        Work::Copy(copy) => {
            let to_device = copy.direction == Direction::ToDevice;
            let latency = profile.copy_latency_seconds;
            let moving = profile.copy_seconds(copy.bytes, to_device) - latency;
            latency + moving * slowdown[direction_index(copy.direction)]
        }
    });
    seconds.collect()
}

fn node_seconds(profile: &HardwareProfile, graph: &Graph, node: usize) -> f64 {
    let node = &graph.nodes()[node];
    let op = node.op.clone().map(|_, id| graph.tensor(id));
    let outputs: Vec<&Tensor> = node.outputs.iter().map(|&id| graph.tensor(id)).collect();
    profile.op_seconds(&op, &outputs)
}

/// By direction: how much longer copies take because the other direction shares the connection.
///
/// Both ways at once are slower only where `duplex_bandwidth` is less than the two together, and only
/// while both are busy. That time is not known before the simulation, so it is taken as large as it
/// can be: all of the direction that moves less, and as much time of the other one.
fn duplex_slowdown(plan: &Plan, profile: &HardwareProfile) -> [f64; 2] {
    let mut alone = [0.0; 2];
    for_each_copy(plan, |_, copy, times| {
        let to_device = copy.direction == Direction::ToDevice;
        let moving = profile.copy_seconds(copy.bytes, to_device) - profile.copy_latency_seconds;
        alone[direction_index(copy.direction)] += times as f64 * moving;
    });
    let together = profile.host_to_device_bandwidth + profile.device_to_host_bandwidth;
    let shared = (together / profile.duplex_bandwidth).max(1.0);
    let both = alone[0].min(alone[1]);
    alone.map(|alone| match alone > 0.0 {
        true => 1.0 + (shared - 1.0) * both / alone,
        false => 1.0,
    })
}

/// By queue: how long it works in a step.
pub(super) fn busy_seconds(plan: &Plan, seconds: &[f64]) -> [f64; Queue::ALL.len()] {
    let mut busy = [0.0; Queue::ALL.len()];
    for run in &plan.step {
        for index in plan.segment(run.segment).instructions.clone() {
            busy[plan.instructions[index].queue().index()] += run.times as f64 * seconds[index];
        }
    }
    busy
}

/// What moves in a step. Bytes between the values of a copy go with the next of them.
pub(super) fn transfers(plan: &Plan, seconds: &[f64], waited: &Waited) -> Vec<Transfer> {
    let mut totals = [[(0u64, 0.0); CLASSES.len()]; 2];
    for_each_copy(plan, |index, copy, times| {
        let totals = &mut totals[direction_index(copy.direction)];
        let mut counted = 0;
        for (operand, (class, share)) in copy.values.iter().zip(class_shares(plan, copy)) {
            let end = operand.offset + plan.value(operand.value).size_bytes;
            totals[class].0 += (end - counted) as u64 * times as u64;
            totals[class].1 += seconds[index] * share * times as f64;
            counted = end;
        }
    });
    let mut transfers = Vec::new();
    for (way, direction) in DIRECTIONS.into_iter().enumerate() {
        for (index, class) in CLASSES.into_iter().enumerate() {
            let (bytes, busy_seconds) = totals[way][index];
            let exposed_seconds = waited.exposed[way][index];
            if bytes > 0 {
                let transfer = Transfer { class, direction, bytes, busy_seconds, exposed_seconds };
                transfers.push(transfer);
            }
        }
    }
    transfers
}

/// Each value's class, as a position in [`CLASSES`], and its share of the bytes of the values.
pub(super) fn class_shares(plan: &Plan, copy: &Copy) -> impl Iterator<Item = (usize, f64)> {
    let size = |value| plan.value(value).size_bytes as f64;
    let total: f64 = copy.values.iter().map(|operand| size(operand.value)).sum();
    copy.values.iter().map(move |operand| {
        let value = plan.value(operand.value);
        (class_index(value.class), value.size_bytes as f64 / total.max(1.0))
    })
}

pub(super) fn direction_index(direction: Direction) -> usize {
    match direction {
        Direction::ToDevice => 0,
        Direction::ToHost => 1,
    }
}

fn class_index(class: TensorClass) -> usize {
    CLASSES.iter().position(|&known| known == class).expect("all classes are listed")
}

/// Every copy of a step: its position, and how often it runs.
fn for_each_copy(plan: &Plan, mut visit: impl FnMut(usize, &Copy, usize)) {
    for run in &plan.step {
        for index in plan.segment(run.segment).instructions.clone() {
            if let Work::Copy(copy) = &plan.instructions[index].work {
                visit(index, copy, run.times);
            }
        }
    }
}

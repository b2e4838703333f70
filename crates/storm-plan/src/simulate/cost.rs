//! What does not depend on timing: durations, bytes, work per queue.

use super::queues::Waited;
use super::{CLASSES, Transfer};
use crate::plan::{Copy, InstructionId, Plan, Work};
use crate::profile::HardwareProfile;
use crate::queue::{Link, PerQueue, Queue};
use storm_graph::{Graph, Tensor, TensorClass};

/// By instruction: its duration on that hardware. Copies are slowed by those in the opposite
/// direction that may overlap them in a step.
///
/// # Panics
/// If the plan refers to something that does not exist, or copies over a link that the profile does
/// not have.
pub fn instruction_seconds(plan: &Plan, profile: &HardwareProfile) -> Vec<f64> {
    let slowdown = duplex_slowdown(plan, profile);
    let mut known: Vec<Vec<Option<f64>>> =
        plan.graphs.iter().map(|graph| vec![None; graph.nodes().len()]).collect();
    let instructions = plan.instructions.iter().enumerate();
    let seconds = instructions.map(|(index, instruction)| match &instruction.work {
        Work::Compute(compute) => {
            let (graph, node) = (compute.graph.0 as usize, compute.node as usize);
            *known[graph][node]
                .get_or_insert_with(|| node_seconds(profile, &plan.graphs[graph], node))
        }
        Work::Collective(collective) => {
            let owned = collective.owned_bytes(plan);
            profile.collective_seconds(collective.kind, plan.rank, &owned)
        }
        Work::Copy(copy) => {
            let (link, queue) = (copy.link(), plan.queue(InstructionId(index as u32)));
            let latency = profile.link(link).latency_seconds;
            latency + moving_seconds(profile, copy.bytes, link) * slowdown[queue]
        }
        // A copy inside host memory.
        Work::Fetch(_) => 0.0,
        Work::ReadAhead(read) => profile.read_seconds(read.bytes),
    });
    let mut seconds: Vec<f64> = seconds.collect();
    slow_kernels(plan, profile, &mut seconds);
    seconds
}

/// Collectives take multiprocessors from the kernels beside them.
fn slow_kernels(plan: &Plan, profile: &HardwareProfile, seconds: &mut [f64]) {
    let (Some(link), Some(queue)) = (&profile.ranks, plan.links.rank_queue()) else { return };
    let busy = busy_seconds(plan, seconds);
    let factor = link.slowdown(busy[Queue::COMPUTE], busy[queue]);
    for (index, seconds) in seconds.iter_mut().enumerate() {
        if plan.queue(InstructionId(index as u32)) == Queue::COMPUTE {
            *seconds *= factor;
        }
    }
}

fn node_seconds(profile: &HardwareProfile, graph: &Graph, node: usize) -> f64 {
    let node = &graph.nodes()[node];
    let op = node.op.clone().map(|_, id| graph.tensor(id));
    let outputs: Vec<&Tensor> = node.outputs.iter().map(|&id| graph.tensor(id)).collect();
    profile.op_seconds(&op, &outputs)
}

/// Time of a copy without its latency.
fn moving_seconds(profile: &HardwareProfile, bytes: usize, link: Link) -> f64 {
    profile.copy_seconds(bytes, link) - profile.link(link).latency_seconds
}

/// By queue: how much longer copies take because the opposite direction shares the link.
///
/// Both directions at once are slower only if `duplex_bandwidth` is less than their sum, and only
/// while both are busy. That time is not known before the simulation, so its upper bound is used: the
/// whole time of the direction that moves less, and as much of the other.
fn duplex_slowdown(plan: &Plan, profile: &HardwareProfile) -> PerQueue<f64> {
    let mut alone = PerQueue::of_each(0.0);
    for_each_copy(plan, |queue, _, copy, times| {
        alone[queue] += times as f64 * moving_seconds(profile, copy.bytes, copy.link());
    });
    PerQueue::from_fn(|queue| {
        let link = plan.links.link(queue);
        let opposite = link.and_then(|link| plan.links.queue(link.reversed()));
        let (Some(link), Some(opposite)) = (link, opposite) else { return 1.0 };
        let both = alone[queue].min(alone[opposite]);
        if both <= 0.0 {
            return 1.0;
        }
        let [there, back] = [link, link.reversed()].map(|link| profile.link(link));
        let shared = ((there.bandwidth + back.bandwidth) / there.duplex_bandwidth).max(1.0);
        1.0 + (shared - 1.0) * both / alone[queue]
    })
}

/// How long each queue works in a step.
pub(super) fn busy_seconds(plan: &Plan, seconds: &[f64]) -> PerQueue<f64> {
    let mut busy = PerQueue::default();
    for run in &plan.step {
        for index in plan.segment(run.segment).instructions.clone() {
            busy[plan.queue(InstructionId(index as u32))] += run.times as f64 * seconds[index];
        }
    }
    busy
}

/// What a step copies. Bytes between the values of a copy count toward the next value.
pub(super) fn transfers(plan: &Plan, seconds: &[f64], waited: &Waited) -> Vec<Transfer> {
    let mut totals = PerQueue::of_each([(0u64, 0.0); CLASSES.len()]);
    for_each_copy(plan, |queue, index, copy, times| {
        let totals = &mut totals[queue];
        let mut counted = 0;
        for (operand, (class, share)) in copy.values.iter().zip(class_shares(plan, copy)) {
            let end = operand.offset + plan.value(operand.value).size_bytes;
            totals[class].0 += (end - counted) as u64 * times as u64;
            totals[class].1 += seconds[index] * share * times as f64;
            counted = end;
        }
    });
    let mut transfers = Vec::new();
    for queue in plan.queues() {
        for (index, class) in CLASSES.into_iter().enumerate() {
            let (bytes, busy_seconds) = totals[queue][index];
            let exposed_seconds = waited.exposed[queue][index];
            if bytes > 0 {
                transfers.push(Transfer { class, queue, bytes, busy_seconds, exposed_seconds });
            }
        }
    }
    transfers
}

/// Each value's class, as an index into [`CLASSES`], and its share of the bytes of the values.
pub(super) fn class_shares(plan: &Plan, copy: &Copy) -> impl Iterator<Item = (usize, f64)> {
    let size = |value| plan.value(value).size_bytes as f64;
    let total: f64 = copy.values.iter().map(|operand| size(operand.value)).sum();
    copy.values.iter().map(move |operand| {
        let value = plan.value(operand.value);
        (class_index(value.class), value.size_bytes as f64 / total.max(1.0))
    })
}

fn class_index(class: TensorClass) -> usize {
    CLASSES.iter().position(|&known| known == class).expect("all classes are listed")
}

/// Every copy of a step: its queue and index, and how often it runs.
fn for_each_copy(plan: &Plan, mut visit: impl FnMut(Queue, usize, &Copy, usize)) {
    for run in &plan.step {
        for index in plan.segment(run.segment).instructions.clone() {
            if let Work::Copy(copy) = &plan.instructions[index].work {
                visit(plan.queue(InstructionId(index as u32)), index, copy, run.times);
            }
        }
    }
}

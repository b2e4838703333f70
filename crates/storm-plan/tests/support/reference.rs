//! Queues at work, event by event, without any shortcut.

use std::collections::VecDeque;
use storm_graph::Tensor;
use storm_plan::{HardwareProfile, InstructionId, Plan, Run, Work};

/// What the host does next.
enum HostAction {
    /// Waits for these runs.
    Wait(Vec<usize>),
    Give(usize),
}

/// A run of an instruction.
struct Event {
    id: InstructionId,
    waits: Vec<usize>,
    given_out: f64,
    end: Option<f64>,
}

/// When everything is done. `Err` tells who is stuck.
pub(crate) fn run(plan: &Plan, runs: &[Run], profile: &HardwareProfile) -> Result<f64, String> {
    let (mut events, mut host) = expand(plan, runs);
    let mut host_time = 0.0f64;
    let mut queues: Vec<VecDeque<usize>> = plan.queues().map(|_| VecDeque::new()).collect();
    let mut free = vec![0.0f64; queues.len()];
    loop {
        let mut moved = false;
        while let Some(action) = host.front() {
            match action {
                HostAction::Wait(runs) => {
                    let ends: Option<Vec<f64>> = runs.iter().map(|&run| events[run].end).collect();
                    let Some(ends) = ends else { break };
                    host_time = ends.into_iter().fold(host_time, f64::max);
                }
                &HostAction::Give(run) => {
                    host_time += profile.launch_seconds;
                    events[run].given_out = host_time;
                    queues[plan.queue(events[run].id).index()].push_back(run);
                }
            }
            host.pop_front();
            moved = true;
        }
        for (queue, free) in queues.iter_mut().zip(&mut free) {
            while let Some(&run) = queue.front() {
                let ends: Option<Vec<f64>> =
                    events[run].waits.iter().map(|&wait| events[wait].end).collect();
                let Some(ends) = ends else { break };
                let start = ends.into_iter().fold(free.max(events[run].given_out), f64::max);
                *free = start + seconds(plan, events[run].id, profile);
                events[run].end = Some(*free);
                queue.pop_front();
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    match events.iter().find(|event| event.end.is_none()) {
        Some(event) => Err(format!("{} never ends", plan.describe(event.id))),
        None => Ok(free.into_iter().fold(host_time, f64::max)),
    }
}

fn expand(plan: &Plan, runs: &[Run]) -> (Vec<Event>, VecDeque<HostAction>) {
    let (mut events, mut host): (Vec<Event>, VecDeque<HostAction>) = Default::default();
    let mut last: Vec<Option<usize>> = vec![None; plan.instructions.len()];
    for run in runs {
        let instructions = plan.segment(run.segment).instructions.clone();
        let is_here = |copies: &[InstructionId]| {
            copies.iter().any(|copy| instructions.contains(&copy.index()))
        };
        for _ in 0..run.times {
            let inputs = plan
                .inputs
                .iter()
                .filter(|input| input.micro_batch.is_some() && !is_here(&input.fetches));
            let inputs = inputs.map(|input| &input.copies);
            let results = plan.results.iter().map(|result| &result.copies);
            let copies = inputs.chain(results).filter(|copies| is_here(copies)).flatten();
            host.push_back(HostAction::Wait(copies.filter_map(|c| last[c.index()]).collect()));
            for index in instructions.clone() {
                let id = InstructionId(index as u32);
                let waits = &plan.instruction(id).waits;
                let waits = waits.iter().filter_map(|wait| last[wait.index()]).collect();
                last[index] = Some(events.len());
                host.push_back(HostAction::Give(events.len()));
                events.push(Event { id, waits, given_out: 0.0, end: None });
            }
        }
    }
    (events, host)
}

/// Duration of an instruction, with the copies of each link on their own.
pub(crate) fn seconds(plan: &Plan, id: InstructionId, profile: &HardwareProfile) -> f64 {
    match &plan.instruction(id).work {
        Work::Copy(copy) => profile.copy_seconds(copy.bytes, copy.link()),
        Work::Fetch(_) => 0.0,
        Work::Collective(_) => unreachable!("toys run on one rank"),
        Work::ReadAhead(read) => {
            profile.data_bandwidth.map_or(0.0, |bandwidth| read.bytes as f64 / bandwidth)
        }
        Work::Compute(compute) => {
            let graph = &plan.graphs[compute.graph.0 as usize];
            let node = &graph.nodes()[compute.node as usize];
            let op = node.op.clone().map(|_, id| graph.tensor(id));
            let outputs: Vec<&Tensor> = node.outputs.iter().map(|&id| graph.tensor(id)).collect();
            profile.op_seconds(&op, &outputs)
        }
    }
}

//! The host's part in a step: which inputs it writes and which results it reads, and when.

use super::error::{Actor, CheckError};
use super::structure::{aligned, within};
use crate::plan::{Direction, InstructionId, Plan, Run, SegmentId, ValueId, Work};
use crate::tier::Tier;
use storm_graph::Tensor;

/// What the host does around the segments.
#[derive(Clone, Debug)]
pub(crate) struct HostWork {
    /// By segment: positions of the inputs that are written before each run of it.
    inputs: Vec<Vec<usize>>,
    /// By segment: positions of the results that arrive with a run of it. They have to be read
    /// before the next run of a segment that brings them.
    results: Vec<Vec<usize>>,
    /// By segment: positions of the inputs that it copies and that a step has once.
    once: Vec<Vec<usize>>,
}

impl HostWork {
    pub(crate) fn new(plan: &Plan) -> HostWork {
        let mut segment_of = vec![0; plan.instructions.len()];
        for (index, segment) in plan.segments.iter().enumerate() {
            segment_of[segment.instructions.clone()].fill(index);
        }
        let empty = vec![Vec::new(); plan.segments.len()];
        let mut work = HostWork { inputs: empty.clone(), results: empty.clone(), once: empty };
        let add = |lists: &mut Vec<Vec<usize>>, copies: &[InstructionId], index: usize| {
            for copy in copies {
                let list = &mut lists[segment_of[copy.index()]];
                if list.last() != Some(&index) {
                    list.push(index);
                }
            }
        };
        for (index, input) in plan.inputs.iter().enumerate() {
            let lists = if input.micro_batch.is_some() { &mut work.inputs } else { &mut work.once };
            add(lists, &input.copies, index);
        }
        for (index, result) in plan.results.iter().enumerate() {
            add(&mut work.results, &result.copies, index);
        }
        work
    }

    /// Inputs to write before a run of the segment.
    pub(crate) fn inputs(&self, segment: SegmentId) -> &[usize] {
        &self.inputs[segment.0 as usize]
    }

    /// Results that a run of the segment brings.
    pub(crate) fn results(&self, segment: SegmentId) -> &[usize] {
        &self.results[segment.0 as usize]
    }

    /// Inputs to write once, before all of the runs.
    pub(crate) fn inputs_at_start(&self, runs: &[Run]) -> Vec<usize> {
        let lists = runs.iter().map(|run| &self.once[run.segment.0 as usize]);
        let mut inputs: Vec<usize> = lists.flatten().copied().collect();
        inputs.sort_unstable();
        inputs.dedup();
        inputs
    }
}

/// Host memory of an input or a result.
struct Area<'a> {
    tensor: &'a Tensor,
    value: ValueId,
    start: usize,
    end: usize,
    copies: &'a [InstructionId],
    direction: Direction,
}

impl Area<'_> {
    fn error<T>(&self, problem: String) -> Result<T, CheckError> {
        Err(CheckError::HostMemory { tensor: self.tensor.name.clone(), problem })
    }
}

/// Only the listed copies touch the memory of inputs and results. As the host waits for these, it
/// does not matter when exactly it writes and reads.
pub(super) fn check(plan: &Plan) -> Result<(), CheckError> {
    let mut areas = areas(plan)?;
    areas.sort_by_key(|area| area.start);
    if let Some(pair) = areas.windows(2).find(|pair| pair[0].end > pair[1].start) {
        return pair[0].error(format!("it overlaps that of `{}`", pair[1].tensor.name));
    }
    for (index, instruction) in plan.instructions.iter().enumerate() {
        let Work::Copy(copy) = &instruction.work else { continue };
        let id = InstructionId(index as u32);
        let end = copy.host + copy.bytes;
        let from = areas.partition_point(|area| area.end <= copy.host);
        for area in areas[from..].iter().take_while(|area| area.start < end) {
            if !area.copies.contains(&id) {
                let actor = Actor::instruction(plan, id);
                return area.error(format!("{actor} uses it, but is not one of its copies"));
            }
        }
    }
    Ok(())
}

fn areas(plan: &Plan) -> Result<Vec<Area<'_>>, CheckError> {
    let inputs = plan.inputs.iter().map(|input| Area {
        tensor: &input.tensor,
        value: input.value,
        start: input.host,
        end: input.host,
        copies: &input.copies,
        direction: Direction::ToDevice,
    });
    let results = plan.results.iter().map(|result| Area {
        tensor: &result.tensor,
        value: result.value,
        start: result.host,
        end: result.host,
        copies: &result.copies,
        direction: Direction::ToHost,
    });
    let mut areas = Vec::new();
    for mut area in inputs.chain(results) {
        let size = plan.value(area.value).size_bytes;
        if size != area.tensor.size_bytes() {
            let value = &plan.value(area.value).name;
            return area.error(format!("its value `{value}` has {size} bytes"));
        }
        aligned(|| format!("`{}`", area.tensor.name), area.start)?;
        within(plan, || format!("`{}`", area.tensor.name), Tier::HOST, area.start, size)?;
        area.end += size;
        if area.copies.is_empty() && area.direction == Direction::ToHost {
            return area.error("no copy brings the result".to_owned());
        }
        for &id in area.copies {
            let moves_it = match &plan.instruction(id).work {
                Work::Compute(_) => false,
                Work::Copy(copy) => {
                    copy.direction == area.direction
                        && copy.values.iter().any(|operand| {
                            operand.value == area.value && copy.host + operand.offset == area.start
                        })
                }
            };
            if !moves_it {
                let actor = Actor::instruction(plan, id);
                return area.error(format!("{actor} is listed, but does not move it"));
            }
        }
        areas.push(area);
    }
    Ok(areas)
}

//! The host's part in a step: which inputs it writes, which results it reads, and when.

use super::error::{Actor, CheckError};
use super::structure::{aligned, within};
use crate::plan::{Compute, Copy, InstructionId, Place, Plan, Run, SegmentId, ValueId, Work};
use storm_graph::Tensor;

/// What the host does around the segments.
#[derive(Clone, Debug)]
pub(crate) struct HostWork {
    /// By segment: indices of the inputs that the host writes before each run of it: those that no fetch of
    /// the segment writes.
    inputs: Vec<Vec<usize>>,
    /// By segment: indices of the results that a run of it delivers. The host must read them
    /// before the next run of a segment that delivers them.
    results: Vec<Vec<usize>>,
    /// By segment: indices of the inputs that it copies and that are written once per step.
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
            for fetch in &input.fetches {
                lists[segment_of[fetch.index()]].retain(|&listed| listed != index);
            }
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

    /// Results that a run of the segment delivers.
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

/// What the host does with an area.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Use {
    /// The host writes it, and copies read it.
    Input,
    /// Copies write, and it reads.
    Result,
}

impl Use {
    /// The end of a copy that lies in the area.
    fn end(self, copy: &Copy) -> Place {
        match self {
            Use::Input => copy.from,
            Use::Result => copy.to,
        }
    }
}

/// Memory of an input or a result.
struct Area<'a> {
    tensor: &'a Tensor,
    value: ValueId,
    place: Place,
    bytes: usize,
    copies: &'a [InstructionId],
    used: Use,
}

impl Area<'_> {
    fn error<T>(&self, problem: String) -> Result<T, CheckError> {
        let (tensor, tier) = (self.tensor.name.clone(), self.place.tier);
        Err(CheckError::HostMemory { tensor, tier, problem })
    }

    fn end(&self) -> usize {
        self.place.offset + self.bytes
    }
}

/// Only the listed copies touch the memory of inputs and results. The host waits for those, so it
/// does not matter exactly when it writes and reads.
pub(super) fn check(plan: &Plan) -> Result<(), CheckError> {
    let mut areas = areas(plan)?;
    areas.sort_by_key(|area| area.place);
    let overlap = |pair: &[Area<'_>]| {
        let (first, second) = (&pair[0], pair[1].place);
        first.place.tier == second.tier && first.end() > second.offset
    };
    if let Some(pair) = areas.windows(2).find(|pair| overlap(pair)) {
        return pair[0].error(format!("it overlaps that of `{}`", pair[1].tensor.name));
    }
    for (index, instruction) in plan.instructions.iter().enumerate() {
        let Work::Copy(copy) = &instruction.work else { continue };
        let id = InstructionId(index as u32);
        for start in copy.ends() {
            let end = Place { offset: start.offset + copy.bytes, ..start };
            let before =
                |area: &Area<'_>| (area.place.tier, area.end()) <= (start.tier, start.offset);
            let from = areas.partition_point(before);
            for area in areas[from..].iter().take_while(|area| area.place < end) {
                if !area.copies.contains(&id) {
                    let actor = Actor::instruction(plan, id);
                    return area.error(format!("{actor} uses it, but is not one of its copies"));
                }
            }
        }
    }
    Ok(())
}

fn areas(plan: &Plan) -> Result<Vec<Area<'_>>, CheckError> {
    let inputs = plan.inputs.iter().map(|input| Area {
        tensor: &input.tensor,
        value: input.value,
        place: input.place,
        bytes: input.tensor.size_bytes(),
        copies: &input.copies,
        used: Use::Input,
    });
    let results = plan.results.iter().map(|result| Area {
        tensor: &result.tensor,
        value: result.value,
        place: result.place,
        bytes: result.tensor.size_bytes(),
        copies: &result.copies,
        used: Use::Result,
    });
    let mut areas = Vec::new();
    for area in inputs.chain(results) {
        let size = plan.value(area.value).size_bytes;
        if size != area.bytes {
            let value = &plan.value(area.value).name;
            return area.error(format!("its value `{value}` has {size} bytes"));
        }
        aligned(|| format!("`{}`", area.tensor.name), area.place.offset)?;
        within(plan, || format!("`{}`", area.tensor.name), area.place, size)?;
        if area.place.tier == Compute::TIER {
            return area
                .error("it is in the tier of the kernels, which the host does not use".to_owned());
        }
        if area.copies.is_empty() && area.used == Use::Result {
            return area.error("no copy brings the result".to_owned());
        }
        for &id in area.copies {
            let moves_it = match &plan.instruction(id).work {
                Work::Compute(_) | Work::Fetch(_) | Work::ReadAhead(_) | Work::Collective(_) => {
                    false
                }
                Work::Copy(copy) => {
                    let Place { tier, offset } = area.used.end(copy);
                    copy.values.iter().any(|operand| {
                        let place = Place { tier, offset: offset + operand.offset };
                        operand.value == area.value && place == area.place
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

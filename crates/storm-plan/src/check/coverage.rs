//! Checks that the values an instruction lists are the bytes it touches.

use super::error::{Actor, CheckError};
use super::structure::{aligned, check_collective, check_copy, check_fetch, within};
use crate::plan::{Compute, InstructionId, Operand, Place, Plan, Work};
use storm_graph::Graph;

/// A node's requirements on its memory.
#[derive(Clone, Debug)]
struct NodeNeeds {
    /// Name and size of the operands, then of the outputs.
    tensors: Vec<(String, usize)>,
    operand_count: usize,
    /// Indices of an operand and of the output that overwrites it.
    in_place: Vec<(usize, usize)>,
}

impl NodeNeeds {
    fn new(graph: &Graph, node: usize) -> NodeNeeds {
        let node = &graph.nodes()[node];
        let operands = node.op.operands();
        let operand_count = operands.len();
        let mut tensors: Vec<(String, usize)> = operands
            .into_iter()
            .map(|(role, id)| (format!("operand `{role}`"), graph.tensor(id).size_bytes()))
            .collect();
        tensors.extend(node.outputs.iter().map(|&id| {
            let tensor = graph.tensor(id);
            (format!("output `{}`", tensor.name), tensor.size_bytes())
        }));
        // By index rather than by tensor: one tensor may be two operands.
        let mut position = 0..;
        let positions = node.op.clone().map(|_, _| position.next().expect("endless"));
        let in_place = positions
            .in_place()
            .into_iter()
            .map(|(operand, output)| (operand, operand_count + output))
            .collect();
        NodeNeeds { tensors, operand_count, in_place }
    }
}

/// Bounds, alignment and values of every instruction.
pub(super) fn check(plan: &Plan) -> Result<(), CheckError> {
    let mut needs: Vec<Vec<Option<NodeNeeds>>> =
        plan.graphs.iter().map(|graph| vec![None; graph.nodes().len()]).collect();
    for (index, instruction) in plan.instructions.iter().enumerate() {
        let id = InstructionId(index as u32);
        match &instruction.work {
            Work::Copy(copy) => check_copy(plan, id, copy)?,
            Work::Fetch(fetch) => check_fetch(plan, id, fetch)?,
            Work::ReadAhead(_) => {}
            Work::Collective(collective) => check_collective(plan, id, collective)?,
            Work::Compute(compute) => {
                let (graph, node) = (compute.graph.0 as usize, compute.node as usize);
                let needs = needs[graph][node]
                    .get_or_insert_with(|| NodeNeeds::new(&plan.graphs[graph], node));
                ComputeCheck { plan, id, compute, needs }.run()?;
            }
        }
    }
    Ok(())
}

struct ComputeCheck<'a> {
    plan: &'a Plan,
    id: InstructionId,
    compute: &'a Compute,
    needs: &'a NodeNeeds,
}

impl ComputeCheck<'_> {
    fn run(&self) -> Result<(), CheckError> {
        let (places, tensors) = (&self.compute.places, &self.needs.tensors);
        if places.len() != tensors.len() {
            let whom = self.actor().to_string();
            let what = format!("{} tensors: it has {}", tensors.len(), places.len());
            return Err(CheckError::NoAddress { whom, what });
        }
        for (&place, (name, size)) in places.iter().zip(tensors) {
            let what = || format!("{name} of {}", self.actor());
            let at = |offset| Place { tier: Compute::TIER, offset };
            aligned(what, place)?;
            within(self.plan, what, at(place), *size)?;
        }
        let outputs = self.needs.operand_count..tensors.len();
        self.covered(&self.compute.reads, 0..self.needs.operand_count)?;
        self.covered(&self.compute.writes, outputs.clone())?;
        for &(operand, output) in &self.needs.in_place {
            if places[operand] != places[output] {
                return Err(self.aliasing(operand, output, true));
            }
        }
        for output in outputs {
            for other in (0..output).filter(|&other| self.overlap(other, output)) {
                if !self.needs.in_place.contains(&(other, output)) {
                    return Err(self.aliasing(other, output, false));
                }
            }
        }
        self.written_once()
    }

    /// The values lie end to end over each of these tensors, and nowhere else.
    fn covered(
        &self,
        operands: &[Operand],
        tensors: std::ops::Range<usize>,
    ) -> Result<(), CheckError> {
        let size = |operand: &Operand| self.plan.value(operand.value).size_bytes;
        // Empty tensors have values, but no bytes to check.
        let mut values: Vec<&Operand> = operands.iter().filter(|o| size(o) > 0).collect();
        values.sort_by_key(|operand| operand.offset);
        let mut used = vec![false; values.len()];
        for index in tensors {
            let (name, bytes) = &self.needs.tensors[index];
            let mut next = self.compute.places[index];
            let end = next + bytes;
            while next < end {
                let first = values.partition_point(|operand| operand.offset < next);
                let Some(value) = values.get(first).filter(|operand| operand.offset == next) else {
                    let whom = self.actor().to_string();
                    let what = format!("byte {} of {name}", bytes - (end - next));
                    return Err(CheckError::NoAddress { whom, what });
                };
                // An operand that is passed twice may be listed twice.
                let same = values[first..].iter().take_while(|operand| operand == &value).count();
                used[first..first + same].fill(true);
                next = next.saturating_add(size(value));
            }
            if next > end {
                return self.bad(format!("its values go beyond {name}"));
            }
        }
        match used.iter().position(|&used| !used) {
            None => Ok(()),
            Some(index) => {
                let value = &self.plan.value(values[index].value).name;
                self.bad(format!("`{value}` is part of none of its tensors"))
            }
        }
    }

    /// An instruction writes one new version of a value, so the value can be in only one place.
    fn written_once(&self) -> Result<(), CheckError> {
        let mut values: Vec<_> = self.compute.writes.iter().map(|operand| operand.value).collect();
        values.sort();
        match values.windows(2).find(|pair| pair[0] == pair[1]) {
            None => Ok(()),
            Some(pair) => self.bad(format!("writes `{}` twice", self.plan.value(pair[0]).name)),
        }
    }

    fn overlap(&self, a: usize, b: usize) -> bool {
        let bytes = |index: usize| {
            let start = self.compute.places[index];
            start..start + self.needs.tensors[index].1
        };
        let (a, b) = (bytes(a), bytes(b));
        a.start.max(b.start) < a.end.min(b.end)
    }

    fn actor(&self) -> Actor {
        Actor::instruction(self.plan, self.id)
    }

    fn bad(&self, problem: String) -> Result<(), CheckError> {
        Err(CheckError::BadCoverage { instruction: self.actor(), problem })
    }

    fn aliasing(&self, first: usize, second: usize, must_share: bool) -> CheckError {
        let name = |index: usize| self.needs.tensors[index].0.clone();
        let (first, second) = (name(first), name(second));
        CheckError::Aliasing { instruction: self.actor(), first, second, must_share }
    }
}

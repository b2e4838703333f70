//! Small damage to plans.

use super::access::accesses;
use super::random::Random;
use super::{oracle, tight_budget};
use storm_plan::{ALIGNMENT, Copy, InstructionId, Place, Plan, Tier, Work, verify};

/// One change of a plan.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Mutation {
    /// An instruction no longer waits for one of those that it waited for.
    RemoveWait { instruction: usize, wait: usize },
    /// A tensor of a kernel, with the values in it, lies elsewhere.
    ShiftTensor { instruction: usize, tensor: usize, by: isize },
    /// The device side of a copy lies elsewhere.
    ShiftDeviceSide { instruction: usize, by: isize },
    /// The host side of a copy lies elsewhere.
    ShiftHostSide { instruction: usize, by: isize },
    /// An input, with what fetches it, lies elsewhere.
    ShiftInput { input: usize, by: isize },
    /// More is read ahead than was fetched.
    ReadMore { instruction: usize },
    /// Two neighbours, one of which depends on the other, are issued the other way round.
    Swap { instruction: usize },
}

/// Every wait, every neighbourhood, and each address shifted by some random amount.
pub(crate) fn mutations(plan: &Plan, random: &mut Random) -> Vec<Mutation> {
    let mut all = Vec::new();
    for (instruction, content) in plan.instructions.iter().enumerate() {
        all.extend((0..content.waits.len()).map(|wait| Mutation::RemoveWait { instruction, wait }));
        let mut by = || {
            let blocks = (1 + random.below(6)) * ALIGNMENT;
            if random.chance(50) { blocks as isize } else { -(blocks as isize) }
        };
        match &content.work {
            Work::Compute(compute) => {
                all.extend((0..compute.places.len()).map(|tensor| Mutation::ShiftTensor {
                    instruction,
                    tensor,
                    by: by(),
                }))
            }
            Work::Copy(_) => {
                all.push(Mutation::ShiftDeviceSide { instruction, by: by() });
                all.push(Mutation::ShiftHostSide { instruction, by: by() });
            }
            Work::Fetch(fetch) => {
                let inputs = fetch.inputs.iter();
                all.extend(inputs.map(|&i| Mutation::ShiftInput { input: i as usize, by: by() }));
            }
            Work::ReadAhead(_) => all.push(Mutation::ReadMore { instruction }),
            Work::Collective(_) => unreachable!("toys run on one rank"),
        }
        if depends_on_next(plan, instruction) {
            all.push(Mutation::Swap { instruction });
        }
    }
    all
}

fn depends_on_next(plan: &Plan, index: usize) -> bool {
    let is_inside = |segment: &storm_plan::Segment| {
        segment.instructions.contains(&index) && segment.instructions.contains(&(index + 1))
    };
    if !plan.segments.iter().any(is_inside) {
        return false;
    }
    let (this, next) = (&plan.instructions[index], &plan.instructions[index + 1]);
    let touched = accesses(plan, next);
    next.waits.contains(&InstructionId(index as u32))
        || accesses(plan, this).iter().any(|a| touched.iter().any(|b| a.conflicts(b)))
}

/// The damaged plan; none if an address would be negative.
pub(crate) fn mutant(plan: &Plan, mutation: &Mutation) -> Option<Plan> {
    let mut plan = plan.clone();
    match *mutation {
        Mutation::RemoveWait { instruction, wait } => {
            plan.instructions[instruction].waits.remove(wait);
        }
        Mutation::ShiftTensor { instruction, tensor, by } => {
            let values = plan.values.clone();
            let Work::Compute(compute) = &mut plan.instructions[instruction].work else {
                unreachable!("kernels have tensors")
            };
            let node = &plan.graphs[compute.graph.0 as usize].nodes()[compute.node as usize];
            let operands = node.op.operands();
            let graph = &plan.graphs[compute.graph.0 as usize];
            let (id, list) = match operands.get(tensor) {
                Some(&(_, id)) => (id, &mut compute.reads),
                None => (node.outputs[tensor - operands.len()], &mut compute.writes),
            };
            let start = compute.places[tensor];
            let end = start + graph.tensor(id).size_bytes();
            compute.places[tensor] = start.checked_add_signed(by)?;
            for operand in list {
                let size = values[operand.value.index()].size_bytes;
                if operand.offset >= start && operand.offset + size <= end {
                    operand.offset = operand.offset.checked_add_signed(by)?;
                }
            }
        }
        Mutation::ShiftDeviceSide { instruction, by } => {
            let copy = copy(&mut plan, instruction);
            let end = end(copy, Tier::DEVICE);
            end.offset = end.offset.checked_add_signed(by)?;
        }
        Mutation::ShiftHostSide { instruction, by } => {
            let copy = copy(&mut plan, instruction);
            let end = end(copy, Tier::HOST);
            end.offset = end.offset.checked_add_signed(by)?;
        }
        Mutation::ShiftInput { input, by } => {
            let offset = &mut plan.inputs[input].place.offset;
            *offset = offset.checked_add_signed(by)?;
        }
        Mutation::ReadMore { instruction } => {
            if let Work::ReadAhead(read) = &mut plan.instructions[instruction].work {
                read.micro_batches += 1;
            }
        }
        Mutation::Swap { instruction } => {
            plan.instructions.swap(instruction, instruction + 1);
            let renamed = |id: &mut InstructionId| match id.index() {
                index if index == instruction => id.0 += 1,
                index if index == instruction + 1 => id.0 -= 1,
                _ => {}
            };
            plan.instructions.iter_mut().flat_map(|i| &mut i.waits).for_each(renamed);
            let inputs = plan.inputs.iter_mut();
            inputs.flat_map(|i| i.copies.iter_mut().chain(&mut i.fetches)).for_each(renamed);
            plan.results.iter_mut().flat_map(|r| &mut r.copies).for_each(renamed);
        }
    }
    Some(plan)
}

/// The end of a copy that is in a tier.
fn end(copy: &mut Copy, tier: Tier) -> &mut Place {
    let Copy { from, to, .. } = copy;
    if from.tier == tier { from } else { to }
}

fn copy(plan: &mut Plan, instruction: usize) -> &mut storm_plan::Copy {
    match &mut plan.instructions[instruction].work {
        Work::Copy(copy) => copy,
        _ => unreachable!("only copies have sides"),
    }
}

/// What became of mutants.
#[derive(Clone, Debug, Default)]
pub(crate) struct Verdicts {
    /// Unsafe, and refused.
    pub(crate) caught: usize,
    /// Unsafe, and accepted: what, and why the oracle thinks so.
    pub(crate) survivors: Vec<String>,
    /// Safe, and accepted.
    pub(crate) harmless: usize,
    /// Safe, but refused: the checker asks for more than safety.
    pub(crate) strict: Vec<String>,
}

impl Verdicts {
    pub(crate) fn total(&self) -> usize {
        self.caught + self.survivors.len() + self.harmless + self.strict.len()
    }

    /// Of those that are not safe.
    pub(crate) fn caught_share(&self) -> f64 {
        self.caught as f64 / (self.caught + self.survivors.len()).max(1) as f64
    }
}

/// Damages a plan in up to `limit` ways and compares the checker with the oracle.
pub(crate) fn try_mutants(
    name: &str,
    plan: &Plan,
    limit: usize,
    random: &mut Random,
    verdicts: &mut Verdicts,
) {
    let mut mutations = mutations(plan, random);
    while mutations.len() > limit {
        mutations.swap_remove(random.below(mutations.len()));
    }
    for mutation in mutations {
        let Some(mutant) = mutant(plan, &mutation) else { continue };
        match (verify(&mutant, tight_budget(&mutant)), oracle::judge(&mutant)) {
            (Err(_), Err(_)) => verdicts.caught += 1,
            (Ok(()), Ok(())) => verdicts.harmless += 1,
            (Err(error), Ok(())) => verdicts.strict.push(format!("{name}: {mutation:?}: {error}")),
            (Ok(()), Err(why)) => verdicts.survivors.push(format!("{name}: {mutation:?}: {why}")),
        }
    }
}

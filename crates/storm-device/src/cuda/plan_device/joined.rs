//! Joins neighboring instructions that do the same to different tensors: one launch for the updates
//! of a layer, two for the sums of squares of its gradients. Bits do not change, because the
//! kernels for several tensors run the code of those for one.

use super::super::context::Launch;
use super::super::join::{TENSORS_MAX, can_join, join};
use super::super::plan::Action;
use std::borrow::Cow;
use std::ops::Range;
use storm_plan::{InstructionId, Operands, Plan, Work};

/// The actions of instructions in a row, joined where possible.
pub(super) fn joined<'a>(
    plan: &Plan,
    ids: &[InstructionId],
    actions: impl Fn(InstructionId) -> &'a [Action],
) -> Vec<Cow<'a, Action>> {
    let mut list = Vec::new();
    let mut rest = ids;
    while let Some(&first) = rest.first() {
        let alike = |&id: &InstructionId| are_alike(actions(first), actions(id));
        let mut count = 1;
        while count < rest.len().min(TENSORS_MAX)
            && alike(&rest[count])
            && rest[..count].iter().all(|&before| are_independent(plan, before, rest[count]))
        {
            count += 1;
        }
        let (together, others) = rest.split_at(count);
        let parts: Vec<&[Action]> = together.iter().map(|&id| actions(id)).collect();
        match all_joined(&parts).filter(|_| count > 1) {
            Some(joined) => list.extend(joined.into_iter().map(Cow::Owned)),
            None => list.extend(parts.into_iter().flatten().map(Cow::Borrowed)),
        }
        rest = others;
    }
    list
}

/// Whether two instructions consist of launches that [`join`] can join, pair by pair.
fn are_alike(one: &[Action], other: &[Action]) -> bool {
    let pairs = || one.iter().zip(other);
    one.len() == other.len()
        && pairs().all(|pair| match pair {
            (Action::Launch(one), Action::Launch(other)) => can_join(one, other),
            _ => false,
        })
}

/// Joins the first launches of all parts, then the second ones, and so on.
fn all_joined(parts: &[&[Action]]) -> Option<Vec<Action>> {
    let launch_of = |action: &'_ Action| match action {
        Action::Launch(launch) => Some(launch.clone()),
        Action::Gemm(_) => None,
    };
    (0..parts[0].len())
        .map(|phase| {
            let launches = parts.iter().map(|part| launch_of(&part[phase]));
            let launches = launches.collect::<Option<Vec<Launch>>>()?;
            join(&launches.iter().collect::<Vec<_>>()).map(Action::Launch)
        })
        .collect()
}

/// Whether neither of two instructions touches what the other writes.
fn are_independent(plan: &Plan, one: InstructionId, other: InstructionId) -> bool {
    let [Some(one), Some(other)] = [one, other].map(|id| Touched::new(plan, id)) else {
        return false;
    };
    let apart = |some: &[Range<usize>], others: &[Range<usize>]| {
        some.iter().all(|a| others.iter().all(|b| a.end <= b.start || b.end <= a.start))
    };
    apart(&one.writes, &other.writes)
        && apart(&one.writes, &other.reads)
        && apart(&one.reads, &other.writes)
}

/// The bytes that an instruction reads and writes.
pub(super) struct Touched {
    pub(super) reads: Vec<Range<usize>>,
    pub(super) writes: Vec<Range<usize>>,
}

impl Touched {
    pub(super) fn new(plan: &Plan, id: InstructionId) -> Option<Touched> {
        let Work::Compute(compute) = &plan.instruction(id).work else { return None };
        let ranges = |operands: &Operands| {
            let range = |operand: &storm_plan::Operand| {
                let bytes = plan.value(operand.value).size_bytes;
                operand.offset..operand.offset + bytes
            };
            operands.iter().map(range).collect()
        };
        Some(Touched { reads: ranges(&compute.reads), writes: ranges(&compute.writes) })
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::context::{Argument, Joint, Kernel};
    use super::*;
    use storm_graph::TensorClass;
    use storm_plan::{Compute, GraphId, Instruction, Operand, Value, ValueId};

    const BYTES: usize = 256;

    /// Instructions that each read and write one range of [`BYTES`], given by their offsets.
    fn plan(accesses: &[(usize, usize)]) -> Plan {
        let class = TensorClass::Scratch;
        let value = Value { name: String::new(), size_bytes: BYTES, class };
        let at = |offset| Operands::from_iter([Operand { value: ValueId(0), offset }]);
        let instruction = |&(reads, writes): &(usize, usize)| {
            let (reads, writes) = (at(reads), at(writes));
            let (graph, places) = (GraphId(0), Default::default());
            let compute = Compute { graph, node: 0, layer: 0, places, reads, writes };
            Instruction { work: Work::Compute(compute), waits: Vec::new() }
        };
        let instructions = accesses.iter().map(instruction).collect();
        Plan { values: vec![value], instructions, ..Plan::default() }
    }

    fn launch(kernel: usize, address: u64) -> Action {
        Action::Launch(Launch {
            kernel: Kernel::named(kernel),
            grid: (1, 1, 1),
            block: 32,
            shared_bytes: 0,
            arguments: vec![Argument::Pointer(address)],
            begins_early: false,
            joint: Some(Joint { kernel: Kernel::named(kernel + 100), common: &[] }),
        })
    }

    /// Kernel and blocks of each launch.
    fn shown(list: &[Cow<'_, Action>]) -> Vec<(Kernel, u32)> {
        let show = |action: &Cow<'_, Action>| match action.as_ref() {
            Action::Launch(launch) => (launch.kernel, launch.grid.0),
            Action::Gemm(_) => panic!("a product"),
        };
        list.iter().map(show).collect()
    }

    fn of_plan(accesses: &[(usize, usize)], actions: &[Vec<Action>]) -> Vec<(Kernel, u32)> {
        let plan = plan(accesses);
        let ids: Vec<InstructionId> = plan.ids().collect();
        shown(&joined(&plan, &ids, |id| &actions[id.index()]))
    }

    #[test]
    fn neighbours_on_different_tensors_are_one_phase_by_phase() {
        let two_phases = |address| vec![launch(1, address), launch(2, address)];
        let actions = [two_phases(0), two_phases(1), two_phases(2), vec![launch(3, 0)]];
        let accesses = [(0, 1024), (256, 1280), (512, 1536), (768, 1792)];
        let expected = [(Kernel::named(101), 3), (Kernel::named(102), 3), (Kernel::named(3), 1)];
        assert_eq!(of_plan(&accesses, &actions), expected);
    }

    #[test]
    fn what_touches_what_another_writes_stays_apart() {
        let actions: Vec<Vec<Action>> = (0..2).map(|address| vec![launch(1, address)]).collect();
        let apart = [(Kernel::named(1), 1), (Kernel::named(1), 1)];
        for second in [(1024 + 255, 2048), (512, 1024 - 255), (512, 255)] {
            assert_eq!(of_plan(&[(0, 1024), second], &actions), apart, "{second:?}");
        }
        // Both may read the same bytes.
        assert_eq!(of_plan(&[(0, 1024), (0, 2048)], &actions), [(Kernel::named(101), 2)]);
        // The third depends on the first alone, but still cannot be joined with it.
        let actions: Vec<Vec<Action>> = (0..3).map(|address| vec![launch(1, address)]).collect();
        let found = of_plan(&[(0, 1024), (256, 2048), (1024, 512)], &actions);
        assert_eq!(found, [(Kernel::named(101), 2), (Kernel::named(1), 1)]);
    }

    #[test]
    fn a_launch_takes_only_so_many() {
        let count = TENSORS_MAX + 3;
        let actions: Vec<Vec<Action>> = (0..count).map(|n| vec![launch(1, n as u64)]).collect();
        let accesses: Vec<(usize, usize)> =
            (0..count).map(|n| (n * BYTES, (100 + n) * BYTES)).collect();
        let expected = [(Kernel::named(101), TENSORS_MAX as u32), (Kernel::named(101), 3)];
        assert_eq!(of_plan(&accesses, &actions), expected);
    }
}

//! A judge of plans that shares nothing with the checker: it follows all steps in full, finds out
//! who is ordered with whom by closing the relation, compares every pair, and moves contents around
//! in several orders.

mod world;

use super::access::{Access, accesses};
use std::collections::BTreeMap;
use std::ops::Range;
use storm_plan::{InstructionId, PerQueue, Place, Plan, Run, Tier, Work};
use world::{Order, World};

/// Why a plan is not safe; none if it is.
pub(crate) fn judge(plan: &Plan) -> Result<(), String> {
    for instruction in &plan.instructions {
        for access in accesses(plan, instruction) {
            let size = plan.bytes[access.tier];
            if access.bytes.end > size {
                return Err(format!("{access:?} is out of bounds"));
            }
        }
        aliasing(plan, instruction)?;
    }
    let step = History::of(plan, &plan.step);
    step.races()?;
    let mut programs = vec![&step, &step];
    let flush = plan.flush.map(|segment| History::of(plan, &[Run { segment, times: 1 }]));
    if let Some(flush) = &flush {
        flush.races()?;
        programs.insert(1, flush);
    }
    for order in
        [Order::GivenOut, Order::Queues([2, 1, 0]), Order::Queues([1, 0, 2]), Order::Random]
    {
        let mut world = World::at_rest(plan);
        for program in &programs {
            world.run(program, order)?;
        }
    }
    Ok(())
}

/// Outputs of a kernel lie apart from everything but the operands that they overwrite.
fn aliasing(plan: &Plan, instruction: &storm_plan::Instruction) -> Result<(), String> {
    let Work::Compute(compute) = &instruction.work else { return Ok(()) };
    let node = &plan.graphs[compute.graph.0 as usize].nodes()[compute.node as usize];
    let operands = node.op.operands().len();
    let mut position = 0..;
    let positions = node.op.clone().map(|_, _| position.next().expect("endless"));
    let mut shared = Vec::new();
    for (operand, output) in positions.in_place() {
        if compute.places[operand] != compute.places[operands + output] {
            return Err("an output is not over its operand".to_owned());
        }
        shared.push(compute.places[operand]);
    }
    let bytes = |operand: &storm_plan::Operand| {
        operand.offset..operand.offset + plan.value(operand.value).size_bytes
    };
    for (index, write) in compute.writes.iter().enumerate() {
        let write = bytes(write);
        let overlaps = |other: &Range<usize>| other.start < write.end && write.start < other.end;
        if compute.writes[..index].iter().map(bytes).any(|other| overlaps(&other)) {
            return Err("two outputs overlap".to_owned());
        }
        for read in compute.reads.iter().map(bytes).filter(overlaps) {
            // In place, piece over piece: the piece lies behind the shared place.
            if read != write || !shared.iter().any(|&place| place <= read.start) {
                return Err("an output overlaps an operand".to_owned());
            }
        }
    }
    Ok(())
}

/// Something that happens.
struct Event {
    kind: Kind,
    accesses: Vec<Access>,
    /// Which thread does it: a queue, or none for the host.
    queue: Option<usize>,
    /// Positions of those that are directly before it.
    after: Vec<usize>,
}

#[derive(Clone, Copy)]
enum Kind {
    Instruction(InstructionId),
    WriteInput(usize),
    ReadResult(usize),
}

/// All events from one barrier to the next.
struct History<'a> {
    plan: &'a Plan,
    events: Vec<Event>,
    /// By event: who is before it, as bits.
    ancestors: Vec<Vec<u64>>,
    /// Data that is read where none was fetched, or not at all.
    problem: Option<String>,
}

impl<'a> History<'a> {
    fn of(plan: &'a Plan, runs: &[Run]) -> History<'a> {
        let mut history =
            History { plan, events: Vec::new(), ancestors: Vec::new(), problem: None };
        let mut builder = HistoryBuilder::new(plan);
        let once = plan.inputs.iter().enumerate().filter(|(_, input)| input.micro_batch.is_none());
        for (index, input) in once {
            if runs.iter().any(|run| has_any(plan, run, &input.copies)) {
                builder.write_input(&mut history, index);
            }
        }
        for run in runs {
            for _ in 0..run.times {
                builder.segment(&mut history, run);
            }
        }
        if builder.fetched != builder.read {
            history.problem = Some(format!("{} of {} are read", builder.read, builder.fetched));
        }
        history.close();
        history
    }

    fn close(&mut self) {
        let words = self.events.len().div_ceil(64);
        for event in &self.events {
            let mut bits = vec![0u64; words];
            for &before in &event.after {
                bits[before / 64] |= 1 << (before % 64);
                for (bit, other) in bits.iter_mut().zip(&self.ancestors[before]) {
                    *bit |= other;
                }
            }
            self.ancestors.push(bits);
        }
    }

    fn is_before(&self, a: usize, b: usize) -> bool {
        self.ancestors[b][a / 64] >> (a % 64) & 1 == 1
    }

    fn races(&self) -> Result<(), String> {
        if let Some(problem) = &self.problem {
            return Err(problem.clone());
        }
        for (b, later) in self.events.iter().enumerate() {
            for (a, earlier) in self.events[..b].iter().enumerate() {
                let conflict = || {
                    earlier.accesses.iter().any(|x| later.accesses.iter().any(|y| x.conflicts(y)))
                };
                if !self.is_before(a, b) && conflict() {
                    return Err(format!("a race of {} and {}", self.name(a), self.name(b)));
                }
            }
        }
        Ok(())
    }

    fn name(&self, event: usize) -> String {
        match self.events[event].kind {
            Kind::Instruction(id) => self.plan.describe(id),
            Kind::WriteInput(index) => format!("input {index}"),
            Kind::ReadResult(index) => format!("result {index}"),
        }
    }
}

fn has_any(plan: &Plan, run: &Run, copies: &[InstructionId]) -> bool {
    let instructions = &plan.segment(run.segment).instructions;
    run.times > 0 && copies.iter().any(|copy| instructions.contains(&copy.index()))
}

struct HistoryBuilder<'a> {
    plan: &'a Plan,
    /// By instruction: its last run.
    last_run: BTreeMap<InstructionId, usize>,
    last_of_queue: PerQueue<Option<usize>>,
    /// Everything that the host has done or waited for.
    host_knows: Vec<usize>,
    /// By result: when the host reads it next.
    unread: BTreeMap<usize, usize>,
    /// Micro-batches of the step that were fetched, and of the next that were read in their place.
    fetched: usize,
    read: usize,
}

impl<'a> HistoryBuilder<'a> {
    fn new(plan: &'a Plan) -> HistoryBuilder<'a> {
        HistoryBuilder {
            plan,
            last_run: BTreeMap::new(),
            last_of_queue: PerQueue::default(),
            host_knows: Vec::new(),
            unread: BTreeMap::new(),
            fetched: 0,
            read: 0,
        }
    }

    fn segment(&mut self, history: &mut History<'a>, run: &Run) {
        let plan = self.plan;
        for (index, result) in plan.results.iter().enumerate() {
            if has_any(plan, run, &result.copies) {
                self.host_knows.extend(self.unread.remove(&index));
            }
        }
        for (index, input) in plan.inputs.iter().enumerate() {
            let is_fetched = has_any(plan, run, &input.fetches);
            if input.micro_batch.is_some() && !is_fetched && has_any(plan, run, &input.copies) {
                self.write_input(history, index);
            }
        }
        for index in plan.segment(run.segment).instructions.clone() {
            let id = InstructionId(index as u32);
            let instruction = plan.instruction(id);
            let queue = plan.queue(id);
            let mut after = self.host_knows.clone();
            after.extend(self.last_of_queue[queue]);
            after.extend(instruction.waits.iter().filter_map(|wait| self.last_run.get(wait)));
            let position = history.events.len();
            self.last_of_queue[queue] = Some(position);
            self.last_run.insert(id, position);
            let mut accesses = accesses(plan, instruction);
            accesses.extend(self.source(history, &instruction.work));
            let kind = Kind::Instruction(id);
            history.events.push(Event { kind, accesses, queue: Some(queue.index()), after });
        }
        for (index, result) in plan.results.iter().enumerate() {
            if has_any(plan, run, &result.copies) {
                let mut after = self.host_knows.clone();
                after.extend(result.copies.iter().filter_map(|copy| self.last_run.get(copy)));
                self.unread.insert(index, history.events.len());
                let Place { tier, offset } = result.place;
                let end = offset + plan.value(result.value).size_bytes;
                let access = Access { tier, bytes: offset..end, writes: false };
                let (kind, accesses) = (Kind::ReadResult(index), vec![access]);
                history.events.push(Event { kind, accesses, queue: None, after });
            }
        }
    }

    /// The memory of the source that is touched: a fetch takes from it what a read then replaces.
    fn source(&mut self, history: &mut History<'a>, work: &Work) -> Option<Access> {
        let (counter, count, writes) = match work {
            Work::Fetch(fetch) => (&mut self.fetched, fetch.micro_batches, false),
            Work::ReadAhead(read) => (&mut self.read, read.micro_batches, true),
            _ => return None,
        };
        let bytes = *counter..*counter + count;
        *counter = bytes.end;
        if self.read > self.fetched {
            history.problem = Some("data is read that replaces what was not fetched".to_owned());
        }
        // A tier that no plan has.
        let tier = Tier::HOST.behind().and_then(Tier::behind).expect("the last tier");
        Some(Access { tier, bytes, writes })
    }

    fn write_input(&mut self, history: &mut History<'a>, index: usize) {
        let input = &self.plan.inputs[index];
        let mut after = self.host_knows.clone();
        let before = input.copies.iter().chain(&input.fetches);
        after.extend(before.filter_map(|copy| self.last_run.get(copy)));
        self.host_knows.push(history.events.len());
        let Place { tier, offset } = input.place;
        let end = offset + self.plan.value(input.value).size_bytes;
        let access = Access { tier, bytes: offset..end, writes: true };
        let (kind, accesses) = (Kind::WriteInput(index), vec![access]);
        history.events.push(Event { kind, accesses, queue: None, after });
    }
}

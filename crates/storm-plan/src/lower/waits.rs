//! Derives the waits of instructions from the bytes they access.
//!
//! Walks instructions in issue order. If two instructions in different queues access the same bytes and at least one of
//! them writes, the later one waits for the earlier one, unless other waits already imply that.

use crate::plan::{Compute, Input, Instruction, InstructionId, Operand, Plan, Run, Work};
use crate::queue::Queue;
use crate::ranges::merged_ranges;
use crate::tier::{PerTier, Tier};
use std::ops::Range;
use storm_graph::work;

const QUEUES: usize = Queue::COUNT_MAX;

/// Progress of each queue: positions count from 1 over the whole walk.
type Clock = [u32; QUEUES];

/// Fills in the waits of every instruction.
pub(crate) fn add_waits(plan: &mut Plan) {
    let mut waits: Vec<Vec<InstructionId>> = vec![Vec::new(); plan.instructions.len()];
    // A repeated segment also conflicts with itself: two repetitions cover every pair of neighbors.
    let step: Vec<Run> =
        plan.step.iter().map(|run| Run { times: run.times.min(2), ..*run }).collect();
    let walk = Walk::new(plan);
    for segment in [plan.flush, plan.evaluation].into_iter().flatten() {
        walk.clone().run(&[Run { segment, times: 1 }], &mut waits);
    }
    walk.run(&step, &mut waits);
    for (instruction, waits) in plan.instructions.iter_mut().zip(waits) {
        instruction.waits = waits;
    }
}

/// The last accesses of a range of bytes, as positions in queues; 0 for none.
#[derive(Clone, Copy, Debug, Default)]
struct Touched {
    written: Option<(usize, u32)>,
    read: Clock,
}

impl Touched {
    /// Records an access to all of it, and raises `needed` to the accesses that must come before.
    fn touch(&mut self, queue: usize, position: u32, writes: bool, needed: &mut Clock) {
        if let Some((writer, at)) = self.written {
            needed[writer] = needed[writer].max(at);
        }
        if writes {
            for (need, &at) in needed.iter_mut().zip(&self.read) {
                *need = (*need).max(at);
            }
            self.written = Some((queue, position));
            self.read = Clock::default();
        } else {
            self.read[queue] = position;
        }
    }
}

/// A tier's bytes, split wherever an access starts or ends.
#[derive(Clone)]
struct Bytes {
    /// Where each part starts; it ends where the next one starts.
    starts: Vec<usize>,
    parts: Vec<Touched>,
}

impl Bytes {
    fn new(mut starts: Vec<usize>) -> Bytes {
        starts.sort_unstable();
        starts.dedup();
        Bytes { parts: vec![Touched::default(); starts.len()], starts }
    }

    /// Records an access, and raises `needed` to the accesses that must come before.
    fn touch(
        &mut self,
        range: Range<usize>,
        queue: usize,
        position: u32,
        writes: bool,
        needed: &mut Clock,
    ) {
        let first = self.starts.partition_point(|&start| start < range.start);
        for (start, part) in self.starts[first..].iter().zip(&mut self.parts[first..]) {
            work::count(1);
            if *start >= range.end {
                return;
            }
            part.touch(queue, position, writes, needed);
        }
    }
}

#[derive(Clone)]
struct Walk<'a> {
    plan: &'a Plan,
    /// The bytes in the kernels' tier that copies access. Kernels among themselves are ordered by their queue.
    shared: Vec<Range<usize>>,
    tiers: PerTier<Bytes>,
    /// By queue: the progress of all queues known when its next instruction starts.
    known: [Clock; QUEUES],
    /// By queue and position: the instruction, and the progress of all queues known when it is done.
    done: [Vec<(InstructionId, Clock)>; QUEUES],
    /// The last fetch: its queue and position there.
    fetched: Option<(usize, u32)>,
}

impl<'a> Walk<'a> {
    fn new(plan: &'a Plan) -> Walk<'a> {
        let shared = copied_ranges(plan);
        let tiers = cuts(plan, &shared).map(Bytes::new);
        let (known, done) = ([[0; QUEUES]; QUEUES], Default::default());
        Walk { plan, shared, tiers, known, done, fetched: None }
    }

    fn run(mut self, runs: &[Run], waits: &mut [Vec<InstructionId>]) {
        for run in runs {
            for _ in 0..run.times {
                for index in self.plan.segment(run.segment).instructions.clone() {
                    self.visit(index, &mut waits[index]);
                }
            }
        }
    }

    fn visit(&mut self, index: usize, waits: &mut Vec<InstructionId>) {
        let instruction: &Instruction = &self.plan.instructions[index];
        let id = InstructionId(index as u32);
        let queue = self.plan.queue(id).index();
        let position = self.done[queue].len() as u32 + 1;
        let mut needed: Clock = [0; QUEUES];
        match &instruction.work {
            Work::Compute(compute) => {
                for (operands, writes) in [(&compute.reads, false), (&compute.writes, true)] {
                    for range in operands.iter().map(|operand| bytes_of(self.plan, operand)) {
                        if is_shared(&self.shared, &range) {
                            let tier = &mut self.tiers[Compute::TIER];
                            tier.touch(range, queue, position, writes, &mut needed);
                        }
                    }
                }
            }
            Work::Copy(copy) => {
                for (place, writes) in [(copy.from, false), (copy.to, true)] {
                    let range = place.offset..place.offset + copy.bytes;
                    self.tiers[place.tier].touch(range, queue, position, writes, &mut needed);
                }
            }
            Work::Fetch(fetch) => {
                for input in self.plan.fetched(fetch) {
                    let (tier, range) = slot(self.plan, input);
                    self.tiers[tier].touch(range, queue, position, true, &mut needed);
                }
                self.fetched = Some((queue, position));
            }
            // It reads into the memory that the fetch before it frees.
            Work::ReadAhead(_) => {
                if let Some((fetching, position)) = self.fetched {
                    needed[fetching] = position;
                }
            }
            Work::Collective(collective) => {
                let reads = collective.reads().map(|operand| (operand, false));
                let writes = collective.writes().map(|(_, operand)| (operand, true));
                for (operand, writes) in reads.chain(writes) {
                    let range = bytes_of(self.plan, operand);
                    let tier = &mut self.tiers[Compute::TIER];
                    tier.touch(range, queue, position, writes, &mut needed);
                }
            }
        }
        // Waiting for one queue may imply progress of another, so go through the queues and add only waits that are not
        // implied.
        for other in (0..QUEUES).filter(|&other| other != queue) {
            if needed[other] > self.known[queue][other] {
                let (id, clock) = self.done[other][needed[other] as usize - 1];
                if !waits.contains(&id) {
                    waits.push(id);
                }
                join(&mut self.known[queue], &clock);
            }
        }
        self.known[queue][queue] = position;
        let clock = self.known[queue];
        self.done[queue].push((id, clock));
    }
}

fn join(clock: &mut Clock, other: &Clock) {
    for (mine, theirs) in clock.iter_mut().zip(other) {
        *mine = (*mine).max(*theirs);
    }
}

/// Where accesses start and end.
fn cuts(plan: &Plan, shared: &[Range<usize>]) -> PerTier<Vec<usize>> {
    let mut cuts = PerTier::<Vec<usize>>::default();
    for instruction in &plan.instructions {
        match &instruction.work {
            Work::Compute(compute) => {
                for operand in compute.reads.iter().chain(&compute.writes) {
                    let range = bytes_of(plan, operand);
                    if is_shared(shared, &range) {
                        cuts[Compute::TIER].extend([range.start, range.end]);
                    }
                }
            }
            Work::Copy(copy) => {
                for place in copy.ends() {
                    cuts[place.tier].extend([place.offset, place.offset + copy.bytes]);
                }
            }
            Work::Fetch(fetch) => {
                for input in plan.fetched(fetch) {
                    let (tier, range) = slot(plan, input);
                    cuts[tier].extend([range.start, range.end]);
                }
            }
            Work::ReadAhead(_) => {}
            Work::Collective(collective) => {
                for operand in collective.pieces.iter().flat_map(|piece| piece.operands()) {
                    let range = bytes_of(plan, operand);
                    cuts[Compute::TIER].extend([range.start, range.end]);
                }
            }
        }
    }
    cuts
}

fn bytes_of(plan: &Plan, operand: &Operand) -> Range<usize> {
    operand.offset..operand.offset + plan.value(operand.value).size_bytes
}

/// The memory that the host or a fetch writes.
fn slot(plan: &Plan, input: &Input) -> (Tier, Range<usize>) {
    let start = input.place.offset;
    (input.place.tier, start..start + plan.value(input.value).size_bytes)
}

/// The ranges in the kernels' tier that copies and collectives access, merged and sorted.
fn copied_ranges(plan: &Plan) -> Vec<Range<usize>> {
    let mut ranges: Vec<Range<usize>> = Vec::new();
    for instruction in &plan.instructions {
        match &instruction.work {
            Work::Copy(copy) => {
                let here = copy.ends().into_iter().filter(|end| end.tier == Compute::TIER);
                ranges.extend(here.map(|end| end.offset..end.offset + copy.bytes));
            }
            Work::Collective(collective) => {
                let operands = collective.pieces.iter().flat_map(|piece| piece.operands());
                ranges.extend(operands.map(|operand| bytes_of(plan, operand)));
            }
            Work::Compute(_) | Work::Fetch(_) | Work::ReadAhead(_) => {}
        }
    }
    merged_ranges(ranges)
}

fn is_shared(shared: &[Range<usize>], range: &Range<usize>) -> bool {
    let next = shared.partition_point(|known| known.end <= range.start);
    shared.get(next).is_some_and(|known| known.start < range.end)
}

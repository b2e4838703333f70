//! Contents of memory, moved around by a history in some order.

use super::{Event, History, Kind};
use crate::support::access::accesses;
use crate::support::random::Random;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use storm_plan::{PerTier, Place, Plan, Queue, Tier, ValueId, Work};

/// In which order events happen that are in no order.
#[derive(Clone, Copy)]
pub(super) enum Order {
    GivenOut,
    /// The first of these queues that can: kernels, and copies into the device and out of it.
    Queues([usize; 3]),
    Random,
}

/// A byte of something that was written once.
type Content = Option<(u64, usize)>;

/// Contents of both tiers, by ranges that are touched as a whole, and what each value should be.
pub(super) struct World<'a> {
    plan: &'a Plan,
    /// By tier: where ranges begin, and what lies there.
    memory: PerTier<BTreeMap<usize, Content>>,
    meaning: Vec<u64>,
    written: u64,
}

impl<'a> World<'a> {
    pub(super) fn at_rest(plan: &'a Plan) -> World<'a> {
        let meaning: Vec<u64> = (0..plan.values.len() as u64).collect();
        let written = meaning.len() as u64;
        let mut world = World { plan, memory: cells(plan), meaning, written };
        for (tier, bytes, value) in world.resting() {
            world.put(tier, bytes, world.meaning[value.index()]);
        }
        world
    }

    fn resting(&self) -> Vec<(Tier, Range<usize>, ValueId)> {
        let mut all = Vec::new();
        for lasting in &self.plan.lasting {
            for place in &lasting.places {
                let mut start = place.offset;
                for &value in &lasting.pieces {
                    let end = start + self.plan.value(value).size_bytes;
                    all.push((place.tier, start..end, value));
                    start = end;
                }
            }
            for &(piece, Place { tier, offset }) in &lasting.parts {
                let value = lasting.pieces[piece as usize];
                all.push((tier, offset..offset + self.plan.value(value).size_bytes, value));
            }
        }
        all
    }

    fn put(&mut self, tier: Tier, bytes: Range<usize>, what: u64) {
        let start = bytes.start;
        for (&at, content) in self.memory[tier].range_mut(bytes) {
            *content = Some((what, at - start));
        }
    }

    fn expect(&self, tier: Tier, bytes: Range<usize>, what: u64) -> Result<(), String> {
        for (&at, &content) in self.memory[tier].range(bytes.clone()) {
            if content != Some((what, at - bytes.start)) {
                return Err(format!("{what} was expected at {tier:?} {bytes:?}, not {content:?}"));
            }
        }
        Ok(())
    }

    pub(super) fn run(&mut self, history: &History<'_>, order: Order) -> Result<(), String> {
        let meanings = self.sequential_meaning(history);
        for event in linear(history, order) {
            self.happen(&history.events[event], &meanings[event])?;
        }
        for (tier, bytes, value) in self.resting() {
            self.expect(tier, bytes, self.meaning[value.index()])?;
        }
        Ok(())
    }

    /// By event: what it should find in each value that it reads, then what it writes.
    fn sequential_meaning(&mut self, history: &History<'_>) -> Vec<Vec<u64>> {
        let mut meanings = Vec::with_capacity(history.events.len());
        for event in &history.events {
            let (reads, writes): (Vec<ValueId>, Vec<ValueId>) = match event.kind {
                Kind::WriteInput(index) => (Vec::new(), vec![self.plan.inputs[index].value]),
                Kind::ReadResult(index) => (vec![self.plan.results[index].value], Vec::new()),
                Kind::Instruction(id) => match &self.plan.instruction(id).work {
                    Work::Copy(_) | Work::ReadAhead(_) => (Vec::new(), Vec::new()),
                    Work::Collective(_) => unreachable!("toys run on one rank"),
                    Work::Fetch(fetch) => {
                        let value = |&input: &u32| self.plan.inputs[input as usize].value;
                        (Vec::new(), fetch.inputs.iter().map(value).collect())
                    }
                    Work::Compute(compute) => (
                        compute.reads.iter().map(|operand| operand.value).collect(),
                        compute.writes.iter().map(|operand| operand.value).collect(),
                    ),
                },
            };
            let mut meaning: Vec<u64> = reads.iter().map(|v| self.meaning[v.index()]).collect();
            for value in writes {
                self.meaning[value.index()] = self.written;
                meaning.push(self.written);
                self.written += 1;
            }
            meanings.push(meaning);
        }
        meanings
    }

    fn happen(&mut self, event: &Event, meaning: &[u64]) -> Result<(), String> {
        let is_copy = matches!(event.kind, Kind::Instruction(id)
            if matches!(self.plan.instruction(id).work, Work::Copy(_)));
        if !is_copy {
            // What is behind the values is the memory of the source, whose contents are not followed.
            for (access, &what) in event.accesses.iter().zip(meaning) {
                match access.writes {
                    true => self.put(access.tier, access.bytes.clone(), what),
                    false => self.expect(access.tier, access.bytes.clone(), what)?,
                }
            }
            return Ok(());
        }
        let [from, to] = match &event.accesses[..] {
            [a, b] if b.writes => [a, b],
            [a, b] => [b, a],
            _ => unreachable!("a copy has two sides"),
        };
        let taken: Vec<(usize, Content)> = self.memory[from.tier]
            .range(from.bytes.clone())
            .map(|(&at, &content)| (at - from.bytes.start, content))
            .collect();
        let mut next = 0;
        for (&at, content) in self.memory[to.tier].range_mut(to.bytes.clone()) {
            let relative = at - to.bytes.start;
            while next + 1 < taken.len() && taken[next + 1].0 <= relative {
                next += 1;
            }
            let (start, source) = taken[next];
            *content = source.map(|(what, position)| (what, position + relative - start));
        }
        Ok(())
    }
}

/// Both tiers cut wherever anything begins or ends, on either side of a copy.
fn cells(plan: &Plan) -> PerTier<BTreeMap<usize, Content>> {
    let mut cells = PerTier::<BTreeMap<usize, Content>>::default();
    let mut cut = |tier: Tier, bytes: Range<usize>| {
        cells[tier].insert(bytes.start, None);
        cells[tier].insert(bytes.end, None);
    };
    for instruction in &plan.instructions {
        for access in accesses(plan, instruction) {
            cut(access.tier, access.bytes);
        }
        if let Work::Copy(copy) = &instruction.work {
            for operand in &copy.values {
                let size = plan.value(operand.value).size_bytes;
                for Place { tier, offset } in copy.ends() {
                    let start = offset + operand.offset;
                    cut(tier, start..start + size);
                }
            }
        }
    }
    for lasting in &plan.lasting {
        for place in &lasting.places {
            let mut start = place.offset;
            for &value in &lasting.pieces {
                let end = start + plan.value(value).size_bytes;
                cut(place.tier, start..end);
                start = end;
            }
        }
        for &(piece, Place { tier, offset }) in &lasting.parts {
            let value = lasting.pieces[piece as usize];
            cut(tier, offset..offset + plan.value(value).size_bytes);
        }
    }
    let inputs = plan.inputs.iter().map(|input| (input.place, input.value));
    let results = plan.results.iter().map(|result| (result.place, result.value));
    for (Place { tier, offset }, value) in inputs.chain(results) {
        cut(tier, offset..offset + plan.value(value).size_bytes);
    }
    cells
}

/// The events in an order that they may happen in: each thread does its own one by one.
fn linear(history: &History<'_>, order: Order) -> Vec<usize> {
    let count = history.events.len();
    if let Order::GivenOut = order {
        return (0..count).collect();
    }
    // The queues, then the host.
    let mut threads: [VecDeque<usize>; Queue::COUNT_MAX + 1] = Default::default();
    for (event, Event { queue, .. }) in history.events.iter().enumerate() {
        threads[queue.unwrap_or(Queue::COUNT_MAX)].push_back(event);
    }
    let mut random = Random(count as u64);
    let mut done = vec![false; count];
    let mut result = Vec::with_capacity(count);
    while result.len() < count {
        let is_ready = |&thread: &usize| {
            let next = threads[thread].front();
            next.is_some_and(|&event| history.events[event].after.iter().all(|&b| done[b]))
        };
        let ready: Vec<usize> = (0..threads.len()).filter(is_ready).collect();
        let thread = match order {
            Order::Queues(queues) => {
                let rank = |thread: &&usize| queues.iter().position(|queue| queue == *thread);
                *ready.iter().min_by_key(rank).expect("no cycles")
            }
            Order::Random | Order::GivenOut => random.pick(&ready),
        };
        let event = threads[thread].pop_front().expect("it is ready");
        done[event] = true;
        result.push(event);
    }
    result
}

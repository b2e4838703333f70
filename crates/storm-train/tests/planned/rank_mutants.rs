//! Damaged plans of ranks. An interpreter runs the plans of all ranks together, queue by queue in
//! random order, with symbols for contents. The checker must refuse all plans on which it
//! deadlocks, or which give other contents than the original plans.

use crate::ranks::{Case, large_vocabulary, plans_on_machines};
use crate::support::{options, tiny};
use std::collections::{BTreeMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use storm_graph::random::Random;
use storm_plan::{
    Collective, CollectiveKind, InstructionId, Lanes, Operand, Place, Plan, Queue, SegmentId, Tier,
    ValueId, Work, verify, verify_ranks,
};
use storm_train::{Precision, TrainOptions};

fn hash(of: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    hasher.finish()
}

/// Consecutive bytes of one symbol: how many, which symbol, and the offset of the first.
type Piece = (usize, u64, usize);

/// Contents of a tier.
#[derive(Clone, Default)]
struct Bytes {
    /// By first byte: the end, the symbol, and the offset of the first byte in it.
    ranges: BTreeMap<usize, (usize, u64, usize)>,
}

impl Bytes {
    fn split(&mut self, at: usize) {
        let Some((&start, &(end, symbol, first))) = self.ranges.range(..at).next_back() else {
            return;
        };
        if end > at {
            self.ranges.insert(start, (at, symbol, first));
            self.ranges.insert(at, (end, symbol, first + at - start));
        }
    }

    fn read(&mut self, bytes: Range<usize>) -> Vec<Piece> {
        self.split(bytes.start);
        self.split(bytes.end);
        let (mut found, mut next) = (Vec::<Piece>::new(), bytes.start);
        let mut push = |size: usize, symbol: u64, first: usize| match found.last_mut() {
            Some((known, same, begin)) if *same == symbol && *begin + *known == first => {
                *known += size;
            }
            _ if size > 0 => found.push((size, symbol, first)),
            _ => {}
        };
        for (&start, &(end, symbol, first)) in self.ranges.range(bytes.clone()) {
            push(start - next, 0, next);
            push(end - start, symbol, first);
            next = end;
        }
        push(bytes.end - next, 0, next);
        found
    }

    fn write(&mut self, start: usize, pieces: &[Piece]) {
        let size: usize = pieces.iter().map(|piece| piece.0).sum();
        self.split(start);
        self.split(start + size);
        let old: Vec<usize> = self.ranges.range(start..start + size).map(|(&at, _)| at).collect();
        for at in old {
            self.ranges.remove(&at);
        }
        let mut at = start;
        for &(size, symbol, first) in pieces {
            self.ranges.insert(at, (at + size, symbol, first));
            at += size;
        }
    }
}

/// An issued instruction, and how many runs of others it waits for.
type Issued = (usize, Vec<(usize, u64)>);

/// One rank in the middle of a step.
struct Rank<'a> {
    plan: &'a Plan,
    memory: BTreeMap<Tier, Bytes>,
    /// Segments that are not yet issued.
    left: VecDeque<SegmentId>,
    queues: BTreeMap<Queue, VecDeque<Issued>>,
    issued: Vec<u64>,
    done: Vec<u64>,
    inputs: u64,
}

impl<'a> Rank<'a> {
    fn new(plan: &'a Plan) -> Rank<'a> {
        let mut left = VecDeque::new();
        for run in &plan.step {
            left.extend(std::iter::repeat_n(run.segment, run.times));
        }
        left.extend(plan.flush);
        let count = plan.instructions.len();
        let mut rank = Rank {
            plan,
            memory: BTreeMap::new(),
            left,
            queues: BTreeMap::new(),
            issued: vec![0; count],
            done: vec![0; count],
            inputs: 0,
        };
        for (value, place) in resting(plan) {
            let symbol = hash(("start", &plan.value(value).name));
            rank.put(place, &[(plan.value(value).size_bytes, symbol, 0)]);
        }
        rank
    }

    fn put(&mut self, place: Place, pieces: &[Piece]) {
        self.memory.entry(place.tier).or_default().write(place.offset, pieces);
    }

    fn get(&mut self, place: Place, bytes: usize) -> Vec<Piece> {
        let range = place.offset..place.offset + bytes;
        self.memory.entry(place.tier).or_default().read(range)
    }

    fn read(&mut self, operand: &Operand) -> Vec<Piece> {
        let bytes = self.plan.value(operand.value).size_bytes;
        self.get(Place { tier: Tier::DEVICE, offset: operand.offset }, bytes)
    }

    /// Issues the next segment once the queues are empty. Returns whether it did.
    fn issue(&mut self) -> bool {
        if self.queues.values().any(|queue| !queue.is_empty()) {
            return false;
        }
        let Some(segment) = self.left.pop_front() else { return false };
        let plan = self.plan;
        for input in &plan.inputs {
            self.inputs += 1;
            // Micro-batches differ between ranks.
            let rank = input.micro_batch.map(|_| (plan.rank.rank, self.inputs));
            let symbol = hash(("input", &input.tensor.name, rank));
            self.put(input.place, &[(input.tensor.size_bytes(), symbol, 0)]);
        }
        for index in plan.segment(segment).instructions.clone() {
            let waits = plan.instructions[index].waits.iter();
            let waits = waits.map(|id| (id.index(), self.issued[id.index()])).collect();
            let queue = plan.queue(InstructionId(index as u32));
            self.queues.entry(queue).or_default().push_back((index, waits));
            self.issued[index] += 1;
        }
        true
    }

    /// The instructions that can run now.
    fn ready(&self) -> Vec<(Queue, usize)> {
        let heads = self.queues.iter().filter_map(|(&queue, line)| Some((queue, line.front()?)));
        let is_ready = |waits: &Vec<(usize, u64)>| waits.iter().all(|&(on, n)| self.done[on] >= n);
        heads.filter(|(_, (_, waits))| is_ready(waits)).map(|(q, head)| (q, head.0)).collect()
    }

    fn complete(&mut self, queue: Queue) {
        let (index, _) = self.queues.get_mut(&queue).and_then(VecDeque::pop_front).expect("a head");
        self.done[index] += 1;
    }

    /// Runs anything but a collective.
    fn run(&mut self, index: usize) {
        let plan = self.plan;
        match &plan.instructions[index].work {
            Work::Compute(compute) => {
                let graph = &plan.graphs[compute.graph.0 as usize];
                let node = &graph.nodes()[compute.node as usize];
                let read: Vec<Vec<Piece>> = compute.reads.iter().map(|o| self.read(o)).collect();
                for (number, operand) in compute.writes.iter().enumerate() {
                    let symbol = hash((node.op.name(), &node.name, compute.layer, &read, number));
                    let place = Place { tier: Tier::DEVICE, offset: operand.offset };
                    self.put(place, &[(plan.value(operand.value).size_bytes, symbol, 0)]);
                }
            }
            Work::Copy(copy) => {
                let pieces = self.get(copy.from, copy.bytes);
                self.put(copy.to, &pieces);
            }
            Work::Fetch(fetch) => {
                for input in plan.fetched(fetch) {
                    self.inputs += 1;
                    let symbol = hash(("fetched", plan.rank.rank, self.inputs));
                    self.put(input.place, &[(input.tensor.size_bytes(), symbol, 0)]);
                }
            }
            Work::ReadAhead(_) => {}
            Work::Collective(_) => unreachable!("ranks run it together"),
        }
    }

    fn collective(&self, index: usize) -> Option<&'a Collective> {
        match &self.plan.instructions[index].work {
            Work::Collective(collective) => Some(collective),
            _ => None,
        }
    }
}

/// All persistent values, at all their places.
fn resting(plan: &Plan) -> Vec<(ValueId, Place)> {
    let mut found = Vec::new();
    for lasting in &plan.lasting {
        for place in &lasting.places {
            let mut offset = place.offset;
            for &value in &lasting.pieces {
                found.push((value, Place { offset, ..*place }));
                offset += plan.value(value).size_bytes;
            }
        }
        found.extend(lasting.parts.iter().map(|&(at, p)| (lasting.pieces[at as usize], p)));
    }
    found
}

/// The contents of all ranks after a step and a flush, or why there are none.
fn interpret(plans: &[&Plan], seed: u64) -> Result<Vec<Vec<Piece>>, String> {
    let mut random = Random(seed);
    let mut ranks: Vec<Rank<'_>> = plans.iter().map(|plan| Rank::new(plan)).collect();
    loop {
        let mut moves = Vec::new();
        let mut waiting = Vec::new();
        for (number, rank) in ranks.iter_mut().enumerate() {
            rank.issue();
            for (queue, index) in rank.ready() {
                match rank.collective(index) {
                    Some(collective) => waiting.push((queue, index, collective)),
                    None => moves.push((number, queue, index)),
                }
            }
        }
        // Ranks that exchange nothing with each other meet as well, because all call every
        // collective.
        let meets = waiting.len() == plans.len();
        if moves.is_empty() && !meets {
            break;
        }
        let choice = random.below(moves.len() + usize::from(meets));
        if let Some(&(number, queue, index)) = moves.get(choice) {
            ranks[number].run(index);
            ranks[number].complete(queue);
            continue;
        }
        let all: Vec<&Collective> = waiting.iter().map(|&(.., collective)| collective).collect();
        meet(&mut ranks, &all)?;
        for (rank, (queue, ..)) in ranks.iter_mut().zip(waiting) {
            rank.complete(queue);
        }
    }
    if ranks.iter().any(|rank| rank.queues.values().any(|queue| !queue.is_empty())) {
        return Err("deadlock".to_owned());
    }
    let mut found = Vec::new();
    for rank in &mut ranks {
        for (value, place) in resting(rank.plan) {
            found.push(rank.get(place, rank.plan.value(value).size_bytes));
        }
        for result in rank.plan.results.iter().filter(|result| result.micro_batch.is_none()) {
            found.push(rank.get(result.place, result.tensor.size_bytes()));
        }
    }
    Ok(found)
}

/// The ranks that receive a piece: one rank of the sender's machine, the owner, or all.
fn receivers(rank: u32, plan: &Plan, kind: CollectiveKind, owner: u32) -> Vec<u32> {
    let machine = plan.rank.machine;
    match kind {
        CollectiveKind::Exchange => vec![rank / machine * machine + owner % machine],
        CollectiveKind::ExchangeSums => vec![owner],
        CollectiveKind::Gather => (0..plan.rank.ranks).collect(),
    }
}

/// Pieces that one rank sends to another, each with its owner, in the order of sending.
type Messages = VecDeque<(u32, Vec<Piece>)>;

/// One collective of all ranks. Each sends a message to each, and pieces arrive in the order of
/// sending.
fn meet(ranks: &mut [Rank<'_>], all: &[&Collective]) -> Result<(), String> {
    let kind = all[0].kind;
    if all.iter().any(|other| other.kind != kind) {
        return Err("ranks meet in different collectives".to_owned());
    }
    let mut messages: BTreeMap<(u32, u32), Messages> = BTreeMap::new();
    for (number, collective) in (0..).zip(all) {
        let rank = &mut ranks[number as usize];
        for piece in &collective.pieces {
            let Some(sent) = &piece.sent else { continue };
            let contents = rank.read(sent);
            for to in receivers(number, rank.plan, kind, piece.owner) {
                if to == number && kind != CollectiveKind::Gather {
                    return Err("a rank sends to itself".to_owned());
                }
                let sent = (piece.owner, contents.clone());
                messages.entry((number, to)).or_default().push_back(sent);
            }
        }
    }
    for (number, collective) in (0..).zip(all) {
        let rank = &mut ranks[number as usize];
        for piece in &collective.pieces {
            for (from, operand) in &piece.received {
                let message = messages.get_mut(&(*from, number));
                let sent = message.and_then(VecDeque::pop_front).ok_or("nothing was sent")?;
                let size: usize = sent.1.iter().map(|piece| piece.0).sum();
                if size != rank.plan.value(operand.value).size_bytes || sent.0 != piece.owner {
                    return Err("another piece arrives".to_owned());
                }
                rank.put(Place { tier: Tier::DEVICE, offset: operand.offset }, &sent.1);
            }
        }
    }
    // An owner need not receive its own piece.
    let left = messages.iter().any(|((from, to), left)| from != to && !left.is_empty());
    if left { Err("a message is not received".to_owned()) } else { Ok(()) }
}

/// Every collective of a plan.
fn collectives(plan: &Plan) -> Vec<usize> {
    let is_one = |&index: &usize| matches!(plan.instructions[index].work, Work::Collective(_));
    (0..plan.instructions.len()).filter(is_one).collect()
}

fn collective(plan: &mut Plan, index: usize) -> &mut Collective {
    match &mut plan.instructions[index].work {
        Work::Collective(collective) => collective,
        _ => unreachable!("a collective"),
    }
}

/// Swaps two neighbors, and renames references to them.
fn swap_neighbours(plan: &mut Plan, first: usize) {
    plan.instructions.swap(first, first + 1);
    let renamed = |id: &mut InstructionId| match id.index() {
        index if index == first => id.0 += 1,
        index if index == first + 1 => id.0 -= 1,
        _ => {}
    };
    plan.instructions.iter_mut().flat_map(|i| &mut i.waits).for_each(renamed);
    let inputs = plan.inputs.iter_mut();
    inputs.flat_map(|i| i.copies.iter_mut().chain(&mut i.fetches)).for_each(renamed);
    plan.results.iter_mut().flat_map(|r| &mut r.copies).for_each(renamed);
}

/// Makes one change to a plan, and describes it. `None` if it does not apply here.
fn damage(plan: &mut Plan, random: &mut Random) -> Option<String> {
    let all = collectives(plan);
    let index = all[random.below(all.len())];
    let other = all[random.below(all.len())];
    let inside =
        plan.segments.iter().find(|s| s.instructions.contains(&index))?.instructions.clone();
    let kind = random.below(12);
    let needs_pieces = (4..10).contains(&kind);
    if needs_pieces && [index, other].iter().any(|&at| collective(plan, at).pieces.is_empty()) {
        return None;
    }
    match kind {
        0 => {
            let waiters: Vec<usize> = (0..plan.instructions.len())
                .filter(|&i| {
                    let waits = &plan.instructions[i].waits;
                    waits.iter().any(|id| all.contains(&id.index()))
                        || (i == index && !waits.is_empty())
                })
                .collect();
            let waiter = *waiters.get(random.below(waiters.len().max(1)))?;
            let waits = &mut plan.instructions[waiter].waits;
            let which = random.below(waits.len());
            waits.remove(which);
        }
        1 => {
            let works = [index, other].map(|at| plan.instructions[at].work.clone());
            let [one, two] = works;
            (plan.instructions[index].work, plan.instructions[other].work) = (two, one);
        }
        // Past its neighbors, far enough to change what it meets.
        2 | 3 => {
            let steps = 1 + random.below(12);
            let mut at = index;
            for _ in 0..steps {
                if kind == 2 && at > inside.start {
                    at -= 1;
                    swap_neighbours(plan, at);
                } else if kind == 3 && at + 1 < inside.end {
                    swap_neighbours(plan, at);
                    at += 1;
                }
            }
        }
        4 => {
            let ranks = plan.rank.ranks;
            let pieces = &mut collective(plan, index).pieces;
            let which = random.below(pieces.len());
            pieces[which].owner = (pieces[which].owner + 1) % ranks;
        }
        5 => {
            let pieces = &mut collective(plan, index).pieces;
            let (one, two) = (random.below(pieces.len()), random.below(pieces.len()));
            pieces.swap(one, two);
        }
        6 => drop({
            let pieces = &mut collective(plan, index).pieces;
            let which = random.below(pieces.len());
            pieces.remove(which)
        }),
        7 | 8 => {
            let by = 256 * (1 + random.below(8));
            let pieces = &mut collective(plan, index).pieces;
            let which = random.below(pieces.len());
            let piece = &mut pieces[which];
            let mut operands: Vec<&mut Operand> = piece.sent.iter_mut().collect();
            operands.extend(piece.received.iter_mut().map(|(_, operand)| operand));
            let which = random.below(operands.len());
            let operand = &mut operands[which];
            operand.offset =
                if kind == 7 { operand.offset + by } else { operand.offset.checked_sub(by)? };
        }
        9 => {
            let theirs = collective(plan, other).pieces[0].clone();
            let pieces = &mut collective(plan, index).pieces;
            let which = random.below(pieces.len());
            match (&mut pieces[which].sent, theirs.sent) {
                (Some(own), Some(theirs)) => *own = theirs,
                _ => pieces[which].received = theirs.received,
            }
        }
        10 => collective(plan, index).pieces.clear(),
        _ => {
            let kinds =
                [CollectiveKind::Exchange, CollectiveKind::ExchangeSums, CollectiveKind::Gather];
            collective(plan, index).kind = kinds[random.below(kinds.len())];
        }
    }
    Some(format!("damage {kind} of instruction {index}, and {other}"))
}

#[derive(Default, Debug)]
struct Verdicts {
    caught: usize,
    harmless: usize,
    strict: usize,
    survivors: Vec<String>,
}

/// Damages one of the plans of some ranks in many ways.
fn try_mutants(case: Case<'_>, machines: (u32, u32), count: usize, verdicts: &mut Verdicts) {
    let plans = plans_on_machines(case, machines);
    let plans: Vec<Plan> = plans.into_iter().map(|p| p.into_plan()).collect();
    let all: Vec<&Plan> = plans.iter().collect();
    let expected = interpret(&all, 1).expect("plans that work");
    assert_eq!(interpret(&all, 2).expect("plans that work"), expected, "the order matters");
    let mut random = Random(case.3);
    for number in 0..count {
        let victim = random.below(plans.len());
        let mut damaged = plans[victim].clone();
        let Some(what) = damage(&mut damaged, &mut random) else { continue };
        if damaged == plans[victim] {
            continue;
        }
        let mut all: Vec<&Plan> = plans.iter().collect();
        all[victim] = &damaged;
        let accepted = verify(&damaged, damaged.bytes).is_ok() && verify_ranks(&all).is_ok();
        let mut wrong = None;
        // The interpreter needs addresses that exist.
        for seed in 0..if accepted { 6 } else { 2 } {
            match interpret(&all, seed) {
                Ok(found) if found == expected => {}
                Ok(_) => wrong = Some("other contents".to_owned()),
                Err(why) => wrong = Some(why),
            }
        }
        match (accepted, wrong) {
            (true, Some(why)) => verdicts
                .survivors
                .push(format!("seed {}, mutant {number}, rank {victim}: {what}: {why}", case.3)),
            (true, None) => verdicts.harmless += 1,
            (false, Some(_)) => verdicts.caught += 1,
            (false, None) => verdicts.strict += 1,
        }
    }
}

/// At least 1,000 pairs, and ten times as many with `STORM_LONG_TESTS=1`.
#[test]
fn damaged_plans_of_ranks_are_refused() {
    let times = if std::env::var_os("STORM_LONG_TESTS").is_some() { 10 } else { 1 };
    let mut verdicts = Verdicts::default();
    let small = tiny("llama-3.2-1b");
    let large = large_vocabulary();
    for seed in 0..6 {
        let config = if seed % 2 == 0 { &small } else { &large };
        let precision = if seed % 3 == 0 { Precision::F32 } else { Precision::Bf16Master };
        let ranks = if seed == 5 { 4 } else { 2 };
        let lanes = if seed % 2 == 0 { 4 } else { ranks as usize };
        let options = TrainOptions { lanes: lanes.into(), ..options(precision) };
        let case = (config, &options, lanes, seed);
        try_mutants(case, (ranks, ranks), 250 * times, &mut verdicts);
    }
    assert!(verdicts.survivors.is_empty(), "{verdicts:#?}");
    assert!(verdicts.caught > 600 * times, "too few are unsafe: {verdicts:?}");
    assert!(verdicts.harmless > 5 * times, "too few are safe: {verdicts:?}");
}

/// The same on two levels, where exchanges are among some of the ranks: two machines of two ranks,
/// with one lane each and with two, and three machines.
#[test]
fn damaged_plans_of_machines_are_refused() {
    let times = if std::env::var_os("STORM_LONG_TESTS").is_some() { 10 } else { 1 };
    let mut verdicts = Verdicts::default();
    let (small, large) = (tiny("llama-3.2-1b"), large_vocabulary());
    let cases = [(&large, "2x2", 4), (&small, "4x2", 4), (&large, "4x2", 4), (&large, "3x2", 6)];
    for (seed, (config, lanes, ranks)) in (0..).zip(cases) {
        let lanes: Lanes = lanes.parse().expect("lanes");
        let precision = if seed % 2 == 0 { Precision::Bf16Master } else { Precision::F32 };
        let options = TrainOptions { lanes, ..options(precision) };
        let case = (config, &options, lanes.count(), seed);
        try_mutants(case, (ranks, 2), 150 * times, &mut verdicts);
    }
    assert!(verdicts.survivors.is_empty(), "{verdicts:#?}");
    assert!(verdicts.caught > 300 * times, "too few are unsafe: {verdicts:?}");
    assert!(verdicts.harmless > 3 * times, "too few are safe: {verdicts:?}");
}

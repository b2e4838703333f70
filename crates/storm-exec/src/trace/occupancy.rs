use std::collections::BTreeMap;
use storm_device::{Span, Trace};
use storm_plan::{Compute, Operand, Plan, Tier, Work};

/// Bytes in use in a tier, from some time on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Occupancy {
    /// Start time.
    pub start_ns: u64,
    /// The tier.
    pub tier: Tier,
    /// The bytes.
    pub bytes: usize,
}

/// Memory in each tier that holds something still needed, at each change. Persistent tensors, and
/// the host memory of inputs and results, are always in use; anything else is in use from its write
/// to its last read.
pub fn occupancy(plan: &Plan, trace: &Trace) -> Vec<Occupancy> {
    let always = Always::new(plan);
    let mut uses = Uses::default();
    let mut spans: Vec<&Span> = trace.spans.iter().collect();
    spans.sort_by_key(|span| span.start_ns);
    for span in spans {
        for touch in touches(plan, span) {
            if !always.covers(&touch) {
                uses.touch(touch, span);
            }
        }
    }
    let first_ns = trace.spans.iter().map(|span| span.start_ns).min().unwrap_or(0);
    let mut all = Vec::new();
    for tier in plan.tiers() {
        let mut bytes = always.bytes(tier) as isize;
        all.push(Occupancy { start_ns: first_ns, tier, bytes: bytes as usize });
        for (start_ns, change) in uses.changes(tier) {
            bytes += change;
            all.push(Occupancy { start_ns, tier, bytes: bytes as usize });
        }
    }
    all
}

/// An access of an instruction to some bytes.
struct Touch {
    tier: Tier,
    offset: usize,
    bytes: usize,
    is_write: bool,
}

fn touches(plan: &Plan, span: &Span) -> Vec<Touch> {
    let size = |operand: &storm_plan::Operand| plan.value(operand.value).size_bytes;
    match &plan.instruction(span.instruction).work {
        Work::Compute(compute) => {
            let reads = compute.reads.iter().map(|operand| (operand, false));
            let writes = compute.writes.iter().map(|operand| (operand, true));
            let touch = |(operand, is_write): (&storm_plan::Operand, bool)| Touch {
                tier: Compute::TIER,
                offset: operand.offset,
                bytes: size(operand),
                is_write,
            };
            reads.chain(writes).map(touch).collect()
        }
        Work::Copy(copy) => {
            let ends = [(copy.from, false), (copy.to, true)];
            let touches = ends.into_iter().flat_map(|(place, is_write)| {
                copy.values.iter().map(move |operand| Touch {
                    tier: place.tier,
                    offset: place.offset + operand.offset,
                    bytes: size(operand),
                    is_write,
                })
            });
            touches.collect()
        }
        // Inputs are always in use.
        Work::Fetch(_) | Work::ReadAhead(_) => Vec::new(),
        Work::Collective(collective) => {
            let reads = collective.reads().map(|operand| (operand, false));
            let writes = collective.writes().map(|(_, operand)| (operand, true));
            let touch = |(operand, is_write): (&Operand, bool)| Touch {
                tier: Compute::TIER,
                offset: operand.offset,
                bytes: size(operand),
                is_write,
            };
            reads.chain(writes).map(touch).collect()
        }
    }
}

/// Ranges that are in use all the time.
struct Always {
    /// Start and end by tier, sorted.
    ranges: Vec<(Tier, usize, usize)>,
}

impl Always {
    fn new(plan: &Plan) -> Always {
        let lasting = plan.lasting.iter().flat_map(|lasting| {
            let bytes = lasting.tensor.size_bytes();
            let piece = |index: u32| plan.value(lasting.pieces[index as usize]).size_bytes;
            let wholes = lasting.places.iter().map(move |place| (*place, bytes));
            let parts = lasting.parts.iter().map(move |&(index, place)| (place, piece(index)));
            wholes.chain(parts).map(|(place, bytes)| (place.tier, place.offset, bytes))
        });
        let inputs = plan.inputs.iter().map(|input| (input.place, input.tensor.size_bytes()));
        let results = plan.results.iter().map(|result| (result.place, result.tensor.size_bytes()));
        let given = inputs.chain(results).map(|(place, bytes)| (place.tier, place.offset, bytes));
        let all = lasting.chain(given);
        let mut ranges: Vec<_> =
            all.map(|(tier, start, bytes)| (tier, start, start + bytes)).collect();
        ranges.sort();
        Always { ranges }
    }

    fn covers(&self, touch: &Touch) -> bool {
        let key = (touch.tier, touch.offset);
        let after = self.ranges.partition_point(|&(tier, start, _)| (tier, start) <= key);
        let before = after.checked_sub(1).map(|last| self.ranges[last]);
        before.is_some_and(|(tier, _, end)| tier == touch.tier && touch.offset < end)
    }

    fn bytes(&self, tier: Tier) -> usize {
        let ranges = self.ranges.iter().filter(|(of, ..)| *of == tier);
        ranges.map(|(_, start, end)| end - start).sum()
    }
}

/// The period during which bytes are needed.
#[derive(Clone, Copy)]
struct Use {
    bytes: usize,
    from_ns: u64,
    until_ns: u64,
}

#[derive(Default)]
struct Uses {
    /// By tier and first byte: what was written there last.
    current: BTreeMap<(Tier, usize), Use>,
    over: Vec<(Tier, Use)>,
}

impl Uses {
    fn touch(&mut self, touch: Touch, span: &Span) {
        let key = (touch.tier, touch.offset);
        if touch.is_write {
            let (from_ns, until_ns) = (span.start_ns, span.end_ns);
            let written = Use { bytes: touch.bytes, from_ns, until_ns };
            if let Some(mut before) = self.current.insert(key, written) {
                // An op that overwrites its operand needs only one of the two at any time.
                before.until_ns = before.until_ns.min(from_ns).max(before.from_ns);
                self.over.push((touch.tier, before));
            }
        } else if let Some(written) = self.current.get_mut(&key) {
            written.until_ns = written.until_ns.max(span.end_ns);
        }
    }

    /// By how much the bytes in use change, and when.
    fn changes(&self, tier: Tier) -> Vec<(u64, isize)> {
        let current = self.current.iter().map(|(&(of, _), written)| (of, *written));
        let mut changes = BTreeMap::new();
        for (_, use_of) in current.chain(self.over.iter().copied()).filter(|(of, _)| *of == tier) {
            *changes.entry(use_of.from_ns).or_insert(0) += use_of.bytes as isize;
            *changes.entry(use_of.until_ns).or_insert(0) -= use_of.bytes as isize;
        }
        changes.into_iter().filter(|&(_, change)| change != 0).collect()
    }
}

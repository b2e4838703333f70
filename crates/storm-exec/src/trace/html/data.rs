use super::TierLimits;
use super::kind::Kind;
use crate::trace::occupancy::{Occupancy, occupancy};
use crate::trace::stalls::{Bounds, stall_spans};
use serde_json::{Value, json};
use std::collections::HashMap;
use storm_device::{Span, Trace, WaitedFor};
use storm_plan::{InstructionId, PerTier, Plan, Queue, Tier, Work};

/// For a span that waited for nothing.
const NOTHING: i64 = -1;
/// For a span that the host had not issued yet.
const HOST: i64 = -2;

/// The data that the script draws, in columns of small numbers: each name and each repeated instruction
/// appears once, and times are differences.
pub(super) fn json(plan: &Plan, trace: &Trace, limits: PerTier<TierLimits>) -> Value {
    let bounds = Bounds::of(plan, trace);
    let Bounds { start_ns, end_ns, .. } = bounds;
    let mut instructions = Instructions::new(plan);
    let lanes = plan.queues().map(|queue| {
        let spans = of_queue(plan, trace, queue);
        lane(plan.links.queue_name(queue), &spans, start_ns, &mut instructions)
    });
    let lanes: Vec<Value> = lanes.collect();
    let compute = of_queue(plan, trace, Queue::COMPUTE);
    let kinds = Kind::ALL.map(|kind| json!([kind.key(), kind.name()]));
    let points = occupancy(plan, trace);
    let tiers = plan.tiers().map(|of| tier(of, plan.bytes[of], limits[of], &points, start_ns));
    json!({
        "total": end_ns - start_ns,
        "kinds": kinds,
        "lanes": lanes,
        "stalls": stalls(plan, &compute, bounds),
        "segments": segments(plan, &compute, start_ns),
        "memory": tiers.collect::<Vec<_>>(),
        "instructions": instructions.into_json(),
    })
}

fn of_queue<'a>(plan: &Plan, trace: &'a Trace, queue: Queue) -> Vec<&'a Span> {
    let spans = trace.spans.iter();
    spans.filter(|span| plan.queue(span.instruction) == queue).collect()
}

/// Starts as distances from the previous end, and durations.
#[derive(Default)]
struct Times {
    gap: Vec<i64>,
    length: Vec<u64>,
    before_ns: u64,
}

impl Times {
    fn from(start_ns: u64) -> Times {
        Times { before_ns: start_ns, ..Times::default() }
    }

    fn add(&mut self, start_ns: u64, end_ns: u64) {
        self.gap.push(start_ns as i64 - self.before_ns as i64);
        self.length.push(end_ns - start_ns);
        self.before_ns = end_ns;
    }
}

fn lane(
    name: String,
    spans: &[&Span],
    start_ns: u64,
    instructions: &mut Instructions<'_>,
) -> Value {
    let mut times = Times::from(start_ns);
    let (mut ran, mut waited_for, mut held) = (Vec::new(), Vec::new(), Vec::new());
    for span in spans {
        let free_ns = times.before_ns;
        held.push(span.ready_ns.clamp(free_ns, span.start_ns.max(free_ns)) - free_ns);
        waited_for.push(match span.waited_for {
            WaitedFor::Nothing => NOTHING,
            WaitedFor::Host => HOST,
            WaitedFor::Instruction(id) => instructions.number(id) as i64,
        });
        ran.push(instructions.number(span.instruction));
        times.add(span.start_ns, span.end_ns);
    }
    json!({
        "name": name,
        "gap": times.gap,
        "length": times.length,
        "instruction": ran,
        "waited_for": waited_for,
        "held": held,
    })
}

fn stalls(plan: &Plan, compute: &[&Span], bounds: Bounds) -> Value {
    let mut times = Times::from(bounds.start_ns);
    let mut causes = Strings::default();
    let (mut cause, mut kind, mut before) = (Vec::new(), Vec::new(), Vec::new());
    for stall in stall_spans(plan, compute, bounds) {
        times.add(stall.start_ns, stall.end_ns);
        cause.push(causes.number(stall.cause.to_string()));
        kind.push(Kind::of_stall(stall.cause).index());
        before.push(stall.before.map_or(NOTHING, |index| index as i64));
    }
    json!({
        "gap": times.gap,
        "length": times.length,
        "cause": cause,
        "causes": causes.all,
        "kind": kind,
        "before": before,
    })
}

/// When each run of a segment starts on the compute queue; the first starts with the step.
fn segments(plan: &Plan, compute: &[&Span], start_ns: u64) -> Value {
    let (mut names, mut starts) = (Vec::new(), Vec::new());
    let mut before: Option<(usize, InstructionId)> = None;
    for span in compute {
        let index = span.instruction.index();
        let contains = |segment: &storm_plan::Segment| segment.instructions.contains(&index);
        let Some(segment) = plan.segments.iter().position(contains) else { continue };
        // Within a run, instructions are in list order.
        if before.is_none_or(|(of, last)| of != segment || span.instruction <= last) {
            names.push(plan.segments[segment].name);
            starts.push(if starts.is_empty() { 0 } else { span.start_ns - start_ns });
        }
        before = Some((segment, span.instruction));
    }
    json!({"name": names, "start": starts})
}

fn tier(
    tier: Tier,
    plan_bytes: usize,
    limits: TierLimits,
    points: &[Occupancy],
    start_ns: u64,
) -> Value {
    let (mut gap, mut change) = (Vec::new(), Vec::new());
    let (mut before_ns, mut before_bytes) = (start_ns, 0);
    for point in points.iter().filter(|point| point.tier == tier) {
        gap.push(point.start_ns - before_ns);
        change.push(point.bytes as i64 - before_bytes);
        (before_ns, before_bytes) = (point.start_ns, point.bytes as i64);
    }
    json!({
        "name": format!("{tier} memory"),
        "gap": gap,
        "change": change,
        "plan": plan_bytes,
        "besides": limits.beside_plan_bytes,
        "budget": limits.budget_bytes,
    })
}

/// Texts by number, each once.
#[derive(Default)]
struct Strings {
    all: Vec<String>,
    numbers: HashMap<String, usize>,
}

impl Strings {
    fn number(&mut self, text: String) -> usize {
        *self.numbers.entry(text).or_insert_with_key(|text| {
            self.all.push(text.clone());
            self.all.len() - 1
        })
    }
}

/// The instructions of a trace, numbered as they come.
struct Instructions<'a> {
    plan: &'a Plan,
    numbers: HashMap<InstructionId, usize>,
    strings: Strings,
    name: Vec<usize>,
    kind: Vec<usize>,
    /// The first tensor it writes, if its name does not say so.
    writes: Vec<i64>,
    bytes: Vec<usize>,
}

impl<'a> Instructions<'a> {
    fn new(plan: &'a Plan) -> Instructions<'a> {
        Instructions {
            plan,
            numbers: HashMap::new(),
            strings: Strings::default(),
            name: Vec::new(),
            kind: Vec::new(),
            writes: Vec::new(),
            bytes: Vec::new(),
        }
    }

    fn number(&mut self, id: InstructionId) -> usize {
        if let Some(&number) = self.numbers.get(&id) {
            return number;
        }
        let plan = self.plan;
        let (writes, bytes) = match &plan.instruction(id).work {
            Work::Copy(copy) => (NOTHING, copy.bytes),
            Work::Fetch(fetch) => {
                (NOTHING, plan.fetched(fetch).map(|input| input.tensor.size_bytes()).sum())
            }
            Work::ReadAhead(read) => (NOTHING, read.bytes),
            Work::Collective(collective) => (NOTHING, collective.busiest_bytes(plan)),
            Work::Compute(compute) => {
                let values = compute.writes.iter().map(|operand| plan.value(operand.value));
                let first = compute.writes.first().map(|operand| &plan.value(operand.value).name);
                let first = first.map(|name| self.strings.number(name.clone()) as i64);
                (first.unwrap_or(NOTHING), values.map(|value| value.size_bytes).sum())
            }
        };
        let number = self.name.len();
        self.numbers.insert(id, number);
        self.name.push(self.strings.number(plan.describe(id)));
        self.kind.push(Kind::of_instruction(plan, id).index());
        self.writes.push(writes);
        self.bytes.push(bytes);
        number
    }

    fn into_json(self) -> Value {
        json!({
            "strings": self.strings.all,
            "name": self.name,
            "kind": self.kind,
            "writes": self.writes,
            "bytes": self.bytes,
        })
    }
}

use super::busy::BusyTime;
use super::class_name;
use super::occupancy::occupancy;
use super::stalls::{Bounds, StallCause, StallSpan, stall_spans};
use std::collections::BTreeMap;
use std::fmt;
use storm_device::{Span, Trace};
use storm_graph::TensorClass;
use storm_plan::{Copy, Link, PerTier, Plan, Queue, Tier, Work};

/// A trace in numbers.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// From the first start to the last end.
    pub total_ns: u64,
    /// In the order of the plan's queues.
    pub queues: Vec<QueueSummary>,
    /// Copies, by link and class.
    pub transfers: Vec<TransferSummary>,
    /// Why the compute queue was not always busy, longest first.
    pub stalls: Vec<Stall>,
    /// Peak of bytes that held something still needed.
    pub peak_bytes: PerTier<usize>,
}

/// Totals of a queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueSummary {
    /// The queue.
    pub queue: Queue,
    /// Its name, for display.
    pub name: String,
    /// Number of instructions.
    pub instructions: usize,
    /// Busy time.
    pub busy_ns: u64,
}

/// Copies of a class over a link. A copy of several values is divided by their bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferSummary {
    /// The link.
    pub link: Link,
    /// The class.
    pub class: TensorClass,
    /// Bytes copied.
    pub bytes: u64,
    /// Time of the copies.
    pub busy_ns: u64,
    /// Part of that time in which the compute queue was busy.
    pub hidden_ns: u64,
}

impl TransferSummary {
    /// The fraction of the time in which the compute queue was busy, 0 to 1.
    pub fn hidden_share(&self) -> f64 {
        match self.busy_ns {
            0 => 1.0,
            busy_ns => self.hidden_ns as f64 / busy_ns as f64,
        }
    }
}

/// Idle time of the compute queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stall {
    /// The cause.
    pub cause: StallCause,
    /// Total time.
    pub ns: u64,
}

impl Summary {
    /// The fraction of the time in which a queue was busy, 0 to 1.
    pub fn busy_share(&self, queue: Queue) -> f64 {
        self.queues[queue.index()].busy_ns as f64 / self.total_ns.max(1) as f64
    }
}

/// Summarizes a trace.
pub fn summarize(plan: &Plan, trace: &Trace) -> Summary {
    let of_queue =
        |queue: Queue| trace.spans.iter().filter(move |span| plan.queue(span.instruction) == queue);
    let bounds = Bounds::of(plan, trace);
    let queues = plan.queues().map(|queue| QueueSummary {
        queue,
        name: plan.links.queue_name(queue),
        instructions: of_queue(queue).count(),
        busy_ns: of_queue(queue).map(|span| span.end_ns - span.start_ns).sum(),
    });
    let compute: Vec<&Span> = of_queue(Queue::COMPUTE).collect();
    let compute_busy = BusyTime::new(compute.iter().copied());
    let occupancy = occupancy(plan, trace);
    let peak = |tier| {
        let of_tier = occupancy.iter().filter(|point| point.tier == tier);
        of_tier.map(|point| point.bytes).max().unwrap_or(0)
    };
    Summary {
        total_ns: bounds.end_ns - bounds.start_ns,
        queues: queues.collect(),
        transfers: transfers(plan, trace, &compute_busy),
        stalls: stalls(&stall_spans(plan, &compute, bounds)),
        peak_bytes: PerTier::from_fn(peak),
    }
}

fn transfers(plan: &Plan, trace: &Trace, compute: &BusyTime) -> Vec<TransferSummary> {
    let mut totals: BTreeMap<(Queue, TensorClass), TransferSummary> = BTreeMap::new();
    for span in &trace.spans {
        let queue = plan.queue(span.instruction);
        let Work::Copy(copy) = &plan.instruction(span.instruction).work else { continue };
        let busy_ns = span.end_ns - span.start_ns;
        let hidden_ns = compute.between_ns(span.start_ns, span.end_ns);
        let copied: usize = copy.values.iter().map(|o| plan.value(o.value).size_bytes).sum();
        for operand in &copy.values {
            let value = plan.value(operand.value);
            let share = |ns: u64| {
                (u128::from(ns) * value.size_bytes as u128 / copied.max(1) as u128) as u64
            };
            let total = totals.entry((queue, value.class)).or_insert(TransferSummary {
                link: copy.link(),
                class: value.class,
                bytes: 0,
                busy_ns: 0,
                hidden_ns: 0,
            });
            total.bytes += value.size_bytes as u64;
            total.busy_ns += share(busy_ns);
            total.hidden_ns += share(hidden_ns);
        }
    }
    totals.into_values().collect()
}

/// How long the compute queue was idle for each cause, longest first.
fn stalls(spans: &[StallSpan]) -> Vec<Stall> {
    let mut totals: BTreeMap<StallCause, u64> = BTreeMap::new();
    for span in spans {
        *totals.entry(span.cause).or_default() += span.end_ns - span.start_ns;
    }
    let mut stalls: Vec<Stall> =
        totals.into_iter().map(|(cause, ns)| Stall { cause, ns }).collect();
    stalls.sort_by_key(|stall| std::cmp::Reverse(stall.ns));
    stalls
}

/// The class that most bytes of a copy belong to.
pub(super) fn largest_class(plan: &Plan, copy: &Copy) -> TensorClass {
    let mut bytes: BTreeMap<TensorClass, usize> = BTreeMap::new();
    for operand in &copy.values {
        let value = plan.value(operand.value);
        *bytes.entry(value.class).or_default() += value.size_bytes;
    }
    let largest = bytes.into_iter().max_by_key(|&(_, bytes)| bytes);
    largest.map_or(TensorClass::Scratch, |(class, _)| class)
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |ns: u64| ns as f64 / 1e6;
        let mb = |bytes: f64| bytes / 1e6;
        writeln!(f, "{:.3} ms", ms(self.total_ns))?;
        for QueueSummary { queue, name, instructions, busy_ns } in &self.queues {
            let share = 100.0 * self.busy_share(*queue);
            let busy = ms(*busy_ns);
            writeln!(f, "  {name:<16} {busy:>10.3} ms {share:>6.1} % {instructions:>8} runs")?;
        }
        let [device, host] = [Tier::DEVICE, Tier::HOST].map(|tier| self.peak_bytes[tier] as f64);
        writeln!(f, "in use at most: device {:.1} MB, host {:.1} MB", mb(device), mb(host))?;
        writeln!(f, "transfers")?;
        for transfer in &self.transfers {
            let what = format!("{} to the {}", class_name(transfer.class), transfer.link.to);
            let (size, busy) = (mb(transfer.bytes as f64), ms(transfer.busy_ns));
            let hidden = 100.0 * transfer.hidden_share();
            writeln!(f, "  {what:<34} {size:>10.1} MB {busy:>10.3} ms {hidden:>6.1} % hidden")?;
        }
        writeln!(f, "compute waits for")?;
        for Stall { cause, ns } in &self.stalls {
            let share = 100.0 * *ns as f64 / self.total_ns.max(1) as f64;
            let cause = cause.to_string();
            writeln!(f, "  {cause:<34} {:>10.3} ms {share:>6.1} %", ms(*ns))?;
        }
        Ok(())
    }
}

use super::busy::BusyTime;
use super::stalls::{Bounds, StallCause, stall_spans};
use super::summary::largest_class;
use storm_device::{Span, Trace};
use storm_graph::{Phase, TensorClass};
use storm_plan::{Link, Plan, Queue, Work};

/// How well copies are hidden behind compute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Overlap {
    /// From the first start to the last end.
    pub total_ns: u64,
    /// Time in which all queues are busy.
    pub all_queues_ns: u64,
    /// The forward passes: their kernels, and the waits of these.
    pub forward_ns: u64,
    /// The part spent waiting for copies to the host while activations are copied there. If copies of the optimizer
    /// are queued before them, the wait counts for the optimizer.
    pub offload_gap_ns: u64,
    /// The backward passes.
    pub backward_ns: u64,
    /// The part spent waiting for copies from the host while anything but optimizer state is copied.
    pub fetch_gap_ns: u64,
}

impl Overlap {
    /// The share of the forward passes in which the compute queue waits for copies to the host.
    pub fn offload_gap(&self) -> f64 {
        self.offload_gap_ns as f64 / self.forward_ns.max(1) as f64
    }

    /// The share of the backward passes in which it waits for copies from the host.
    pub fn fetch_gap(&self) -> f64 {
        self.fetch_gap_ns as f64 / self.backward_ns.max(1) as f64
    }

    /// The share of the time in which all queues are busy.
    pub fn all_queues(&self) -> f64 {
        self.all_queues_ns as f64 / self.total_ns.max(1) as f64
    }
}

/// The pass a kernel belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pass {
    Forward,
    Backward,
    /// The optimizer, which may run during either.
    Update,
}

/// Attributes waits to passes.
pub fn overlap(plan: &Plan, trace: &Trace) -> Overlap {
    let bounds = Bounds::of(plan, trace);
    let of_queue =
        |queue: Queue| trace.spans.iter().filter(move |span| plan.queue(span.instruction) == queue);
    let compute: Vec<&Span> = of_queue(Queue::COMPUTE).collect();
    let passes: Vec<Pass> = compute.iter().map(|span| pass(plan, span)).collect();
    let is_on_device =
        |queue: Queue| !plan.links.is_of_host(queue) && plan.links.rank_queue() != Some(queue);
    let on_device = plan.queues().filter(|&queue| is_on_device(queue));
    let on_device = on_device.map(|queue| of_queue(queue).collect());
    let mut overlap = Overlap {
        total_ns: bounds.end_ns - bounds.start_ns,
        all_queues_ns: all_busy_ns(&on_device.collect::<Vec<_>>()),
        ..Overlap::default()
    };
    for (span, pass) in compute.iter().zip(&passes) {
        let ns = span.end_ns - span.start_ns;
        match pass {
            Pass::Forward => overlap.forward_ns += ns,
            Pass::Backward => overlap.backward_ns += ns,
            Pass::Update => {}
        }
    }
    let copies_of = |queue: Queue, counts: fn(TensorClass) -> bool| {
        BusyTime::new(of_queue(queue).filter(|span| {
            let Work::Copy(copy) = &plan.instruction(span.instruction).work else { return false };
            counts(largest_class(plan, copy))
        }))
    };
    let out = copies_of(Queue::DEVICE_TO_HOST, |class| class == TensorClass::Activation);
    let into = copies_of(Queue::HOST_TO_DEVICE, |class| class != TensorClass::OptimizerState);
    for stall in stall_spans(plan, &compute, bounds) {
        let ns = stall.end_ns - stall.start_ns;
        match (stall.before.map(|index| passes[index]), stall.cause) {
            (Some(Pass::Forward), cause) => {
                overlap.forward_ns += ns;
                if matches!(cause, StallCause::Copy(Link::DEVICE_TO_HOST, _)) {
                    overlap.offload_gap_ns += out.between_ns(stall.start_ns, stall.end_ns);
                }
            }
            (Some(Pass::Backward), cause) => {
                overlap.backward_ns += ns;
                if matches!(cause, StallCause::Copy(Link::HOST_TO_DEVICE, _)) {
                    overlap.fetch_gap_ns += into.between_ns(stall.start_ns, stall.end_ns);
                }
            }
            _ => {}
        }
    }
    overlap
}

fn pass(plan: &Plan, span: &Span) -> Pass {
    let Work::Compute(compute) = &plan.instruction(span.instruction).work else {
        unreachable!("a copy in the compute queue")
    };
    let node = &plan.graphs[compute.graph.0 as usize].nodes()[compute.node as usize];
    match node.phase {
        _ if node.op.is_update() => Pass::Update,
        Phase::Backward | Phase::Recompute => Pass::Backward,
        Phase::Forward => Pass::Forward,
    }
}

/// Time in which all queues are busy. A queue's own spans do not overlap.
fn all_busy_ns(queues: &[Vec<&Span>]) -> u64 {
    let mut moments: Vec<(u64, i32)> = Vec::new();
    for span in queues.iter().flatten() {
        moments.extend([(span.start_ns, 1), (span.end_ns, -1)]);
    }
    // At equal times, ends come first.
    moments.sort_unstable();
    let (mut busy, mut since_ns, mut total_ns) = (0, 0, 0);
    for (moment_ns, change) in moments {
        if busy == queues.len() as i32 {
            total_ns += moment_ns - since_ns;
        }
        busy += change;
        since_ns = moment_ns;
    }
    total_ns
}

#[cfg(test)]
mod tests {
    use super::*;
    use storm_device::WaitedFor;
    use storm_plan::InstructionId;

    fn span(start_ns: u64, end_ns: u64) -> Span {
        let instruction = InstructionId(0);
        Span { instruction, waited_for: WaitedFor::Nothing, ready_ns: start_ns, start_ns, end_ns }
    }

    #[test]
    fn all_three_at_once() {
        let spans = [span(0, 10), span(12, 20)];
        let into = [span(5, 15)];
        let out = [span(0, 6), span(6, 7), span(13, 30)];
        let queues = [spans.iter().collect(), into.iter().collect(), out.iter().collect()];
        // 5 to 7 and 13 to 15.
        assert_eq!(all_busy_ns(&queues), 4);
        assert_eq!(all_busy_ns(&[Vec::new(), Vec::new(), Vec::new()]), 0);
    }
}

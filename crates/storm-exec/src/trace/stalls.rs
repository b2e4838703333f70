use super::class_name;
use super::summary::largest_class;
use std::fmt;
use storm_device::{Span, Trace, WaitedFor};
use storm_graph::TensorClass;
use storm_plan::{InstructionId, Link, Plan, Work};

/// What the compute queue waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StallCause {
    /// A copy over a link, mostly of this class: it delivers an operand, or frees bytes that will
    /// be overwritten.
    Copy(Link, TensorClass),
    /// The host, which has not issued the next kernel yet.
    Host,
    /// Nothing: the overhead between two kernels.
    Overhead,
    /// The last copies, after all kernels.
    Drain,
    /// The data of the next step, after everything else.
    Data,
}

impl fmt::Display for StallCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StallCause::Copy(link, class) => {
                write!(f, "{} to the {}", class_name(*class), link.to)
            }
            StallCause::Host => f.write_str("the host"),
            StallCause::Overhead => f.write_str("between kernels"),
            StallCause::Drain => f.write_str("the last copies"),
            StallCause::Data => f.write_str("the data of the next step"),
        }
    }
}

/// A period in which the compute queue was idle for one cause.
#[derive(Clone, Copy, Debug)]
pub(super) struct StallSpan {
    pub(super) cause: StallCause,
    pub(super) start_ns: u64,
    pub(super) end_ns: u64,
    /// Index, among the queue's spans, of the kernel that was delayed; none after the last.
    pub(super) before: Option<usize>,
}

/// From the first start to the last end.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    pub(super) start_ns: u64,
    pub(super) end_ns: u64,
    /// The last end without the data queue, which works for the next step.
    pub(super) own_end_ns: u64,
}

impl Bounds {
    pub(super) fn of(plan: &Plan, trace: &Trace) -> Bounds {
        let data = plan.links.data_queue();
        let own = trace.spans.iter().filter(|span| Some(plan.queue(span.instruction)) != data);
        let end_ns = trace.spans.iter().map(|span| span.end_ns).max().unwrap_or(0);
        Bounds {
            start_ns: trace.spans.iter().map(|span| span.start_ns).min().unwrap_or(0),
            end_ns,
            own_end_ns: own.map(|span| span.end_ns).max().unwrap_or(end_ns),
        }
    }
}

/// All idle time of the compute queue within the bounds; `compute` are the queue's spans.
pub(super) fn stall_spans(plan: &Plan, compute: &[&Span], bounds: Bounds) -> Vec<StallSpan> {
    let Bounds { start_ns, end_ns, own_end_ns } = bounds;
    let mut stalls = Vec::new();
    let mut add = |cause, start_ns, end_ns, before| {
        if start_ns < end_ns {
            stalls.push(StallSpan { cause, start_ns, end_ns, before });
        }
    };
    let mut free_ns = start_ns;
    for (index, span) in compute.iter().enumerate() {
        let start_ns = span.start_ns.max(free_ns);
        let ready_ns = span.ready_ns.clamp(free_ns, start_ns);
        let cause = match span.waited_for {
            WaitedFor::Nothing => StallCause::Overhead,
            WaitedFor::Host => StallCause::Host,
            WaitedFor::Instruction(id) => cause_of_wait(plan, id),
        };
        add(cause, free_ns, ready_ns, Some(index));
        add(StallCause::Overhead, ready_ns, start_ns, Some(index));
        free_ns = span.end_ns.max(free_ns);
    }
    add(StallCause::Drain, free_ns, own_end_ns, None);
    add(StallCause::Data, free_ns.max(own_end_ns), end_ns, None);
    stalls
}

fn cause_of_wait(plan: &Plan, awaited: InstructionId) -> StallCause {
    let Work::Copy(copy) = &plan.instruction(awaited).work else {
        return StallCause::Overhead;
    };
    StallCause::Copy(copy.link(), largest_class(plan, copy))
}

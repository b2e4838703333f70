//! Traces of queues.

use storm_plan::{InstructionId, PerQueue, Plan, Queue};

/// One run of an instruction. Times are nanoseconds from an origin chosen by the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The instruction.
    pub instruction: InstructionId,
    /// What it waited for last, after the previous instruction of its queue was done.
    pub waited_for: WaitedFor,
    /// When its last wait ended.
    pub ready_ns: u64,
    /// When it started.
    pub start_ns: u64,
    /// When it was done.
    pub end_ns: u64,
}

/// What an instruction at the head of its queue waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitedFor {
    /// Nothing.
    Nothing,
    /// The host had not issued it yet.
    Host,
    /// This instruction, in another queue, was not done.
    Instruction(InstructionId),
}

/// All instructions of a step, a flush or an evaluation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    /// Queue by queue, each in execution order.
    pub spans: Vec<Span>,
    /// Number of spans dropped for lack of room.
    pub left_out: usize,
}

/// A preallocated buffer for the spans of one step.
#[derive(Debug)]
pub(crate) struct Recorder {
    spans: PerQueue<Vec<Span>>,
    left_out: usize,
}

/// By queue: the instructions of a step of the plan, or of its flush or evaluation if longer.
pub(crate) fn longest(plan: &Plan) -> PerQueue<usize> {
    let in_segment = |segment, queue| {
        let range = plan.segment(segment).instructions.clone();
        range.filter(|&index| plan.queue(InstructionId(index as u32)) == queue).count()
    };
    PerQueue::from_fn(|queue| {
        let runs = plan.step.iter();
        let step: usize = runs
            .map(|run| run.times.saturating_mul(in_segment(run.segment, queue)))
            .fold(0, usize::saturating_add);
        let outside = [plan.flush, plan.evaluation].into_iter().flatten();
        outside.map(|segment| in_segment(segment, queue)).fold(step, usize::max)
    })
}

/// The most spans kept for a queue: 40 MB of them.
const SPANS_MAX: usize = 1 << 20;

impl Recorder {
    /// Allocates room for a step of the plan, or for its flush or evaluation if longer.
    pub(crate) fn new(plan: &Plan) -> Recorder {
        let spans = longest(plan).map(|count| Vec::with_capacity(count.min(SPANS_MAX)));
        Recorder { spans, left_out: 0 }
    }

    /// Clears the spans of the step before.
    pub(crate) fn begin(&mut self) {
        self.spans.iter_mut().for_each(|(_, spans)| spans.clear());
        self.left_out = 0;
    }

    /// Records a span of a queue.
    pub(crate) fn record(&mut self, queue: Queue, span: Span) {
        let spans = &mut self.spans[queue];
        if spans.len() < spans.capacity() {
            spans.push(span);
        } else {
            self.left_out += 1;
        }
    }

    /// Everything recorded.
    pub(crate) fn trace(&self) -> Trace {
        let spans = self.spans.iter().flat_map(|(_, spans)| spans).copied().collect();
        Trace { spans, left_out: self.left_out }
    }
}

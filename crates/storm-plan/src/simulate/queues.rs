//! The pass over the instructions: when each starts and ends, and what delayed it.

use super::cost::class_shares;
use super::{CLASSES, Span};
use crate::check::host::HostWork;
use crate::plan::{InstructionId, Plan, SegmentId, Work};
use crate::queue::{PerQueue, Queue};
use storm_graph::work;

/// Time in which the compute queue waited.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Waited {
    /// For copies, by queue and class.
    pub(super) exposed: PerQueue<[f64; CLASSES.len()]>,
    /// For the host.
    pub(super) launch: f64,
    /// For other ranks.
    pub(super) ranks: f64,
}

impl Waited {
    /// Combines several arrays of numbers element by element.
    pub(super) fn combine<const N: usize>(
        all: [&Waited; N],
        each: impl Fn([f64; N]) -> f64,
    ) -> Waited {
        let exposed = PerQueue::from_fn(|queue| {
            std::array::from_fn(|class| each(all.map(|waited| waited.exposed[queue][class])))
        });
        let launch = each(all.map(|waited| waited.launch));
        Waited { exposed, launch, ranks: each(all.map(|waited| waited.ranks)) }
    }
}

/// The times that everything else follows from.
#[derive(Clone, Debug)]
pub(super) struct Moments {
    /// The host's time.
    pub(super) host: f64,
    /// By queue: when it has done everything it was given.
    pub(super) free: PerQueue<f64>,
    /// By instruction: when its last run ends; far in the past if it was never issued.
    pub(super) ends: Vec<f64>,
}

/// The state of the queues, from empty to empty.
pub(super) struct Queues<'a> {
    pub(super) plan: &'a Plan,
    host_work: &'a HostWork,
    seconds: &'a [f64],
    launch_seconds: f64,
    pub(super) now: Moments,
    pub(super) waited: Waited,
    /// The candidates of every maximum; see [`super::repeat`]. None while not needed.
    pub(super) reasons: Option<Reasons>,
    timeline: Option<Vec<Span>>,
}

/// Times that were the maximum of several candidates.
#[derive(Clone, Debug, Default)]
pub(super) struct Reasons {
    /// Candidates, followed by their maximum; then the next.
    pub(super) moments: Vec<f64>,
    /// Where each group ends.
    pub(super) group_ends: Vec<usize>,
}

impl<'a> Queues<'a> {
    pub(super) fn new(
        plan: &'a Plan,
        host_work: &'a HostWork,
        seconds: &'a [f64],
        launch_seconds: f64,
        timeline: Option<Vec<Span>>,
    ) -> Queues<'a> {
        let ends = vec![f64::NEG_INFINITY; plan.instructions.len()];
        Queues {
            plan,
            host_work,
            seconds,
            launch_seconds,
            now: Moments { host: 0.0, free: PerQueue::default(), ends },
            waited: Waited::default(),
            reasons: None,
            timeline,
        }
    }

    /// When the compute queue has done everything it was given.
    pub(super) fn compute_end(&self) -> f64 {
        self.now.free[Queue::COMPUTE]
    }

    /// When everything is done.
    pub(super) fn end(&self) -> f64 {
        self.now.free.iter().map(|(_, &free)| free).fold(self.now.host, f64::max)
    }

    pub(super) fn waited(&self) -> &Waited {
        &self.waited
    }

    pub(super) fn into_timeline(self) -> Vec<Span> {
        self.timeline.unwrap_or_default()
    }

    /// One run of a segment.
    pub(super) fn segment(&mut self, id: SegmentId) {
        let (plan, work) = (self.plan, self.host_work);
        let results = work.results(id).iter().map(|&index| &plan.results[index].copies);
        let inputs = work.inputs(id).iter().map(|&index| &plan.inputs[index].copies);
        let copies = results.chain(inputs).flatten().map(|copy| self.now.ends[copy.index()]);
        let mut candidates: Vec<f64> = copies.collect();
        if !candidates.is_empty() {
            candidates.push(self.now.host);
            self.now.host = candidates.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            self.note(&candidates, self.now.host);
        }
        for index in plan.segment(id).instructions.clone() {
            self.give_out(index, &mut candidates);
        }
    }

    fn give_out(&mut self, index: usize, candidates: &mut Vec<f64>) {
        let plan = self.plan;
        let instruction = &plan.instructions[index];
        work::count(1 + instruction.waits.len());
        let queue = plan.queue(InstructionId(index as u32));
        self.now.host += self.launch_seconds;
        let free = self.now.free[queue];
        candidates.clear();
        candidates.extend([free, self.now.host]);
        let (mut start, mut waited_for) = (free.max(self.now.host), None);
        for &awaited in &instruction.waits {
            let end = self.now.ends[awaited.index()];
            candidates.push(end);
            if end > start {
                (start, waited_for) = (end, Some(awaited));
            }
        }
        self.note(candidates, start);
        if queue == Queue::COMPUTE && start > free {
            self.charge(waited_for, start - free);
        }
        let end = start + self.seconds[index];
        self.now.ends[index] = end;
        self.now.free[queue] = end;
        if let Some(timeline) = &mut self.timeline {
            let instruction = InstructionId(index as u32);
            let (start_seconds, end_seconds) = (start, end);
            timeline.push(Span { instruction, queue, start_seconds, end_seconds, waited_for });
        }
    }

    fn note(&mut self, candidates: &[f64], latest: f64) {
        if let Some(reasons) = &mut self.reasons {
            reasons.moments.extend_from_slice(candidates);
            reasons.moments.push(latest);
            reasons.group_ends.push(reasons.moments.len());
        }
    }

    /// Charges idle time of the compute queue to the instruction that it waited for last.
    fn charge(&mut self, to: Option<InstructionId>, seconds: f64) {
        match to.map(|id| (self.plan.queue(id), &self.plan.instruction(id).work)) {
            Some((queue, Work::Copy(copy))) => {
                let exposed = &mut self.waited.exposed[queue];
                for (class, share) in class_shares(self.plan, copy) {
                    exposed[class] += seconds * share;
                }
            }
            Some((_, Work::Collective(_))) => self.waited.ranks += seconds,
            Some((_, Work::Compute(_) | Work::Fetch(_) | Work::ReadAhead(_))) | None => {
                self.waited.launch += seconds;
            }
        }
    }

    /// How long the reading of data goes on when everything else is done.
    pub(super) fn data_seconds(&self) -> f64 {
        let data = self.plan.links.data_queue();
        let others = self.now.free.iter().filter(|&(queue, _)| Some(queue) != data);
        let others_end = others.map(|(_, &free)| free).fold(self.now.host, f64::max);
        self.end() - others_end
    }

    /// How long the queues continue after the last kernel. That time is charged to the copies of
    /// the queue that finishes last.
    pub(super) fn drain(&mut self) -> f64 {
        let (kernels_end, all_end) = (self.compute_end(), self.end());
        let is_data = |queue| self.plan.links.is_data(queue);
        let copies = self.plan.queues().filter(|&queue| queue != Queue::COMPUTE && !is_data(queue));
        let last = copies.max_by(|&a, &b| self.now.free[a].total_cmp(&self.now.free[b]));
        for (index, instruction) in self.plan.instructions.iter().enumerate() {
            let end = self.now.ends[index];
            let queue = self.plan.queue(InstructionId(index as u32));
            if Some(queue) == last && end > kernels_end {
                let start = (end - self.seconds[index]).max(kernels_end);
                if let Work::Copy(copy) = &instruction.work {
                    let exposed = &mut self.waited.exposed[queue];
                    for (class, share) in class_shares(self.plan, copy) {
                        exposed[class] += (end - start) * share;
                    }
                }
            }
        }
        all_end - kernels_end
    }
}

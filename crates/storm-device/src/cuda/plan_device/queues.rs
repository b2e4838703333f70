//! Streams in step with each other and with the host.

use super::super::CudaError;
use super::super::context::{Context, Stream};
use super::super::event::Event;
use crate::tickets::{Command, Targets, Tickets};
use std::collections::VecDeque;
use std::sync::Arc;
use storm_plan::{InstructionId, PerQueue, Plan, Queue};

/// A queue has a mark at least so often, so that the host knows how far it is.
const MARK_EVERY: usize = 32;

/// Marks of a queue that the host has not seen done. The host waits when it is that far ahead; the
/// driver makes it wait much earlier if there are kernels between.
const PENDING_MAX: usize = 4096;

/// A stream for each queue, and marks in them that others wait for.
#[derive(Debug)]
pub(super) struct Queues {
    /// By queue.
    streams: Vec<Stream>,
    /// By instruction: the mark behind it, where an instruction waits for it. Recorded again each time that
    /// the instruction is issued; earlier waits are not affected.
    marks: Vec<Option<Event>>,
    tickets: Tickets,
    /// By waiting queue and awaited queue: how far the first has already waited for the second.
    waited: PerQueue<PerQueue<u64>>,
    /// By queue.
    progress: Vec<Progress>,
}

/// What the host knows of a queue.
#[derive(Debug)]
struct Progress {
    /// Marks that were not seen done: how many instructions the queue had been given with it, and the
    /// last of them.
    pending: VecDeque<(u64, InstructionId)>,
    /// Instructions that are done, and the last of them that has a mark.
    done: u64,
    done_last: Option<InstructionId>,
    given_last: Option<InstructionId>,
}

/// What a queue was given and is not known to have done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Unfinished {
    /// All up to this was done; none if nothing is known to be.
    pub(super) after: Option<InstructionId>,
    /// The last that was issued.
    pub(super) last: InstructionId,
    /// How many there are.
    pub(super) count: u64,
}

impl Queues {
    /// Computes on `multiprocessors` of the card; on all of it if none are given.
    pub(super) fn new(
        plan: &Plan,
        context: &Arc<Context>,
        multiprocessors: Option<usize>,
    ) -> Result<Queues, CudaError> {
        let streams = plan.queues().map(|_| Stream::new(context));
        let mut streams = streams.collect::<Result<Vec<_>, _>>()?;
        if let Some(multiprocessors) = multiprocessors {
            streams[Queue::COMPUTE.index()] = Stream::on_part(context, multiprocessors)?;
        }
        let marks = is_marked(plan)
            .into_iter()
            .map(|is_marked| is_marked.then(|| Event::without_time(context)).transpose())
            .collect::<Result<_, _>>()?;
        let progress = || Progress {
            pending: VecDeque::with_capacity(PENDING_MAX),
            done: 0,
            done_last: None,
            given_last: None,
        };
        Ok(Queues {
            streams,
            marks,
            tickets: Tickets::new(plan),
            waited: PerQueue::default(),
            progress: plan.queues().map(|_| progress()).collect(),
        })
    }

    pub(super) fn stream(&self, queue: Queue) -> &Stream {
        &self.streams[queue.index()]
    }

    pub(super) fn streams(&self) -> &[Stream] {
        &self.streams
    }

    /// Instructions given to each queue so far.
    pub(super) fn given(&self) -> PerQueue<u64> {
        self.tickets.given()
    }

    /// Notes that an instruction is issued, and lets its stream wait for what it waits for.
    pub(super) fn begin(
        &mut self,
        plan: &Plan,
        id: InstructionId,
    ) -> Result<(Queue, Command), CudaError> {
        let (queue, command) = self.tickets.give(plan, id);
        self.progress[queue.index()].given_last = Some(id);
        let waited = &mut self.waited[queue];
        for (other, target) in command.targets.iter() {
            // A stream works in order: who has waited for more has waited for this, and so has who
            // knows it to be done.
            if target.count > waited[other] && target.count > self.progress[other.index()].done {
                let mark = self.marks[target.instruction.index()].as_ref();
                mark.expect("awaited instructions have marks")
                    .hold(&self.streams[queue.index()])?;
                waited[other] = target.count;
            }
        }
        Ok((queue, command))
    }

    /// Notes that all of an instruction is in its stream.
    pub(super) fn end(&mut self, queue: Queue, id: InstructionId) -> Result<(), CudaError> {
        let Some(mark) = &self.marks[id.index()] else { return Ok(()) };
        mark.record(&self.streams[queue.index()])?;
        while self.progress[queue.index()].pending.len() == PENDING_MAX {
            self.look(queue.index())?;
            std::thread::yield_now();
        }
        let count = self.tickets.last(id);
        self.progress[queue.index()].pending.push_back((count, id));
        self.look(queue.index())
    }

    /// Waits, on the host, until all of these are done, as last issued.
    pub(super) fn wait_for(&mut self, instructions: &[InstructionId]) -> Result<(), CudaError> {
        let targets: Targets = self.tickets.targets(instructions);
        self.wait(targets.map(|target| target.count))
    }

    /// Waits, on the host, until all is done.
    pub(super) fn wait_for_all(&mut self) -> Result<(), CudaError> {
        self.wait(self.tickets.given())
    }

    /// Looks at the marks of all queues rather than to wait for one: after an error the driver does not
    /// say any more which were done.
    fn wait(&mut self, counts: PerQueue<u64>) -> Result<(), CudaError> {
        let counts = counts.iter().map(|(_, &count)| count);
        for (queue, count) in (0..self.progress.len()).zip(counts) {
            while self.progress[queue].done < count {
                let has_mark = !self.progress[queue].pending.is_empty();
                assert!(has_mark, "whoever the host waits for has a mark");
                (0..self.progress.len()).try_for_each(|queue| self.look(queue))?;
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    /// Takes note of what a queue has done.
    fn look(&mut self, queue: usize) -> Result<(), CudaError> {
        let progress = &mut self.progress[queue];
        while let Some(&(count, id)) = progress.pending.front() {
            // Given out again since then, its mark is of the later run, which is also in the list.
            if self.tickets.last(id) == count {
                let mark = self.marks[id.index()].as_ref().expect("it was recorded");
                if !mark.is_done()? {
                    return Ok(());
                }
                (progress.done, progress.done_last) = (count, Some(id));
            }
            progress.pending.pop_front();
        }
        Ok(())
    }

    /// Where a queue is, if it is not done with all it was given.
    pub(super) fn unfinished(&self, queue: Queue) -> Option<Unfinished> {
        let progress = &self.progress[queue.index()];
        let count = self.tickets.given()[queue] - progress.done;
        let (after, last) = (progress.done_last, progress.given_last?);
        (count > 0).then_some(Unfinished { after, last, count })
    }
}

impl Drop for Queues {
    /// Whatever was issued ends before the memory that it uses can be freed.
    fn drop(&mut self) {
        let _ = self.streams[0].context().make_current();
        for stream in &self.streams {
            // After an error nothing runs any more: the result says nothing new.
            let _ = stream.synchronize("ending");
        }
    }
}

/// By instruction: whether the host asks if it is done.
fn is_marked(plan: &Plan) -> Vec<bool> {
    let mut is_marked = vec![false; plan.instructions.len()];
    let waits = plan.instructions.iter().flat_map(|instruction| &instruction.waits);
    let inputs = plan.inputs.iter().flat_map(|input| &input.copies);
    let results = plan.results.iter().flat_map(|result| &result.copies);
    for awaited in waits.chain(inputs).chain(results) {
        is_marked[awaited.index()] = true;
    }
    for segment in &plan.segments {
        for queue in plan.queues() {
            let range = segment.instructions.clone();
            let mut last = None;
            for (position, index) in
                range.filter(|&index| plan.queue(InstructionId(index as u32)) == queue).enumerate()
            {
                is_marked[index] |= position % MARK_EVERY == MARK_EVERY - 1;
                last = Some(index);
            }
            // The host waits for whole segments.
            if let Some(last) = last {
                is_marked[last] = true;
            }
        }
    }
    is_marked
}

//! One stream per queue, with events that order the streams and tell the host how far each is.

use super::super::CudaError;
use super::super::context::{Context, Stream};
use super::super::event::Event;
use super::super::ranks::CudaRanks;
use super::disk_queues::DiskQueues;
use crate::tickets::{Command, Targets, Tickets};
use std::collections::VecDeque;
use std::sync::Arc;
use storm_plan::{InstructionId, PerQueue, Plan, Queue};

/// Each queue records an event after at most this many instructions, to tell the host how far it
/// is.
const MARK_EVERY: usize = 32;

/// The largest number of a queue's events that were not yet seen done. The host waits when it is
/// that far ahead. If there are kernels between events, the driver makes it wait much earlier.
const PENDING_MAX: usize = 4096;

/// After how many rounds of waiting the host checks whether a rank has failed.
const RANKS_EVERY: u32 = 1024;

/// One stream per queue, and the events that other streams and the host wait for.
#[derive(Debug)]
pub(super) struct Queues {
    /// By queue. `None` for queues that threads of the host run.
    streams: Vec<Option<Stream>>,
    /// By instruction: the event after it, if anything waits for it. Recorded again each time the
    /// instruction is issued, which does not affect earlier waits.
    marks: Vec<Option<Event>>,
    tickets: Tickets,
    /// By waiting queue and awaited queue: how far the first has already waited for the second.
    waited: PerQueue<PerQueue<u64>>,
    /// By queue.
    progress: Vec<Progress>,
    /// By instruction: whether the disk waits for it, so its stream signals when it is done.
    signals: Vec<bool>,
    /// `None` if the plan has no disk tier.
    disk: Option<DiskQueues>,
    /// `None` if the plan is for one rank.
    ranks: Option<Arc<CudaRanks>>,
}

/// What the host knows about a queue.
#[derive(Debug)]
struct Progress {
    /// Events not yet seen done: how many instructions the queue had been given by then, and the last of
    /// them.
    pending: VecDeque<(u64, InstructionId)>,
    /// Instructions that are done, and the last of them that has an event.
    done: u64,
    done_last: Option<InstructionId>,
    given_last: Option<InstructionId>,
}

/// Instructions given to a queue and not known to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Unfinished {
    /// Everything up to this one is done. `None` if nothing is known to be done.
    pub(super) after: Option<InstructionId>,
    /// The last that was issued.
    pub(super) last: InstructionId,
    /// How many there are.
    pub(super) count: u64,
}

impl Queues {
    /// Computes on `multiprocessors` of the card, or on all of them if `None`.
    pub(super) fn new(
        plan: &Plan,
        context: &Arc<Context>,
        multiprocessors: Option<usize>,
    ) -> Result<Queues, CudaError> {
        let stream = |queue| match multiprocessors {
            _ if plan.links.is_of_host(queue) => Ok(None),
            Some(count) if queue == Queue::COMPUTE => Stream::on_part(context, count).map(Some),
            _ => Stream::new(context).map(Some),
        };
        let streams = plan.queues().map(stream).collect::<Result<Vec<_>, CudaError>>()?;
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
            signals: awaited_by_disk(plan),
            disk: None,
            ranks: None,
        })
    }

    /// Sets the queues for copies from and to the disk.
    pub(super) fn set_disk(&mut self, disk: DiskQueues) {
        self.disk = Some(disk);
    }

    /// Sets the ranks whose errors are checked while the host waits.
    pub(super) fn set_ranks(&mut self, ranks: Option<Arc<CudaRanks>>) {
        self.ranks = ranks;
    }

    pub(super) fn disk(&self) -> Option<&DiskQueues> {
        self.disk.as_ref()
    }

    /// Issues a copy from or to the disk.
    pub(super) fn give_to_disk(&mut self, plan: &Plan, id: InstructionId) {
        let (queue, command) = self.tickets.give(plan, id);
        self.progress[queue.index()].given_last = Some(id);
        if let Some(disk) = &self.disk {
            disk.give(queue, command);
        }
    }

    pub(super) fn stream(&self, queue: Queue) -> &Stream {
        self.streams[queue.index()].as_ref().expect("it runs on the card")
    }

    /// The streams of all queues that run on the card, with that of kernels first.
    pub(super) fn streams(&self) -> impl Iterator<Item = &Stream> {
        self.streams.iter().flatten()
    }

    /// Instructions given to each queue so far.
    pub(super) fn given(&self) -> PerQueue<u64> {
        self.tickets.given()
    }

    /// Registers that an instruction is being issued, and makes its stream wait for what it waits for.
    pub(super) fn begin(
        &mut self,
        plan: &Plan,
        id: InstructionId,
    ) -> Result<(Queue, Command), CudaError> {
        let (queue, command) = self.tickets.give(plan, id);
        self.progress[queue.index()].given_last = Some(id);
        let waited = &mut self.waited[queue];
        for (other, target) in command.targets.iter() {
            // A stream runs in order. No wait is needed if this queue has already waited for this or a
            // later instruction, or if the host knows it is done.
            if target.count > waited[other] && target.count > self.progress[other.index()].done {
                let stream = self.streams[queue.index()].as_ref().expect("it runs on the card");
                match &self.disk {
                    Some(disk) if plan.links.is_disk(other) => {
                        disk.hold(stream, other, target.count)?;
                    }
                    _ => {
                        let mark = self.marks[target.instruction.index()].as_ref();
                        mark.expect("awaited instructions have marks").hold(stream)?;
                    }
                }
                waited[other] = target.count;
            }
        }
        Ok((queue, command))
    }

    /// Registers that the whole instruction was issued to its stream.
    pub(super) fn end(&mut self, queue: Queue, id: InstructionId) -> Result<(), CudaError> {
        if let Some(disk) = self.disk.as_ref().filter(|_| self.signals[id.index()]) {
            disk.signal(self.stream(queue), queue, self.tickets.last(id))?;
        }
        let Some(mark) = &self.marks[id.index()] else { return Ok(()) };
        mark.record(self.stream(queue))?;
        while self.progress[queue.index()].pending.len() == PENDING_MAX {
            self.look(queue.index())?;
            std::thread::yield_now();
        }
        let count = self.tickets.last(id);
        self.progress[queue.index()].pending.push_back((count, id));
        self.look(queue.index())
    }

    /// Registers that the host has run every instruction that a queue was given.
    pub(super) fn done_by_host(&mut self, queue: Queue) {
        let progress = &mut self.progress[queue.index()];
        (progress.done, progress.done_last) = (self.tickets.given()[queue], progress.given_last);
    }

    /// Blocks the host until the latest run of each of these is done.
    pub(super) fn wait_for(&mut self, instructions: &[InstructionId]) -> Result<(), CudaError> {
        let targets: Targets = self.tickets.targets(instructions);
        self.wait(targets.map(|target| target.count))
    }

    /// Blocks the host until everything is done.
    pub(super) fn wait_for_all(&mut self) -> Result<(), CudaError> {
        self.wait(self.tickets.given())
    }

    /// Polls the events of all queues instead of blocking on one, because after an error the driver
    /// no longer reports which are done.
    fn wait(&mut self, counts: PerQueue<u64>) -> Result<(), CudaError> {
        let counts = counts.iter().map(|(_, &count)| count);
        let mut rounds = 0u32;
        for (queue, count) in (0..self.progress.len()).zip(counts) {
            while self.progress[queue].done < count {
                let has_mark = !self.progress[queue].pending.is_empty() || self.is_disk(queue);
                assert!(has_mark, "whoever the host waits for has a mark");
                (0..self.progress.len()).try_for_each(|queue| self.look(queue))?;
                rounds = rounds.wrapping_add(1);
                if let Some(ranks) =
                    self.ranks.as_ref().filter(|_| rounds.is_multiple_of(RANKS_EVERY))
                {
                    ranks.check()?;
                }
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    fn is_disk(&self, queue: usize) -> bool {
        let mut on_disk = self.disk.iter().flat_map(DiskQueues::queues);
        on_disk.any(|known| known.index() == queue)
    }

    /// Updates what is known about a queue's progress.
    fn look(&mut self, queue: usize) -> Result<(), CudaError> {
        let progress = &mut self.progress[queue];
        let disk = self.disk.as_ref().and_then(|disk| disk.progress(queue));
        if let Some(done) = disk {
            // After a failure it is more than was given.
            progress.done = done;
            return Ok(());
        }
        while let Some(&(count, id)) = progress.pending.front() {
            // If the instruction was issued again since, its event belongs to the later run, which is also
            // in the list.
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

    /// What a queue has not finished, if anything.
    pub(super) fn unfinished(&self, queue: Queue) -> Option<Unfinished> {
        let progress = &self.progress[queue.index()];
        let count = self.tickets.given()[queue].saturating_sub(progress.done);
        let (after, last) = (progress.done_last, progress.given_last?);
        (count > 0).then_some(Unfinished { after, last, count })
    }
}

impl Drop for Queues {
    /// All issued work must end before the memory it uses can be freed.
    fn drop(&mut self) {
        let _ = self.stream(Queue::COMPUTE).context().make_current();
        for stream in self.streams() {
            // After an error, nothing runs any more, and the error was already reported.
            let _ = stream.synchronize("ending");
        }
        // Its threads use memory that is freed after this.
        self.disk = None;
    }
}

/// By instruction: whether an event follows it.
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
    // Needs no event: the host knows what it has run itself.
    for (index, is_marked) in is_marked.iter_mut().enumerate() {
        *is_marked &= !plan.links.is_of_host(plan.queue(InstructionId(index as u32)));
    }
    is_marked
}

/// By instruction: whether it runs on the card, and a copy from or to the disk waits for it.
fn awaited_by_disk(plan: &Plan) -> Vec<bool> {
    let mut awaited = vec![false; plan.instructions.len()];
    for id in plan.ids().filter(|&id| plan.links.is_disk(plan.queue(id))) {
        for &wait in &plan.instruction(id).waits {
            awaited[wait.index()] = !plan.links.is_of_host(plan.queue(wait));
        }
    }
    awaited
}

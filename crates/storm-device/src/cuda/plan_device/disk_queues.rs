//! The disk queues of a plan on a GPU: one thread runs the reads, and another the writes.

use super::super::CudaError;
use super::super::context::{Context, Stream};
use super::counters::Counters;
use super::reader::HostRun;
use crate::DeviceError;
use crate::disk::{DiskCopy, DiskTier};
use crate::error::Failed;
use crate::tickets::Command;
use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use storm_plan::{CheckedPlan, InstructionId, PerQueue, Queue, Work};

/// How long a thread sleeps before it reads a stream's counter again.
const LOOK_EVERY: Duration = Duration::from_micros(20);

/// The largest number of copies of a step that are recorded.
const RUNS_MAX: usize = 1 << 16;

/// What is added to counters after a failure, so that no stream waits any more.
const RELEASED: u64 = 1 << 30;

/// Threads that read and write the disk tier.
pub(super) struct DiskQueues {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    plan: Arc<CheckedPlan>,
    disk: DiskTier,
    /// The address of the pinned memory.
    host: usize,
    counters: Counters,
    state: Mutex<State>,
    /// Signaled at every change.
    news: Condvar,
}

#[derive(Default)]
struct State {
    /// Copies that are not done.
    waiting: PerQueue<VecDeque<Command>>,
    done: PerQueue<u64>,
    failure: Option<DeviceError>,
    stopping: bool,
    runs: Vec<HostRun>,
}

impl DiskQueues {
    /// Starts the threads. `host` is the plan's pinned memory. `recorded` tells whether runs are
    /// recorded.
    ///
    /// # Safety
    /// The memory is as large as the plan says, and outlives this.
    pub(super) unsafe fn new(
        plan: &Arc<CheckedPlan>,
        context: &Arc<Context>,
        mut disk: DiskTier,
        host: *mut u8,
        recorded: bool,
    ) -> Result<DiskQueues, DeviceError> {
        // SAFETY: as the caller guarantees.
        unsafe { disk.register(host) };
        let mut state = State::default();
        state.runs.reserve(if recorded { RUNS_MAX } else { 0 });
        for index in 0..plan.instructions.len() {
            let queue = plan.queue(InstructionId(index as u32));
            if plan.links.is_disk(queue) {
                state.waiting[queue].reserve(1);
            }
        }
        let shared = Arc::new(Shared {
            plan: Arc::clone(plan),
            disk,
            host: host as usize,
            counters: Counters::new(context)?,
            state: Mutex::new(state),
            news: Condvar::new(),
        });
        let mut queues = DiskQueues { shared, threads: Vec::new() };
        for queue in plan.queues().filter(|&queue| plan.links.is_disk(queue)) {
            let shared = Arc::clone(&queues.shared);
            let name = plan.links.queue_name(queue);
            let thread = std::thread::Builder::new().name(name).spawn(move || shared.run(queue));
            let no_thread =
                |error: std::io::Error| DeviceError::Thread { reason: error.to_string() };
            queues.threads.push(thread.map_err(no_thread)?);
        }
        Ok(queues)
    }

    pub(super) fn disk(&self) -> &DiskTier {
        &self.shared.disk
    }

    /// Issues a copy to its queue.
    pub(super) fn give(&self, queue: Queue, command: Command) {
        self.shared.lock().waiting[queue].push_back(command);
        self.shared.news.notify_all();
    }

    /// Makes a stream wait until a disk queue has done this many copies.
    pub(super) fn hold(&self, stream: &Stream, queue: Queue, count: u64) -> Result<(), CudaError> {
        self.shared.counters.hold(stream, queue, count)
    }

    /// Makes a stream report its progress to the disk queues.
    pub(super) fn signal(
        &self,
        stream: &Stream,
        queue: Queue,
        count: u64,
    ) -> Result<(), CudaError> {
        self.shared.counters.signal(stream, queue, count)
    }

    /// The queues of the disk.
    pub(super) fn queues(&self) -> impl Iterator<Item = Queue> + '_ {
        let plan = &self.shared.plan;
        plan.queues().filter(|&queue| plan.links.is_disk(queue))
    }

    /// The number of copies that the queue with this index has done. `None` if it is not a disk
    /// queue. After a failure, it is more than the queue was given.
    pub(super) fn progress(&self, index: usize) -> Option<u64> {
        let queue = self.queues().find(|queue| queue.index() == index)?;
        Some(self.shared.lock().done[queue])
    }

    /// The first failure.
    pub(super) fn failure(&self) -> Option<DeviceError> {
        self.shared.lock().failure.clone()
    }

    /// Forgets the runs of the previous step.
    pub(super) fn begin(&self) {
        self.shared.lock().runs.clear();
    }

    /// The copies of the step.
    pub(super) fn runs(&self) -> Vec<HostRun> {
        self.shared.lock().runs.clone()
    }
}

impl Shared {
    fn run(&self, queue: Queue) {
        loop {
            let is_idle = |state: &mut State| {
                state.waiting[queue].is_empty() && !state.stopping && state.failure.is_none()
            };
            let state = self.news.wait_while(self.lock(), is_idle);
            let state = state.unwrap_or_else(PoisonError::into_inner);
            let Some(&command) = state.waiting[queue].front() else { return };
            if state.stopping || state.failure.is_some() {
                return;
            }
            drop(state);
            if !self.wait(&command) {
                return;
            }
            let start = Instant::now();
            let result = self.execute(command.instruction);
            let end = Instant::now();
            let mut state = self.lock();
            if let Err(failed) = result {
                let failure = DeviceError::instruction(&self.plan, command.instruction, failed);
                state.failure.get_or_insert(failure);
                self.release(&mut state);
                return;
            }
            state.waiting[queue].pop_front();
            state.done[queue] += 1;
            self.counters.set(queue, state.done[queue]);
            if state.runs.len() < state.runs.capacity() {
                let instruction = command.instruction;
                state.runs.push(HostRun { instruction, start, end });
            }
            drop(state);
            self.news.notify_all();
        }
    }

    /// Waits for everything that a copy waits for. Returns false if the copy must not run any more.
    fn wait(&self, command: &Command) -> bool {
        for (other, target) in command.targets.iter().filter(|(_, target)| target.count > 0) {
            if self.plan.links.is_disk(other) {
                let is_early = |state: &mut State| {
                    state.done[other] < target.count && !state.stopping && state.failure.is_none()
                };
                drop(self.news.wait_while(self.lock(), is_early));
            } else if !self.plan.links.is_data(other) {
                while !self.counters.is_done(other, target.count) {
                    if self.must_stop() {
                        return false;
                    }
                    std::thread::sleep(LOOK_EVERY);
                }
            }
        }
        !self.must_stop()
    }

    fn must_stop(&self) -> bool {
        let state = self.lock();
        state.stopping || state.failure.is_some()
    }

    fn execute(&self, id: InstructionId) -> Result<(), Failed> {
        let copy = match &self.plan.instruction(id).work {
            Work::Copy(copy) => DiskCopy::new(copy),
            _ => None,
        };
        let copy = copy.ok_or_else(|| "it does not touch the disk".to_owned())?;
        // In bounds: the checker has compared every copy with the sizes of its tiers.
        let host = (self.host + copy.host) as *mut u8;
        // SAFETY: the memory exists, as the caller of `new` guarantees. Everything that the copy
        // waits for is done, nothing that waits for it starts before its counter is set, and the
        // checker has proved that nothing else touches its bytes. This is the only thread of its
        // queue.
        unsafe { self.disk.run(copy, host) }
    }

    /// Releases everything that waits for the disk. What it computes is never used.
    fn release(&self, state: &mut State) {
        for queue in self.plan.queues().filter(|&queue| self.plan.links.is_disk(queue)) {
            state.done[queue] += RELEASED;
            self.counters.set(queue, state.done[queue]);
        }
        self.news.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No code panics while it holds the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for DiskQueues {
    fn drop(&mut self) {
        self.shared.lock().stopping = true;
        self.shared.news.notify_all();
        for thread in self.threads.drain(..) {
            // Failures of the disk were recorded in the state.
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for DiskQueues {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DiskQueues").field("disk", &self.shared.disk).finish_non_exhaustive()
    }
}

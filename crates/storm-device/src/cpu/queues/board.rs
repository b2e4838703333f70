use crate::DeviceError;
use crate::spans::{Recorder, Span, Trace, WaitedFor};
use crate::tickets::{Command, Targets};
use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use storm_plan::{InstructionId, PerQueue, Plan, Queue};

/// State that the host and the queues share: commands in one direction, progress and failures in
/// the other.
///
/// It cannot deadlock: of all commands issued and not done, the one issued first is at the head of
/// its queue and waits only for commands issued before it, which are done. So it can run, however
/// small the queues are.
#[derive(Debug)]
pub(super) struct Board {
    state: Mutex<State>,
    /// One per queue, signaled when the queue has a command, when the instruction that it waits for
    /// is done, or when all queues must stop.
    queue_news: PerQueue<Condvar>,
    /// Signaled when the host can continue.
    host_news: Condvar,
}

#[derive(Debug)]
struct State {
    /// Commands issued and not started, at most `room` per queue.
    commands: PerQueue<VecDeque<Command>>,
    room: usize,
    /// Instructions done, by queue.
    done: PerQueue<u64>,
    /// What each queue waits for, so that only queues that can continue are woken. None while it
    /// runs a command.
    queue_waits: PerQueue<Option<QueueWait>>,
    host_waits: Option<HostWait>,
    failure: Option<DeviceError>,
    stopping: bool,
    recorder: Option<Recorder>,
}

/// A queue that has completed some number of instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Progress {
    queue: Queue,
    count: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QueueWait {
    Command,
    Done(Progress),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HostWait {
    Room { queue: Queue },
    Done(Progress),
}

/// A command that may start.
#[derive(Clone, Copy, Debug)]
pub(super) struct Taken {
    pub(super) instruction: InstructionId,
    pub(super) waited_for: WaitedFor,
}

impl Board {
    /// The queues of a plan, with room for this many commands each. A `recorder` records a trace.
    pub(super) fn new(plan: &Plan, room: usize, recorder: Option<Recorder>) -> Board {
        let room = room.max(1);
        let mut commands = PerQueue::<VecDeque<Command>>::default();
        for queue in plan.queues() {
            commands[queue].reserve(room);
        }
        let state = State {
            commands,
            room,
            done: PerQueue::default(),
            queue_waits: PerQueue::default(),
            host_waits: None,
            failure: None,
            stopping: false,
            recorder,
        };
        Board {
            state: Mutex::new(state),
            queue_news: PerQueue::default(),
            host_news: Condvar::new(),
        }
    }

    // ---- the host's side --------------------------------------------------------------------

    /// The first failure so far.
    pub(super) fn check(&self) -> Result<(), DeviceError> {
        self.lock().failure.clone().map_or(Ok(()), Err)
    }

    /// Issues a command to a queue, once there is room.
    pub(super) fn give(&self, queue: Queue, command: Command) -> Result<(), DeviceError> {
        let mut state = self.wait_as_host(HostWait::Room { queue })?;
        state.commands[queue].push_back(command);
        if state.queue_waits[queue] == Some(QueueWait::Command) {
            self.queue_news[queue].notify_one();
        }
        Ok(())
    }

    /// Waits until the queues have progressed this far.
    pub(super) fn wait(&self, counts: PerQueue<u64>) -> Result<(), DeviceError> {
        for (queue, &count) in counts.iter() {
            drop(self.wait_as_host(HostWait::Done(Progress { queue, count }))?);
        }
        Ok(())
    }

    /// [`Board::wait`] for the targets of a command.
    pub(super) fn wait_for(&self, targets: Targets) -> Result<(), DeviceError> {
        self.wait(targets.map(|target| target.count))
    }

    /// Discards the trace of the previous step.
    pub(super) fn begin_trace(&self) {
        if let Some(recorder) = &mut self.lock().recorder {
            recorder.begin();
        }
    }

    pub(super) fn trace(&self) -> Option<Trace> {
        self.lock().recorder.as_ref().map(Recorder::trace)
    }

    /// Tells all queues to stop after their current command.
    pub(super) fn stop(&self) {
        self.lock().stopping = true;
        self.wake_all();
    }

    /// Waits until `wait` is fulfilled, and returns with the lock held.
    fn wait_as_host(&self, wait: HostWait) -> Result<MutexGuard<'_, State>, DeviceError> {
        let mut state = self.lock();
        loop {
            if let Some(failure) = &state.failure {
                return Err(failure.clone());
            }
            if state.is_fulfilled(wait) {
                state.host_waits = None;
                return Ok(state);
            }
            state.host_waits = Some(wait);
            state = self.host_news.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    // ---- the queues' side -------------------------------------------------------------------

    /// Waits for the queue's next command, and until that command may start. None means stop.
    pub(super) fn take(&self, queue: Queue) -> Option<Taken> {
        let mut waited_for = WaitedFor::Nothing;
        let mut state = self.lock();
        loop {
            if state.stopping || state.failure.is_some() {
                return None;
            }
            let wait = match state.commands[queue].front() {
                None => {
                    waited_for = WaitedFor::Host;
                    QueueWait::Command
                }
                Some(command) => match state.unmet(command) {
                    None => break,
                    Some((progress, instruction)) => {
                        waited_for = WaitedFor::Instruction(instruction);
                        QueueWait::Done(progress)
                    }
                },
            };
            state.queue_waits[queue] = Some(wait);
            state = self.queue_news[queue].wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.queue_waits[queue] = None;
        let command = state.commands[queue].pop_front().expect("seen at the front");
        self.wake_host(&state);
        Some(Taken { instruction: command.instruction, waited_for })
    }

    /// The queue has completed the command it took.
    pub(super) fn complete(&self, queue: Queue, span: Span) {
        let mut state = self.lock();
        state.done[queue] += 1;
        if let Some(recorder) = &mut state.recorder {
            recorder.record(queue, span);
        }
        for (waiting, wait) in state.queue_waits.iter() {
            if let Some(QueueWait::Done(progress)) = wait
                && state.is_done(*progress)
            {
                self.queue_news[waiting].notify_one();
            }
        }
        self.wake_host(&state);
    }

    /// The command that the queue took has failed: all queues stop before their next command.
    pub(super) fn fail(&self, failure: DeviceError) {
        self.lock().failure.get_or_insert(failure);
        self.wake_all();
    }

    fn wake_host(&self, state: &State) {
        if state.host_waits.is_some_and(|wait| state.is_fulfilled(wait)) {
            self.host_news.notify_one();
        }
    }

    fn wake_all(&self) {
        let queues = self.queue_news.iter().map(|(_, news)| news);
        queues.chain([&self.host_news]).for_each(Condvar::notify_all);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No code panics while it holds the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn is_done(&self, progress: Progress) -> bool {
        self.done[progress.queue] >= progress.count
    }

    fn is_fulfilled(&self, wait: HostWait) -> bool {
        match wait {
            HostWait::Room { queue } => self.commands[queue].len() < self.room,
            HostWait::Done(progress) => self.is_done(progress),
        }
    }

    /// An instruction that a command still waits for.
    fn unmet(&self, command: &Command) -> Option<(Progress, InstructionId)> {
        let targets = command.targets.iter();
        targets
            .map(|(queue, target)| (Progress { queue, count: target.count }, target.instruction))
            .find(|&(progress, _)| !self.is_done(progress))
    }
}

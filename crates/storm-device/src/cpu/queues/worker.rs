use super::board::Taken;
use super::options::{CpuPlanOptions, Fault, FaultKind};
use super::program::Program;
use crate::chaos::Chaos;
use crate::error::Failed;
use crate::spans::Span;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};
use storm_plan::{InstructionId, Queue};

/// The thread of one queue.
pub(super) struct Worker {
    queue: Queue,
    program: Arc<Program>,
    chaos: Option<Chaos>,
    fault: Option<Fault>,
    executed: u64,
}

impl Worker {
    pub(super) fn new(queue: Queue, program: Arc<Program>, options: &CpuPlanOptions) -> Worker {
        let chaos = options.chaos_seed.map(|seed| Chaos::new(seed, queue));
        let fault = options.fault.filter(|fault| fault.queue == queue);
        Worker { queue, program, chaos, fault, executed: 0 }
    }

    /// Runs the queue's commands until it must stop.
    pub(super) fn run(mut self) {
        let program = Arc::clone(&self.program);
        while let Some(Taken { instruction, waited_for }) = program.board.take(self.queue) {
            let ready_ns = program.now_ns();
            if let Some(chaos) = &mut self.chaos {
                keep_busy(Duration::from_nanos(u64::from(chaos.delay_ns())));
            }
            let start_ns = program.now_ns();
            if let Err(failed) = self.execute(instruction) {
                program.board.fail(program.failure(instruction, failed));
                return;
            }
            let end_ns = program.now_ns();
            let span = Span { instruction, waited_for, ready_ns, start_ns, end_ns };
            program.board.complete(self.queue, span);
        }
    }

    fn execute(&mut self, instruction: InstructionId) -> Result<(), Failed> {
        let fault = self.fault.filter(|fault| fault.after == self.executed);
        self.executed += 1;
        let outcome = catch_unwind(AssertUnwindSafe(|| match fault.map(|fault| fault.kind) {
            Some(FaultKind::Error) => Err("failed on purpose".to_owned().into()),
            Some(FaultKind::Panic) => panic!("panicked on purpose"),
            None => {
                // SAFETY: the board passed this instruction to this thread alone, everything it
                // waits for is done, and it does not count as done before this returns.
                unsafe { self.program.run(instruction) }
            }
        }));
        outcome.unwrap_or_else(|panic| Err(message(&*panic).into()))
    }
}

/// Keeps the thread busy, and yields the core to others.
fn keep_busy(time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        std::thread::yield_now();
    }
}

/// The message of a panic.
pub(super) fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("it panicked").to_owned()
}

use storm_plan::{InstructionId, PerQueue, Plan, Queue};

/// A queue's progress to wait for: `count` instructions done, none if 0. The last of
/// them is `instruction`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    pub(crate) count: u64,
    pub(crate) instruction: InstructionId,
}

/// How far every queue must be.
pub(crate) type Targets = PerQueue<Target>;

const NOTHING: Targets = PerQueue::of_each(Target { count: 0, instruction: InstructionId(0) });

/// What a queue is given: an instruction, and how far the others must be before it starts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Command {
    pub(crate) instruction: InstructionId,
    pub(crate) targets: Targets,
}

/// How much was given to each queue. Turns "the last run of that instruction before this one" into
/// a count, once, when the waiter is issued: later runs do not change what it means.
#[derive(Debug)]
pub(crate) struct Tickets {
    queues: Vec<Queue>,
    /// By instruction: how many its queue had been given, itself included, when it was issued
    /// last; 0 if it never was.
    last: Vec<u64>,
    given: PerQueue<u64>,
}

impl Tickets {
    pub(crate) fn new(plan: &Plan) -> Tickets {
        let queues: Vec<Queue> = plan.ids().map(|id| plan.queue(id)).collect();
        let last = vec![0; queues.len()];
        Tickets { queues, last, given: PerQueue::default() }
    }

    /// Notes that an instruction is issued.
    pub(crate) fn give(&mut self, plan: &Plan, id: InstructionId) -> (Queue, Command) {
        let queue = self.queues[id.index()];
        let targets = self.targets(&plan.instruction(id).waits);
        self.given[queue] += 1;
        self.last[id.index()] = self.given[queue];
        (queue, Command { instruction: id, targets })
    }

    /// How far the queues must be for all of these to be done, as last issued.
    pub(crate) fn targets(&self, instructions: &[InstructionId]) -> Targets {
        let mut targets = NOTHING;
        for &instruction in instructions {
            let (queue, count) = (self.queues[instruction.index()], self.last[instruction.index()]);
            let target = &mut targets[queue];
            if count > target.count {
                *target = Target { count, instruction };
            }
        }
        targets
    }

    /// How many its queue had been given when the instruction was issued last, itself included; 0 if
    /// it never was.
    pub(crate) fn last(&self, id: InstructionId) -> u64 {
        self.last[id.index()]
    }

    /// Instructions given to each queue so far.
    pub(crate) fn given(&self) -> PerQueue<u64> {
        self.given
    }
}

use storm_plan::{InstructionId, PerQueue, Plan, Queue};

/// Progress of a queue to wait for: `count` instructions done, the last of which is `instruction`. A
/// count of 0 means no wait.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    pub(crate) count: u64,
    pub(crate) instruction: InstructionId,
}

/// The progress required of every queue.
pub(crate) type Targets = PerQueue<Target>;

const NOTHING: Targets = PerQueue::of_each(Target { count: 0, instruction: InstructionId(0) });

/// An instruction issued to a queue, and the progress required of the other queues before it starts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Command {
    pub(crate) instruction: InstructionId,
    pub(crate) targets: Targets,
}

/// Counts what was issued to each queue. Turns "the latest run of that instruction before this one"
/// into a count, when the waiting instruction is issued, so later runs do not change its meaning.
#[derive(Debug)]
pub(crate) struct Tickets {
    queues: Vec<Queue>,
    /// By instruction: how many its queue had been given, itself included, when it was last issued;
    /// 0 if never.
    last: Vec<u64>,
    given: PerQueue<u64>,
}

impl Tickets {
    pub(crate) fn new(plan: &Plan) -> Tickets {
        let queues: Vec<Queue> = plan.ids().map(|id| plan.queue(id)).collect();
        let last = vec![0; queues.len()];
        Tickets { queues, last, given: PerQueue::default() }
    }

    /// Records that an instruction is issued.
    pub(crate) fn give(&mut self, plan: &Plan, id: InstructionId) -> (Queue, Command) {
        let queue = self.queues[id.index()];
        let targets = self.targets(&plan.instruction(id).waits);
        self.given[queue] += 1;
        self.last[id.index()] = self.given[queue];
        (queue, Command { instruction: id, targets })
    }

    /// The progress at which the latest runs of all these instructions are done.
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

    /// How many its queue had been given when the instruction was last issued, itself included; 0 if
    /// never.
    pub(crate) fn last(&self, id: InstructionId) -> u64 {
        self.last[id.index()]
    }

    /// Instructions given to each queue so far.
    pub(crate) fn given(&self) -> PerQueue<u64> {
        self.given
    }
}

use storm_graph::random::{Purpose, Seed, Stream, words};
use storm_plan::Queue;

/// Short random delays for a queue, so tests see queues overtake each other in every way the plan
/// allows.
#[derive(Clone, Debug)]
pub(crate) struct Chaos {
    seed: Seed,
    stream: Stream,
    delays: u64,
}

/// The longest delay.
const DELAY_NS_MAX: u32 = 30_000;

impl Chaos {
    pub(crate) fn new(seed: u64, queue: Queue) -> Chaos {
        let stream = Stream { tensor: queue.index() as u16, layer: 0 };
        Chaos { seed: Seed { seed, step: 0 }, stream, delays: 0 }
    }

    /// The delay before the queue's next instruction.
    pub(crate) fn delay_ns(&mut self) -> u32 {
        let [word, ..] = words(self.seed, Purpose::Rounding, self.stream, self.delays);
        self.delays += 1;
        word % DELAY_NS_MAX
    }
}

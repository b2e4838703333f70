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

/// The longest delay: several times as long as most instructions of small models.
const DELAY_NS_MAX: u32 = 60_000;
/// One in this many instructions is delayed. If all were, tests would spend most of their time waiting, and queues would
/// stay closer together.
const ONE_IN: u32 = 8;

impl Chaos {
    pub(crate) fn new(seed: u64, queue: Queue) -> Chaos {
        let stream = Stream { tensor: queue.index() as u16, layer: 0 };
        Chaos { seed: Seed { seed, step: 0 }, stream, delays: 0 }
    }

    /// The delay before the queue's next instruction, mostly none.
    pub(crate) fn delay_ns(&mut self) -> u32 {
        let [choice, length, ..] = words(self.seed, Purpose::Rounding, self.stream, self.delays);
        self.delays += 1;
        if choice.is_multiple_of(ONE_IN) { length % DELAY_NS_MAX } else { 0 }
    }
}

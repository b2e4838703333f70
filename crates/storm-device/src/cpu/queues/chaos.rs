use std::time::{Duration, Instant};
use storm_graph::random::{Purpose, Seed, Stream, words};
use storm_plan::Queue;

/// Random short delays, so that queues overtake each other in every way that the plan allows.
pub(super) struct Chaos {
    seed: Seed,
    stream: Stream,
    delays: u64,
}

/// The longest delay.
const DELAY_NS_MAX: u32 = 30_000;

impl Chaos {
    pub(super) fn new(seed: u64, queue: Queue) -> Chaos {
        let stream = Stream { tensor: queue.index() as u16, layer: 0 };
        Chaos { seed: Seed { seed, step: 0 }, stream, delays: 0 }
    }

    /// Keeps the thread, but not the core, busy for a while.
    pub(super) fn delay(&mut self) {
        let [word, ..] = words(self.seed, Purpose::Rounding, self.stream, self.delays);
        self.delays += 1;
        let delay = Duration::from_nanos(u64::from(word % DELAY_NS_MAX));
        let start = Instant::now();
        while start.elapsed() < delay {
            std::thread::yield_now();
        }
    }
}

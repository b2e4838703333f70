//! The seeded random generator of the campaigns.

pub(crate) struct Random(storm_graph::random::Random);

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        Random(storm_graph::random::Random(seed))
    }

    /// The generator of one case, unrelated to those of its neighbors.
    pub(crate) fn of_case(seed: u64, case: u64) -> Random {
        let mut seeds = Random::new(seed);
        let mut random = Random::new(seeds.next() ^ case.wrapping_mul(0xd134_2543_de82_ef95));
        random.next();
        random
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0.bits()
    }

    /// A number below a limit that is not 0.
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// An index into something of this length, which is not 0.
    pub(crate) fn index(&mut self, len: usize) -> usize {
        self.0.below(len)
    }

    pub(crate) fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.index(from.len())]
    }
}

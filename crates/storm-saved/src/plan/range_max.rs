//! Range additions and range maxima over positions, in logarithmic time.

/// One number per position, with range addition and range maximum.
#[derive(Clone, Debug)]
pub(super) struct RangeMax {
    positions: usize,
    /// By node: the maximum of its subtree, without the additions pending at the nodes above.
    maxima: Vec<i64>,
    /// By node: the value added to its whole subtree.
    added: Vec<i64>,
}

impl RangeMax {
    pub(super) fn new(values: &[i64]) -> RangeMax {
        let positions = values.len().next_power_of_two();
        let mut maxima = vec![i64::MIN / 2; 2 * positions];
        maxima[positions..positions + values.len()].copy_from_slice(values);
        for node in (1..positions).rev() {
            maxima[node] = maxima[2 * node].max(maxima[2 * node + 1]);
        }
        RangeMax { positions, maxima, added: vec![0; 2 * positions] }
    }

    /// Adds to the positions `first..=last`. Does nothing if the range is empty.
    pub(super) fn add(&mut self, first: usize, last: usize, value: i64) {
        if first <= last {
            self.add_below(1, 0, self.positions, first, last + 1, value);
        }
    }

    /// The maximum over the positions `first..=last`, which must not be empty.
    pub(super) fn max(&self, first: usize, last: usize) -> i64 {
        self.max_below(1, 0, self.positions, first, last + 1)
    }

    fn add_below(
        &mut self,
        node: usize,
        from: usize,
        to: usize,
        first: usize,
        end: usize,
        value: i64,
    ) {
        if end <= from || to <= first {
            return;
        }
        if first <= from && to <= end {
            self.maxima[node] += value;
            self.added[node] += value;
            return;
        }
        let middle = usize::midpoint(from, to);
        self.add_below(2 * node, from, middle, first, end, value);
        self.add_below(2 * node + 1, middle, to, first, end, value);
        self.maxima[node] = self.maxima[2 * node].max(self.maxima[2 * node + 1]) + self.added[node];
    }

    fn max_below(&self, node: usize, from: usize, to: usize, first: usize, end: usize) -> i64 {
        if end <= from || to <= first {
            return i64::MIN / 2;
        }
        if first <= from && to <= end {
            return self.maxima[node];
        }
        let middle = usize::midpoint(from, to);
        let left = self.max_below(2 * node, from, middle, first, end);
        let right = self.max_below(2 * node + 1, middle, to, first, end);
        left.max(right) + self.added[node]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use storm_graph::random::{Purpose, Seed, Stream, words};

    #[test]
    fn agrees_with_plain_sums() {
        for length in [1_usize, 2, 5, 16, 33] {
            let mut plain: Vec<i64> = (0..length as i64).map(|x| x * 7 % 5).collect();
            let mut tree = RangeMax::new(&plain);
            for round in 0..200 {
                let seed = Seed { seed: length as u64, step: 0 };
                let stream = Stream { tensor: 0, layer: 0 };
                let [a, b, value, _] = words(seed, Purpose::Rounding, stream, round);
                let (a, b) = (a as usize % length, b as usize % length);
                let (first, last) = (a.min(b), a.max(b));
                let value = i64::from(value % 100) - 50;
                tree.add(first, last, value);
                plain[first..=last].iter_mut().for_each(|x| *x += value);
                let (first, last) = (first / 2, last);
                let expected = *plain[first..=last].iter().max().expect("not empty");
                assert_eq!(tree.max(first, last), expected);
            }
        }
    }
}

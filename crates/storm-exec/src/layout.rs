//! Addresses in the work area: a pure function from lifetimes to offsets.

use crate::schedule::Home;
use crate::slots::ALIGNMENT;

/// Offsets of the work values, and the size of the area.
pub(crate) struct WorkLayout {
    /// By value; unused for slots.
    pub(crate) offsets: Vec<usize>,
    pub(crate) size_bytes: usize,
}

/// A range of free bytes.
#[derive(Clone, Copy)]
struct Gap {
    start: usize,
    end: usize,
}

/// First fit over time: a value takes the lowest gap that holds it when it is made, and gives its
/// bytes back after its last reader.
pub(crate) fn lay_out(values: &[Home], steps: usize) -> WorkLayout {
    let mut made_at: Vec<Vec<usize>> = vec![Vec::new(); steps];
    let mut dead_after: Vec<Vec<usize>> = vec![Vec::new(); steps + 1];
    let mut sizes = vec![0; values.len()];
    for (index, value) in values.iter().enumerate() {
        if let Home::Work { size_bytes, made, last_read } = *value {
            sizes[index] = size_bytes.max(1).next_multiple_of(ALIGNMENT);
            made_at[made].push(index);
            dead_after[last_read.min(steps)].push(index);
        }
    }

    let mut offsets = vec![0; values.len()];
    let mut gaps: Vec<Gap> = Vec::new();
    let mut top = 0;
    for step in 0..steps {
        for &value in &made_at[step] {
            offsets[value] = take(&mut gaps, &mut top, sizes[value]);
        }
        for &value in &dead_after[step] {
            give_back(&mut gaps, offsets[value], sizes[value]);
        }
    }
    WorkLayout { offsets, size_bytes: top }
}

fn take(gaps: &mut Vec<Gap>, top: &mut usize, size: usize) -> usize {
    if let Some(index) = gaps.iter().position(|gap| gap.end - gap.start >= size) {
        let start = gaps[index].start;
        gaps[index].start += size;
        if gaps[index].start == gaps[index].end {
            gaps.remove(index);
        }
        return start;
    }
    // Grow, starting inside the last gap if it touches the top.
    let start = match gaps.last() {
        Some(gap) if gap.end == *top => gaps.pop().expect("just seen").start,
        _ => *top,
    };
    *top = start.saturating_add(size);
    start
}

fn give_back(gaps: &mut Vec<Gap>, start: usize, size: usize) {
    let at = gaps.partition_point(|gap| gap.start < start);
    gaps.insert(at, Gap { start, end: start + size });
    if at + 1 < gaps.len() && gaps[at].end == gaps[at + 1].start {
        gaps[at].end = gaps[at + 1].end;
        gaps.remove(at + 1);
    }
    if at > 0 && gaps[at - 1].end == gaps[at].start {
        gaps[at - 1].end = gaps[at].end;
        gaps.remove(at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values that live at the same time never share a byte, for many seeded random lifetimes.
    #[test]
    fn living_values_do_not_overlap() {
        let mut state = 1u64;
        let mut random = |below: usize| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as usize % below
        };
        for _ in 0..200 {
            let steps = 1 + random(40);
            let values: Vec<Home> = (0..1 + random(60))
                .map(|_| {
                    let made = random(steps);
                    let last_read = made + random(steps + 1 - made);
                    Home::Work { size_bytes: random(5000), made, last_read }
                })
                .collect();
            let layout = lay_out(&values, steps);
            for (i, a) in values.iter().enumerate() {
                for (j, b) in values.iter().enumerate().take(i) {
                    let (
                        Home::Work { size_bytes: size_a, made: from_a, last_read: to_a },
                        Home::Work { size_bytes: size_b, made: from_b, last_read: to_b },
                    ) = (a, b)
                    else {
                        unreachable!("only work values here")
                    };
                    let together = from_a <= to_b && from_b <= to_a;
                    let (at_a, at_b) = (layout.offsets[i], layout.offsets[j]);
                    let apart = at_a + size_a <= at_b || at_b + size_b <= at_a;
                    assert!(!together || apart, "{a:?} at {at_a} and {b:?} at {at_b}");
                    assert!(at_a + size_a <= layout.size_bytes);
                }
            }
        }
    }

    /// A chain in which each value is read by the next step only needs room for two.
    #[test]
    fn dead_bytes_are_used_again() {
        let values: Vec<Home> = (0..10)
            .map(|made| Home::Work { size_bytes: ALIGNMENT, made, last_read: made + 1 })
            .collect();
        assert_eq!(lay_out(&values, 11).size_bytes, 2 * ALIGNMENT);
    }
}

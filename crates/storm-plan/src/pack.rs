//! Assigns memory addresses by lifetime.

/// Alignment of offsets, sufficient for every device.
pub const ALIGNMENT: usize = 256;

/// A buffer that needs memory from one point in time to another, inclusive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lifetime {
    /// Its size.
    pub size_bytes: usize,
    /// When it is first written.
    pub made: usize,
    /// When it is last accessed.
    pub last_use: usize,
}

/// The offsets of buffers, and the total size.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Packing {
    /// In the order of the lifetimes.
    pub offsets: Vec<usize>,
    /// The total size.
    pub size_bytes: usize,
}

/// A range of free bytes.
#[derive(Clone, Copy)]
struct Gap {
    start: usize,
    end: usize,
}

/// The smaller of two packings: first fit over time, and largest first.
pub fn pack(lifetimes: &[Lifetime]) -> Packing {
    let (over_time, by_size) = (pack_over_time(lifetimes), pack_by_size(lifetimes));
    if by_size.size_bytes < over_time.size_bytes { by_size } else { over_time }
}

/// Largest first, each at the lowest offset that is free for its whole lifetime.
fn pack_by_size(lifetimes: &[Lifetime]) -> Packing {
    let offsets: Vec<usize> =
        pack_within(lifetimes, usize::MAX).into_iter().map(Option::unwrap_or_default).collect();
    let ends = offsets.iter().zip(lifetimes);
    let ends = ends.map(|(&start, life)| start.saturating_add(aligned(life.size_bytes.max(1))));
    Packing { size_bytes: ends.max().unwrap_or(0), offsets }
}

/// The same within `limit` bytes; `None` for those that do not fit beside the larger ones.
pub(crate) fn pack_within(lifetimes: &[Lifetime], limit: usize) -> Vec<Option<usize>> {
    let mut order: Vec<usize> = (0..lifetimes.len()).collect();
    order.sort_by_key(|&index| std::cmp::Reverse(lifetimes[index].size_bytes));
    let mut offsets = vec![None; lifetimes.len()];
    let mut placed: Vec<(usize, usize, usize)> = Vec::new(); // start, end, index; by start
    for index in order {
        let (life, size) = (lifetimes[index], aligned(lifetimes[index].size_bytes.max(1)));
        let mut start = 0usize;
        for &(other_start, other_end, other) in &placed {
            let other = lifetimes[other];
            let together = other.made <= life.last_use && life.made <= other.last_use;
            if together && other_start < start.saturating_add(size) && start < other_end {
                start = other_end;
            }
        }
        let end = start.saturating_add(size);
        if end <= limit {
            offsets[index] = Some(start);
            let at = placed.partition_point(|&(known, _, _)| known <= start);
            placed.insert(at, (start, end, index));
        }
    }
    offsets
}

/// First fit over time: each takes the lowest gap that holds it when it is created, and frees it
/// after its last use.
fn pack_over_time(lifetimes: &[Lifetime]) -> Packing {
    let positions = lifetimes.iter().map(|l| l.last_use + 1).max().unwrap_or(0);
    let mut made_at: Vec<Vec<usize>> = vec![Vec::new(); positions];
    let mut dead_after: Vec<Vec<usize>> = vec![Vec::new(); positions];
    for (index, lifetime) in lifetimes.iter().enumerate() {
        made_at[lifetime.made].push(index);
        dead_after[lifetime.last_use].push(index);
    }
    let size = |index: usize| aligned(lifetimes[index].size_bytes.max(1));
    let mut offsets = vec![0; lifetimes.len()];
    let mut gaps: Vec<Gap> = Vec::new();
    let mut top = 0;
    for position in 0..positions {
        for &index in &made_at[position] {
            offsets[index] = take(&mut gaps, &mut top, size(index));
        }
        for &index in &dead_after[position] {
            give_back(&mut gaps, offsets[index], size(index));
        }
    }
    Packing { offsets, size_bytes: top }
}

/// Rounds up to a multiple of [`ALIGNMENT`].
pub fn aligned(bytes: usize) -> usize {
    bytes.checked_next_multiple_of(ALIGNMENT).unwrap_or(usize::MAX)
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
    // Grow, starting inside the last gap if that reaches the top.
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
    use storm_graph::random::Random;

    /// Values alive at the same time never share a byte, for many seeded random lifetimes.
    #[test]
    fn living_values_do_not_overlap() {
        let mut random = Random(1);
        let mut random = |limit| random.below(limit);
        for _ in 0..200 {
            let lifetimes: Vec<Lifetime> = (0..30)
                .map(|_| {
                    let made = random(20);
                    let last_use = made + random(20 - made);
                    Lifetime { size_bytes: random(3000), made, last_use }
                })
                .collect();
            for packing in [pack_over_time(&lifetimes), pack_by_size(&lifetimes)] {
                for (i, a) in lifetimes.iter().enumerate() {
                    assert!(packing.offsets[i] + a.size_bytes <= packing.size_bytes);
                    assert!(packing.offsets[i].is_multiple_of(ALIGNMENT));
                    for (j, b) in lifetimes.iter().enumerate().skip(i + 1) {
                        let apart_in_time = a.last_use < b.made || b.last_use < a.made;
                        let (start_a, start_b) = (packing.offsets[i], packing.offsets[j]);
                        let apart =
                            start_a + a.size_bytes <= start_b || start_b + b.size_bytes <= start_a;
                        assert!(apart_in_time || apart, "{a:?} at {start_a}, {b:?} at {start_b}");
                    }
                }
            }
        }
    }

    /// Larger ones first; those that begin later take the same bytes again.
    #[test]
    fn what_does_not_fit_within_the_limit_is_left_out() {
        let sizes = [(512, 0, 2), (300, 1, 1), (256, 2, 3), (512, 3, 4), (1024, 0, 0)];
        let lifetimes =
            sizes.map(|(size_bytes, made, last_use)| Lifetime { size_bytes, made, last_use });
        assert_eq!(pack_within(&lifetimes, 768), [Some(0), None, Some(512), Some(0), None]);
    }

    /// A chain in which only the next position reads each value needs room for two.
    #[test]
    fn dead_bytes_are_used_again() {
        let chain: Vec<Lifetime> = (0..10)
            .map(|made| Lifetime { size_bytes: ALIGNMENT, made, last_use: made + 1 })
            .collect();
        assert_eq!(pack(&chain).size_bytes, 2 * ALIGNMENT);
    }
}

//! The order of rows: a pure function of seed and epoch. A row is a record, or some tokens of a
//! stream. It belongs to the block that it begins in, and may extend into later blocks.

use crate::loader::Shuffle;
use serde::{Deserialize, Serialize};
use std::iter::once;
use std::ops::Range;
use storm_graph::random::Random;

/// Consecutive blocks that are read together. A disk reads them nearly as fast as longer runs.
pub(super) const GROUP_BLOCKS: u64 = 4;

/// Domain separators for the random numbers.
const OF_GROUPS: u64 = 0x6772_6f75_7073;
const OF_PHASE: u64 = 0x0070_6861_7365;
const OF_WINDOW: u64 = 0x7769_6e64_6f77;

/// The order of rows, which are records or rows of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// Fully random. Every row is a separate read if the dataset does not fit in memory.
    #[serde(alias = "shuffled")]
    Global,
    /// Short runs of blocks come in random order, and rows are shuffled within a window of as many
    /// blocks as fit in memory. Reads are long.
    Window,
    /// Disk order.
    Sequential,
}

impl Order {
    /// Its name in options and messages.
    pub fn name(self) -> &'static str {
        match self {
            Order::Global => "global",
            Order::Window => "window",
            Order::Sequential => "sequential",
        }
    }
}

/// The blocks of a part, and how many rows begin in each.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) blocks: Vec<u32>,
    beginning: Vec<u32>,
    /// The last block that rows of each block extend into, as an index. `None` if no row crosses
    /// blocks.
    reach: Option<Vec<u32>>,
    pub(super) rows: u64,
}

impl Part {
    /// Blocks of whole rows.
    pub(super) fn new(blocks: Vec<u32>, rows: Vec<u32>) -> Part {
        let sum = rows.iter().map(|&rows| u64::from(rows)).sum();
        Part { blocks, beginning: rows, reach: None, rows: sum }
    }

    /// Blocks whose rows extend into others.
    pub(super) fn with_reach(blocks: Vec<u32>, rows: Vec<u32>, reach: Vec<u32>) -> Part {
        Part { reach: Some(reach), ..Part::new(blocks, rows) }
    }

    /// Rows that begin before each block.
    pub(super) fn rows_before(&self) -> Vec<u64> {
        let sum = |sum: &mut u64, &rows: &u32| {
            *sum += u64::from(rows);
            Some(*sum - u64::from(rows))
        };
        self.beginning.iter().scan(0, sum).collect()
    }

    /// Maximum blocks that a group needs.
    pub(super) fn group_blocks_max(&self) -> u64 {
        let beyond = |(at, reach): (u32, &u32)| u64::from(reach.saturating_sub(at));
        let reach = self.reach.iter().flat_map(|reach| (0..).zip(reach).map(beyond));
        GROUP_BLOCKS + reach.max().unwrap_or(0)
    }

    /// Blocks after a group that its rows extend into.
    fn beyond(&self, group: &Range<usize>) -> Range<usize> {
        let reach = self.reach.as_ref().and_then(|reach| reach[group.clone()].iter().max());
        let end = reach.map_or(0, |&last| last as usize + 1);
        group.end..end.max(group.end)
    }
}

/// What determines the order besides the epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rule {
    pub(super) order: Order,
    pub(super) seed: u64,
    /// Blocks in a window. Unused in global order.
    pub(super) window_blocks: u64,
}

/// The order of one epoch.
#[derive(Debug)]
pub(super) struct EpochOrder {
    rule: Rule,
    epoch: u64,
    /// Runs of blocks, as indices into the part.
    groups: Vec<Range<usize>>,
    windows: Vec<Cut>,
}

/// The groups and rows of a window.
#[derive(Clone, Debug)]
struct Cut {
    groups: Range<usize>,
    rows: Range<u64>,
}

/// The rows of a window and their order.
#[derive(Debug)]
pub(super) struct WindowOrder {
    /// Indices of its blocks in the part: those that its rows begin in, then those that they extend
    /// into.
    pub(super) blocks: Vec<usize>,
    /// The same indices sorted, each with its position in `blocks`. `None` if `blocks` is the
    /// identity.
    sorted: Option<Vec<(usize, usize)>>,
    /// Its range of rows in the epoch.
    pub(super) rows: Range<u64>,
    /// Rows before each block that rows begin in, and in total.
    before: Vec<u64>,
    shuffle: Option<Shuffle>,
}

impl EpochOrder {
    pub(super) fn new(part: &Part, rule: Rule, epoch: u64) -> EpochOrder {
        let blocks = part.blocks.len() as u64;
        let (groups, capacity) = match rule.order {
            // One group and one window.
            Order::Global => (once(0..blocks as usize).collect::<Vec<_>>(), blocks),
            Order::Sequential => (groups(blocks, 0).collect(), rule.window_blocks),
            Order::Window => {
                let phase = mix(mix(rule.seed ^ OF_PHASE) ^ epoch) % GROUP_BLOCKS;
                let groups: Vec<_> = groups(blocks, phase).collect();
                let shuffle = Shuffle::new(groups.len() as u64, rule.seed ^ OF_GROUPS, epoch);
                let order = (0..groups.len() as u64).map(|place| shuffle.at(place) as usize);
                (order.map(|group| groups[group].clone()).collect(), rule.window_blocks)
            }
        };
        let mut windows: Vec<Cut> = Vec::new();
        let (mut row, mut held) = (0, 0);
        for (number, group) in groups.iter().enumerate() {
            let blocks = (group.len() + part.beyond(group).len()) as u64;
            let rows: u64 = part.beginning[group.clone()].iter().map(|&rows| u64::from(rows)).sum();
            match windows.last_mut() {
                Some(window) if held + blocks <= capacity => {
                    held += blocks;
                    window.groups.end = number + 1;
                    window.rows.end = row + rows;
                }
                _ => {
                    held = blocks;
                    windows.push(Cut { groups: number..number + 1, rows: row..row + rows });
                }
            }
            row += rows;
        }
        EpochOrder { rule, epoch, groups, windows }
    }

    pub(super) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// How many windows there are.
    pub(super) fn windows(&self) -> usize {
        self.windows.len()
    }

    /// The window that contains a row.
    pub(super) fn window_of(&self, row: u64) -> usize {
        self.windows.partition_point(|window| window.rows.end <= row)
    }

    pub(super) fn window(&self, part: &Part, number: usize) -> WindowOrder {
        let Cut { groups, rows } = self.windows[number].clone();
        let groups = &self.groups[groups];
        let mut blocks: Vec<usize> = groups.iter().cloned().flatten().collect();
        let mut before = Vec::with_capacity(blocks.len() + 1);
        before.push(0);
        let mut sum = 0;
        for &block in &blocks {
            sum += u64::from(part.beginning[block]);
            before.push(sum);
        }
        let sorted = (part.reach.is_some() && self.rule.order != Order::Global).then(|| {
            let numbered = |blocks: &[usize]| -> Vec<(usize, usize)> {
                let mut numbered: Vec<_> = blocks.iter().copied().zip(0..).collect();
                numbered.sort_unstable();
                numbered
            };
            let own = numbered(&blocks);
            let is_own = |block: &usize| own.binary_search_by_key(block, |own| own.0).is_ok();
            let mut beyond: Vec<usize> =
                groups.iter().flat_map(|group| part.beyond(group)).collect();
            beyond.sort_unstable();
            beyond.dedup();
            blocks.extend(beyond.into_iter().filter(|block| !is_own(block)));
            numbered(&blocks)
        });
        let Rule { order, seed, .. } = self.rule;
        let shuffle = match order {
            Order::Sequential => None,
            Order::Global => Some(Shuffle::new(sum, seed, self.epoch)),
            Order::Window => {
                let seed = mix(seed ^ OF_WINDOW) ^ number as u64;
                Some(Shuffle::new(sum, seed, self.epoch))
            }
        };
        WindowOrder { blocks, sorted, rows, before, shuffle }
    }
}

impl WindowOrder {
    /// The position in the window of a block, given its index in the part.
    pub(super) fn find(&self, block: usize) -> usize {
        match &self.sorted {
            None => block,
            Some(sorted) => sorted[sorted.partition_point(|(place, _)| *place < block)].1,
        }
    }

    /// The row at a position of the window: the position of its block in the window, and its number
    /// in that block.
    pub(super) fn at(&self, place: u64) -> (usize, u32) {
        let number = self.shuffle.as_ref().map_or(place, |shuffle| shuffle.at(place));
        let block = self.before.partition_point(|&before| before <= number) - 1;
        (block, (number - self.before[block]) as u32)
    }
}

/// Runs of [`GROUP_BLOCKS`] blocks. The first is shorter by `phase`.
fn groups(blocks: u64, phase: u64) -> impl Iterator<Item = Range<usize>> {
    (0..(blocks + phase).div_ceil(GROUP_BLOCKS)).map(move |group| {
        let start = (group * GROUP_BLOCKS).saturating_sub(phase);
        let end = ((group + 1) * GROUP_BLOCKS - phase).min(blocks);
        start as usize..end as usize
    })
}

/// Minimum blocks of a window.
pub(super) const WINDOW_BLOCKS_MIN: u64 = GROUP_BLOCKS;

fn mix(value: u64) -> u64 {
    Random(value).bits()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows that extend into up to three more blocks. In some blocks no row begins.
    fn reaching(blocks: u32) -> Part {
        let rows = (0..blocks).map(|block| block * 5 % 4).collect();
        let reach = (0..blocks).map(|block| match block * 5 % 4 {
            0 => block,
            more => (block + more).min(blocks - 1),
        });
        Part::with_reach((0..blocks).collect(), rows, reach.collect())
    }

    fn part(blocks: u32) -> Part {
        Part::new((0..blocks).collect(), (0..blocks).map(|block| 1 + block * 7 % 11).collect())
    }

    /// The blocks and records of an epoch, in order.
    fn epoch(part: &Part, rule: Rule, epoch: u64) -> Vec<(usize, u32)> {
        let order = EpochOrder::new(part, rule, epoch);
        let mut all = Vec::new();
        for number in 0..order.windows() {
            let window = order.window(part, number);
            assert_eq!(window.rows.start, all.len() as u64);
            assert!(window.blocks.len() as u64 <= rule.window_blocks.max(part.group_blocks_max()));
            let rows = window.rows.end - window.rows.start;
            assert_eq!(window.before.last(), Some(&rows));
            // Where rows extend into other blocks, a window may have no rows.
            assert!(rows == 0 || order.window_of(window.rows.start) == number);
            all.extend((0..rows).map(|place| {
                let (block, record) = window.at(place);
                let own = window.blocks[block];
                for reached in part.reach.iter().flat_map(|reach| own..=reach[own] as usize) {
                    assert_eq!(window.blocks[window.find(reached)], reached);
                }
                (window.blocks[block], record)
            }));
        }
        all
    }

    #[test]
    fn every_record_comes_once_in_every_order() {
        let some = [1, 2, 3, 4, 5, 9, 64, 101];
        let parts = some.map(part).into_iter().chain(some.map(reaching));
        for (part, blocks) in parts.zip(some.into_iter().cycle()) {
            for order in [Order::Global, Order::Window, Order::Sequential] {
                for window_blocks in [4, 7, 16, 1000] {
                    let window_blocks = match order {
                        Order::Global => blocks.into(),
                        _ => window_blocks,
                    };
                    for number in 0..5 {
                        let rule = Rule { order, seed: 3, window_blocks };
                        let mut all = epoch(&part, rule, number);
                        assert_eq!(all.len() as u64, part.rows);
                        if all.len() > 12 {
                            assert_eq!(all.is_sorted(), order == Order::Sequential);
                        }
                        all.sort_unstable();
                        all.dedup();
                        assert_eq!(all.len() as u64, part.rows, "{blocks} {rule:?} {number}");
                    }
                }
            }
        }
    }

    #[test]
    fn the_order_depends_on_seed_and_epoch_alone() {
        let part = part(101);
        let rule = |seed| Rule { order: Order::Window, seed, window_blocks: 16 };
        let reference = epoch(&part, rule(1), 0);
        assert_eq!(epoch(&part, rule(1), 0), reference);
        for (seed, number) in [(2, 0), (1, 1)] {
            let other = epoch(&part, rule(seed), number);
            let same = other.iter().zip(&reference).filter(|(one, other)| one == other).count();
            assert!(same < reference.len() / 10, "{same} of {}", reference.len());
        }
    }

    #[test]
    fn neighbours_are_in_other_groups_in_other_epochs() {
        let phases = (0..64).map(|epoch| {
            let rule = Rule { order: Order::Window, seed: 5, window_blocks: 8 };
            let order = EpochOrder::new(&part(101), rule, epoch);
            order.groups.iter().map(|group| group.start % GROUP_BLOCKS as usize).max()
        });
        let mut phases: Vec<_> = phases.collect();
        phases.sort_unstable();
        phases.dedup();
        assert_eq!(phases.len() as u64, GROUP_BLOCKS);
    }
}

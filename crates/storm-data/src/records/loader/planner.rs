//! Decides which rows are in which batch, and which blocks are prefetched with it.

use super::window::{Residence, Slot, Window};
use crate::Passes;
use crate::records::order::{EpochOrder, Part, Rule};
use std::ops::Range;
use std::sync::Arc;

/// A planned batch.
#[derive(Debug)]
pub(super) struct Planned {
    pub(super) stretches: Vec<Stretch>,
    pub(super) prefetch: Vec<Prefetch>,
    /// The position after it.
    pub(super) epoch: u64,
    pub(super) row: u64,
}

/// Rows of one window.
#[derive(Debug)]
pub(super) struct Stretch {
    pub(super) window: Arc<Window>,
    pub(super) epoch: u64,
    pub(super) places: Range<u64>,
}

/// Blocks of a window to read.
#[derive(Debug)]
pub(super) struct Prefetch {
    pub(super) window: Arc<Window>,
    pub(super) blocks: Range<usize>,
}

/// Iterates over epochs and windows.
#[derive(Debug)]
pub(super) struct Planner {
    part: Arc<Part>,
    rule: Rule,
    passes: Passes,
    residence: Residence,
    now: Option<At>,
    next: Option<At>,
    /// Rows of the current window already planned.
    place: u64,
    /// Blocks of the next window already prefetched or planned.
    prefetched: usize,
}

/// A window of an epoch.
#[derive(Clone, Debug)]
struct At {
    order: Arc<EpochOrder>,
    number: usize,
    window: Arc<Window>,
}

impl Planner {
    pub(super) fn new(
        part: Arc<Part>,
        rule: Rule,
        passes: Passes,
        residence: Residence,
    ) -> Planner {
        let mut planner = Planner {
            part,
            rule,
            passes,
            residence,
            now: None,
            next: None,
            place: 0,
            prefetched: 0,
        };
        planner.seek(0, 0);
        planner
    }

    pub(super) fn rows(&self) -> u64 {
        self.part.rows
    }

    /// The blocks that stay in memory, with their slots. Empty unless all of them do.
    pub(super) fn blocks(&self) -> Vec<(u32, &Slot)> {
        match &self.residence {
            Residence::Whole(slots) => self.part.blocks.iter().copied().zip(&**slots).collect(),
            _ => Vec::new(),
        }
    }

    pub(super) fn window_blocks(&self) -> u64 {
        self.rule.window_blocks
    }

    /// Moves to a row of an epoch. One past the last row is the end.
    pub(super) fn seek(&mut self, epoch: u64, row: u64) {
        // Release the blocks of the current windows before planning others.
        (self.now, self.next) = (None, None);
        let order = Arc::new(EpochOrder::new(&self.part, self.rule, epoch));
        let number = order.window_of(row);
        if number < order.windows() {
            let at = self.at(&order, number);
            self.place = row - at.window.order.rows.start;
            self.begin(Some(at));
        }
    }

    fn at(&self, order: &Arc<EpochOrder>, number: usize) -> At {
        let window = order.window(&self.part, number);
        let window = Arc::new(Window::new(window, &self.part, &self.residence));
        At { order: Arc::clone(order), number, window }
    }

    fn begin(&mut self, at: Option<At>) {
        self.next = at.as_ref().and_then(|at| self.after(at));
        self.now = at;
        self.prefetched = 0;
    }

    /// The window that follows.
    fn after(&self, at: &At) -> Option<At> {
        if at.number + 1 < at.order.windows() {
            return Some(self.at(&at.order, at.number + 1));
        }
        match self.passes {
            Passes::One => None,
            Passes::Endless => {
                let epoch = at.order.epoch().wrapping_add(1);
                let order = Arc::new(EpochOrder::new(&self.part, self.rule, epoch));
                Some(self.at(&order, 0))
            }
        }
    }

    /// Plans a batch of this many rows, fewer at the end of [`Passes::One`], and `None` after that.
    pub(super) fn next(&mut self, rows: usize) -> Option<Planned> {
        let mut left = rows as u64;
        let (mut stretches, mut prefetch) = (Vec::new(), Vec::new());
        let mut position = (0, 0);
        while left > 0 {
            let Some(now) = &self.now else { break };
            let window_rows = now.window.order.rows.end - now.window.order.rows.start;
            let count = left.min(window_rows - self.place);
            let places = self.place..self.place + count;
            let epoch = now.order.epoch();
            // Where rows extend into many blocks, a window may have no rows.
            if count > 0 {
                stretches.push(Stretch { window: Arc::clone(&now.window), epoch, places });
            }
            self.place += count;
            left -= count;
            position = (epoch, now.window.order.rows.start + self.place);
            if let Some(next) = &self.next {
                // Prefetch the same fraction of the next window as was planned of this one.
                let share = self.place as f64 / window_rows as f64;
                let all = next.window.prefetchable();
                let wanted = ((all as f64 * share).ceil() as usize).min(all);
                if wanted > self.prefetched {
                    let blocks = self.prefetched..wanted;
                    prefetch.push(Prefetch { window: Arc::clone(&next.window), blocks });
                    self.prefetched = wanted;
                }
            }
            if self.place == window_rows {
                let next = self.next.take();
                self.place = 0;
                self.begin(next);
            }
        }
        // At the end of an epoch, the position is the start of the next, not one past the last row.
        if position.1 == self.part.rows && self.passes == Passes::Endless {
            position = (position.0 + 1, 0);
        }
        let (epoch, row) = position;
        (!stretches.is_empty()).then_some(Planned { stretches, prefetch, epoch, row })
    }
}

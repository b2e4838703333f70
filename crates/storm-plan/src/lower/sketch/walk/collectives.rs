//! Collectives: exchanges of gradients, gathers of weights and of partial sums of squares.

use super::{Exchanged, Walk, one_cell};
use crate::lower::residency::Class;
use crate::lower::sketch::queues::{Lane, Use};
use crate::lower::sketch::tables::UpdateCopies;
use storm_graph::Block;

impl Walk<'_> {
    /// Sends a block's gradients to the ranks that add them up. Returns whether there was anything to send.
    pub(super) fn exchange_gradients(&mut self, block: usize) -> bool {
        let table = &self.sketch.tables.stages[self.at(block).stage];
        let Some(seconds) = table.exchange else { return false };
        self.segment.touch(self.in_slot(Class::Gradients, block, &table.exchanged, Use::Read));
        self.segment.touch([one_cell(self.cells.received, Use::Write)]);
        self.segment.copy(self.position(), Lane::Ranks, seconds);
        true
    }

    /// Adds up what was sent of blocks' gradients. If machines add up their lanes first, their sums are then sent on.
    pub(super) fn advance_sums(&mut self) {
        if let Some(Exchanged { block, group, lane }) = self.exchanged_sums.take() {
            self.end_lane(group, block, lane);
        }
        let Some(exchanged) = self.exchanged.take() else { return };
        let Exchanged { block, group, lane } = exchanged;
        let table = &self.sketch.tables.stages[self.at(block).stage];
        match table.exchange_sums {
            Some(seconds) => {
                self.segment.touch(self.in_slot(
                    Class::Gradients,
                    block,
                    &table.exchanged,
                    Use::Read,
                ));
                self.segment.touch([
                    one_cell(self.cells.received, Use::Read),
                    one_cell(self.cells.machine, Use::Write),
                ]);
                self.segment.compute(table.machine_sums.seconds, table.machine_sums.count);
                self.segment.touch([
                    one_cell(self.cells.machine, Use::Read),
                    one_cell(self.cells.sums, Use::Write),
                ]);
                self.segment.copy(self.position(), Lane::Ranks, seconds);
                self.exchanged_sums = Some(exchanged);
            }
            None => self.end_lane(group, block, lane),
        }
    }

    /// Adds up all that was sent.
    pub(super) fn settle_sums(&mut self) {
        while self.exchanged.is_some() || self.exchanged_sums.is_some() {
            self.advance_sums();
        }
    }

    /// Adds up what was sent of blocks whose gradients have memory that another block is about to take.
    pub(super) fn settle_sums_in(&mut self, class: Class, block: usize) {
        while self.sums_wait_in(class, block) {
            self.advance_sums();
        }
    }

    fn sums_wait_in(&self, class: Class, block: usize) -> bool {
        let at = |class: Class, block: usize| {
            let Block { stage, index } = self.at(block);
            (class, stage, index)
        };
        let mut waiting = [&self.exchanged_sums, &self.exchanged].into_iter().flatten();
        waiting.any(|&Exchanged { block: waiting, .. }| {
            let is_same = class == Class::Gradients && block == waiting;
            let (one, other) = (at(class, block), at(Class::Gradients, waiting));
            !is_same && self.residency.meet(self.layout, one, other)
        })
    }

    /// Brings what other ranks have updated.
    pub(super) fn gather_weights(&mut self, block: usize, update: &UpdateCopies) {
        let Some(seconds) = update.gather else { return };
        for (runs, used) in [(&update.own_weights, Use::Read), (&update.others_weights, Use::Write)]
        {
            for run in runs {
                self.segment.touch(self.in_slot(Class::Weights, block, &run.cells, used));
            }
        }
        self.segment.copy(self.position(), Lane::Ranks, seconds);
    }

    /// Brings the partial sums of squares together, which the norm reads.
    pub(super) fn gather_squares(&mut self) {
        let Some(seconds) = self.sketch.tables.gather_squares else { return };
        self.segment.touch([
            one_cell(self.cells.squares, Use::Read),
            one_cell(self.cells.all_squares, Use::Write),
        ]);
        self.segment.copy(self.position(), Lane::Ranks, seconds);
        self.segment.touch([one_cell(self.cells.all_squares, Use::Read)]);
    }
}

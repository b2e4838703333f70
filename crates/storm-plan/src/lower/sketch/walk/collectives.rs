//! Collectives: exchanges of gradients, gathers of weights and of partial sums of squares.

use super::{Exchanged, Walk, one_cell};
use crate::lower::residency::Class;
use crate::lower::sketch::queues::{Lane, Use};
use crate::lower::sketch::tables::UpdateCopies;
use storm_graph::Block;

impl Walk<'_> {
    /// Sends a block's gradients to their owners. Returns whether there was anything to send.
    pub(super) fn exchange_gradients(&mut self, block: usize) -> bool {
        let table = &self.sketch.tables.stages[self.at(block).stage];
        let Some(seconds) = table.exchange else { return false };
        self.segment.touch(self.in_slot(Class::Gradients, block, &table.exchanged, Use::Read));
        self.segment.touch([one_cell(self.cells.received, Use::Write)]);
        self.segment.copy(self.position(), Lane::Ranks, seconds);
        true
    }

    /// Adds up what was sent of a block's gradients.
    pub(super) fn settle_sums(&mut self) {
        if let Some(Exchanged { block, group, lane }) = self.exchanged.take() {
            self.end_lane(group, block, lane);
        }
    }

    /// The same if a block is about to take the memory of those gradients.
    pub(super) fn settle_sums_in(&mut self, class: Class, block: usize) {
        let Some(Exchanged { block: waiting, .. }) = self.exchanged else { return };
        let at = |class: Class, block: usize| {
            let Block { stage, index } = self.at(block);
            (class, stage, index)
        };
        let is_same = class == Class::Gradients && block == waiting;
        let (one, other) = (at(class, block), at(Class::Gradients, waiting));
        if !is_same && self.residency.meet(self.layout, one, other) {
            self.settle_sums();
        }
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

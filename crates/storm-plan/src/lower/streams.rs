//! Copies of weights and gradients that stream through rings.

use super::emit::{Emit, Ends, copy_values};
use super::residency::Class;
use super::slab::{CopyRun, Slab};
use storm_graph::Block;

pub(super) fn all_runs(slab: &Slab) -> Vec<CopyRun> {
    slab.runs(0..slab.entries.len())
}

/// A subset of a block's gradients.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Gradients {
    /// Those of its own parameters that the rank owns: the persistent ones.
    Own,
    /// Also its parts of tied parameters' gradients: everything needed once a lane is complete.
    Complete,
    /// All.
    All,
}

impl Emit<'_> {
    pub(super) fn slab(&self, class: Class, stage: usize) -> &Slab {
        match class {
            Class::Weights => &self.layout.cut.stages[stage].weights,
            Class::Gradients => &self.layout.cut.stages[stage].gradients,
        }
    }

    /// The device address of a block's weights or gradients, while they are there.
    pub(super) fn place(&self, class: Class, block: usize) -> usize {
        let Block { stage, index } = self.lowering.blocks.get(block);
        class.places(&self.layout)[stage].device(index)
    }

    /// Both ends of a copy of a block's weights or gradients.
    fn ends(&self, class: Class, block: usize, run: &CopyRun) -> Ends {
        let Block { stage, index } = self.lowering.blocks.get(block);
        let host = match class {
            Class::Weights => self.weights_on_host(block, run),
            Class::Gradients => {
                self.layout.gradients[stage].host(index) + self.gradient_on_host(stage, run)
            }
        };
        Ends { kind: class.kind(), device: self.place(class, block) + run.offset, host }
    }

    /// The offset of a run of gradients in the block's host memory.
    pub(super) fn gradient_on_host(&self, stage: usize, run: &CopyRun) -> usize {
        let slab = self.lowering.gradients_on_host(self.decisions, &self.layout.cut.stages[stage]);
        run.pieces.first().map_or(0, |&(entry, piece, _)| slab.piece_offset(entry, piece))
    }

    /// Fetches parts of a block's weights or gradients from host memory, after `after` kernels.
    fn bring(&mut self, class: Class, block: usize, runs: &[CopyRun], after: usize) {
        let pieces = self.pieces(class, block);
        for run in runs {
            let values = copy_values(run, |entry, piece| pieces[entry].piece(piece));
            let ends = self.ends(class, block, run);
            self.copy_in(after, ends, run, values);
        }
    }

    /// Copies parts of a block's weights or gradients to host memory.
    fn send(&mut self, class: Class, block: usize, runs: &[CopyRun]) {
        let pieces = self.pieces(class, block);
        for run in runs {
            let values = copy_values(run, |entry, piece| pieces[entry].piece(piece));
            let ends = self.ends(class, block, run);
            self.copy_out(ends, run, values);
        }
    }

    fn pieces(&self, class: Class, block: usize) -> Vec<super::emit::Pieces> {
        match class {
            Class::Weights => self.values.weights[block].clone(),
            Class::Gradients => self.values.gradients[block].clone(),
        }
    }

    pub(super) fn is_pinned(&self, class: Class, block: usize) -> bool {
        let Block { stage, index } = self.lowering.blocks.get(block);
        class.places(&self.layout)[stage].streaming.is_pinned(index)
    }

    /// Assigns a block its slot. Returns the number of kernels after which its tensors may be fetched; `None` if they
    /// are already there.
    pub(super) fn enter(&mut self, class: Class, block: usize) -> Option<usize> {
        let Block { stage, index } = self.lowering.blocks.get(block);
        self.settle_sums_in(class, block);
        self.residency.enter(&self.layout, class, stage, index)
    }

    /// Whether a block's tensors are on the device now.
    pub(super) fn is_there(&self, class: Class, block: usize) -> bool {
        let Block { stage, index } = self.lowering.blocks.get(block);
        self.residency.is_there(&self.layout, class, stage, index)
    }

    /// Records that a block's tensors were in use until now.
    pub(super) fn touch(&mut self, class: Class, block: usize) {
        let Block { stage, index } = self.lowering.blocks.get(block);
        let now = self.position();
        self.residency.touch(&self.layout, class, stage, index, now);
    }

    /// Fetches a block's own weights unless they are on the device.
    pub(super) fn fetch_own_weights(&mut self, block: usize) {
        let class = Class::Weights;
        if let Some(after) = self.enter(class, block) {
            let runs = match self.frozen_homes(block) {
                Some(homes) => homes.learning.clone(),
                None => all_runs(self.slab(class, self.lowering.blocks.get(block).stage)),
            };
            self.bring(class, block, &runs, after);
            self.bring_frozen(block, after);
        }
    }

    /// The blocks whose weights a block reads: itself, and the owners of its tied parameters.
    pub(super) fn weight_blocks(&self, block: usize) -> Vec<usize> {
        let blocks = &self.lowering.blocks;
        let Block { stage, index } = blocks.get(block);
        let owner = |&owner: &usize| match owner == stage {
            true => blocks.number(stage, index),
            // Only stages that run once share their parameters.
            false => blocks.number(owner, 0),
        };
        blocks.weight_owners[stage].iter().map(owner).collect()
    }

    /// Fetches all weights that a block reads.
    pub(super) fn fetch_weights(&mut self, block: usize) {
        for owner in self.weight_blocks(block) {
            self.fetch_own_weights(owner);
        }
    }

    /// Records that a block has read its weights until now.
    pub(super) fn touch_weights(&mut self, block: usize) {
        for owner in self.weight_blocks(block) {
            self.touch(Class::Weights, owner);
        }
    }

    /// Fetches what one group of a block's updates needs, unless it is on the device. All groups of a block are updated
    /// in a row. Each fetches only its own part, so that the first need not wait for the last.
    pub(super) fn fetch_for_update(
        &mut self,
        block: usize,
        pieces: &[(usize, usize)],
        group: usize,
        not_before: usize,
    ) {
        if group == 0 {
            self.arriving = Class::ALL.map(|class| self.enter(class, block));
        }
        let stage = self.lowering.blocks.get(block).stage;
        let set = &self.lowering.sets[stage];
        let trainable: Vec<usize> = set.trainable().collect();
        if let Some(after) = self.arriving[Class::Weights as usize] {
            let mut wanted: Vec<(usize, usize)> =
                pieces.iter().map(|&(t, piece)| (trainable[t], piece)).collect();
            let is_on_disk = self.frozen_homes(block).is_some();
            if group == 0 && !is_on_disk {
                // The first group also fetches the weights that are not updated.
                let frozen = (0..set.parameters.len()).filter(|p| !trainable.contains(p));
                let slab = self.slab(Class::Weights, stage);
                let pieces_of = |p: usize| slab.entries[p].pieces.len();
                wanted.extend(frozen.flat_map(|p| (0..pieces_of(p)).map(move |piece| (p, piece))));
                wanted.sort_unstable();
            }
            self.bring_pieces(Class::Weights, block, wanted, after.max(not_before));
            if group == 0 {
                self.bring_frozen(block, after.max(not_before));
            }
        }
        if let Some(after) = self.arriving[Class::Gradients as usize] {
            let wanted = pieces.to_vec();
            self.bring_pieces(Class::Gradients, block, wanted, after.max(not_before));
        }
    }

    fn bring_pieces(
        &mut self,
        class: Class,
        block: usize,
        wanted: Vec<(usize, usize)>,
        after: usize,
    ) {
        let stage = self.lowering.blocks.get(block).stage;
        let runs = self.slab(class, stage).runs_of(wanted.into_iter());
        self.bring(class, block, &runs, after);
    }

    /// Copies a block's gradients to host memory.
    pub(super) fn write_back_gradients(&mut self, block: usize, which: Gradients) {
        let runs = self.gradient_runs(block, which);
        self.send(Class::Gradients, block, &runs);
    }

    /// Fetches a block's gradients unless they are on the device.
    pub(super) fn fetch_gradients(&mut self, block: usize, which: Gradients) {
        if let Some(after) = self.enter(Class::Gradients, block) {
            let runs = self.gradient_runs(block, which);
            self.bring(Class::Gradients, block, &runs, after);
        }
    }

    fn gradient_runs(&self, block: usize, which: Gradients) -> Vec<CopyRun> {
        let stage = self.lowering.blocks.get(block).stage;
        let set = &self.lowering.sets[stage];
        let (slab, shards) = (self.slab(Class::Gradients, stage), &self.layout.cut.shards);
        let trainable = set.trainable().count();
        let entries = match which {
            Gradients::All | Gradients::Complete => set.gradients.len(),
            Gradients::Own => trainable,
        };
        let pieces = |t: usize| (0..slab.entries[t].pieces.len()).map(move |piece| (t, piece));
        let is_wanted = |&(t, piece): &(usize, usize)| {
            which == Gradients::All || t >= trainable || shards.is_own(stage, t, piece)
        };
        slab.runs_of((0..entries).flat_map(pieces).filter(is_wanted))
    }

    /// Copies pieces of a block's weights to host memory, unless they stay on the device.
    pub(super) fn write_back_weights(&mut self, block: usize, pieces: &[(usize, usize)]) {
        let class = Class::Weights;
        if self.is_pinned(class, block) {
            return;
        }
        let slab = self.slab(class, self.lowering.blocks.get(block).stage);
        let runs = slab.runs_of(pieces.iter().copied());
        self.send(class, block, &runs);
    }
}

//! How long the collectives of a step take, without building its plan.

use super::Lowering;
use super::shards::partials_bytes;
use super::shared::Cut;
use crate::CollectiveKind;
use storm_graph::DType;

impl Lowering<'_> {
    /// Seconds of the exchange of a block's gradients, inside machines if it has two levels; none if there is none.
    pub(super) fn exchange_seconds(&self, cut: &Cut, stage: usize) -> Option<f64> {
        let entries = &cut.stages[stage].gradients.entries;
        let pieces = self.pieces_that_learn(cut, stage);
        let bytes = |t: usize, piece: usize| entries[t].pieces[piece];
        self.moving_seconds(CollectiveKind::Exchange, cut, stage, &pieces, bytes)
    }

    /// Seconds of the exchange of the sums of machines; none if the exchange has one level.
    pub(super) fn exchange_sums_seconds(&self, cut: &Cut, stage: usize) -> Option<f64> {
        if !self.task.rank.has_levels() {
            return None;
        }
        let entries = &cut.stages[stage].gradients.entries;
        let pieces = self.pieces_that_learn(cut, stage);
        let is_none = pieces.is_empty();
        let added = |&(t, piece): &(usize, usize)| cut.shards.adds(stage, t, piece);
        let pieces: Vec<(usize, usize)> = pieces.into_iter().filter(added).collect();
        let bytes = |t: usize, piece: usize| {
            let size = self.sets[stage].gradients[t].dtype.size_bytes();
            entries[t].pieces[piece] / size * DType::F32.size_bytes()
        };
        (!is_none)
            .then(|| self.owned_seconds(CollectiveKind::ExchangeSums, cut, stage, &pieces, bytes))
    }

    /// Seconds of the gather of some pieces of a block's weights; none if there is none.
    pub(super) fn gather_seconds(
        &self,
        cut: &Cut,
        stage: usize,
        pieces: &[(usize, usize)],
    ) -> Option<f64> {
        let trainable: Vec<usize> = self.sets[stage].trainable().collect();
        let entries = &cut.stages[stage].weights.entries;
        let bytes = |t: usize, piece: usize| entries[trainable[t]].pieces[piece];
        self.moving_seconds(CollectiveKind::Gather, cut, stage, pieces, bytes)
    }

    /// Seconds of the gather of all partial sums of squares; none if there is none.
    pub(super) fn gather_squares_seconds(&self, cut: &Cut, piece_elements: usize) -> Option<f64> {
        if !self.shares_step() {
            return None;
        }
        let mut owned = vec![0; self.task.rank.ranks as usize];
        for (stage, set) in self.sets.iter().enumerate() {
            let repeat = self.task.program().stages()[stage].repeat;
            let trainable: Vec<usize> = set.trainable().collect();
            for (t, piece) in self.pieces_that_learn(cut, stage) {
                let elements = set.parameters[trainable[t]].tensor.shape.elements();
                let size = piece_elements.min(elements - piece * piece_elements);
                let owner = cut.shards.owner(stage, t, piece);
                owned[owner as usize] += repeat * partials_bytes(size);
            }
        }
        Some(self.profile.collective_seconds(CollectiveKind::Gather, self.task.rank, &owned))
    }

    /// All pieces of a stage's parameters that learn, by position among these.
    fn pieces_that_learn(&self, cut: &Cut, stage: usize) -> Vec<(usize, usize)> {
        cut.updates[stage].iter().flat_map(|group| group.pieces.iter().copied()).collect()
    }

    fn moving_seconds(
        &self,
        kind: CollectiveKind,
        cut: &Cut,
        stage: usize,
        pieces: &[(usize, usize)],
        bytes: impl Fn(usize, usize) -> usize,
    ) -> Option<f64> {
        let is_any = self.shares_step() && !pieces.is_empty();
        is_any.then(|| self.owned_seconds(kind, cut, stage, pieces, bytes))
    }

    fn owned_seconds(
        &self,
        kind: CollectiveKind,
        cut: &Cut,
        stage: usize,
        pieces: &[(usize, usize)],
        bytes: impl Fn(usize, usize) -> usize,
    ) -> f64 {
        let mut owned = vec![0; self.task.rank.ranks as usize];
        for &(t, piece) in pieces {
            owned[cut.shards.owner(stage, t, piece) as usize] += bytes(t, piece);
        }
        self.profile.collective_seconds(kind, self.task.rank, &owned)
    }

    /// What the queue between ranks does in a step.
    pub(crate) fn communication(&self) -> Communication {
        let mut communication = Communication::default();
        if !self.shares_step() {
            return communication;
        }
        let piece_elements = self.piece_elements();
        let cut = self.cut(piece_elements);
        for (stage, s) in self.task.program().stages().iter().enumerate() {
            let repeat = s.repeat as f64;
            let levels =
                [self.exchange_seconds(&cut, stage), self.exchange_sums_seconds(&cut, stage)];
            let exchange: f64 = levels.into_iter().flatten().sum();
            communication.exchange += repeat * exchange;
            if exchange > 0.0 && communication.last_exchange == 0.0 {
                communication.last_exchange = exchange;
            }
            for group in &cut.updates[stage] {
                let gather = self.gather_seconds(&cut, stage, &group.pieces).unwrap_or(0.0);
                communication.gather += repeat * gather;
            }
        }
        communication.squares = self.gather_squares_seconds(&cut, piece_elements).unwrap_or(0.0);
        communication
    }
}

/// Seconds of the queue between ranks; all 0 if one rank makes the step.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Communication {
    /// All exchanges of a lane.
    pub(crate) exchange: f64,
    /// Of these, that of the first block that learns, which the backward pass reaches last: no kernels hide it.
    pub(crate) last_exchange: f64,
    /// All gathers of weights.
    pub(crate) gather: f64,
    /// The gather of partial sums of squares.
    pub(crate) squares: f64,
}

impl Communication {
    /// All of a step.
    pub(crate) fn busy_seconds(&self, lanes: f64) -> f64 {
        lanes * self.exchange + self.gather + self.squares
    }
}

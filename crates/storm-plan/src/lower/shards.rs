//! Which rank owns which piece of a parameter: it adds up the piece's gradients, has its optimizer state and updates it.

use super::parameters::Set;
use crate::RankPlace;
use crate::pack::aligned;
use crate::task::Task;
use storm_graph::SUM_BLOCK;

/// The owners of all pieces of one size. All blocks of a stage have the same.
#[derive(Clone, Debug)]
pub(super) struct Shards {
    pub(super) place: RankPlace,
    /// By stage, trainable parameter and piece.
    owners: Vec<Vec<Vec<u32>>>,
}

impl Shards {
    /// Gives each piece to the rank with the fewest elements so far.
    pub(super) fn new(task: &Task, sets: &[Set], piece_elements: usize) -> Shards {
        let place = task.rank;
        let mut owned = vec![0usize; place.ranks as usize];
        let mut owners = Vec::new();
        for (stage, set) in task.program().stages().iter().zip(sets) {
            let mut of_stage = Vec::new();
            for parameter in set.trainable() {
                let elements = set.parameters[parameter].tensor.shape.elements();
                let mut of_parameter = Vec::new();
                for first in (0..elements.max(1)).step_by(piece_elements) {
                    let size = piece_elements.min(elements - first);
                    let least = (0..owned.len()).min_by_key(|&rank| owned[rank]);
                    let owner = least.expect("at least one rank");
                    owned[owner] += size * stage.repeat;
                    of_parameter.push(owner as u32);
                }
                of_stage.push(of_parameter);
            }
            owners.push(of_stage);
        }
        Shards { place, owners }
    }

    /// The same pieces, for another rank.
    pub(super) fn of_rank(&self, rank: u32) -> Shards {
        Shards { place: RankPlace { rank, ..self.place }, ..self.clone() }
    }

    /// Who owns a piece of a stage's trainable parameter.
    pub(super) fn owner(&self, stage: usize, parameter: usize, piece: usize) -> u32 {
        self.owners[stage][parameter][piece]
    }

    /// Whether this rank does.
    pub(super) fn is_own(&self, stage: usize, parameter: usize, piece: usize) -> bool {
        self.owner(stage, parameter, piece) == self.place.rank
    }
}

/// Where a rank receives what others have of its pieces of a block, relative to the first of them.
#[derive(Clone, Debug, Default)]
pub(super) struct Received {
    /// By trainable parameter and piece: the place of what the first other rank sends; none for pieces of others. What the
    /// next one sends follows, aligned.
    starts: Vec<Vec<Option<usize>>>,
    pub(super) size_bytes: usize,
}

impl Received {
    /// `sizes` has the bytes of each piece of each gradient.
    pub(super) fn new(shards: &Shards, stage: usize, sizes: &[&[usize]]) -> Received {
        let others = shards.place.ranks as usize - 1;
        let mut received = Received::default();
        for (parameter, pieces) in sizes.iter().enumerate() {
            let mut starts = Vec::new();
            for (piece, &bytes) in pieces.iter().enumerate() {
                let is_own = shards.is_own(stage, parameter, piece);
                starts.push(is_own.then_some(received.size_bytes));
                if is_own {
                    received.size_bytes += others * aligned(bytes);
                }
            }
            received.starts.push(starts);
        }
        received
    }

    /// The place of what the `number`-th other rank sends of a piece of this many bytes.
    pub(super) fn place(
        &self,
        parameter: usize,
        piece: usize,
        number: usize,
        bytes: usize,
    ) -> usize {
        let start = self.starts[parameter][piece].expect("asked for own pieces only");
        start + number * aligned(bytes)
    }
}

/// Bytes of the partial sums of squares of this many elements.
pub(super) fn partials_bytes(elements: usize) -> usize {
    elements.div_ceil(SUM_BLOCK) * size_of::<f32>()
}

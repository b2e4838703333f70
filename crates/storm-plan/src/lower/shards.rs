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

    /// Whether this rank adds up what its machine has of a piece. If the exchange has one level, owners do.
    pub(super) fn adds(&self, stage: usize, parameter: usize, piece: usize) -> bool {
        let owner = self.owner(stage, parameter, piece);
        self.place.adder(owner) == self.place.rank
    }
}

/// Where copies of some pieces of a block lie, relative to the first of them.
#[derive(Clone, Debug, Default)]
pub(super) struct Copies {
    /// By trainable parameter and piece: the place of the first copy; none for other pieces. The next one follows, aligned.
    starts: Vec<Vec<Option<usize>>>,
    pub(super) size_bytes: usize,
}

impl Copies {
    /// So many copies of the pieces that are wanted, given the bytes of each piece of each gradient.
    pub(super) fn new(
        sizes: &[Vec<usize>],
        count: usize,
        is_wanted: impl Fn(usize, usize) -> bool,
    ) -> Copies {
        let mut copies = Copies::default();
        for (parameter, pieces) in sizes.iter().enumerate() {
            let mut starts = Vec::new();
            for (piece, &bytes) in pieces.iter().enumerate() {
                let is_wanted = is_wanted(parameter, piece);
                starts.push(is_wanted.then_some(copies.size_bytes));
                if is_wanted {
                    copies.size_bytes += count * aligned(bytes);
                }
            }
            copies.starts.push(starts);
        }
        copies
    }

    /// The place of a copy of a piece of this many bytes.
    pub(super) fn place(
        &self,
        (parameter, piece): (usize, usize),
        number: usize,
        bytes: usize,
    ) -> usize {
        let start = self.starts[parameter][piece].expect("one of the pieces");
        start + number * aligned(bytes)
    }
}

/// What a rank receives of a block's gradients and adds up.
#[derive(Clone, Debug, Default)]
pub(super) struct Received {
    /// Of each piece that the rank adds up, what every other rank of its machine sends.
    pub(super) lanes: Copies,
    /// If the exchange has two levels: of each of these, the sum of the machine.
    pub(super) machine: Copies,
    /// Of each own piece, the sum of every other machine.
    pub(super) sums: Copies,
}

impl Received {
    /// `sizes` has the bytes of each piece of each gradient, and `sum_sizes` those of its sum.
    pub(super) fn new(
        shards: &Shards,
        stage: usize,
        sizes: &[Vec<usize>],
        sum_sizes: &[Vec<usize>],
    ) -> Received {
        let place = shards.place;
        let levels = usize::from(place.has_levels());
        let adds = |t, piece| shards.adds(stage, t, piece);
        let is_own = |t, piece| shards.is_own(stage, t, piece);
        Received {
            lanes: Copies::new(sizes, place.machine as usize - 1, adds),
            machine: Copies::new(sum_sizes, levels, adds),
            sums: Copies::new(sum_sizes, place.machines() as usize - 1, is_own),
        }
    }

    /// Bytes of each part.
    pub(super) fn bytes(&self) -> [usize; 3] {
        [&self.lanes, &self.machine, &self.sums].map(|copies| copies.size_bytes)
    }
}

/// Bytes of the partial sums of squares of this many elements.
pub(super) fn partials_bytes(elements: usize) -> usize {
    elements.div_ceil(SUM_BLOCK) * size_of::<f32>()
}

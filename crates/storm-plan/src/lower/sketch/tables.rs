//! What sketches of a task share: copies of weights, gradients and updates as cells and bytes.

use super::super::Lowering;
use super::super::lanes::lane_graph;
use super::super::parameters::Set;
use super::super::shared::Cut;
use super::super::slab::{CopyRun, Slab};
use super::super::update::UpdateGroup;
use super::super::variant::node_seconds;
use crate::UpdateTime;
use std::ops::Range;
use std::sync::Arc;
use storm_graph::{Block, DType, Graph, Op, Shape, TensorClass};

/// Some kernels in a row.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Kernels {
    pub(super) seconds: f64,
    pub(super) count: u32,
}

impl Kernels {
    pub(super) fn add(&mut self, seconds: f64) {
        self.seconds += seconds;
        self.count += 1;
    }
}

/// One copy, and the cells of a slot that it fills or empties.
#[derive(Clone, Debug)]
pub(super) struct Run {
    /// Relative to the slab.
    pub(super) offset: usize,
    pub(super) bytes: usize,
    pub(super) cells: Range<u32>,
}

/// A slab: each of its pieces is a cell.
#[derive(Debug, Default)]
pub(super) struct SlabCells {
    pub(super) count: u32,
    /// By entry: its cells.
    pub(super) entries: Vec<Range<u32>>,
    /// Copies of all of it.
    pub(super) runs: Vec<Run>,
    /// Where each cell begins.
    offsets: Vec<usize>,
}

impl SlabCells {
    fn new(slab: &Slab) -> SlabCells {
        let mut cells = SlabCells::default();
        for entry in &slab.entries {
            let first = cells.count;
            cells.count += entry.pieces.len() as u32;
            cells.entries.push(first..cells.count);
            let mut offset = entry.offset;
            for bytes in &entry.pieces {
                cells.offsets.push(offset);
                offset += bytes;
            }
        }
        cells.runs = cells.of(&slab.runs(0..slab.entries.len()));
        cells
    }

    /// The cells with bytes in a range of the slab.
    pub(super) fn within(&self, bytes: Range<usize>) -> Range<u32> {
        let first = self.offsets.partition_point(|&offset| offset <= bytes.start);
        let end = self.offsets.partition_point(|&offset| offset < bytes.end);
        (first.saturating_sub(1)) as u32..end.max(first.saturating_sub(1)) as u32
    }

    fn of(&self, runs: &[CopyRun]) -> Vec<Run> {
        let cell =
            |&(entry, piece, _): &(usize, usize, usize)| self.entries[entry].start + piece as u32;
        let range = |run: &CopyRun| match (run.pieces.first(), run.pieces.last()) {
            (Some(first), Some(last)) => cell(first)..cell(last) + 1,
            _ => 0..0,
        };
        runs.iter()
            .map(|run| Run { offset: run.offset, bytes: run.size_bytes, cells: range(run) })
            .collect()
    }
}

/// Pieces that are updated together.
#[derive(Debug)]
pub(super) struct UpdateCopies {
    /// Including what is not updated, in the first group.
    pub(super) weights_in: Vec<Run>,
    pub(super) weights_out: Vec<Run>,
    pub(super) gradients: Vec<Run>,
    pub(super) states: Vec<usize>,
    pub(super) kernels: Kernels,
    /// Bytes of the copies of the sums of lanes.
    pub(super) sums: Vec<usize>,
    /// What adds a lane to them, and what adds the last one.
    pub(super) sum_kernels: [Kernels; 2],
}

/// A part of a tied gradient, which is added to the total piece by piece.
#[derive(Debug)]
pub(super) struct Fold {
    /// The stage that computes it.
    pub(super) user: usize,
    /// For each piece: its cell in that stage's slab, the cell of the total in this one's, bytes and
    /// seconds.
    pub(super) pieces: Vec<(u32, u32, usize, f64)>,
}

/// What all blocks of a stage share.
#[derive(Debug)]
pub(super) struct StageTable {
    pub(super) weights: SlabCells,
    /// Copies of frozen weights and of the others, where the frozen ones are on disk.
    pub(super) frozen: Vec<Run>,
    pub(super) learning: Vec<Run>,
    pub(super) gradients: SlabCells,
    pub(super) updates: Vec<UpdateCopies>,
    /// Sums of squares of a block's gradients.
    pub(super) squares: Kernels,
    pub(super) folds: Vec<Fold>,
}

/// All stages, divided into pieces of one size.
#[derive(Debug)]
pub(super) struct Tables {
    pub(super) stages: Vec<StageTable>,
    /// Norm and clip scale.
    pub(super) norm: Kernels,
    /// The most copies of state that an update has, at least one.
    pub(super) state_runs: usize,
}

impl Tables {
    pub(super) fn new(lowering: &Lowering<'_>, piece_elements: usize) -> Tables {
        let cut = lowering.cut(piece_elements);
        let mut stages: Vec<StageTable> = (0..cut.stages.len())
            .map(|stage| stage_table(lowering, &cut, stage, piece_elements))
            .collect();
        for stage in 0..stages.len() {
            stages[stage].folds = folds(lowering, &cut, &stages, stage);
        }
        let mut norm = Kernels::default();
        if let Some(training) = &lowering.task.training {
            let graph = &training.norm;
            let nodes = graph.nodes().iter();
            let others = nodes.filter(|node| !matches!(node.op, Op::SumOfSquares { .. }));
            others.for_each(|node| norm.add(node_seconds(graph, node, lowering.profile)));
        }
        let updates = stages.iter().flat_map(|stage| &stage.updates);
        let state_runs = updates.map(|update| update.states.len()).max().unwrap_or(1).max(1);
        Tables { stages, norm, state_runs }
    }
}

fn stage_table(
    lowering: &Lowering<'_>,
    cut: &Arc<Cut>,
    stage: usize,
    piece_elements: usize,
) -> StageTable {
    let (set, slabs) = (&lowering.sets[stage], &cut.stages[stage]);
    let (weights, gradients) = (SlabCells::new(&slabs.weights), SlabCells::new(&slabs.gradients));
    let trainable: Vec<usize> = set.trainable().collect();
    let update = |(number, group): (usize, &UpdateGroup)| {
        let of = |pieces: &[(usize, usize)]| -> Vec<(usize, usize)> {
            pieces.iter().map(|&(t, piece)| (trainable[t], piece)).collect()
        };
        let mut wanted = of(&group.own);
        if number == 0 {
            let frozen = (0..set.parameters.len()).filter(|p| !trainable.contains(p));
            let pieces_of = |p: usize| slabs.weights.entries[p].pieces.len();
            wanted.extend(frozen.flat_map(|p| (0..pieces_of(p)).map(move |piece| (p, piece))));
            wanted.sort_unstable();
        }
        let weight_runs =
            |pieces: Vec<(usize, usize)>| weights.of(&slabs.weights.runs_of(pieces.into_iter()));
        UpdateCopies {
            weights_in: weight_runs(wanted),
            weights_out: weight_runs(of(&group.pieces)),
            gradients: gradients.of(&slabs.gradients.runs_of(group.own.iter().copied())),
            states: group.runs.iter().map(|run| run.copy.size_bytes).collect(),
            kernels: update_kernels(lowering, set, &trainable, group, piece_elements),
            sums: group.sums.iter().map(|(run, _)| run.size_bytes).collect(),
            sum_kernels: sum_kernels(lowering, set, group, &slabs.gradients),
        }
    };
    let updates = cut.updates[stage].iter().enumerate().map(update).collect();
    let squares = squares(lowering, stage);
    let homes = &cut.frozen[stage];
    let frozen: Vec<CopyRun> = homes.on_disk.iter().map(|run| run.copy.clone()).collect();
    let (frozen, learning) = (weights.of(&frozen), weights.of(&homes.learning));
    StageTable { weights, frozen, learning, gradients, updates, squares, folds: Vec::new() }
}

fn update_kernels(
    lowering: &Lowering<'_>,
    set: &Set,
    trainable: &[usize],
    group: &UpdateGroup,
    piece_elements: usize,
) -> Kernels {
    let mut kernels = Kernels::default();
    for &(t, piece) in &group.own {
        let parameter = &set.parameters[trainable[t]];
        let first = piece * piece_elements;
        let size = piece_elements.min(parameter.tensor.shape.elements() - first);
        // Whether there is a clip scale makes no difference to the time.
        let rule = parameter.rule.expect("trainable");
        let graph = lowering.update_graph(rule, (first, size), UpdateTime::EndOfStep);
        kernels.add(node_seconds(&graph, &graph.nodes()[0], lowering.profile));
    }
    kernels
}

fn sum_kernels(
    lowering: &Lowering<'_>,
    set: &Set,
    group: &UpdateGroup,
    gradients: &Slab,
) -> [Kernels; 2] {
    let [mut usual, mut last] = [Kernels::default(); 2];
    for &(t, piece, _) in group.sums.iter().flat_map(|(run, _)| &run.pieces) {
        let dtype = set.gradients[t].dtype;
        let elements = gradients.entries[t].pieces[piece] / dtype.size_bytes();
        let graph = lane_graph(dtype, elements);
        let [_, add, round] = [0, 1, 2]
            .map(|node: usize| node_seconds(&graph, &graph.nodes()[node], lowering.profile));
        usual.add(add);
        last.add(add);
        last.add(round);
    }
    [usual, last]
}

fn squares(lowering: &Lowering<'_>, stage: usize) -> Kernels {
    let mut kernels = Kernels::default();
    let Some(training) = &lowering.task.training else { return kernels };
    let (set, program) = (&lowering.sets[stage], lowering.task.program());
    for position in 0..set.trainable().count() {
        // Blocks of a stage have tensors of the same shapes.
        let block = Block { stage, index: 0 };
        let name = program.gradient_name(block, &set.gradients[position].name);
        let node = &training.norm.nodes()[lowering.squares_node(&name)];
        kernels.add(node_seconds(&training.norm, node, lowering.profile));
    }
    kernels
}

/// Parts of a stage's gradients that other stages compute.
fn folds(lowering: &Lowering<'_>, cut: &Cut, stages: &[StageTable], stage: usize) -> Vec<Fold> {
    let mut folds = Vec::new();
    for (user, set) in lowering.sets.iter().enumerate().filter(|&(user, _)| user != stage) {
        for (part, gradient) in set.gradients.iter().enumerate().filter(|(_, g)| g.owner == stage) {
            let whole = lowering.sets[stage].gradient(&gradient.name);
            let whole = stages[stage].gradients.entries[whole.expect("learned here")].clone();
            let added = stages[user].gradients.entries[part].clone();
            let bytes = &cut.stages[user].gradients.entries[part].pieces;
            let pieces = added.zip(whole).zip(bytes).map(|((added, whole), &bytes)| {
                (added, whole, bytes, add_seconds(lowering, gradient.dtype, bytes))
            });
            folds.push(Fold { user, pieces: pieces.collect() });
        }
    }
    folds
}

fn add_seconds(lowering: &Lowering<'_>, dtype: DType, bytes: usize) -> f64 {
    let mut graph = Graph::new();
    let mut source = |name: &str| {
        let shape = Shape::from([bytes / dtype.size_bytes()]);
        graph.source(name, shape, dtype, TensorClass::Gradient)
    };
    let (sum, x) = (source("sum"), source("part"));
    graph.apply("fold", Op::Accumulate { sum, x }).expect("both have one shape");
    node_seconds(&graph, &graph.nodes()[0], lowering.profile)
}

//! What sketches of a task share: copies of weights, gradients and updates as cells and bytes.

use super::super::Lowering;
use super::super::exchange::{partial_graph, square_graph};
use super::super::lanes::{Lane, lane_graph};
use super::super::parameters::Set;
use super::super::shards::partials_bytes;
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
    /// Of these, what the rank updates, and what others bring.
    pub(super) own_weights: Vec<Run>,
    pub(super) others_weights: Vec<Run>,
    pub(super) gradients: Vec<Run>,
    pub(super) states: Vec<usize>,
    pub(super) kernels: Kernels,
    /// Bytes of the copies of the sums of lanes.
    pub(super) sums: Vec<usize>,
    pub(super) sum_kernels: SumKernels,
    /// Seconds in which other ranks bring what they have updated.
    pub(super) gather: Option<f64>,
}

/// What adds the gradients of lanes, those of all ranks one after another, or sums of machines.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SumKernels {
    /// Begins a sum with a lane.
    begin: Kernels,
    /// Adds a lane to it.
    add: Kernels,
    /// Begins a sum with another sum, or adds one to it.
    begin_sum: Kernels,
    add_sum: Kernels,
    /// Makes it the gradient of the step.
    round: Kernels,
    /// How many machines send sums of their lanes; none if ranks send lanes.
    machines: Option<u32>,
}

impl SumKernels {
    /// Those of a lane.
    pub(super) fn of(&self, lane: Lane) -> Kernels {
        let mut kernels = Kernels::default();
        let mut add = |more: Kernels, times: usize| {
            kernels.seconds += times as f64 * more.seconds;
            kernels.count += times as u32 * more.count;
        };
        match self.machines {
            Some(machines) => {
                let begun = usize::from(lane.begins_step());
                add(self.begin_sum, begun);
                add(self.add_sum, machines as usize - begun);
            }
            None => {
                let added = lane.added();
                let begun = added.iter().filter(|added| added.begins()).count();
                add(self.begin, begun);
                add(self.add, added.len() - begun);
                add(self.add_sum, added.iter().filter(|added| added.ends_group()).count());
            }
        }
        add(self.round, usize::from(lane.ends_step()));
        kernels
    }
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
    /// Copies of what a complete lane leaves of them.
    pub(super) complete: Vec<Run>,
    /// Cells of the gradients of its own parameters.
    pub(super) exchanged: Range<u32>,
    /// Seconds in which these go to the ranks that add them up; none if one rank makes the step.
    pub(super) exchange: Option<f64>,
    /// What adds up the lanes of a machine, and the seconds in which their sums go to the owners; none if lanes do.
    pub(super) machine_sums: Kernels,
    pub(super) exchange_sums: Option<f64>,
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
    /// Seconds of the gather of partial sums of squares before that.
    pub(super) gather_squares: Option<f64>,
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
        let gather_squares = lowering.gather_squares_seconds(&cut, piece_elements);
        if gather_squares.is_some() {
            for (stage, set) in lowering.sets.iter().enumerate() {
                let repeat = lowering.task.program().stages()[stage].repeat as u32;
                for parameter in set.trainable() {
                    let elements = set.parameters[parameter].tensor.shape.elements();
                    let graph = partial_graph(partials_bytes(elements) / size_of::<f32>());
                    let seconds = node_seconds(&graph, &graph.nodes()[0], lowering.profile);
                    norm.seconds += f64::from(repeat) * seconds;
                    norm.count += repeat;
                }
            }
        }
        let updates = stages.iter().flat_map(|stage| &stage.updates);
        let state_runs = updates.map(|update| update.states.len()).max().unwrap_or(1).max(1);
        Tables { stages, norm, gather_squares, state_runs }
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
        let others = group.pieces.iter().filter(|at| !group.own.contains(at)).copied();
        UpdateCopies {
            own_weights: weight_runs(of(&group.own)),
            others_weights: weight_runs(of(&others.collect::<Vec<_>>())),
            weights_in: weight_runs(wanted),
            weights_out: weight_runs(of(&group.pieces)),
            gradients: gradients.of(&slabs.gradients.runs_of(group.own.iter().copied())),
            states: group.runs.iter().map(|run| run.copy.size_bytes).collect(),
            kernels: update_kernels(lowering, set, &trainable, group, piece_elements),
            sums: group.sums.iter().map(|(run, _)| run.size_bytes).collect(),
            sum_kernels: sum_kernels(lowering, set, group, &slabs.gradients),
            gather: lowering.gather_seconds(cut, stage, &group.pieces),
        }
    };
    let updates = cut.updates[stage].iter().enumerate().map(update).collect();
    let squares = match lowering.shares_step() {
        true => own_squares(lowering, cut, stage),
        false => squares(lowering, stage),
    };
    let pieces = |t: usize| (0..slabs.gradients.entries[t].pieces.len()).map(move |p| (t, p));
    let is_complete = |&(t, p): &(usize, usize)| slabs.complete_gradients.entries[t].pieces[p] > 0;
    let complete = (0..slabs.gradients.entries.len()).flat_map(pieces).filter(is_complete);
    let complete = gradients.of(&slabs.gradients.runs_of(complete));
    let exchanged = trainable.len().checked_sub(1).map_or(0, |t| gradients.entries[t].end);
    let homes = &cut.frozen[stage];
    let frozen: Vec<CopyRun> = homes.on_disk.iter().map(|run| run.copy.clone()).collect();
    let (frozen, learning) = (weights.of(&frozen), weights.of(&homes.learning));
    StageTable {
        weights,
        frozen,
        learning,
        gradients,
        complete,
        exchanged: 0..exchanged,
        exchange: lowering.exchange_seconds(cut, stage),
        machine_sums: machine_sums(lowering, cut, stage),
        exchange_sums: lowering.exchange_sums_seconds(cut, stage),
        updates,
        squares,
        folds: Vec::new(),
    }
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
) -> SumKernels {
    let mut kernels = SumKernels::default();
    let rank = lowering.task.rank;
    if lowering.task.lanes == 1 && !rank.is_shared() {
        return kernels;
    }
    kernels.machines = rank.has_levels().then(|| rank.machines());
    for &(t, piece) in &group.own {
        let dtype = set.gradients[t].dtype;
        let elements = gradients.entries[t].pieces[piece] / dtype.size_bytes();
        let [begin, add, round] = lane_seconds(lowering, dtype, elements);
        let [begin_sum, add_sum, _] = lane_seconds(lowering, DType::F32, elements);
        kernels.begin.add(begin);
        kernels.add.add(add);
        kernels.begin_sum.add(begin_sum);
        kernels.add_sum.add(add_sum);
        kernels.round.add(round);
    }
    kernels
}

/// Seconds in which a lane begins a sum, is added to one, and a sum is rounded.
fn lane_seconds(lowering: &Lowering<'_>, dtype: DType, elements: usize) -> [f64; 3] {
    let graph = lane_graph(dtype, elements);
    [0, 1, 2].map(|node: usize| node_seconds(&graph, &graph.nodes()[node], lowering.profile))
}

/// What adds up the lanes of a machine.
fn machine_sums(lowering: &Lowering<'_>, cut: &Cut, stage: usize) -> Kernels {
    let mut kernels = Kernels::default();
    let rank = lowering.task.rank;
    if !rank.has_levels() {
        return kernels;
    }
    let (set, slab) = (&lowering.sets[stage], &cut.stages[stage].gradients);
    for &(t, piece) in cut.updates[stage].iter().flat_map(|group| &group.pieces) {
        if cut.shards.adds(stage, t, piece) {
            let dtype = set.gradients[t].dtype;
            let elements = slab.entries[t].pieces[piece] / dtype.size_bytes();
            let [begin, add, _] = lane_seconds(lowering, dtype, elements);
            kernels.add(begin);
            (1..rank.machine).for_each(|_| kernels.add(add));
        }
    }
    kernels
}

/// Sums of squares of the pieces that the rank owns.
fn own_squares(lowering: &Lowering<'_>, cut: &Cut, stage: usize) -> Kernels {
    let mut kernels = Kernels::default();
    let (set, slab) = (&lowering.sets[stage], &cut.stages[stage].gradients);
    for &(t, piece) in cut.updates[stage].iter().flat_map(|group| &group.own) {
        let dtype = set.gradients[t].dtype;
        let graph = square_graph(dtype, slab.entries[t].pieces[piece] / dtype.size_bytes());
        kernels.add(node_seconds(&graph, &graph.nodes()[0], lowering.profile));
    }
    kernels
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

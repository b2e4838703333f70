//! A program as a list of blocks: the stage of each block, and the tensors that neighboring blocks
//! exchange.

use super::slab::{COPY_BYTES_MAX, Slab};
use crate::{PlanError, Task};
use storm_graph::{Block, GraphError, Origin, Tensor};

/// All blocks of a task's program.
#[derive(Debug)]
pub(crate) struct Blocks {
    blocks: Vec<Block>,
    /// By block: the tensors it receives from the block right before.
    pub(crate) seams: Vec<Seam>,
    /// Carried tensors from earlier blocks.
    pub(crate) skips: Vec<Skip>,
    /// By stage: whether the backward pass runs its blocks.
    reached: Vec<bool>,
    /// By stage: the stages whose weights its blocks read, itself first.
    pub(crate) weight_owners: Vec<Vec<usize>>,
    /// By stage: its first block.
    first: Vec<usize>,
}

/// The tensors a block receives from the block right before it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seam {
    /// Index among the block's inputs, and among the outputs of the block before.
    pub(crate) tensors: Vec<(usize, usize)>,
    /// One entry for each.
    pub(crate) slab: Slab,
}

/// A carried tensor that bypasses at least one block.
#[derive(Clone, Debug)]
pub(crate) struct Skip {
    pub(crate) from: Origin,
    /// The block that receives it, and the index among that block's inputs.
    pub(crate) to: (usize, usize),
    pub(crate) tensor: Tensor,
}

impl Blocks {
    pub(crate) fn new(task: &Task) -> Result<Blocks, PlanError> {
        let program = task.program();
        let problem = |error: GraphError| PlanError::Task { problem: error.to_string() };
        let origins = program.origins().map_err(problem)?;
        let blocks: Vec<Block> = program.blocks().collect();
        let (mut seams, mut skips) = (Vec::new(), Vec::new());
        for (number, origins) in origins.iter().enumerate() {
            let section = program.section(blocks[number].stage);
            let mut seam = Seam::default();
            for (input, &from) in origins.iter().enumerate() {
                let tensor = section.graph.tensor(section.carried_in[input].tensor);
                if from.block + 1 == number {
                    seam.tensors.push((input, from.output));
                    seam.slab.push(tensor.size_bytes(), COPY_BYTES_MAX);
                } else {
                    let tensor = tensor.clone();
                    skips.push(Skip { from, to: (number, input), tensor });
                }
            }
            seams.push(seam);
        }
        let stages = 0..program.stages().len();
        let weight_owners = stages.clone().map(|stage| {
            let section = program.section(stage);
            let mut owners = vec![stage];
            for id in section.outside_tensors() {
                let name = &section.graph.tensor(id).name;
                if section.parameter(name).is_some() {
                    let owner = program.owner(stage, name);
                    if !owners.contains(&owner) {
                        owners.push(owner);
                    }
                }
            }
            owners
        });
        let weight_owners = weight_owners.collect();
        let reached = stages.clone().map(|stage| program.is_reached(stage)).collect();
        let repeats = program.stages().iter().map(|stage| stage.repeat);
        let first = repeats.scan(0, |next, repeat| Some(std::mem::replace(next, *next + repeat)));
        let first = first.collect();
        Ok(Blocks { seams, skips, reached, weight_owners, first, blocks })
    }

    pub(crate) fn count(&self) -> usize {
        self.blocks.len()
    }

    pub(crate) fn last(&self) -> usize {
        self.blocks.len() - 1
    }

    pub(crate) fn get(&self, block: usize) -> Block {
        self.blocks[block]
    }

    /// The number of a stage's block.
    pub(crate) fn number(&self, stage: usize, index: usize) -> usize {
        self.first[stage] + index
    }

    /// Whether the backward pass runs the block.
    pub(crate) fn is_reached(&self, block: usize) -> bool {
        self.reached[self.blocks[block].stage]
    }

    /// Bytes of the largest seam before a block for which `wanted` holds.
    pub(crate) fn seam_bytes_max(&self, wanted: impl Fn(usize) -> bool) -> usize {
        let blocks = (0..self.count()).filter(|&block| wanted(block));
        blocks.map(|block| self.seams[block].slab.size_bytes).max().unwrap_or(0)
    }
}

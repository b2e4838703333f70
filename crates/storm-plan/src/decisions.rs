//! What a planner decides. None of it changes a bit of the result.

use crate::Task;
use serde::Serialize;

/// What happens to a tensor between the forward pass that makes it and the backward pass that
/// reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Storage {
    /// Stays in device memory.
    Keep,
    /// Is recomputed.
    Recompute,
    /// Waits in host memory.
    Offload,
}

/// Where a class of a stage's tensors lives: that of the first `pinned` blocks on the device, that of the
/// others in host memory, coming in through a ring of `ring` slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Streaming {
    /// Blocks whose tensors stay on the device.
    pub pinned: usize,
    /// Slots for the others.
    pub ring: usize,
}

impl Streaming {
    /// Everything on the device.
    pub fn resident(blocks: usize) -> Streaming {
        Streaming { pinned: blocks, ring: 0 }
    }

    /// Blocks whose tensors have memory on the device at a time.
    pub fn slots(self) -> usize {
        self.pinned + self.ring
    }

    /// Which slot a block uses, by its position in the stage.
    pub fn slot(self, index: usize) -> usize {
        match index.checked_sub(self.pinned) {
            None => index,
            Some(beyond) => self.pinned + beyond % self.ring.max(1),
        }
    }

    /// Whether the tensors of a block stay on the device.
    pub fn is_pinned(self, index: usize) -> bool {
        index < self.pinned
    }
}

/// When gradients are applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum UpdateTime {
    /// At the end of the step.
    EndOfStep,
    /// In the next step, each block just before its first use, beside the block before it.
    NextStep,
}

/// How the rings of streamed weights and gradients share device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum RingMemory {
    /// Each stage has rings of its own.
    Separate,
    /// The rings of all stages lie over each other: a stage's weights and gradients take the memory of
    /// those of the stage that ran before. Nothing of the next stage is fetched before that.
    Shared,
}

/// All decisions of a plan.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Decisions {
    /// Micro-batches that go through a block together: streamed weights move once for all of them.
    pub group: usize,
    /// One for each stage of the program.
    pub stages: Vec<StageDecisions>,
    /// How rings share memory.
    pub rings: RingMemory,
    /// When gradients are applied.
    pub update: UpdateTime,
    /// Pieces of optimizer state that have memory on the device at a time, where any is streamed.
    pub state_ring: usize,
    /// How many blocks' offloaded tensors have memory on the device at a time.
    pub activation_ring: usize,
    /// How many offloaded inputs of blocks have memory on the device at a time, beyond what a group
    /// needs.
    pub input_ring: usize,
    /// Parameters are updated and copied in pieces of this many elements.
    pub piece_elements: usize,
}

/// Decisions about the blocks of one stage.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct StageDecisions {
    /// Per block and saved unit (see [`Task::saved_units`]).
    pub saved: Vec<Vec<Storage>>,
    /// Per block, what it takes from the block before. [`Storage::Recompute`] runs the blocks since the
    /// last one whose input is stored. Without meaning for the last stage, which runs backward at once.
    pub inputs: Vec<Storage>,
    /// Parameters.
    pub weights: Streaming,
    /// Their gradients.
    pub gradients: Streaming,
    /// Blocks whose optimizer state stays on the device.
    pub states_pinned: usize,
}

/// Elements of a piece unless decided otherwise: 32 MiB of bf16.
pub const PIECE_ELEMENTS: usize = 16 << 20;

impl Decisions {
    /// Everything in device memory, one micro-batch after another.
    pub fn resident(task: &Task) -> Decisions {
        let stages = task.program().stages().iter().enumerate();
        Decisions {
            group: 1,
            stages: stages
                .map(|(stage, s)| StageDecisions {
                    saved: vec![vec![Storage::Keep; task.saved_units(stage).len()]; s.repeat],
                    inputs: vec![Storage::Keep; s.repeat],
                    weights: Streaming::resident(s.repeat),
                    gradients: Streaming::resident(s.repeat),
                    states_pinned: s.repeat,
                })
                .collect(),
            rings: RingMemory::Separate,
            update: UpdateTime::EndOfStep,
            state_ring: 0,
            activation_ring: 0,
            input_ring: 0,
            piece_elements: PIECE_ELEMENTS,
        }
    }
}

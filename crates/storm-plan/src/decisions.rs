//! The planner's decisions. None of them changes a bit of the result.

use crate::Task;
use serde::{Deserialize, Serialize};
use smallvec::{SmallVec, smallvec};

/// What happens to a tensor between the forward pass that computes it and the backward pass that reads
/// it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Storage {
    /// Stays in device memory.
    Keep,
    /// Is recomputed in the backward pass.
    Recompute,
    /// Is offloaded to host memory.
    Offload,
}

/// Where the tensors of one class of a stage live. Those of the first `pinned` blocks stay on the device;
/// the others live in host memory and stream through a ring of `ring` slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
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

    /// How many blocks' tensors have memory on the device at a time.
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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum UpdateTime {
    /// At the end of the step.
    #[default]
    EndOfStep,
    /// In the next step: each block is updated just before its first use, while the block before it runs.
    NextStep,
    /// In the backward pass, each block as soon as its gradients are complete, so that no gradient outlives its block,
    /// except parts of tied ones. Requires steps of one group, without clipping. A non-finite gradient does not cancel
    /// the update.
    InBackward,
}

/// How the rings of streamed weights and gradients share device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RingMemory {
    /// Each stage has separate rings.
    Separate,
    /// The rings of all stages overlap: a stage's weights and gradients reuse the memory of the stage
    /// that ran before it. Nothing of the next stage is fetched until then.
    Shared,
}

/// How the inputs of blocks on their way through share device memory with the gradients of those inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SeamMemory {
    /// Each have separate rings.
    Separate,
    /// A gradient uses memory that only the forward pass needs for inputs. Requires groups of one micro-batch. Inputs that
    /// come back from host memory have one slot less.
    Shared,
}

/// All decisions of a plan.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Decisions {
    /// The groups of micro-batches of a step, in order. The first may differ: it also applies a deferred
    /// update during its forward pass, which takes time to hide and leaves less memory.
    pub groups: Vec<GroupDecisions>,
    /// One for each stage of the program.
    pub stages: Vec<StageDecisions>,
    /// How rings share memory.
    pub rings: RingMemory,
    /// When gradients are applied.
    pub update: UpdateTime,
    /// How many pieces of optimizer state have memory on the device at a time, if any is streamed.
    pub state_ring: usize,
    /// How many pieces of optimizer state have pinned memory on their way from and to the disk at a time, if any
    /// is on disk.
    pub disk_ring: usize,
    /// How many copies of frozen weights have pinned memory on their way from the disk at a time, if any are there.
    pub frozen_ring: usize,
    /// Parameters are updated and copied in pieces of this many elements.
    pub piece_elements: usize,
}

/// Consecutive groups of micro-batches of a lane that are treated alike.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GroupDecisions {
    /// Micro-batches that run through a block together: streamed weights are copied once for all of them.
    pub micro_batches: usize,
    /// How many such groups there are in a row.
    pub times: usize,
    /// One for each stage of the program.
    pub stages: Vec<ActivationDecisions>,
    /// How many blocks' offloaded tensors have memory on the device at a time.
    pub activation_ring: usize,
    /// How many offloaded block inputs have memory on the device at a time, beyond what a group needs.
    pub input_ring: usize,
    /// How their memory is shared.
    pub seams: SeamMemory,
}

/// What happens to each saved unit of a block. Inline, because a search makes thousands of them.
pub type SavedStorage = SmallVec<[Storage; 16]>;

/// How the blocks of one stage provide what their backward pass reads.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ActivationDecisions {
    /// Per block and saved unit (see [`Task::saved_units`]).
    pub saved: Vec<SavedStorage>,
    /// Per block: its input, from the block before. [`Storage::Recompute`] reruns the blocks since the
    /// last one with a stored input. Unused for the last stage, whose backward pass follows immediately.
    pub inputs: Vec<Storage>,
}

/// Where the parameters of one stage live, with their gradients and optimizer state.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct StageDecisions {
    /// Parameters.
    pub weights: Streaming,
    /// Their gradients.
    pub gradients: Streaming,
    /// Blocks whose optimizer state stays on the device.
    pub states_pinned: usize,
    /// By block: how many kinds of its optimizer state are on disk, second moments first, then first moments.
    /// Nothing of the blocks beyond the list is, nor of those whose state stays on the device.
    pub on_disk: Vec<usize>,
    /// By block: whether its frozen weights are on disk. Those of the blocks beyond the list are not, nor those of
    /// blocks whose weights stay on the device.
    pub frozen_on_disk: Vec<bool>,
}

/// Default size of a piece in elements: 32 MiB of bf16.
pub const PIECE_ELEMENTS: usize = 16 << 20;

impl Decisions {
    /// Everything in device memory, one micro-batch after another.
    pub fn resident(task: &Task) -> Decisions {
        let stages = task.program().stages();
        let activations = stages.iter().enumerate().map(|(stage, s)| ActivationDecisions {
            saved: vec![smallvec![Storage::Keep; task.saved_units(stage).len()]; s.repeat],
            inputs: vec![Storage::Keep; s.repeat],
        });
        let parameters = stages.iter().map(|s| StageDecisions {
            weights: Streaming::resident(s.repeat),
            gradients: Streaming::resident(s.repeat),
            states_pinned: s.repeat,
            on_disk: Vec::new(),
            frozen_on_disk: Vec::new(),
        });
        Decisions {
            groups: vec![GroupDecisions {
                micro_batches: 1,
                times: task.lane_micro_batches(),
                stages: activations.collect(),
                activation_ring: 0,
                input_ring: 0,
                seams: SeamMemory::Separate,
            }],
            stages: parameters.collect(),
            rings: RingMemory::Separate,
            update: UpdateTime::EndOfStep,
            state_ring: 0,
            disk_ring: 0,
            frozen_ring: 0,
            piece_elements: PIECE_ELEMENTS,
        }
    }

    /// Nothing stays on the device longer than it must; all rings have two slots.
    pub fn streamed(task: &Task) -> Decisions {
        let mut decisions =
            Decisions { update: UpdateTime::NextStep, state_ring: 2, ..Decisions::resident(task) };
        for group in &mut decisions.groups {
            (group.activation_ring, group.input_ring) = (2, 2);
            for stage in &mut group.stages {
                stage.saved.iter_mut().for_each(|saved| saved.fill(Storage::Offload));
                stage.inputs.fill(Storage::Offload);
            }
        }
        for stage in &mut decisions.stages {
            stage.weights = Streaming { pinned: 0, ring: 2 };
            stage.gradients = Streaming { pinned: 0, ring: 2 };
            stage.states_pinned = 0;
        }
        decisions
    }

    /// The most micro-batches that run through a block together.
    pub fn group_max(&self) -> usize {
        self.groups.iter().map(|group| group.micro_batches).max().unwrap_or(0)
    }

    /// For display: `8`, or `2, then 1`.
    pub fn group_sizes(&self) -> String {
        let sizes: Vec<String> =
            self.groups.iter().map(|group| group.micro_batches.to_string()).collect();
        sizes.join(", then ")
    }

    /// The groups that contain most micro-batches of a step.
    ///
    /// # Panics
    /// If there are no groups.
    pub fn usual_group(&self) -> &GroupDecisions {
        let count = |group: &&GroupDecisions| group.micro_batches * group.times;
        self.groups.iter().max_by_key(count).expect("a step has groups")
    }
}

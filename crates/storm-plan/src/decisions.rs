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
    /// Is made again.
    Recompute,
    /// Waits in host memory.
    Offload,
}

/// Where a class of per-layer tensors lives: the first `pinned` layers on the device, the others in
/// host memory, coming in through a ring of `ring` layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Streaming {
    /// Layers that stay on the device.
    pub pinned: usize,
    /// Slots for the others.
    pub ring: usize,
}

impl Streaming {
    /// Everything on the device.
    pub fn resident(layers: usize) -> Streaming {
        Streaming { pinned: layers, ring: 0 }
    }

    /// Layers that have memory on the device at a time.
    pub fn slots(self) -> usize {
        self.pinned + self.ring
    }

    /// Which slot a layer uses.
    pub fn slot(self, layer: usize) -> usize {
        match layer.checked_sub(self.pinned) {
            None => layer,
            Some(beyond) => self.pinned + beyond % self.ring.max(1),
        }
    }

    /// Whether a layer stays on the device.
    pub fn is_pinned(self, layer: usize) -> bool {
        layer < self.pinned
    }
}

/// When gradients are applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum UpdateTime {
    /// At the end of the step.
    EndOfStep,
    /// In the next step, each layer just before its first use, beside the layers before it.
    NextStep,
}

/// All decisions of a plan.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Decisions {
    /// Micro-batches that go through a layer together: streamed weights move once for all of them.
    pub group: usize,
    /// Per layer and saved unit (see [`Task::saved_units`]).
    pub saved: Vec<Vec<Storage>>,
    /// Per layer, what it takes from the layer before. [`Storage::Recompute`] runs the layers since
    /// the last one that is not again.
    pub boundary: Vec<Storage>,
    /// Parameters of the layers.
    pub weights: Streaming,
    /// Their gradients.
    pub gradients: Streaming,
    /// Optimizer state of the layers. The ring counts pieces, not layers.
    pub states: Streaming,
    /// Whether the optimizer state of prologue and epilogue stays on the device.
    pub edge_states_resident: bool,
    /// When gradients are applied.
    pub update: UpdateTime,
    /// How many layers' offloaded tensors have memory on the device at a time.
    pub activation_ring: usize,
    /// How many offloaded layer inputs have memory on the device at a time, beyond what a group
    /// needs.
    pub boundary_ring: usize,
    /// Parameters are updated and copied in pieces of this many elements.
    pub piece_elements: usize,
}

/// Elements of a piece unless decided otherwise: 32 MiB of bf16.
pub const PIECE_ELEMENTS: usize = 16 << 20;

impl Decisions {
    /// Everything in device memory, one micro-batch after another.
    pub fn resident(task: &Task) -> Decisions {
        let layers = task.layer_count();
        Decisions {
            group: 1,
            saved: vec![vec![Storage::Keep; task.saved_units().len()]; layers],
            boundary: vec![Storage::Keep; layers],
            weights: Streaming::resident(layers),
            gradients: Streaming::resident(layers),
            states: Streaming::resident(layers),
            edge_states_resident: true,
            update: UpdateTime::EndOfStep,
            activation_ring: 0,
            boundary_ring: 0,
            piece_elements: PIECE_ELEMENTS,
        }
    }
}

//! Tracks which blocks' weights and gradients are on the device, and how long their memory is in use.

use super::layout::{ClassPlaces, Layout};
use crate::TensorKind;
use std::ops::Range;

/// Tensor classes that stream through slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    Weights,
    Gradients,
}

impl Class {
    pub(super) const ALL: [Class; 2] = [Class::Weights, Class::Gradients];

    pub(super) fn kind(self) -> TensorKind {
        match self {
            Class::Weights => TensorKind::Weights,
            Class::Gradients => TensorKind::Gradients,
        }
    }

    /// The places of this class, by stage.
    pub(super) fn places(self, layout: &Layout) -> &[ClassPlaces] {
        match self {
            Class::Weights => &layout.weights,
            Class::Gradients => &layout.gradients,
        }
    }
}

/// Device memory for one block's weights or gradients, used by one block at a time.
#[derive(Clone, Debug)]
struct Slot {
    bytes: Range<usize>,
    is_pinned: bool,
    /// The block whose tensors are in the slot, as an index in its stage.
    contents: Option<usize>,
    /// Number of kernels in the segment up to its last use.
    free_after: usize,
    /// Other slots that overlap it in memory.
    overlaps: Vec<usize>,
}

/// All slots of all stages.
#[derive(Clone, Debug)]
pub(super) struct Residency {
    slots: Vec<Slot>,
    /// The first slot of each class and stage.
    first: [Vec<usize>; 2],
}

impl Residency {
    pub(super) fn new(layout: &Layout) -> Residency {
        let mut slots: Vec<Slot> = Vec::new();
        let first = Class::ALL.map(|class| {
            let mut first = Vec::new();
            for places in class.places(layout) {
                first.push(slots.len());
                for slot in 0..places.streaming.slots() {
                    let start = places.slot(slot);
                    let is_pinned = places.streaming.is_pinned(slot);
                    slots.push(Slot {
                        bytes: start..start + places.slot_bytes,
                        is_pinned,
                        contents: is_pinned.then_some(slot),
                        free_after: 0,
                        overlaps: Vec::new(),
                    });
                }
            }
            first
        });
        let in_ring = |&s: &usize| !slots[s].is_pinned && !slots[s].bytes.is_empty();
        let in_rings: Vec<usize> = (0..slots.len()).filter(in_ring).collect();
        for &one in &in_rings {
            let meets = |&other: &usize| {
                let (a, b) = (&slots[one].bytes, &slots[other].bytes);
                other != one && a.start < b.end && b.start < a.end
            };
            slots[one].overlaps = in_rings.iter().copied().filter(meets).collect();
        }
        Residency { slots, first }
    }

    fn slot(&self, class: Class, stage: usize, places: &ClassPlaces, index: usize) -> usize {
        self.first[class as usize][stage] + places.streaming.slot(index)
    }

    /// The number of the first slot of a class and stage.
    pub(super) fn first_slot(&self, class: Class, stage: usize) -> usize {
        self.first[class as usize][stage]
    }

    /// Slots that overlap another in memory.
    pub(super) fn overlapping(&self, slot: usize) -> &[usize] {
        &self.slots[slot].overlaps
    }

    /// The memory of a slot.
    pub(super) fn bytes(&self, slot: usize) -> Range<usize> {
        self.slots[slot].bytes.clone()
    }

    /// Assigns a block its slot. Returns the number of kernels after which its tensors may be fetched; `None` if they
    /// are already there.
    pub(super) fn enter(
        &mut self,
        layout: &Layout,
        class: Class,
        stage: usize,
        index: usize,
    ) -> Option<usize> {
        let slot = self.slot(class, stage, &class.places(layout)[stage], index);
        if self.slots[slot].contents == Some(index) {
            return None;
        }
        let mut after = self.slots[slot].free_after;
        for position in 0..self.slots[slot].overlaps.len() {
            let other = self.slots[slot].overlaps[position];
            self.slots[other].contents = None;
            after = after.max(self.slots[other].free_after);
        }
        self.slots[slot].contents = Some(index);
        Some(after)
    }

    /// Whether the tensors of a block are on the device.
    pub(super) fn is_there(
        &self,
        layout: &Layout,
        class: Class,
        stage: usize,
        index: usize,
    ) -> bool {
        let slot = self.slot(class, stage, &class.places(layout)[stage], index);
        self.slots[slot].contents == Some(index)
    }

    /// Records that a block's tensors are in use until the kernel at `position`.
    pub(super) fn touch(
        &mut self,
        layout: &Layout,
        class: Class,
        stage: usize,
        index: usize,
        position: usize,
    ) {
        let slot = self.slot(class, stage, &class.places(layout)[stage], index);
        self.slots[slot].free_after = position;
    }

    /// Whether other stages share the memory of a block's slot.
    pub(super) fn is_shared(
        &self,
        layout: &Layout,
        class: Class,
        stage: usize,
        index: usize,
    ) -> bool {
        let slot = self.slot(class, stage, &class.places(layout)[stage], index);
        !self.slots[slot].overlaps.is_empty()
    }

    /// Whether two slots are the same or overlap in memory.
    pub(super) fn meet(
        &self,
        layout: &Layout,
        one: (Class, usize, usize),
        other: (Class, usize, usize),
    ) -> bool {
        let [one, other] = [one, other].map(|(class, stage, index)| {
            self.slot(class, stage, &class.places(layout)[stage], index)
        });
        one == other || self.slots[one].overlaps.contains(&other)
    }

    /// The contents of the rings: class, stage and block index.
    pub(super) fn in_rings(&self) -> Vec<(Class, usize, usize)> {
        let mut found = Vec::new();
        for class in Class::ALL {
            let first = &self.first[class as usize];
            for (stage, &start) in first.iter().enumerate() {
                let next = first.get(stage + 1).copied();
                let end = next.unwrap_or(match class {
                    Class::Weights => self.first[Class::Gradients as usize][0],
                    Class::Gradients => self.slots.len(),
                });
                let slots = self.slots[start..end].iter().filter(|slot| !slot.is_pinned);
                found.extend(slots.filter_map(|slot| Some((class, stage, slot.contents?))));
            }
        }
        found
    }

    /// Resets positions, which count from the start of a segment.
    pub(super) fn begin_segment(&mut self) {
        for slot in &mut self.slots {
            slot.free_after = 0;
        }
    }
}

/// Slots that are used round-robin.
#[derive(Clone, Debug)]
pub(super) struct Turns {
    next: usize,
    /// Slots from here on take turns.
    first: usize,
    free_after: Vec<usize>,
}

impl Turns {
    pub(super) fn new(slots: usize) -> Turns {
        Turns { next: 0, first: 0, free_after: vec![0; slots.max(1)] }
    }

    pub(super) fn next(&mut self) -> usize {
        let slot = self.first + self.next % (self.free_after.len() - self.first);
        self.next += 1;
        slot
    }

    /// The first `count` slots have no more turns in this segment.
    pub(super) fn leave_out(&mut self, count: usize) {
        self.first = count;
    }

    pub(super) fn free_after(&self, slot: usize) -> usize {
        self.free_after[slot]
    }

    pub(super) fn touch(&mut self, slot: usize, position: usize) {
        self.free_after[slot] = position;
    }

    pub(super) fn begin_segment(&mut self) {
        self.free_after.fill(0);
        (self.next, self.first) = (0, 0);
    }
}

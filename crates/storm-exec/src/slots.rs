use crate::ExecError;
use std::collections::BTreeMap;
use storm_graph::Tensor;
use storm_plan::ALIGNMENT;

/// A tensor that outlives a schedule: a parameter, a gradient, optimizer state, an input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SlotId(usize);

#[derive(Clone, Debug)]
struct Slot {
    tensor: Tensor,
    offset: usize,
}

/// All persistent tensors by name, one after another from offset 0.
#[derive(Clone, Debug, Default)]
pub struct Slots {
    slots: Vec<Slot>,
    by_name: BTreeMap<String, SlotId>,
    size_bytes: usize,
}

impl Slots {
    /// No slots.
    pub fn new() -> Slots {
        Slots::default()
    }

    /// The slot of that name, created if it is new.
    ///
    /// # Errors
    /// There is one with a different shape or dtype.
    pub fn declare(&mut self, tensor: Tensor) -> Result<SlotId, ExecError> {
        if let Some(&id) = self.by_name.get(&tensor.name) {
            let known = &self.slots[id.0].tensor;
            if known.shape == tensor.shape && known.dtype == tensor.dtype {
                return Ok(id);
            }
            return Err(ExecError::SlotMismatch {
                name: tensor.name.clone(),
                known: Box::new(known.clone()),
                wanted: Box::new(tensor),
            });
        }
        let id = SlotId(self.slots.len());
        let offset = self.size_bytes;
        let end = offset.saturating_add(tensor.size_bytes());
        self.size_bytes = end.checked_next_multiple_of(ALIGNMENT).unwrap_or(usize::MAX);
        self.by_name.insert(tensor.name.clone(), id);
        self.slots.push(Slot { tensor, offset });
        Ok(id)
    }

    /// The slot of that name.
    pub fn find(&self, name: &str) -> Option<SlotId> {
        self.by_name.get(name).copied()
    }

    /// Like [`Slots::find`], with an error that lists what exists.
    ///
    /// # Errors
    /// No such slot.
    pub fn get(&self, name: &str) -> Result<SlotId, ExecError> {
        self.find(name).ok_or_else(|| ExecError::unknown(name, self.by_name.keys()))
    }

    /// The tensor of a slot.
    pub fn tensor(&self, id: SlotId) -> &Tensor {
        &self.slots[id.0].tensor
    }

    /// The offset of a slot.
    pub(crate) fn offset(&self, id: SlotId) -> usize {
        self.slots[id.0].offset
    }

    /// Bytes of all slots.
    pub fn size_bytes(&self) -> usize {
        self.size_bytes
    }
}

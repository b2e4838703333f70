//! Finds compute instructions that a device may issue as one.

use crate::plan::{InstructionId, Plan, SegmentId};
use crate::queue::Queue;

/// Consecutive instructions of the compute queue of which only the first waits for other queues, and other queues wait
/// only for the last. Only the queue orders those in between, so all of them can be issued in place of the first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// In the order of the queue; never empty.
    pub instructions: Vec<InstructionId>,
}

impl Plan {
    /// Splits the compute instructions of a segment into the fewest stretches.
    pub fn stretches(&self, segment: SegmentId) -> Vec<Stretch> {
        let mut is_awaited = vec![false; self.instructions.len()];
        for &awaited in self.instructions.iter().flat_map(|instruction| &instruction.waits) {
            is_awaited[awaited.index()] = true;
        }
        let mut stretches: Vec<Stretch> = Vec::new();
        let mut is_open = false;
        let ids = self.segment(segment).instructions.clone().map(|id| InstructionId(id as u32));
        for id in ids.filter(|&id| self.queue(id) == Queue::COMPUTE) {
            let waits = !self.instruction(id).waits.is_empty();
            match stretches.last_mut().filter(|_| is_open && !waits) {
                Some(stretch) => stretch.instructions.push(id),
                None => stretches.push(Stretch { instructions: vec![id] }),
            }
            is_open = !is_awaited[id.index()];
        }
        stretches
    }
}

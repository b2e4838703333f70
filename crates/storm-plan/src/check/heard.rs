//! Finds waits that nothing ever fulfills.

use super::error::{Actor, CheckError};
use crate::plan::{InstructionId, Plan};

/// Which waits ever had something to wait for.
pub(super) struct Heard {
    /// By instruction: where its waits start.
    first: Vec<usize>,
    heard: Vec<bool>,
}

impl Heard {
    pub(super) fn new(plan: &Plan) -> Heard {
        let mut first = Vec::with_capacity(plan.instructions.len());
        let mut count = 0;
        for instruction in &plan.instructions {
            first.push(count);
            count += instruction.waits.len();
        }
        Heard { first, heard: vec![false; count] }
    }

    /// Records that a wait of the instruction had something to wait for.
    pub(super) fn hear(&mut self, instruction: usize, wait: usize) {
        self.heard[self.first[instruction] + wait] = true;
    }

    /// Every wait had something to wait for at least once.
    pub(super) fn check(&self, plan: &Plan) -> Result<(), CheckError> {
        for (index, instruction) in plan.instructions.iter().enumerate() {
            for (wait, &awaited) in instruction.waits.iter().enumerate() {
                if !self.heard[self.first[index] + wait] {
                    let waiter = Actor::instruction(plan, InstructionId(index as u32));
                    let awaited = Actor::instruction(plan, awaited);
                    return Err(CheckError::WaitNeverRecorded { waiter, awaited });
                }
            }
        }
        Ok(())
    }
}

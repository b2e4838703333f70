//! Which bytes instructions touch.

use std::ops::Range;
use storm_plan::{Instruction, Place, Plan, Tier, Work};

/// Bytes that somebody touches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Access {
    pub(crate) tier: Tier,
    pub(crate) bytes: Range<usize>,
    pub(crate) writes: bool,
}

impl Access {
    pub(crate) fn conflicts(&self, other: &Access) -> bool {
        self.tier == other.tier
            && (self.writes || other.writes)
            && self.bytes.start < other.bytes.end
            && other.bytes.start < self.bytes.end
    }
}

/// All that an instruction touches, the bytes between the values of a copy included.
pub(crate) fn accesses(plan: &Plan, instruction: &Instruction) -> Vec<Access> {
    match &instruction.work {
        Work::Compute(compute) => {
            let reads = compute.reads.iter().map(|operand| (operand, false));
            let writes = compute.writes.iter().map(|operand| (operand, true));
            reads
                .chain(writes)
                .map(|(operand, writes)| {
                    let end = operand.offset + plan.value(operand.value).size_bytes;
                    Access { tier: Tier::DEVICE, bytes: operand.offset..end, writes }
                })
                .collect()
        }
        Work::Copy(copy) => {
            let access = |Place { tier, offset }, writes| Access {
                tier,
                bytes: offset..offset + copy.bytes,
                writes,
            };
            vec![access(copy.from, false), access(copy.to, true)]
        }
        Work::Fetch(fetch) => {
            let write = |&input: &u32| {
                let storm_plan::Input { place, value, .. } = &plan.inputs[input as usize];
                let end = place.offset + plan.value(*value).size_bytes;
                Access { tier: place.tier, bytes: place.offset..end, writes: true }
            };
            fetch.inputs.iter().map(write).collect()
        }
        // The memory of a source has no address.
        Work::ReadAhead(_) => Vec::new(),
        Work::Collective(collective) => {
            let reads = collective.reads().map(|operand| (operand, false));
            let writes = collective.writes().map(|(_, operand)| (operand, true));
            let access = |(operand, writes): (&storm_plan::Operand, bool)| {
                let end = operand.offset + plan.value(operand.value).size_bytes;
                Access { tier: Tier::DEVICE, bytes: operand.offset..end, writes }
            };
            reads.chain(writes).map(access).collect()
        }
    }
}

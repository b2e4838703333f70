//! Finds device memory that is not needed between steps.

use crate::plan::{Plan, Work};
use crate::ranges::merged_ranges;
use crate::tier::Tier;
use std::ops::Range;

impl Plan {
    /// Device memory that neither persistent tensors nor the evaluation use, in order. It can be released while only
    /// evaluations run. Empty if the plan has no evaluation.
    pub fn idle_in_evaluation(&self) -> Vec<Range<usize>> {
        let Some(evaluation) = self.evaluation else { return Vec::new() };
        let mut used: Vec<Range<usize>> = Vec::new();
        let on_device = |tier: Tier| tier == Tier::DEVICE;
        for lasting in &self.lasting {
            for place in lasting.places.iter().filter(|place| on_device(place.tier)) {
                used.push(place.offset..place.offset + lasting.tensor.size_bytes());
            }
            for (piece, place) in lasting.parts.iter().filter(|(_, place)| on_device(place.tier)) {
                let value = lasting.pieces[*piece as usize];
                used.push(place.offset..place.offset + self.value(value).size_bytes);
            }
        }
        for instruction in &self.instructions[self.segment(evaluation).instructions.clone()] {
            match &instruction.work {
                Work::Compute(compute) => {
                    for operand in compute.reads.iter().chain(&compute.writes) {
                        let end = operand.offset + self.value(operand.value).size_bytes;
                        used.push(operand.offset..end);
                    }
                }
                Work::Copy(copy) => {
                    for place in copy.ends().into_iter().filter(|place| on_device(place.tier)) {
                        used.push(place.offset..place.offset + copy.bytes);
                    }
                }
                Work::Fetch(_) | Work::ReadAhead(_) => {}
                // Collectives are not analyzed here, so nothing counts as idle.
                Work::Collective(_) => return Vec::new(),
            }
        }
        let end = self.bytes[Tier::DEVICE];
        used.push(end..end);
        let mut idle = Vec::new();
        let mut start = 0;
        for range in merged_ranges(used) {
            if start < range.start {
                idle.push(start..range.start);
            }
            start = range.end;
        }
        idle
    }
}

//! Finds device memory that is not needed between steps.

use crate::plan::{Plan, Work};
use crate::ranges::merged_ranges;
use crate::tier::Tier;
use std::ops::Range;
use storm_graph::TensorClass;

/// Device memory that can be released between steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Idle {
    /// What neither persistent tensors nor the evaluation use. Evaluations run meanwhile. Empty if the plan has no
    /// evaluation.
    BesideEvaluation,
    /// All but persistent tensors that are not parameters. Nothing runs meanwhile, and the values of parameters
    /// are undefined afterwards.
    WithParameters,
}

impl Plan {
    /// Device memory that is idle, in order.
    pub fn idle(&self, idle: Idle) -> Vec<Range<usize>> {
        let used = match idle {
            Idle::BesideEvaluation => self.used_in_evaluation(),
            Idle::WithParameters => {
                let is_parameter = |class| matches!(class, TensorClass::Parameter(_));
                Some(self.used_by_persistent(|class| !is_parameter(class)))
            }
        };
        let Some(mut used) = used else { return Vec::new() };
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

    /// Device memory of persistent tensors of these classes.
    fn used_by_persistent(&self, of: impl Fn(TensorClass) -> bool) -> Vec<Range<usize>> {
        let mut used: Vec<Range<usize>> = Vec::new();
        let on_device = |tier: Tier| tier == Tier::DEVICE;
        for lasting in self.lasting.iter().filter(|lasting| of(lasting.tensor.class)) {
            for place in lasting.places.iter().filter(|place| on_device(place.tier)) {
                used.push(place.offset..place.offset + lasting.tensor.size_bytes());
            }
            for (piece, place) in lasting.parts.iter().filter(|(_, place)| on_device(place.tier)) {
                let value = lasting.pieces[*piece as usize];
                used.push(place.offset..place.offset + self.value(value).size_bytes);
            }
        }
        used
    }

    /// Device memory of persistent tensors and of the evaluation. `None` if there is no evaluation, or one that is not
    /// analyzed here.
    fn used_in_evaluation(&self) -> Option<Vec<Range<usize>>> {
        let evaluation = self.evaluation?;
        let mut used = self.used_by_persistent(|_| true);
        for instruction in &self.instructions[self.segment(evaluation).instructions.clone()] {
            match &instruction.work {
                Work::Compute(compute) => {
                    for operand in compute.reads.iter().chain(&compute.writes) {
                        let end = operand.offset + self.value(operand.value).size_bytes;
                        used.push(operand.offset..end);
                    }
                }
                Work::Copy(copy) => {
                    let ends = copy.ends().into_iter();
                    for place in ends.filter(|place| place.tier == Tier::DEVICE) {
                        used.push(place.offset..place.offset + copy.bytes);
                    }
                }
                Work::Fetch(_) | Work::ReadAhead(_) => {}
                // Collectives are not analyzed here, so nothing counts as idle.
                Work::Collective(_) => return None,
            }
        }
        Some(used)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Lasting, PerTier, Place, Value, ValueId};
    use storm_graph::{DType, Tensor, Training};

    /// Bytes of every tensor.
    const BLOCK: usize = 256;

    fn add(plan: &mut Plan, class: TensorClass, in_parts: bool, places: &[(Tier, usize)]) {
        let name = format!("{}", plan.lasting.len());
        let value = ValueId(plan.values.len() as u32);
        plan.values.push(Value { name: name.clone(), size_bytes: BLOCK, class });
        let place = |&(tier, block): &(Tier, usize)| Place { tier, offset: block * BLOCK };
        let places: Vec<Place> = places.iter().map(place).collect();
        let parts = places.iter().map(|&place| (0, place)).collect();
        let shape = [BLOCK / 4].into();
        plan.lasting.push(Lasting {
            tensor: Tensor { name, shape, dtype: DType::F32, class },
            pieces: vec![value],
            places: if in_parts { Vec::new() } else { places },
            parts: if in_parts { parts } else { Vec::new() },
            shard: None,
        });
    }

    #[test]
    fn all_but_persistent_tensors_that_are_no_parameters_is_idle_with_parameters() {
        let bytes = PerTier::new(10 * BLOCK, 10 * BLOCK);
        let mut plan = Plan { bytes, ..Plan::default() };
        let weight = TensorClass::Parameter(Training::Trainable);
        let frozen = TensorClass::Parameter(Training::Frozen);
        add(&mut plan, weight, false, &[(Tier::DEVICE, 1), (Tier::HOST, 0)]);
        add(&mut plan, weight, true, &[(Tier::DEVICE, 5)]);
        add(&mut plan, frozen, false, &[(Tier::DEVICE, 8)]);
        // Blocks of host memory have the same offsets.
        add(&mut plan, TensorClass::OptimizerState, false, &[(Tier::DEVICE, 3), (Tier::HOST, 2)]);
        add(&mut plan, TensorClass::OptimizerState, true, &[(Tier::DEVICE, 6), (Tier::HOST, 9)]);
        add(&mut plan, TensorClass::Gradient, false, &[(Tier::DEVICE, 7)]);
        let blocks = |range: Range<usize>| range.start * BLOCK..range.end * BLOCK;
        let idle = plan.idle(Idle::WithParameters);
        assert_eq!(idle, [0..3, 4..6, 8..10].map(blocks));
        assert!(plan.idle(Idle::BesideEvaluation).is_empty(), "there is no evaluation");
        assert_eq!(Plan { bytes, ..Plan::default() }.idle(Idle::WithParameters), [blocks(0..10)]);
    }
}

use crate::ExecError;
use std::ops::Range;
use storm_graph::Tensor;
use storm_plan::{ALIGNMENT, Plan, Tier};

/// Device memory between steps: everything that no persistent tensor covers is free.
pub(crate) struct Room {
    free: Vec<Range<usize>>,
}

impl Room {
    pub(crate) fn between_steps(plan: &Plan) -> Room {
        let mut taken: Vec<Range<usize>> = Vec::new();
        for lasting in &plan.lasting {
            for place in lasting.places.iter().filter(|place| place.tier == Tier::DEVICE) {
                taken.push(place.offset..place.offset + lasting.tensor.size_bytes());
            }
        }
        taken.sort_by_key(|range| range.start);
        let mut free = Vec::new();
        let mut start: usize = 0;
        for range in taken.iter().chain([&(plan.bytes[Tier::DEVICE]..plan.bytes[Tier::DEVICE])]) {
            if start < range.start {
                free.push(start..range.start);
            }
            start = start.max(range.end.next_multiple_of(ALIGNMENT));
        }
        Room { free }
    }

    /// Allocates room for a tensor.
    pub(crate) fn take(&mut self, tensor: &Tensor) -> Result<usize, ExecError> {
        let bytes = tensor.size_bytes();
        let Some(range) = self.free.iter_mut().find(|range| range.len() >= bytes) else {
            let largest_bytes = self.free.iter().map(|range| range.len()).max().unwrap_or(0);
            return Err(ExecError::NoRoom { tensor: tensor.name.clone(), bytes, largest_bytes });
        };
        let start = range.start;
        range.start = (start + bytes).next_multiple_of(ALIGNMENT).min(range.end);
        Ok(start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use storm_graph::{DType, TensorClass};
    use storm_plan::{Lasting, PerTier, Place};

    fn tensor(bytes: usize) -> Tensor {
        let class = TensorClass::Gradient;
        Tensor { name: "t".to_owned(), shape: [bytes].into(), dtype: DType::U8, class }
    }

    #[test]
    fn lasting_tensors_are_left_alone() {
        let lasting = |bytes, tier, offset| Lasting {
            tensor: tensor(bytes),
            pieces: Vec::new(),
            places: vec![Place { tier, offset }],
            parts: Vec::new(),
            shard: None,
        };
        let plan = Plan {
            lasting: vec![
                lasting(300, Tier::DEVICE, 1024),
                lasting(10, Tier::DEVICE, 0),
                lasting(4096, Tier::HOST, 0),
            ],
            bytes: PerTier::new(2048, 0),
            ..Plan::default()
        };
        // Free: 256..1024 and 1536..2048.
        let mut room = Room::between_steps(&plan);
        assert_eq!(room.take(&tensor(500)), Ok(256));
        assert_eq!(room.take(&tensor(500)), Ok(1536));
        assert_eq!(room.take(&tensor(256)), Ok(768));
        let error = room.take(&tensor(1)).unwrap_err();
        let expected = ExecError::NoRoom { tensor: "t".to_owned(), bytes: 1, largest_bytes: 0 };
        assert_eq!(error, expected);
    }
}

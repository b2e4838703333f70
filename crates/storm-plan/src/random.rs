//! Random decisions that can work, for those who prove that no decision changes a bit.

use crate::{Decisions, Storage, Streaming, Task, UpdateTime};

/// Decisions drawn from all that can work, the same for the same seed.
pub fn random_decisions(task: &Task, seed: u64) -> Decisions {
    let mut random = SplitMix(seed);
    let (layers, units) = (task.layer_count(), task.saved_units().len());
    let divisors: Vec<usize> =
        (1..=task.micro_batches).filter(|g| task.micro_batches.is_multiple_of(*g)).collect();
    let group = if task.is_tied() { 1 } else { divisors[random.below(divisors.len())] };
    let storage = |random: &mut SplitMix| match random.below(3) {
        0 => Storage::Keep,
        1 => Storage::Recompute,
        _ => Storage::Offload,
    };
    let mut boundary: Vec<Storage> = (0..layers).map(|_| storage(&mut random)).collect();
    if boundary[0] == Storage::Recompute {
        boundary[0] = if random.below(2) == 0 { Storage::Keep } else { Storage::Offload };
    }
    let saved = (0..layers).map(|_| (0..units).map(|_| storage(&mut random)).collect()).collect();
    let streaming = |random: &mut SplitMix| Streaming {
        pinned: random.below(layers + 1),
        ring: 1 + random.below(layers),
    };
    let (weights, gradients, states) =
        (streaming(&mut random), streaming(&mut random), streaming(&mut random));
    let update = match random.below(2) {
        0 => UpdateTime::EndOfStep,
        _ => UpdateTime::NextStep,
    };
    Decisions {
        group,
        saved,
        boundary,
        weights,
        gradients,
        states,
        edge_states_resident: random.below(2) == 0,
        update,
        activation_ring: 1 + random.below(3),
        boundary_ring: random.below(3),
        piece_elements: 1024 << random.below(6),
    }
}

/// A small generator, good enough to draw choices.
struct SplitMix(u64);

impl SplitMix {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % limit as u64) as usize
    }
}

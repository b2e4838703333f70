//! Random valid decisions, to test that no decision changes a bit of the result.

use crate::decisions::{
    ActivationDecisions, GroupDecisions, RingMemory, SeamMemory, StageDecisions,
};
use crate::{Decisions, Storage, Streaming, Task, UpdateTime};
use storm_graph::SUM_BLOCK;
use storm_graph::random::Random;

/// Random valid decisions, determined by the seed.
pub fn random_decisions(task: &Task, seed: u64) -> Decisions {
    let mut random = Random(seed);
    let may_update_in_backward = task.training.is_some() && !task.clips() && !task.sums_lanes();
    let in_backward = may_update_in_backward && random.below(2) == 0;
    // A first group of any size, then groups whose size divides the rest.
    let micro_batches = task.lane_micro_batches();
    let first = match in_backward {
        true => micro_batches,
        false => 1 + random.below(micro_batches),
    };
    let mut sizes = vec![(first, 1)];
    let rest = micro_batches - first;
    let divisors: Vec<usize> = (1..=rest).filter(|g| rest.is_multiple_of(*g)).collect();
    if !divisors.is_empty() {
        let group = divisors[random.below(divisors.len())];
        sizes.push((group, rest / group));
    }
    let groups = sizes.into_iter().map(|(micro_batches, times)| GroupDecisions {
        micro_batches,
        times,
        stages: random_activations(task, &mut random),
        activation_ring: 1 + random.below(3),
        input_ring: random.below(3),
        seams: match micro_batches == 1 && random.below(2) == 0 {
            true => SeamMemory::Shared,
            false => SeamMemory::Separate,
        },
    });
    let groups = groups.collect();
    let mut stages = Vec::new();
    for s in task.program().stages() {
        let blocks = s.repeat;
        let streaming = |random: &mut Random| Streaming {
            pinned: random.below(blocks + 1),
            ring: 1 + random.below(blocks),
        };
        stages.push(StageDecisions {
            weights: streaming(&mut random),
            gradients: streaming(&mut random),
            states_pinned: random.below(blocks + 1),
            on_disk: Vec::new(),
            frozen_on_disk: Vec::new(),
        });
    }
    let rings = match random.below(2) {
        0 => RingMemory::Separate,
        _ => RingMemory::Shared,
    };
    let update = match random.below(2) {
        _ if in_backward => UpdateTime::InBackward,
        0 => UpdateTime::EndOfStep,
        _ => UpdateTime::NextStep,
    };
    Decisions {
        groups,
        stages,
        rings,
        update,
        state_ring: 1 + random.below(6),
        disk_ring: 0,
        frozen_ring: 0,
        piece_elements: match task.rank.is_shared() {
            true => SUM_BLOCK,
            false => task.piece_alignment() << random.below(3),
        },
    }
}

/// [`random_decisions`], with some optimizer state and frozen weights on disk.
pub fn random_decisions_with_disk(task: &Task, seed: u64) -> Decisions {
    let mut decisions = random_decisions(task, seed);
    let mut random = Random(seed ^ 0xD15C);
    for (stage, decided) in task.program().stages().iter().zip(&mut decisions.stages) {
        decided.states_pinned = decided.states_pinned.min(random.below(stage.repeat + 1));
        decided.on_disk = (0..stage.repeat).map(|_| random.below(4)).collect();
    }
    decisions.disk_ring = 1 + random.below(6);
    for (stage, decided) in task.program().stages().iter().zip(&mut decisions.stages) {
        decided.frozen_on_disk = (0..stage.repeat).map(|_| random.below(4) > 0).collect();
    }
    decisions.frozen_ring = 1 + random.below(6);
    decisions
}

fn random_activations(task: &Task, random: &mut Random) -> Vec<ActivationDecisions> {
    let storage = |random: &mut Random| match random.below(3) {
        0 => Storage::Keep,
        1 => Storage::Recompute,
        _ => Storage::Offload,
    };
    let program = task.program();
    let first_reached = (0..program.stages().len()).find(|&stage| program.is_reached(stage));
    let mut stages = Vec::new();
    for (stage, s) in program.stages().iter().enumerate() {
        let (blocks, units) = (s.repeat, task.saved_units(stage).len());
        let mut inputs: Vec<Storage> = (0..blocks).map(|_| storage(random)).collect();
        // An input that nothing before it can recompute must be stored.
        let must_store = stage == 0 || Some(stage) == first_reached;
        if must_store && inputs[0] == Storage::Recompute {
            inputs[0] = if random.below(2) == 0 { Storage::Keep } else { Storage::Offload };
        }
        let saved = (0..blocks).map(|_| (0..units).map(|_| storage(random)).collect()).collect();
        stages.push(ActivationDecisions { saved, inputs });
    }
    stages
}

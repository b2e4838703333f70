//! Copies hide behind computing, on the clock of the simulator.

use crate::models::{budget, gib, planned, profile, real_options, real_task};
use std::sync::Arc;
use storm_device::{NullDevice, NullOptions};
use storm_exec::trace::{Overlap, overlap};
use storm_model::preset;
use storm_train::{Batch, PlannedTrainer};

fn simulated(vram_bytes: u64) -> Overlap {
    let (model, batch, micro_batches) = ("qwen2.5-1.5b", 16, 8);
    let profile = profile("h200");
    let task = real_task(model, batch, micro_batches);
    let plan = Arc::new(planned(&task, &profile, budget(vram_bytes, gib(100))).plan);
    let device = NullOptions::of_profile(&plan, &profile);
    let config = preset(model).expect("a preset");
    let mut trainer: PlannedTrainer<NullDevice> =
        PlannedTrainer::new(&config, real_options(batch), plan, device)
            .expect("no memory is taken");
    let tokens = vec![1; batch * 1024];
    let batches = vec![Batch::new(tokens.clone(), tokens, 1024); micro_batches];
    trainer.step(&batches, 1e-3).expect("a step");
    let trace = trainer.trace().expect("a step").expect("it records");
    overlap(trainer.plan(), &trace)
}

#[test]
fn compute_hardly_waits_for_activations() {
    // With more memory the planner offloads a little more than hides, where waiting for it costs less
    // than making it again.
    for vram_bytes in [5_000_000_000, 8_890_000_000, 9_000_000_000] {
        let overlap = simulated(vram_bytes);
        let about = format!("{vram_bytes}: {overlap:?}");
        assert!(overlap.all_queues() > 0.02, "{about}");
        assert!(overlap.offload_gap() < 0.02, "{about}");
        assert!(overlap.fetch_gap() < 0.02, "{about}");
        // Both passes are seen, and the backward pass is the longer one.
        assert!(overlap.forward_ns * 5 > overlap.total_ns, "{about}");
        assert!(overlap.backward_ns > overlap.forward_ns, "{about}");
    }
}

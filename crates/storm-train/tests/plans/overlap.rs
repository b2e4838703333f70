//! Copies are hidden by compute, in simulated time.

use crate::models::{budget, gib, profile, real_options, real_task};
use std::sync::Arc;
use storm_device::{NullDevice, NullOptions};
use storm_exec::trace::{Overlap, overlap};
use storm_model::preset;
use storm_plan::{Forced, Storage, plan};
use storm_train::{Batch, Trainer};

fn simulated(vram_bytes: u64, forced: &Forced) -> Overlap {
    let (model, batch, micro_batches) = ("qwen2.5-1.5b", 16, 8);
    let profile = profile("h200");
    let task = real_task(model, batch, micro_batches);
    let planned = plan(&task, &profile, budget(vram_bytes, gib(100)), forced).expect("it fits");
    let plan = Arc::new(planned.plan);
    let device = NullOptions::of_profile(&plan, &profile);
    let config = preset(model).expect("a preset");
    let mut trainer: Trainer<NullDevice> =
        Trainer::new(&config, real_options(batch), plan, device).expect("no memory is taken");
    let tokens = vec![1; batch * 1024];
    let batches = vec![Batch::new(tokens.clone(), tokens, 1024); micro_batches];
    trainer.step(&batches, 1e-3).expect("a step");
    let trace = trainer.trace().expect("a step").expect("it records");
    overlap(trainer.plan(), &trace)
}

#[test]
fn compute_hardly_waits_for_activations() {
    // With more memory, the planner offloads a little more than can be hidden, if waiting costs
    // less than recomputing.
    for vram_bytes in [5_000_000_000, 8_890_000_000, 9_000_000_000] {
        let overlap = simulated(vram_bytes, &Forced::default());
        let about = format!("{vram_bytes}: {overlap:?}");
        assert!(overlap.all_queues() > 0.02, "{about}");
        assert!(overlap.offload_gap() < 0.02, "{about}");
        assert!(overlap.fetch_gap() < 0.02, "{about}");
        // Both passes are seen, and the backward pass is the longer one.
        assert!(overlap.forward_ns * 5 > overlap.total_ns, "{about}");
        assert!(overlap.backward_ns > overlap.forward_ns, "{about}");
    }
}

/// If the bus is too slow for a forced plan, the gap shows.
#[test]
fn compute_waits_for_more_than_the_bus_can_carry() {
    let forced = Forced { activations: Some(Storage::Offload), ..Forced::default() };
    let overlap = simulated(16_000_000_000, &forced);
    assert!(overlap.offload_gap() > 0.2, "{overlap:?}");
}

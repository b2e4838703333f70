//! A step allocates nothing once the trainer stands.

use crate::support::{batch, families, options};
use storm_device::allocation::count;
use storm_model::Packing;
use storm_train::{Precision, Trainer};

#[test]
fn a_step_does_not_allocate() {
    // One pool for the whole test: entering a pool from outside may allocate, a step inside not.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().expect("a pool");
    for config in families() {
        for precision in [Precision::F32, Precision::Bf16Master, Precision::Bf16Stochastic] {
            let allocations = pool.install(|| {
                let options = options(precision, Packing::Segments);
                let mut trainer = Trainer::new(&config, options).expect("a trainer");
                let batches = [0, 1].map(|seed| batch(&config, Packing::Segments, seed));
                // The first step may grow the pool's own queues.
                trainer.step(&batches, 1e-3).expect("a step");
                // Other tests of this binary run beside this one and allocate: take the quietest
                // of several steps. A step that allocates does so every time.
                (0..50)
                    .map(|_| {
                        let before = count();
                        trainer.step(&batches, 1e-3).expect("a step");
                        count() - before
                    })
                    .min()
            });
            assert_eq!(allocations, Some(0), "{:?} {precision:?}", config.family);
        }
    }
}

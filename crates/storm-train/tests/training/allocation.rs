//! A step allocates nothing once the trainer is set up.

use crate::support::{batch, families, options};
use storm_host::allocation::count;
use storm_model::Packing;
use storm_train::{Precision, ReferenceTrainer};

#[test]
fn a_step_does_not_allocate() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().expect("a pool");
    let allocations = || pool.broadcast(|_| count()).into_iter().sum::<usize>();
    for config in families() {
        for precision in [Precision::F32, Precision::Bf16Master, Precision::Bf16Stochastic] {
            let options = options(precision, Packing::Segments);
            let batches = [0, 1].map(|seed| batch(&config, Packing::Segments, seed));
            let mut trainer =
                pool.install(|| ReferenceTrainer::new(&config, options).expect("a trainer"));
            let mut step = || {
                let before = allocations();
                pool.install(|| trainer.step(&batches, 1e-3).expect("a step"));
                allocations() - before
            };
            // The pool's own queues may still grow at first. A step that allocates does so every
            // time.
            let fewest = (0..10).map(|_| step()).min();
            assert_eq!(fewest, Some(0), "{:?} {precision:?}", config.family);
        }
    }
}

/// The count above would be useless if it missed what the pool's threads allocate.
#[test]
fn the_meter_sees_the_pool() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().expect("a pool");
    let allocations = || pool.broadcast(|_| count()).into_iter().sum::<usize>();
    let before = allocations();
    let kept = pool.install(|| vec![1u8; 100]);
    assert!(allocations() > before && kept.len() == 100);
}

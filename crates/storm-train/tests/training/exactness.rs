//! The guarantee: the same bits for any thread count and any choice of what to recompute.

use crate::support::{Random, families, fingerprint, options};
use storm_model::Packing;
use storm_train::Precision;

const PRECISIONS: [Precision; 3] =
    [Precision::F32, Precision::Bf16Master, Precision::Bf16Stochastic];

fn in_pool<T: Send>(threads: usize, run: impl FnOnce() -> T + Send) -> T {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
    pool.install(run)
}

#[test]
fn any_thread_count_gives_the_same_bits() {
    for config in families() {
        for precision in PRECISIONS {
            let options = options(precision, Packing::Single);
            let one = in_pool(1, || fingerprint(&config, &options, |_| {}));
            for threads in [2, 3, 8] {
                let more = in_pool(threads, || fingerprint(&config, &options, |_| {}));
                assert!(one == more, "{:?} {precision:?}, {threads} threads", config.family);
            }
        }
    }
}

#[test]
fn any_recompute_subset_gives_the_same_bits() {
    for (index, config) in families().into_iter().enumerate() {
        for packing in [Packing::Single, Packing::Segments] {
            for precision in [Precision::F32, Precision::Bf16Stochastic] {
                let options = options(precision, packing);
                let kept = fingerprint(&config, &options, |_| {});
                for case in 0..8u64 {
                    let dropped = fingerprint(&config, &options, |program| {
                        program.recompute(|section, tensor| match case {
                            0 => false, // everything is recomputed
                            1 => tensor.name.ends_with(".sum"),
                            _ => {
                                // The choice depends on names alone, so it is the same for both
                                // passes.
                                let seed = tensor.name.bytes().chain(section.name.bytes()).fold(
                                    case + 100 * index as u64,
                                    |hash, byte| {
                                        hash.wrapping_mul(31).wrapping_add(u64::from(byte))
                                    },
                                );
                                Random(seed).below(2) == 0
                            }
                        });
                    });
                    assert!(
                        kept == dropped,
                        "{:?} {packing:?} {precision:?} {case}",
                        config.family
                    );
                }
            }
        }
    }
}

/// The comparison above would mean nothing if a run did not depend on its data or its seed.
#[test]
fn another_seed_gives_other_bits() {
    let config = &families()[3];
    let base = options(Precision::Bf16Stochastic, Packing::Single);
    let other = storm_train::TrainOptions { seed: 6, ..base.clone() };
    assert!(fingerprint(config, &base, |_| {}) != fingerprint(config, &other, |_| {}));
}

#[test]
fn recomputing_everything_takes_less_memory() {
    use crate::support::{BATCH, SEQUENCE};
    use storm_model::{BuildOptions, build};
    use storm_train::ReferenceTrainer;
    let config = &families()[1];
    let options = options(Precision::F32, Packing::Single);
    let build_options = BuildOptions::training(BATCH, SEQUENCE, options.precision.compute());
    let program = build(config, &build_options).expect("a valid model");
    let work = |change: &dyn Fn(&mut storm_graph::Program)| {
        let trainer =
            ReferenceTrainer::with_passes(config, options.clone(), program.clone(), change);
        trainer.expect("a trainer").memory_bytes().1
    };
    let all = work(&|_| {});
    let none = work(&|program| program.recompute(|_, _| false));
    assert!(none < all * 2 / 3, "{none} of {all} bytes");
}

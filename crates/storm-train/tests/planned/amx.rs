//! Products summed as by AMX: every plan gives the bits of everything resident, on the processor's
//! tiles and emulated.

use crate::exactness::reference;
use crate::random_plans::Case;
use crate::support::{options, resident, resident_with, tiny};
use storm_device::cpu::Bf16Products;
use storm_device::cpu::kernels::gemm::amx_availability;
use storm_plan::random_decisions;
use storm_train::Precision;

#[test]
fn random_plans_are_exact_with_the_sums_of_amx() {
    if let Err(reason) = amx_availability() {
        eprintln!("SKIPPED: AMX itself is not tested, only its emulation: {reason}");
    }
    let long = std::env::var_os("STORM_LONG_TESTS").is_some();
    let profile = reference();
    for (name, precision) in [
        ("gpt2", Precision::Bf16Stochastic),
        ("qwen3-0.6b", Precision::Bf16Master),
        ("llama-3.2-1b", Precision::Bf16Stochastic),
    ] {
        let (config, options) = (tiny(name), options(precision));
        for micro_batches in [4, 1] {
            let products = Bf16Products::Amx;
            let case = Case { name, config: &config, options: &options, micro_batches, products };
            let seeds = 0..if long { 300 } else { 10 };
            case.compare(&profile, seeds, random_decisions, |seed, _, _, device| {
                device.threads = Some(1 + seed as usize % 3);
            });
        }
        // These sums differ from the usual ones.
        assert_ne!(
            resident(&config, &options, 1),
            resident_with(&config, &options, 1, Bf16Products::Amx),
            "{name}"
        );
    }
}

/// They do not affect f32.
#[test]
fn f32_has_the_bits_it_always_has() {
    let (config, options) = (tiny("gpt2"), options(Precision::F32));
    let amx = resident_with(&config, &options, 1, Bf16Products::Amx);
    assert_eq!(amx, resident(&config, &options, 1));
}

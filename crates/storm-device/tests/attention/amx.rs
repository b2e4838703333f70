//! Attention of bf16 tensors with the sums of AMX.

use super::definition::defined;
use super::{
    Inputs, Results, attention, bits, error, inputs, reference, run, segments, shape, sliding,
};
use half::bf16;
use std::sync::{Mutex, MutexGuard, PoisonError};
use storm_device::cpu::kernels::attention::Attention;
use storm_device::cpu::kernels::gemm::{Bf16Products, amx_availability, force_emulation};
use storm_device::cpu::kernels::simd::{Isa, force_isa};
use storm_graph::Mask;
use storm_graph::random::Random;

/// The choice of a kernel is the process's, so one test at a time makes it.
fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether to emulate: never and always, or only always where there are no tiles.
fn kernels() -> Vec<bool> {
    match amx_availability() {
        Ok(()) => vec![false, true],
        Err(reason) => {
            eprintln!("SKIPPED: AMX itself is not tested, only its emulation: {reason}");
            vec![true]
        }
    }
}

fn amx(attention: Attention<'_>) -> Attention<'_> {
    Attention { products: Bf16Products::Amx, ..attention }
}

/// None, packed samples of random lengths, or numbers in no order at all.
fn random_segments(random: &mut Random, tokens: usize) -> Option<Vec<i32>> {
    let mut segment = 0;
    match random.below(4) {
        0 | 1 => None,
        2 => {
            let mut next = || {
                segment += i32::from(random.below(30) == 0);
                segment
            };
            Some((0..tokens).map(|_| next()).collect())
        }
        _ => Some((0..tokens).map(|_| random.below(3) as i32).collect()),
    }
}

/// Calls `check` with calls of random shapes and masks, up to `largest` scores of a head.
fn for_random_calls(seed: u64, count: usize, check: impl Fn(&Attention)) {
    let mut random = Random(seed);
    for _ in 0..count {
        let mut pick = |from: &[usize]| from[random.below(from.len())];
        let seq = pick(&[1, 2, 31, 32, 33, 63, 64, 65, 96, 100, 128, 129, 150, 193]);
        let head_dim = pick(&[1, 4, 13, 16, 32, 33, 48, 64, 80, 96]);
        let kv_heads = pick(&[1, 1, 2]);
        let shape = shape(pick(&[1, 2]), seq, kv_heads * pick(&[1, 2, 3]), kv_heads, head_dim);
        let window = pick(&[1, 7, 63, 64, 65, 100]);
        let mask = [Mask::Causal, Mask::Full, sliding(window)][random.below(3)];
        let segments = random_segments(&mut random, shape.batch * seq);
        check(&amx(Attention { segments: segments.as_deref(), ..attention(shape, mask) }));
    }
}

#[track_caller]
fn assert_equal(ours: &Results<bf16>, expected: &Results<bf16>, what: &str) {
    let differing = bits(ours).into_iter().zip(bits(expected)).position(|(a, b)| a != b);
    assert_eq!(differing, None, "{what}: {} outputs", ours.out.len());
}

#[test]
fn follows_the_definition_on_tiles_and_emulated() {
    let _alone = alone();
    for_random_calls(11, 30, |attention| {
        let inputs = inputs(attention.shape);
        let expected = defined(attention, &inputs);
        for emulate in kernels() {
            force_emulation(emulate);
            let what = format!("{attention:?}, emulated {emulate}");
            assert_equal(&run(attention, &inputs), &expected, &what);
        }
    });
    force_emulation(false);
}

/// Values whose products are denormal, overflow or are not numbers.
#[test]
fn tiles_and_emulation_agree_on_extreme_values() {
    let _alone = alone();
    let mut random = Random(4);
    for round in 0..20 {
        let shape = shape(1, [20, 64, 130][round % 3], 2, 1, [16, 64][round % 2]);
        let attention = amx(attention(shape, Mask::Causal));
        let mut draw = |value: &mut bf16| {
            let exponents = [(100, 50), (40, 40), (0, 130), (0, 255)][round % 4];
            let exponent = (exponents.0 + random.below(exponents.1)) as u16;
            let sign = (random.below(2) as u16) << 15;
            *value = bf16::from_bits(sign | exponent << 7 | random.below(128) as u16);
        };
        let mut inputs = inputs(shape);
        inputs.qkv.iter_mut().chain(&mut inputs.d_out).for_each(&mut draw);
        let results = kernels().into_iter().map(|emulate| {
            force_emulation(emulate);
            // Which NaN results from a NaN is left open.
            let bits = bits(&run(&attention, &inputs));
            let same_nan = |x: u32| if f32::from_bits(x).is_nan() { u32::MAX } else { x };
            bits.into_iter().map(same_nan).collect::<Vec<_>>()
        });
        let results: Vec<Vec<u32>> = results.collect();
        for pair in results.windows(2) {
            let differing = pair[0].iter().zip(&pair[1]).position(|(a, b)| a != b);
            assert_eq!(differing, None, "round {round}");
        }
    }
    force_emulation(false);
}

/// Weights and gradients of scores are rounded to bf16, with a relative error of 2⁻⁹, before they
/// are multiplied. The storage of results has the same error. The usual tolerance has room for a
/// few of both.
#[test]
fn close_to_exact_results() {
    let check = |attention: &Attention, tolerance: f64| {
        let inputs = inputs::<bf16>(attention.shape);
        let (ours, exact) = (run(attention, &inputs), reference(attention, &inputs));
        let errors = [
            ("out", error(&ours.out, &exact.out), tolerance),
            ("lse", error(&ours.lse, &exact.lse), 1e-5),
            ("d_qkv", error(&ours.d_qkv, &exact.d_qkv), tolerance),
        ];
        for (name, error, tolerance) in errors {
            assert!(error <= tolerance, "{name}: relative error {error:e} of {attention:?}");
        }
    };
    for_random_calls(12, 30, |attention| check(attention, 1.5e-2));
    check(&amx(attention(shape(1, 100, 1, 1, 256), Mask::Full)), 1.5e-2);
    check(&amx(attention(shape(1, 2048, 1, 1, 32), Mask::Causal)), 1.5e-2);
}

/// A pool with few threads takes one sweep over the keys, one with many takes two.
#[test]
fn threads_sweeps_and_instruction_sets_do_not_matter() {
    let _alone = alone();
    for_random_calls(13, 12, |attention| {
        let inputs = inputs::<bf16>(attention.shape);
        let expected = run(attention, &inputs);
        for threads in [1, 2, 7] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let results = pool.install(|| run(attention, &inputs));
            assert_equal(&results, &expected, &format!("{attention:?} on {threads} threads"));
        }
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            force_isa(isa);
            assert_equal(&run(attention, &inputs), &expected, &format!("{attention:?}, {isa:?}"));
        }
    });
}

/// With whole blocks of queries, dQ of these heads is larger than its memory for one sweep.
#[test]
fn room_for_one_sweep_is_counted_in_blocks() {
    let shape = shape(2, 450, 9, 1, 64);
    let attention = amx(attention(shape, Mask::Causal));
    let inputs = inputs::<bf16>(shape);
    let of = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| run(&attention, &inputs))
    };
    assert_equal(&of(1), &of(3), "one thread and three");
}

/// Padding is zeros, whatever the blocks before left in a thread's memory. The short sequence has no
/// whole block that would overwrite what was left.
#[test]
fn earlier_calls_do_not_matter() {
    let large = amx(attention(shape(1, 256, 1, 1, 96), Mask::Full));
    let mut nan: Inputs<bf16> = inputs(large.shape);
    nan.qkv.fill(bf16::NAN);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    for seq in [19, 70] {
        let small = amx(attention(shape(1, seq, 1, 1, 33), Mask::Full));
        let inputs_of_small = inputs::<bf16>(small.shape);
        let (before, after) = pool.install(|| {
            let before = run(&small, &inputs_of_small);
            run(&large, &nan);
            (before, run(&small, &inputs_of_small))
        });
        assert_equal(&after, &before, &format!("{seq} tokens after NaN"));
        assert!(bits(&after).into_iter().all(|x| f32::from_bits(x).is_finite()));
    }
}

/// Only bf16 tensors have these sums: f32 tensors have the bits that they always have.
#[test]
fn f32_has_the_bits_it_always_has() {
    let shape = shape(2, 100, 4, 2, 48);
    let segments = segments(shape);
    let usual = Attention { segments: Some(&segments), ..attention(shape, Mask::Causal) };
    let (wide, narrow) = (inputs::<f32>(shape), inputs::<bf16>(shape));
    assert_eq!(bits(&run(&amx(usual), &wide)), bits(&run(&usual, &wide)));
    assert_ne!(bits(&run(&amx(usual), &narrow)), bits(&run(&usual, &narrow)));
}

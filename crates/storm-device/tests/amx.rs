//! Products with the sums of AMX: the tiles of this processor and their emulation, against each other for any
//! bits and against the definition for any shape.

use half::bf16;
use std::sync::{Mutex, MutexGuard, PoisonError};
use storm_device::cpu::kernels::element::Element;
use storm_device::cpu::kernels::gemm::{
    Accumulate, Bf16Products, Bias, Epilogue, Matrix, MatrixMut, amx_availability, force_emulation,
};
use storm_device::cpu::kernels::simd::{Isa, force_isa};
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

fn multiply(a: &[bf16], b: &[bf16], before: &[f32], (m, n, k): (usize, usize, usize)) -> Vec<f32> {
    let mut c = before.to_vec();
    Bf16Products::Amx.gemm(
        Matrix::row_major(a, m, k),
        Matrix::row_major(b, k, n),
        MatrixMut::row_major(&mut c, m, n),
        Epilogue { accumulate: Accumulate::Add, ..Epilogue::default() },
    );
    c
}

/// Equal, or both not a number.
fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

/// Values of one kind: sign, and an exponent in a range, as bf16.
struct Kind {
    name: &'static str,
    exponents: std::ops::Range<usize>,
    /// One value in so many is an infinity, a NaN or a zero.
    special: usize,
}

const KINDS: [Kind; 7] = [
    Kind { name: "usual", exponents: 120..132, special: 0 },
    Kind { name: "large cancellation", exponents: 90..160, special: 9 },
    Kind { name: "products about the smallest normal number", exponents: 58..70, special: 9 },
    Kind { name: "the same within two bits", exponents: 62..65, special: 4 },
    Kind { name: "denormal operands", exponents: 0..3, special: 0 },
    Kind { name: "overflow", exponents: 180..200, special: 0 },
    Kind { name: "anything", exponents: 0..256, special: 30 },
];

fn draw(random: &mut Random, kind: &Kind) -> bf16 {
    let sign = (random.below(2) as u16) << 15;
    if kind.special > 0 && random.below(kind.special) == 0 {
        let specials = [0, 0x7f80, 0x7fc1, 0x7f81];
        // Mostly zeros: a NaN hides the other products of its row.
        let last = if random.below(8) == 0 { 4 } else { 1 };
        return bf16::from_bits(sign | specials[random.below(last)]);
    }
    let exponent = kind.exponents.start + random.below(kind.exponents.len());
    bf16::from_bits(sign | (exponent as u16) << 7 | random.below(128) as u16)
}

#[test]
fn tiles_and_emulation_agree_on_any_bits() {
    let _alone = alone();
    let kernels = kernels();
    let mut random = Random(21);
    for kind in &KINDS {
        for round in 0..30 {
            let (m, n, k) = (32, 32, [32, 64, 2, 70][round % 4]);
            let a: Vec<bf16> = (0..m * k).map(|_| draw(&mut random, kind)).collect();
            let b: Vec<bf16> = (0..k * n).map(|_| draw(&mut random, kind)).collect();
            let before = vec![0.0; m * n];
            let results = kernels.iter().map(|&emulate| {
                force_emulation(emulate);
                multiply(&a, &b, &before, (m, n, k))
            });
            let results: Vec<Vec<f32>> = results.collect();
            for pair in results.windows(2) {
                let differing = pair[0].iter().zip(&pair[1]).position(|(a, b)| !same(*a, *b));
                let at = differing.map(|at| (pair[0][at], pair[1][at]));
                assert_eq!(at, None, "{}, round {round}", kind.name);
            }
        }
    }
    force_emulation(false);
}

/// Where a sum is rounded up to the smallest normal number, the instruction decides after rounding with
/// unlimited exponents whether it is too small.
#[test]
fn what_is_too_small_is_decided_after_rounding() {
    let _alone = alone();
    let power = |exponent: i32| bf16::from_f64(2f64.powi(exponent));
    let one = |factor: f64, exponent: i32| bf16::from_f64(factor * 2f64.powi(exponent));
    // The smallest normal number is 2^-126. The second product is subtracted from it, in units of 2^-151.
    let cases = [
        (one(1.0, -76), power(-75), true),
        (one(1.0078125, -76), power(-75), false),
        (one(1.5, -76), power(-75), false),
        (one(1.0, -75), power(-75), false),
        (one(1.0, -74), power(-75), false),
        (one(1.0, -80), power(-80), true),
    ];
    for emulate in kernels() {
        force_emulation(emulate);
        for (x, y, is_kept) in cases {
            for sign in [bf16::ONE, bf16::NEG_ONE] {
                for odd in [0, 1] {
                    let (mut a, mut b) = ([bf16::ZERO; 4], [bf16::ZERO; 4]);
                    (a[odd], b[odd]) = (power(-63) * sign, power(-63));
                    (a[2 + odd], b[2 + odd]) = (x * sign, -y);
                    let sum = multiply(&a, &b, &[0.0], (1, 1, 4))[0];
                    let kept = if is_kept { f32::MIN_POSITIVE } else { 0.0 };
                    assert_eq!(sum.abs(), kept, "{x:?} · {y:?}, odd {odd}, emulated {emulate}");
                }
            }
        }
    }
    force_emulation(false);
}

/// How an operand lies in memory: strides and the number of elements.
fn strides(order: usize, rows: usize, cols: usize, gap: usize) -> (usize, usize, usize) {
    let (row_stride, col_stride) = match order {
        0 => (cols + gap, 1),
        1 => (1, rows + gap),
        _ => (3 * cols + gap, 3),
    };
    let last = rows.saturating_sub(1) * row_stride + cols.saturating_sub(1) * col_stride;
    (row_stride, col_stride, last + 1)
}

/// A sum by the definition, of operands without denormal numbers or results.
fn sum(k: usize, a: impl Fn(usize) -> f32, b: impl Fn(usize) -> f32) -> f32 {
    let mut sum = 0.0;
    for first in (0..k).step_by(32) {
        let (mut even, mut odd) = (0.0f32, 0.0f32);
        for p in first..k.min(first + 32) {
            let chain = if p % 2 == 0 { &mut even } else { &mut odd };
            *chain = a(p).mul_add(b(p), *chain);
        }
        sum += even + odd;
    }
    sum
}

fn check<C: Element>(random: &mut Random, (m, n, k): (usize, usize, usize)) {
    let values = |random: &mut Random, n: usize| -> Vec<bf16> {
        (0..n).map(|_| bf16::from_f32(random.below(20001) as f32 / 1e4 - 1.0)).collect()
    };
    let gap = random.below(3) * 5;
    let (a_row, a_col, a_len) = strides(random.below(3), m, k, gap);
    let (b_row, b_col, b_len) = strides(random.below(3), k, n, gap);
    let (a, b) = (values(random, a_len), values(random, b_len));
    let bias = values(random, n);
    let [addend, before] = [0; 2].map(|_| -> Vec<C> {
        values(random, m * (n + gap)).into_iter().map(|x| C::from_f32(Element::to_f32(x))).collect()
    });
    let [has_bias, has_addend, accumulates] = [0; 3].map(|_| random.below(2) == 0);

    let mut expected = before.clone();
    for i in 0..m {
        for j in 0..n {
            let a = |p| Element::to_f32(a[i * a_row + p * a_col]);
            let b = |p| Element::to_f32(b[p * b_row + j * b_col]);
            let (mut sum, at) = (sum(k, a, b), i * (n + gap) + j);
            if has_bias {
                sum += Element::to_f32(bias[j]);
            }
            if has_addend {
                sum += addend[at].to_f32();
            }
            if accumulates {
                sum += before[at].to_f32();
            }
            expected[at] = C::from_f32(sum);
        }
    }

    let mut c = before;
    Bf16Products::Amx.gemm(
        Matrix::new(&a, m, k, a_row, a_col),
        Matrix::new(&b, k, n, b_row, b_col),
        MatrixMut::new(&mut c, m, n, n + gap),
        Epilogue {
            scale: 1.0,
            bias: has_bias.then_some(Bias::Bf16(&bias)),
            addend: has_addend.then(|| Matrix::new(&addend, m, n, n + gap, 1)),
            accumulate: if accumulates { Accumulate::Add } else { Accumulate::Replace },
        },
    );
    let differs = |(c, e): (&C, &C)| c.to_f32().to_bits() != e.to_f32().to_bits();
    assert_eq!(c.iter().zip(&expected).position(differs), None, "{m} × {n} × {k}, gap {gap}");
}

#[test]
fn any_shape_stride_and_epilogue_follows_the_definition() {
    let _alone = alone();
    for emulate in kernels() {
        force_emulation(emulate);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            force_isa(isa);
            let mut random = Random(7);
            for round in 0..40 {
                let largest = if round % 4 == 0 { 120 } else { 40 };
                let size = |random: &mut Random| 1 + random.below(largest);
                let shape = (size(&mut random), size(&mut random), random.below(2 * largest));
                match round % 2 {
                    0 => check::<bf16>(&mut random, shape),
                    _ => check::<f32>(&mut random, shape),
                }
            }
        }
    }
    force_emulation(false);
}

/// More than one task and more than one block of k, whole and with remainders.
#[test]
fn several_tiles_and_k_blocks_on_any_number_of_threads() {
    let _alone = alone();
    // On one thread, sums of the last need not be kept, and would not fit their buffer.
    let shapes = [
        (64, 64, 2048),
        (600, 33, 1100),
        (33, 550, 1056),
        (5000, 3, 40),
        (1, 90, 3000),
        (1100, 512, 20),
    ];
    for threads in [1, 2, 3, 7] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let mut random = Random(threads as u64);
            for shape in shapes {
                check::<f32>(&mut random, shape);
                check::<bf16>(&mut random, shape);
            }
        });
    }
}

#[test]
fn rows_in_chunks_equal_rows_at_once() {
    let (m, n, k) = (150, 70, 90);
    let mut random = Random(5);
    let [a, b] =
        [m * k, k * n].map(|n| (0..n).map(|_| draw(&mut random, &KINDS[0])).collect::<Vec<bf16>>());
    let run = |chunk: usize| {
        let rows = a.chunks(chunk * k);
        rows.flat_map(|a| multiply(a, &b, &vec![0.0; a.len() / k * n], (a.len() / k, n, k)))
            .collect::<Vec<f32>>()
    };
    let whole = run(m);
    for chunk in [1, 4, 13, 64] {
        assert_eq!(run(chunk), whole, "chunks of {chunk} rows");
    }
}

/// Only products of two bf16 operands are AMX's: the others have the bits that they always have.
#[test]
fn other_operands_are_multiplied_as_ever() {
    let (m, n, k) = (20, 40, 70);
    let mut random = Random(3);
    let mut draw =
        |n: usize| -> Vec<f32> { (0..n).map(|_| random.below(20001) as f32 / 1e4 - 1.0).collect() };
    let (wide_a, wide_b) = (draw(m * k), draw(k * n));
    let [a, b] =
        [&wide_a, &wide_b].map(|x| x.iter().map(|x| bf16::from_f32(*x)).collect::<Vec<_>>());
    fn run<A: Element, B: Element>(
        products: Bf16Products,
        a: &[A],
        b: &[B],
        (m, n, k): (usize, usize, usize),
    ) -> Vec<f32> {
        let mut c = vec![0.0; m * n];
        let (a, b) = (Matrix::row_major(a, m, k), Matrix::row_major(b, k, n));
        products.gemm(a, b, MatrixMut::row_major(&mut c, m, n), Epilogue::default());
        c
    }
    let shape = (m, n, k);
    let [fma, amx] = [Bf16Products::Fma, Bf16Products::Amx];
    assert_eq!(run(fma, &wide_a, &wide_b, shape), run(amx, &wide_a, &wide_b, shape));
    assert_eq!(run(fma, &a, &wide_b, shape), run(amx, &a, &wide_b, shape));
    assert_eq!(run(fma, &wide_a, &b, shape), run(amx, &wide_a, &b, shape));
    assert_ne!(run(fma, &a, &b, shape), run(amx, &a, &b, shape));
}

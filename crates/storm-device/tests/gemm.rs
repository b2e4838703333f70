//! GEMM against its definition: three nested loops with one fused chain per element, bit for bit.

use half::bf16;
use storm_device::cpu::kernels::element::Element;
use storm_device::cpu::kernels::gemm::{
    Accumulate, Bias, BlockA, Epilogue, Matrix, MatrixMut, block_gemm, gemm,
};
use storm_device::cpu::kernels::simd::{Isa, force_isa};
use storm_graph::random::Random;

fn values<T: Element>(random: &mut Random, n: usize) -> Vec<T> {
    let value = |r: usize| r as f32 / 10000.0 - 1.0;
    (0..n).map(|_| T::from_f32(value(random.below(20001)))).collect()
}

/// How an operand lies in memory.
#[derive(Clone, Copy, Debug)]
enum Order {
    RowMajor,
    ColMajor,
    /// Gaps in both directions.
    Scattered,
}

const ORDERS: [Order; 3] = [Order::RowMajor, Order::ColMajor, Order::Scattered];

/// Strides and the number of elements.
fn strides(order: Order, rows: usize, cols: usize, gap: usize) -> (usize, usize, usize) {
    let (row_stride, col_stride) = match order {
        Order::RowMajor => (cols + gap, 1),
        Order::ColMajor => (1, rows + gap),
        Order::Scattered => (3 * cols + gap, 3),
    };
    let last = rows.saturating_sub(1) * row_stride + cols.saturating_sub(1) * col_stride;
    (row_stride, col_stride, last + 1)
}

#[derive(Clone, Copy, Debug)]
struct Case {
    m: usize,
    n: usize,
    k: usize,
    a_order: Order,
    b_order: Order,
    gap: usize,
    bias: bool,
    addend: bool,
    accumulate: Accumulate,
    seed: u64,
}

/// Runs one case and compares every element, and the gaps between rows of C, with the definition.
fn check<A: Element, B: Element, C: Element>(case: Case) {
    let Case { m, n, k, gap, .. } = case;
    let mut random = Random(case.seed);
    let (a_row, a_col, a_len) = strides(case.a_order, m, k, gap);
    let (b_row, b_col, b_len) = strides(case.b_order, k, n, gap);
    let a: Vec<A> = values(&mut random, a_len);
    let b: Vec<B> = values(&mut random, b_len);
    let bias: Vec<bf16> = values(&mut random, n);
    let bias_f32: Vec<f32> = values(&mut random, n);
    let addend: Vec<C> = values(&mut random, m * (n + 2 * gap));
    let before: Vec<C> = values(&mut random, m * (n + gap));
    let narrow_bias = case.seed.is_multiple_of(2);
    let scale = if case.seed.is_multiple_of(3) { 0.7 } else { 1.0 };

    let mut expected = before.clone();
    for i in 0..m {
        for j in 0..n {
            let mut sum = 0.0f32;
            for p in 0..k {
                let (a, b) = (a[i * a_row + p * a_col], b[p * b_row + j * b_col]);
                sum = a.to_f32().mul_add(b.to_f32(), sum);
            }
            sum *= scale;
            if case.bias {
                sum += if narrow_bias { Element::to_f32(bias[j]) } else { bias_f32[j] };
            }
            if case.addend {
                sum += addend[i * (n + 2 * gap) + j].to_f32();
            }
            if case.accumulate == Accumulate::Add {
                sum += before[i * (n + gap) + j].to_f32();
            }
            expected[i * (n + gap) + j] = C::from_f32(sum);
        }
    }

    let mut c = before;
    let bias = if narrow_bias { Bias::Bf16(&bias) } else { Bias::F32(&bias_f32) };
    let epilogue = Epilogue {
        scale,
        bias: case.bias.then_some(bias),
        addend: case.addend.then(|| Matrix::new(&addend, m, n, n + 2 * gap, 1)),
        accumulate: case.accumulate,
    };
    gemm(
        Matrix::new(&a, m, k, a_row, a_col),
        Matrix::new(&b, k, n, b_row, b_col),
        MatrixMut::new(&mut c, m, n, n + gap),
        epilogue,
    );
    let differing =
        c.iter().zip(&expected).position(|(c, e)| c.to_f32().to_bits() != e.to_f32().to_bits());
    assert_eq!(differing, None, "{case:?}");
}

fn random_case(random: &mut Random, dim_max: usize) -> Case {
    Case {
        m: 1 + random.below(dim_max),
        n: 1 + random.below(dim_max),
        k: random.below(2 * dim_max),
        a_order: ORDERS[random.below(3)],
        b_order: ORDERS[random.below(3)],
        gap: random.below(3) * 5,
        bias: random.below(2) == 0,
        addend: random.below(2) == 0,
        accumulate: if random.below(2) == 0 { Accumulate::Replace } else { Accumulate::Add },
        seed: random.bits(),
    }
}

fn available_isas() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_available())
}

#[test]
fn any_shape_stride_type_and_epilogue_on_every_instruction_set() {
    for isa in available_isas() {
        force_isa(isa);
        let mut random = Random(7);
        for round in 0..60 {
            let case = random_case(&mut random, if round % 4 == 0 { 100 } else { 40 });
            match round % 6 {
                0 | 1 => check::<f32, f32, f32>(case),
                2 => check::<bf16, bf16, bf16>(case),
                3 => check::<bf16, f32, f32>(case),
                4 => check::<f32, bf16, f32>(case),
                _ => check::<bf16, bf16, f32>(case),
            }
        }
    }
}

/// A single row has a way of its own.
#[test]
fn one_row_of_any_length_on_every_instruction_set() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
    for isa in available_isas() {
        force_isa(isa);
        let mut random = Random(13);
        for round in 0..60 {
            let k = [0, 1, 7, 8, 15, 16, 31, 32, 33, 64, 100, 1025][round % 12];
            let n = [1, 15, 16, 17, 32, 33, 95, 300, 1 + random.below(200)][random.below(9)];
            let random_case = random_case(&mut random, 10);
            let case = Case { m: 1, n, k, b_order: Order::ColMajor, ..random_case };
            pool.install(|| match round % 5 {
                0 | 1 => check::<f32, f32, f32>(case),
                2 => check::<bf16, bf16, bf16>(case),
                3 => check::<bf16, f32, f32>(case),
                _ => check::<f32, bf16, f32>(case),
            });
        }
    }
}

/// Longer than the buffer that a row is widened into.
#[test]
fn one_row_that_is_very_long() {
    let case = Case {
        m: 1,
        n: 3,
        k: 70_000,
        a_order: Order::RowMajor,
        b_order: Order::ColMajor,
        gap: 0,
        bias: false,
        addend: false,
        accumulate: Accumulate::Replace,
        seed: 1,
    };
    check::<f32, f32, f32>(case);
}

#[test]
fn several_tiles_and_k_blocks() {
    let case = Case {
        m: 530,
        n: 541,
        k: 801,
        a_order: Order::RowMajor,
        b_order: Order::ColMajor,
        gap: 0,
        bias: true,
        addend: false,
        accumulate: Accumulate::Add,
        seed: 3,
    };
    check::<f32, f32, bf16>(case);
    check::<f32, f32, f32>(Case { a_order: Order::ColMajor, b_order: Order::RowMajor, ..case });
}

/// More sums than a task has room for: they must not be kept, or the task must be divided.
#[test]
fn more_sums_than_are_kept() {
    let case = Case {
        m: 1100,
        n: 512,
        k: 20,
        a_order: Order::RowMajor,
        b_order: Order::ColMajor,
        gap: 0,
        bias: true,
        addend: true,
        accumulate: Accumulate::Replace,
        seed: 5,
    };
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    pool.install(|| {
        check::<f32, f32, bf16>(case);
        check::<f32, f32, f32>(Case { m: 600, k: 400, ..case });
    });
}

#[test]
fn thread_count_does_not_matter() {
    for threads in [1, 2, 3, 7] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let mut random = Random(11);
            for _ in 0..8 {
                check::<f32, f32, f32>(random_case(&mut random, 250));
            }
        });
    }
}

#[test]
fn rows_in_chunks_equal_rows_at_once() {
    let (m, n, k) = (150, 70, 90);
    let mut random = Random(5);
    let (a, b): (Vec<f32>, Vec<f32>) = (values(&mut random, m * k), values(&mut random, k * n));
    let run = |chunk: usize| {
        let mut c = vec![0.0f32; m * n];
        for (a, c) in a.chunks(chunk * k).zip(c.chunks_mut(chunk * n)) {
            let rows = a.len() / k;
            gemm(
                Matrix::row_major(a, rows, k),
                Matrix::row_major(&b, k, n),
                MatrixMut::row_major(c, rows, n),
                Epilogue::default(),
            );
        }
        c
    };
    let whole = run(m);
    for chunk in [1, 4, 13, 64] {
        assert_eq!(run(chunk), whole, "chunks of {chunk} rows");
    }
}

#[test]
fn empty_shapes() {
    gemm(
        Matrix::<f32>::row_major(&[], 0, 3),
        Matrix::<f32>::row_major(&[0.0; 6], 3, 2),
        MatrixMut::<f32>::row_major(&mut [], 0, 2),
        Epilogue::default(),
    );
    let mut c = [5.0f32; 4];
    gemm(
        Matrix::<f32>::row_major(&[], 2, 0),
        Matrix::<f32>::row_major(&[], 0, 2),
        MatrixMut::row_major(&mut c, 2, 2),
        Epilogue::default(),
    );
    assert_eq!(c, [0.0; 4]);
}

#[test]
fn block_gemm_follows_the_same_chain() {
    let (rows, cols, k) = (45, 64, 37);
    let mut random = Random(9);
    let a: Vec<f32> = values(&mut random, rows * k);
    let b: Vec<f32> = values(&mut random, k * cols);
    for isa in available_isas() {
        force_isa(isa);
        // A as it is, and stored transposed.
        for (row_stride, k_stride) in [(k, 1), (1, rows)] {
            let before: Vec<f32> = values(&mut random, rows * cols);
            let mut c = before.clone();
            let a = BlockA { data: &a, row_stride, k_stride };
            block_gemm((rows, cols, k), a, &b, cols, &mut c, cols, true);
            for i in 0..rows {
                for j in 0..cols {
                    let chain = (0..k).fold(before[i * cols + j], |sum, p| {
                        a.data[i * row_stride + p * k_stride].mul_add(b[p * cols + j], sum)
                    });
                    assert_eq!(c[i * cols + j].to_bits(), chain.to_bits());
                }
            }
        }
    }
}

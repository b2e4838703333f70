//! After a warm-up, GEMM, attention, convolutions, pools and observed updates with 8-bit moments never touch the heap. A
//! binary of its own, because it counts the allocations of the whole process.

use half::bf16;
use storm_device::cpu::kernels::attention::{Attention, AttentionShape};
use storm_device::cpu::kernels::convolution::Columns;
use storm_device::cpu::kernels::gemm::{
    Accumulate, Bf16Products, Epilogue, Matrix, MatrixMut, gemm,
};
use storm_device::cpu::kernels::optimizer::{AdamWTensors, Storage, adamw_int8};
use storm_device::cpu::kernels::{pool, warm_up};
use storm_graph::{
    AdamWParameters, MOMENT_GROUP, MOMENT_GROUP_BYTES, Mask, OBSERVED_BLOCK, OBSERVED_SUMS, Planes,
    Rounding, Shape, StepScalars, Window,
};
use storm_host::allocation::{AllocationMeter, count_of_all_threads};

#[global_allocator]
static METER: AllocationMeter = AllocationMeter;

#[test]
fn kernels_do_not_allocate() {
    let (m, n, k) = (300, 200, 600);
    let (a, b, mut c) = (vec![1.0f32; m * k], vec![1.0f32; k * n], vec![0.0f32; m * n]);
    let shape = AttentionShape { batch: 2, seq: 100, q_heads: 4, kv_heads: 2, head_dim: 32 };
    let products = Bf16Products::Amx;
    let attention = Attention { shape, mask: Mask::Causal, scale: 0.2, segments: None, products };
    let qkv = vec![0.1f32; 2 * 100 * 8 * 32];
    let mut d_qkv = qkv.clone();
    let mut out = vec![0.1f32; 2 * 100 * 4 * 32];
    let d_out = out.clone();
    let [narrow_qkv, narrow_d_out] = [&qkv, &d_out].map(|x| vec![bf16::ONE; x.len()]);
    let (mut narrow_d_qkv, mut narrow_out) = (narrow_qkv.clone(), narrow_d_out.clone());
    let (mut lse, mut delta) = (vec![0.0f32; 2 * 4 * 100], vec![0.0f32; 2 * 4 * 100]);
    let window = Window::square(3, 1, 1);
    let planes = Planes::new(&Shape::from([20, 16, 16, 8]), window).expect("fits");
    let (images, weight) = (vec![0.1f32; 20 * 16 * 16 * 8], vec![0.1f32; 8 * 72]);
    let (mut y, mut memory) = (images.clone(), vec![0.0f32; 20 * 16 * 16 * 72]);
    let (mut sum, mut d_weight) = (weight.clone(), weight.clone());
    let elements = 10 * OBSERVED_BLOCK;
    let moment_bytes = elements / MOMENT_GROUP * MOMENT_GROUP_BYTES;
    let (mut parameter, gradient) = (vec![0.1f32; elements], vec![0.1f32; elements]);
    let (mut first_moment, mut second_moment) = (vec![0u8; moment_bytes], vec![0u8; moment_bytes]);
    let mut sums = vec![0; 10 * OBSERVED_SUMS];
    let hyper = AdamWParameters { beta1: 0.9, beta2: 0.99, epsilon: 1e-8, weight_decay: 0.1 };
    let bound = hyper.first_moment_bound().expect("a bound");
    let scalars =
        StepScalars { learning_rate: 0.1, first_correction: 0.1, second_correction: 0.01 };
    let storage =
        Storage { parameter: Rounding::Nearest, moments: Rounding::Nearest, random: None };
    let mut step = || {
        gemm(
            Matrix::row_major(&a, m, k),
            Matrix::row_major(&b, k, n),
            MatrixMut::row_major(&mut c, m, n),
            Epilogue::default(),
        );
        attention.forward(&qkv, &mut out, &mut lse);
        attention.backward(&d_out, &qkv, &out, &lse, &mut delta, &mut d_qkv);
        attention.forward(&narrow_qkv, &mut narrow_out, &mut lse);
        let (d_out, qkv, out) = (&narrow_d_out, &narrow_qkv, &narrow_out);
        attention.backward(d_out, qkv, out, &lse, &mut delta, &mut narrow_d_qkv);
        let mut columns = Columns { planes, memory: &mut memory, products: Bf16Products::Amx };
        columns.forward(&images, &weight, None, &mut y);
        columns.input_grad(&images, &weight, None, Accumulate::Replace, &mut y);
        columns.weight_grad(&images, &images, Accumulate::Add, &mut sum, &mut d_weight);
        pool::max_pool(&planes, &images, &mut y);
        pool::max_pool_grad(&planes, &images, &images, &mut y);
        pool::average_pool(&planes, &images, &mut y);
        pool::average_pool_grad(&planes, &images, &mut y);
        let tensors = AdamWTensors {
            parameter: &mut parameter,
            master: None,
            gradient: &gradient,
            first_moment: &mut first_moment,
            second_moment: &mut second_moment,
            observed: Some(&mut sums),
        };
        adamw_int8((&hyper, bound), &scalars, 1.0, storage, tensors);
    };
    // From inside the pool: handing work to a pool from outside may allocate in rayon.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
    let allocations = pool.install(|| {
        warm_up();
        let before = count_of_all_threads();
        for _ in 0..20 {
            step();
        }
        count_of_all_threads() - before
    });
    assert_eq!(allocations, 0);
}

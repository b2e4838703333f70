//! After a warm-up, GEMM and attention never touch the heap. A binary of its own, because it counts
//! the allocations of the whole process.

use storm_device::cpu::kernels::attention::{Attention, AttentionShape};
use storm_device::cpu::kernels::gemm::{Epilogue, Matrix, MatrixMut, gemm};
use storm_device::cpu::kernels::warm_up;
use storm_graph::Mask;
use storm_host::allocation::{AllocationMeter, count_of_all_threads};

#[global_allocator]
static METER: AllocationMeter = AllocationMeter;

#[test]
fn kernels_do_not_allocate() {
    let (m, n, k) = (300, 200, 600);
    let (a, b, mut c) = (vec![1.0f32; m * k], vec![1.0f32; k * n], vec![0.0f32; m * n]);
    let shape = AttentionShape { batch: 2, seq: 100, q_heads: 4, kv_heads: 2, head_dim: 32 };
    let attention = Attention { shape, mask: Mask::Causal, scale: 0.2, segments: None };
    let qkv = vec![0.1f32; 2 * 100 * 8 * 32];
    let mut d_qkv = qkv.clone();
    let mut out = vec![0.1f32; 2 * 100 * 4 * 32];
    let d_out = out.clone();
    let (mut lse, mut delta) = (vec![0.0f32; 2 * 4 * 100], vec![0.0f32; 2 * 4 * 100]);
    let mut step = || {
        gemm(
            Matrix::row_major(&a, m, k),
            Matrix::row_major(&b, k, n),
            MatrixMut::row_major(&mut c, m, n),
            Epilogue::default(),
        );
        attention.forward(&qkv, &mut out, &mut lse);
        attention.backward(&d_out, &qkv, &out, &lse, &mut delta, &mut d_qkv);
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
